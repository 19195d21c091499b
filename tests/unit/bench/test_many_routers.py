"""What many routers lose of one router's gain is counted right."""

from typing import Any

import pytest

from bench.many_routers import METRICS, OURS, cells, summarise


def rows(trace: str, seed: int, *values: float) -> list[dict[str, Any]]:
    """A latency of the runs on one trace, in the order of `cells`; goodput falls with it."""
    return [
        {
            "trace": cell.trace,
            "seed": cell.seed,
            "policy": cell.policy,
            "routers": cell.routers,
            "again": cell.again,
            **dict.fromkeys(METRICS, value),
            "goodput": 1.0 - value / 1_000.0,
        }
        for cell, value in zip(cells(trace, seed), values, strict=True)
    ]


def test_a_loss_is_what_is_missing_of_the_mean_gain_of_one_routers_two_runs() -> None:
    found = summarise(rows("A", 1, 100.0, 60.0, 64.0, 58.0, 60.0))["metrics"]
    # token-load, one router, two, four, one again.
    e2e = found["e2e_mean_ms"]
    assert e2e["gain"] == pytest.approx(0.4)
    assert e2e["2"]["lost"] == pytest.approx(0.1)
    assert e2e["2"]["ratio"] == pytest.approx(64.0 / 60.0)
    assert e2e["4"]["lost"] == pytest.approx(-0.05)
    assert e2e["chance"]["lost"] == 0.0
    assert found["goodput"]["2"]["lost"] == pytest.approx(0.1)
    assert "ratio" not in found["goodput"]["2"]


def test_losses_of_several_traces_are_summed_and_have_an_error() -> None:
    found = summarise([*rows("A", 1, 100.0, 60.0, 64.0, 60.0, 60.0), *rows("B", 2, 100.0, 80.0, 80.0, 80.0, 80.0)])
    two = found["metrics"]["e2e_mean_ms"]["2"]
    assert two["lost"] == pytest.approx(0.04 / 0.6)
    assert two["error"] > 0.0
    assert found["cells"] == 2
    assert found["by_trace"]["A"]["e2e_mean_ms"]["2"]["lost"] == pytest.approx(0.1)
    assert found["by_trace"]["B"]["e2e_mean_ms"]["2"]["lost"] == pytest.approx(0.0)


def test_a_trace_on_which_a_run_is_missing_does_not_count() -> None:
    whole = rows("A", 1, 100.0, 60.0, 64.0, 60.0, 60.0)
    cut_short = [row for row in rows("B", 1, 100.0, 50.0, 50.0, 50.0, 50.0) if row["routers"] != 4]
    assert summarise([*whole, *cut_short])["cells"] == 1
    assert [cell.policy for cell in cells("A", 1)].count(OURS) == 4
