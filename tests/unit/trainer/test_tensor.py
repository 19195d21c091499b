"""The trainer's way to its tensor rendering, without Hummingbird. With it: tests/tensor."""

import numpy as np
import onnx
import pytest
import xgboost as xgb
from onnx import TensorProto, helper

from services.trainer import cycle, main
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.export import convert_booster
from services.trainer.main import find_tensor
from services.trainer.settings import TensorRendering
from services.trainer.train import FitOptions
from services.trainer.views import report_view
from shared.errors import ConfigurationError
from shared.inference import BundleModel
from tests.unit.trainer.snapshots import line_snapshot

NOW = 1_800_000_000_000.0


def as_graph(booster: xgb.Booster) -> tuple[onnx.GraphProto, str]:
    """A booster as a graph of its own, as Hummingbird gives one; its trees stay a tree-ensemble operator."""
    attributes, _ = convert_booster(booster)
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", booster.num_features()])
    return helper.make_graph(
        [node], "trees", [given], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])]
    ), "fake"


def astray(booster: xgb.Booster) -> tuple[onnx.GraphProto, str]:
    """A wrong conversion: any answer but the trees'."""
    columns = np.full((booster.num_features(), 1), 1e-3, np.float32)
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", booster.num_features()])
    graph = helper.make_graph(
        [node],
        "wrong",
        [given],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])],
        [onnx.numpy_helper.from_array(columns, "weights")],
    )
    return graph, "wrong"


def refuse(booster: xgb.Booster) -> tuple[onnx.GraphProto, str]:
    raise ValueError("not today")


@pytest.fixture(scope="module")
def snapshot():
    return line_snapshot(400)


def cycle_with(snapshot, tensor):
    return run_cycle(snapshot, None, CycleOptions("default", tensor=tensor), NOW)


def test_a_graph_that_differs_from_native_xgboost_isnt_listed_and_the_bundle_goes_on(snapshot):
    report = cycle_with(snapshot, astray)
    assert report.verdict.accepted
    assert [rendering.name for rendering in report.champion.bundle.manifest.renderings] == ["tree_ensemble"]
    assert not report.tensor.listed
    assert report.tensor.parity.max_relative_error > 1e-4
    assert report_view(report)["tensor"]["detail"].startswith("relative error")


def test_a_conversion_that_fails_isnt_listed_and_says_why(snapshot):
    report = cycle_with(snapshot, refuse)
    assert report.verdict.accepted
    assert (report.tensor.listed, report.tensor.parity, report.tensor.detail) == (False, None, "not today")


def test_a_graph_that_matches_is_listed_with_its_parity(snapshot, monkeypatch):
    """The fake's operator stands in another domain, which a tensor graph doesn't import: it is added here."""
    real = cycle.serialize

    def with_domain(model, metadata):
        if not any(item.domain == "ai.onnx.ml" for item in model.opset_import):
            model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
        return real(model, metadata)

    monkeypatch.setattr(cycle, "serialize", with_domain)
    monkeypatch.setattr("services.trainer.export.onnx.checker.check_model", lambda _: None)
    report = cycle_with(snapshot, as_graph)
    assert report.tensor.listed, report.tensor.detail
    manifest = report.champion.bundle.manifest
    assert [rendering.name for rendering in manifest.renderings] == ["tree_ensemble", "tensor"]
    assert manifest.renderings[1].parity_max_relative_error <= 1e-4
    assert manifest.libraries["tensor converter"] == "fake"
    rows = snapshot.rows[:50]
    trees = BundleModel(report.champion.bundle).predict(rows)
    assert BundleModel(report.champion.bundle, rendering="tensor").predict(rows) == pytest.approx(trees, rel=1e-5)


def test_no_tensor_rendering_is_tried_where_nobody_makes_one(snapshot):
    report = cycle_with(snapshot, None)
    assert report.tensor is None
    assert report_view(report)["tensor"] is None


def test_a_trainer_without_hummingbird_says_so_once_and_goes_on(monkeypatch, capsys):
    def missing(threads):
        raise ImportError("No module named 'hummingbird'", name="hummingbird")

    monkeypatch.setattr(main, "load_hummingbird", missing)
    assert find_tensor(TensorRendering.AUTO, 1) is None
    assert capsys.readouterr().out.count("no tensor rendering") == 1
    assert find_tensor(TensorRendering.OFF, 1) is None
    with pytest.raises(ConfigurationError, match="TENSOR_RENDERING: require, but hummingbird can't be imported"):
        find_tensor(TensorRendering.REQUIRE, 1)


def test_fit_options_that_the_tensor_rendering_takes_are_those_that_settings_allow():
    """Perfect trees have 2^depth leaves: the deepest that may be set is far below the limit of the conversion."""
    from services.trainer.tensor import MAX_DEPTH

    assert FitOptions().depth <= 8 < MAX_DEPTH
