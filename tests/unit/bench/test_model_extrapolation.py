"""Steps composed from kernel tables that are made up here, and the sections of the model's benchmark built on them."""

import csv
import json

import numpy as np
import pytest

from bench.kernels import HOST_MS, LLAMA_70B_TP4, MACHINES, Kernels
from bench.model_extrapolation import QUICK_SELECTION, SPLITS, extrapolation, measure_cycle, selection, snapshot_of
from bench.queueing import observe

SIZES = [2**power for power in range(16)]


def write(file, rows):
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder: every GEMM takes 0.02 ms + 1 ns per token, attention 1 ns per token of context."""
    folder = tmp_path_factory.mktemp("data") / "kernels"
    folder.mkdir()
    hardware = ("a100_sxm", "h100_sxm", "h200_sxm")
    shapes = {shape for _, architecture in MACHINES.values() for shape, _ in architecture.gemms}
    gemms = [
        {"hw": hw, "n": n, "k": k, "m": m, "latency": 0.02 + 1e-6 * m * n * k / 4096**2}
        for hw in hardware
        for n, k in sorted(shapes)
        for m in SIZES
    ]
    reduces = [
        {"hw": hw, "num_gpus": 4, "message_size": 8192 * size, "latency": 0.005 + 1e-9 * 8192 * size}
        for hw in hardware
        for size in SIZES
    ]
    prefills = [
        {"hw": hw, "model": model, "kind": "context", "batch_size": 1, "isl": isl, "step": 0,
         "latency": 0.01 + 1e-6 * isl}
        for hw in hardware
        for model in ("llama8b", "llama70b_tp4")
        for isl in SIZES
    ]  # fmt: skip
    decodes = [
        {"hw": hw, "model": model, "kind": "generation", "batch_size": batch, "isl": 1, "step": context - 1,
         "latency": 0.01 + 1e-8 * batch * context}
        for hw in hardware
        for model in ("llama8b", "llama70b_tp4")
        for batch in (1, 8, 64, 128, 256)
        for context in SIZES[1:12]
    ]  # fmt: skip
    write(folder / "aic_gemm_bf16.csv", gemms)
    write(folder / "aic_allreduce_tp4.csv", reduces)
    write(folder / "aic_attention_bf16.csv", prefills + decodes)
    write(
        folder / "vidur_a100_llama3_8b_tp1_linear.csv",
        [{"num_tokens": size, "layer_linear_ops_ms": 0.1 + 1e-3 * size} for size in SIZES for _ in range(2)],
    )
    return folder.parent


def test_a_prefill_is_the_sum_of_its_kernels_over_all_layers(data):
    kernels = Kernels(data / "kernels")
    whole = kernels.prefill_ms("a100-8b", np.array([1024.0]), np.array([0.0]))
    assert whole[0] == pytest.approx(HOST_MS + 32 * (0.1 + 1.024 + 0.01 + 1.024e-3))
    after_cached = kernels.prefill_ms("a100-8b", np.array([1024.0]), np.array([1024.0]))
    assert after_cached[0] == pytest.approx(whole[0] + 32 * (1.024e-3 - 0.01 - 1.024e-3), rel=0.01)


def test_a_model_on_four_gpus_reduces_twice_a_layer(data):
    kernels = Kernels(data / "kernels")
    tokens = np.array([64.0])
    layer = sum(size * (0.02 + 1e-6 * 64 * n * k / 4096**2) for (n, k), size in LLAMA_70B_TP4.gemms)
    reduce = 2 * (0.005 + 1e-9 * 64 * 8192)
    attention = 0.01 + 1e-6 * 64
    expected = HOST_MS + 80 * (layer + reduce + attention)
    assert kernels.prefill_ms("h100-70b-tp4", tokens, np.zeros(1))[0] == pytest.approx(expected)


def test_decode_interpolates_between_measured_batches_and_knows_how_far_they_were_measured(data):
    kernels = Kernels(data / "kernels")
    one, between, eight = kernels.decode_ms("h200-8b", np.array([1.0, 3.0, 8.0]), np.full(3, 1024.0))
    assert one < between < eight
    assert kernels.longest_context("h200-8b", np.array([1.0, 200.0])).tolist() == [2048.0, 2048.0]


def test_a_missing_table_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="aic_gemm_bf16"):
        Kernels(tmp_path)


def test_without_the_public_data_there_are_no_rows(tmp_path):
    assert extrapolation(quick=True, folder=tmp_path) == []
    assert selection(quick=True, folder=tmp_path) == []


def test_every_machine_split_and_method_has_a_row_of_finite_figures(data):
    """On kernels that are straight lines the trainer's own fit stays within the marks, where trees are flat."""
    found = extrapolation(quick=True, folder=data)
    assert len(found) == 2 * len(SPLITS) * 3 * 3
    assert {row["beyond"] for row in found} == {"in", "1-2x", ">2x"}
    assert {row["method"] for row in found} == {"leadtime", "xgboost", "linear"}
    assert all(np.isfinite([row["bias"], row["mape"]]).all() for row in found)
    far = [row for row in found if row["beyond"] == ">2x" and row["split"].startswith("prefill")]
    assert all(abs(row["bias"]) < 0.05 for row in far if row["method"] == "leadtime")
    assert all(row["bias"] < -0.2 for row in far if row["method"] == "xgboost" and row["machine"].startswith("a100"))


def test_each_machine_is_left_out_of_a_choice_once(data):
    """The best pair of its kin costs them no more than the one in use, which is among those asked.

    On kernels that are straight lines no growth is the best, for the machine that had no say too.
    """
    found = selection(quick=True, folder=data)
    assert [row["left_out"] for row in found] == list(QUICK_SELECTION)
    for row in found:
        assert 0 < row["best_cost"] <= row["cost_in_use"] < 1
        assert row["best_growth"] == 0
        assert 0 < row["left_out_cost"] < row["left_out_cost_alike"]


def test_a_measured_cycle_prints_its_cost(tmp_path, capsys):
    observed = observe(600, seed=1)
    file = tmp_path / "rows.npz"
    np.savez(file, rows=observed.rows, ttft=observed.ttft_ms, tpot=observed.tpot_ms, e2e=observed.e2e_ms)
    measure_cycle(str(file))
    cost = json.loads(capsys.readouterr().out)
    assert cost["rows"] == 600
    assert cost["cpu_ms"] > 0
    assert cost["rss_mb"] >= cost["rss_before_mb"] > 0


def test_a_snapshot_says_unknown_of_targets_that_were_not_given():
    observed = observe(20, seed=1)
    snapshot = snapshot_of(observed.rows, ttft=observed.ttft_ms)
    assert len(snapshot.known("ttft")) == 20
    assert len(snapshot.known("e2e")) == 0
