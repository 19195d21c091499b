"""The marks of the latency model: the worst figure of each is named, and what isn't there isn't judged."""

import json
from pathlib import Path

import pytest

from bench.model_marks import line, marks

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "model.json"


def extrapolation(split, beyond, ours, xgboost, machine="h100-8b"):
    return [
        {"machine": machine, "split": split, "beyond": beyond, "method": method, "bias": bias, "mape": mape}
        for method, (bias, mape) in (("leadtime", ours), ("xgboost", xgboost))
    ]


def by_name(result):
    return {mark["mark"]: mark for mark in marks(result)}


def test_nothing_measured_is_nothing_judged():
    assert marks({}) == []
    assert marks({"extrapolation": [], "queueing": [], "drift": []}) == []


def test_the_worst_cell_is_named_whatever_its_sign():
    found = by_name(
        {
            "extrapolation": [
                *extrapolation("prefill<=1024", "1-2x", (-0.06, 0.07), (-0.3, 0.3)),
                *extrapolation("prefill<=2048", "1-2x", (0.04, 0.05), (-0.3, 0.3)),
                *extrapolation("prefill<=1024", ">2x", (0.08, 0.08), (-0.7, 0.7)),
            ]
        }
    )
    to_twice = found["prefill: |median bias| up to twice the range"]
    assert to_twice["worst"] == pytest.approx(0.06)
    assert to_twice["where"] == "h100-8b prefill<=1024 1-2x"
    assert (to_twice["missed"], to_twice["of"], to_twice["met"]) == (1, 2, False)
    assert found["prefill: |median bias| beyond twice the range"]["met"]
    assert "MISSED in 1 of 2" in line(to_twice)


def test_decode_is_judged_by_both_its_mean_error_and_its_median():
    found = by_name({"extrapolation": extrapolation("decode<=64", "1-2x", (0.05, 0.055), (-0.02, 0.07))})
    assert found["decode: MAPE above XGBoost's"]["met"]
    assert not found["decode: |median bias| above XGBoost's"]["met"]
    assert found["decode: |median bias| above XGBoost's"]["worst"] == pytest.approx(0.03)


def queueing(scenario, seed, mape, six, **ours):
    row = {"scenario": scenario, "seed": seed, "p90_coverage": 0.9, "coverage_by_bin": {}}
    return [
        {**row, "method": "leadtime", "ledger": "timer+scrape", "mape": mape, "bias_beyond_2x": 0.0, **ours},
        {**row, "method": "leadtime", "ledger": "exact", "mape": 9.0, "p90_coverage": 0.1},
        {**row, "method": "incumbent-six", "ledger": "own", "mape": six},
    ]


def test_errors_are_compared_over_the_seeds_of_a_scenario_and_with_the_products_ledger_alone():
    rows = [*queueing("poisson-2048", 1, 0.1, 0.2), *queueing("poisson-2048", 2, 0.2, 0.6)]
    found = by_name({"queueing": rows})
    assert found["queueing: MAPE of the six features'"]["worst"] == pytest.approx(0.3 / 0.8)
    assert "queueing: MAPE of the thirteen's" not in found
    assert found["queueing: P90 coverage from 90 %"]["of"] == 2
    assert found["queueing: P90 coverage from 90 %"]["met"]


def test_mixed_hardware_has_a_mark_of_its_own():
    rows = [*queueing("mixed-2048", 1, 0.1, 0.9, bias_beyond_2x=-0.12), *queueing("bursty-8192", 1, 0.1, 0.9)]
    found = by_name({"queueing": rows})
    assert found["queueing: |bias| beyond twice the backlog"]["worst"] == 0.0
    mixed = found["queueing: |bias| beyond twice the backlog, mixed"]
    assert (mixed["worst"], mixed["met"]) == (pytest.approx(0.12), True)


def test_bins_of_few_rows_have_no_mark():
    bins = {
        "0-256": {"rows": 399, "p90": 0.5},
        "256-1024": {"rows": 400, "p90": 0.84},
        "1024-4096": {"rows": 500, "p90": 0.95},
    }
    found = marks({"queueing": queueing("poisson-2048", 1, 0.1, 0.2, coverage_by_bin=bins)})
    by_bin = next(mark for mark in found if "of a bin" in mark["mark"])
    assert (by_bin["of"], by_bin["missed"]) == (2, 1)
    assert by_bin["where"] == "poisson-2048 seed 1 256-1024"


def test_who_never_recovers_misses_and_the_entry_is_still_json():
    step = {"kind": "step", "seed": 3, "labels_to_recover": None, "p90_coverage_after": 0.9, "coverage_after": {}}
    found = by_name({"drift": [step, {**step, "kind": "swap"}]})
    recovery = found["labels to recover from a step"]
    assert (recovery["worst"], recovery["missed"], recovery["of"]) == (None, 1, 1)
    assert json.loads(json.dumps(recovery)) == recovery
    assert "never" in line(recovery)


def test_the_committed_result_says_which_marks_it_meets():
    result = json.loads(RESULTS.read_text())
    assert result["marks"] == marks(result)
