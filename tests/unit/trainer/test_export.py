"""The exported graph says what the native model says, for every shape of booster."""

import numpy as np
import onnx
import pytest

from bench.queueing import A100_70B, H100_70B, Scenario, observe
from services.trainer import export
from services.trainer.export import convert_booster, parity, parity_rows, render, serialize
from services.trainer.train import FitOptions, fit
from shared.features import SCHEMA
from tests.unit.trainer.snapshots import line_snapshot, prompts, runner, snapshot_of, window_of


def strays(snapshot, options) -> tuple[float, object]:
    model = fit(snapshot, options)
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    return parity(runner(render(model)), model.predict(rows), rows).max_relative_error, model


@pytest.mark.parametrize("rounds", [1, 2, 50, 300])
@pytest.mark.parametrize("depth", [1, 6])
def test_every_number_of_trees_and_depth_passes_parity(rounds, depth):
    """One tree alone matches even where the aggregation of several is wrong."""
    snapshot = window_of(observe(1200, seed=4)).snapshot()
    error, model = strays(snapshot, FitOptions(rounds=rounds, depth=depth, rows_per_round=1))
    assert model.targets["ttft"].residual.num_boosted_rounds() == rounds
    assert error <= 1e-4


def test_a_constant_target_passes_parity():
    """Every tree is a single leaf."""
    rows = prompts(np.arange(1, 501))
    error, model = strays(snapshot_of(rows, ttft=np.full(500, 42.0)), FitOptions())
    assert error <= 1e-4
    assert model.predict(rows)[:, 0] == pytest.approx(np.full(500, 42.0), rel=1e-3)


@pytest.mark.parametrize("trees", [1, 10_000])
def test_a_model_of_ten_rows_passes_parity_with_and_without_trees(trees):
    error, model = strays(line_snapshot(10), FitOptions(tree_min_rows=trees, rows_per_round=1, leaf_rows=1))
    assert (model.targets["ttft"].residual is None) == (trees == 10_000)
    assert error <= 1e-4


def test_a_mixed_pool_passes_parity_on_thousands_of_rows():
    mixed = Scenario(pods=(H100_70B, A100_70B), requests_per_s=6, streamed_share=0.7)
    snapshot = window_of(observe(6000, seed=5, scenario=mixed)).snapshot()
    model = fit(snapshot, FitOptions())
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    assert len(rows) >= min(5000, len(snapshot)) + 1000
    checked = parity(runner(render(model)), model.predict(rows), rows)
    assert checked.max_relative_error <= 1e-4
    assert model.outputs[:3] == ("ttft_p50", "ttft_p90", "ttft_p99")
    assert model.outputs[-1] == "in_range"


def test_parity_rows_sit_on_thresholds_and_far_outside():
    snapshot = window_of(observe(1200, seed=4)).snapshot()
    model = fit(snapshot, FitOptions())
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1), at_most=100)
    assert not model.in_range(rows).all()
    thresholds = {
        np.float32(value) for column, value in export.split_points(model.targets["ttft"].residual) if column == 1
    }
    assert thresholds & set(rows[:, 1].tolist())
    SCHEMA.check(rows)


def test_a_graph_that_strays_is_seen():
    snapshot = line_snapshot(200)
    model = fit(snapshot, FitOptions())
    faithful = runner(render(model))
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    expected = model.predict(rows)
    assert parity(lambda r: faithful(r) * np.float32(1.001), expected, rows).max_relative_error > 1e-4
    assert parity(lambda r: faithful(r)[:, :1], expected, rows).max_relative_error == float("inf")
    assert parity(lambda r: np.full_like(faithful(r), np.nan), expected, rows).max_relative_error == float("inf")


def test_both_converters_agree(monkeypatch):
    snapshot = window_of(observe(1200, seed=4)).snapshot()
    model = fit(snapshot, FitOptions())
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(1))
    direct = render(model)

    def refuse(booster):
        raise RuntimeError("no")

    monkeypatch.setattr(export, "directly", refuse)
    by_library = render(model)
    assert (direct.converter, by_library.converter) == ("direct", "onnxmltools")
    assert runner(direct)(rows) == pytest.approx(runner(by_library)(rows), rel=1e-6)
    monkeypatch.setattr(export, "by_onnxmltools", refuse)
    with pytest.raises(ValueError, match="direct: RuntimeError: no; onnxmltools: RuntimeError: no"):
        convert_booster(model.targets["ttft"].residual)


def test_batches_of_any_size_give_the_same_rows():
    snapshot = window_of(observe(800, seed=6)).snapshot()
    run = runner(render(fit(snapshot, FitOptions())))
    whole = run(snapshot.rows[:64])
    single = np.concatenate([run(snapshot.rows[i : i + 1]) for i in range(64)])
    assert single == pytest.approx(whole, rel=1e-5)


def test_the_graph_pins_its_versions_and_carries_its_metadata():
    rendered = render(fit(line_snapshot(200), FitOptions()))
    rendered.model.metadata_props.add(key="leadtime.schema_hash", value=SCHEMA.hash)
    model = onnx.load_model_from_string(serialize(rendered.model, {"leadtime.version": "v"}))
    assert model.ir_version == 8
    assert {(item.domain, item.version) for item in model.opset_import} == {("", 17), ("ai.onnx.ml", 3)}
    assert {item.key: item.value for item in model.metadata_props} == {
        "leadtime.schema_hash": SCHEMA.hash,
        "leadtime.version": "v",
    }
    assert [item.name for item in model.graph.input] == ["features"]
    assert [item.name for item in model.graph.output] == ["predictions"]
