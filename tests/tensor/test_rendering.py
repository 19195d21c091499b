"""The tensor rendering with the real Hummingbird, inside its guards. Run by `make test-tensor`, which installs it."""

import numpy as np
import pytest
import xgboost as xgb

from bench.queueing import A100_70B, H100_70B, Scenario, observe
from services.trainer import cycle
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.export import Parity, parity, parity_rows, render
from services.trainer.tensor import load_hummingbird
from services.trainer.train import FitOptions, fit
from shared.bundle import pack, seal, unpack, unseal
from shared.errors import IntegrityError
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.prediction import OUTPUTS
from tests.unit.trainer.snapshots import line_snapshot, runner, snapshot_of, window_of

NOW = 1_800_000_000_000.0
MIXED = Scenario(pods=(H100_70B, A100_70B), requests_per_s=6, streamed_share=0.7)


@pytest.fixture(scope="module")
def hummingbird():
    return load_hummingbird(1)


@pytest.fixture(scope="module")
def snapshot():
    return window_of(observe(7000, seed=5, scenario=MIXED)).snapshot()


@pytest.fixture(scope="module")
def made(snapshot, hummingbird):
    return run_cycle(snapshot, None, CycleOptions("default", tensor=hummingbird), NOW)


def test_both_renderings_match_native_xgboost_on_five_thousand_window_rows(snapshot, made):
    assert made.verdict.accepted
    assert made.tensor.listed
    assert [rendering.name for rendering in made.champion.bundle.manifest.renderings] == ["tree_ensemble", "tensor"]
    model = fit(snapshot, FitOptions())
    rows = snapshot.rows[-5000:]
    for rendering in made.champion.bundle.manifest.renderings:
        assert rendering.parity_max_relative_error <= 1e-4
        assert rendering.parity_rows >= 5000
        loaded = BundleModel(made.champion.bundle, rendering=rendering.name)
        assert parity(loaded.predict, model.predict(rows), rows).max_relative_error <= 1e-4


def test_a_bundle_of_two_renderings_is_signed_and_verified_whole(made):
    """One changed byte in either graph is seen, with and without a key."""
    packed = pack(made.champion.bundle)
    sealed = seal(packed, b"key")
    bundle = unpack(unseal(sealed, b"key"), pool="default", schema_hash=SCHEMA.hash)
    assert set(bundle.graphs) == {"tree_ensemble", "tensor"}
    sizes = [rendering.size_bytes for rendering in bundle.manifest.renderings]
    for back in (sizes[1] + sizes[0] // 2, sizes[1] // 2):
        changed = bytearray(packed)
        changed[-back] ^= 1
        with pytest.raises(IntegrityError, match="damaged"):
            unpack(bytes(changed), pool="default", schema_hash=SCHEMA.hash)
        forged = seal(bytes(changed), b"another key")
        with pytest.raises(IntegrityError, match="isn't signed"):
            unseal(forged, b"key")


def test_the_tensor_graph_has_no_tree_operator_and_says_what_it_is(made):
    import onnx

    graph = onnx.load_model_from_string(made.champion.bundle.graphs["tensor"])
    assert {item.domain for item in graph.opset_import} == {""}
    assert {node.domain for node in graph.graph.node} == {""}
    said = {item.key: item.value for item in graph.metadata_props}
    assert said["leadtime.rendering"] == "tensor"
    assert said["leadtime.version"] == made.champion.version
    assert "hummingbird-ml 0.4.12" in said["leadtime.converter"]
    trees = onnx.load_model_from_string(made.champion.bundle.graphs["tree_ensemble"])
    assert {item.key for item in trees.metadata_props} == set(said)


@pytest.mark.parametrize("count", [1, 2, 7, 500, 4000])
def test_it_is_right_for_every_batch_size(snapshot, made, count):
    rows = snapshot.rows[:count]
    trees = BundleModel(made.champion.bundle).predict(rows)
    assert BundleModel(made.champion.bundle, rendering="tensor").predict(rows) == pytest.approx(trees, rel=1e-4)


@pytest.mark.parametrize("rounds", [1, 2, 150])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_every_number_of_trees_and_depth_passes_parity(hummingbird, rounds, depth):
    snapshot = window_of(observe(1200, seed=4)).snapshot()
    model = fit(snapshot, FitOptions(rounds=rounds, depth=depth, rows_per_round=1))
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    assert parity(runner(render(model, hummingbird)), model.predict(rows), rows).max_relative_error <= 1e-4


@pytest.mark.parametrize("options", [FitOptions(tree_min_rows=10_000), FitOptions(leaf_rows=10_000, leaf_share=1.0)])
def test_a_model_without_trees_and_one_of_bare_leaves_pass_parity(hummingbird, options):
    snapshot = line_snapshot(200)
    model = fit(snapshot, options)
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    assert parity(runner(render(model, hummingbird)), model.predict(rows), rows).max_relative_error <= 1e-4


@pytest.mark.parametrize(
    ("missing", "count"), [(("ttft", "tpot"), 60), (("ttft", "tpot"), 1500), (("tpot",), 1500), (("e2e",), 1500)]
)
def test_a_bundle_that_has_targets_from_the_prior_passes_parity_in_both_renderings(hummingbird, missing, count):
    """A target without trees beside targets with them, on every hardware class that the prior knows."""
    observed = observe(count, seed=6, scenario=MIXED)
    labels = {"ttft": observed.ttft_ms, "tpot": observed.tpot_ms, "e2e": observed.e2e_ms}
    snapshot = snapshot_of(observed.rows, **{target: own for target, own in labels.items() if target not in missing})
    options = CycleOptions("default", fit=FitOptions(prior="8b"), tensor=hummingbird)
    report = run_cycle(snapshot, None, options, NOW)
    assert report.verdict.accepted
    assert report.tensor.listed
    bundle = report.champion.bundle
    assert bundle.manifest.prior_targets == list(missing)
    assert bundle.manifest.outputs == list(OUTPUTS)
    model = fit(snapshot, options.fit)
    rows = parity_rows(model, observed.rows, np.random.default_rng(1))
    for rendering in bundle.manifest.renderings:
        assert rendering.parity_max_relative_error <= 1e-4
        loaded = BundleModel(bundle, rendering=rendering.name)
        assert parity(loaded.predict, model.predict(rows), rows).max_relative_error <= 1e-4


def booster(**parameters):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(400, 5)).astype(np.float32)
    label = np.exp(rows[:, 0]) + 1
    if parameters.pop("outputs", 1) == 2:
        label = np.stack([label, 2 * label], axis=1)
    chosen = {"max_depth": 3, "tree_method": "hist", "nthread": 1, **parameters}
    return xgb.train(chosen, xgb.DMatrix(rows, label=label), 5)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"objective": "reg:gamma"}, "objective reg:gamma"),
        ({"objective": "reg:quantileerror", "quantile_alpha": [0.5, 0.9]}, "objective reg:quantileerror"),
        ({"objective": "count:poisson"}, "objective count:poisson"),
        ({"outputs": 2}, "2 outputs"),
        ({"max_depth": 12}, "depth 12"),
    ],
)
def test_what_hummingbird_converts_wrongly_or_too_large_is_refused(hummingbird, parameters, reason):
    with pytest.raises(ValueError, match=reason):
        hummingbird(booster(**parameters))


def test_a_base_score_counts(hummingbird):
    found, _ = hummingbird(given := booster(base_score=7.0))
    import onnx
    import onnxruntime as ort

    model = onnx.helper.make_model(found, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(2).normal(size=(50, 5)).astype(np.float32)
    assert session.run(None, {"trees": rows})[0][:, 0] == pytest.approx(given.inplace_predict(rows), rel=1e-5)


def test_a_tensor_rendering_that_strays_isnt_listed_and_the_bundle_goes_on(snapshot, hummingbird, monkeypatch):
    answers = iter([Parity(1e-6, 6000), Parity(2e-4, 6000)])
    monkeypatch.setattr(cycle, "parity", lambda *_: next(answers))
    report = run_cycle(snapshot, None, CycleOptions("default", tensor=hummingbird), NOW)
    assert report.verdict.accepted
    assert [rendering.name for rendering in report.champion.bundle.manifest.renderings] == ["tree_ensemble"]
    assert (report.tensor.listed, report.tensor.detail) == (False, "relative error 2.00e-04 on 6000 rows")


def test_nothing_is_written_to_the_working_directory(tmp_path, monkeypatch, hummingbird):
    """A container's root file system is read-only."""
    monkeypatch.chdir(tmp_path)
    hummingbird(booster())
    assert list(tmp_path.iterdir()) == []
