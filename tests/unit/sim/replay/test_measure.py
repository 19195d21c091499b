"""Figures, capacity and the picture of a replay."""

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from shared.errors import ConfigurationError
from shared.samples import Outcome
from sim.replay.measure import Search, capacity, cold_start, figures, guess, pool_capacity, saturated
from sim.replay.outcomes import Outcomes, RunResult
from sim.replay.picture import picture
from sim.replay.policies import policy
from sim.replay.pool import PoolError, describe, parse_hardware
from sim.replay.trace import load_trace


def result_of(ttft_ms: list[float], tpot_ms: list[float], failed: int = 0) -> RunResult:
    outcomes = Outcomes.empty(len(ttft_ms))
    outcomes.ttft_ms[:] = ttft_ms
    outcomes.tpot_ms[:] = tpot_ms
    outcomes.e2e_ms[:] = np.add(ttft_ms, 100.0)
    outcomes.ttft_slo_ms[:] = 1000.0
    outcomes.tpot_slo_ms[:] = 40.0
    outcomes.input_tokens[:] = 100
    outcomes.cached_tokens[:] = 25
    outcomes.outcome[:] = [Outcome.OK] * (len(ttft_ms) - failed) + [Outcome.UPSTREAM_RESET] * failed
    return RunResult("p", outcomes, 1.0, len(ttft_ms), 0, [], 0, 0, 0, 0.0, None, 0)


def test_figures_leave_the_warm_up_and_the_end_out_and_tell_the_cold_start_apart() -> None:
    result = result_of([9000.0] * 20 + [100.0] * 75 + [9000.0] * 5, [30.0] * 100)
    measured = figures(result)
    assert (measured["requests"], measured["ttft_p99_ms"], measured["goodput"]) == (75.0, 100.0, 1.0)
    assert measured["prefix_hit_ratio"] == 0.25
    assert cold_start(result)["ttft_p50_ms"] == 9000.0


def test_goodput_counts_a_request_that_misses_either_objective_or_fails_as_missed() -> None:
    measured = figures(result_of([100.0] * 50 + [1001.0] * 10 + [100.0] * 40, [30.0] * 60 + [41.0] * 15 + [30.0] * 25))
    assert measured["goodput"] == pytest.approx(50 / 75)
    failed = figures(result_of([100.0] * 100, [30.0] * 100, failed=20))
    assert failed["goodput"] == pytest.approx(60 / 75)
    assert failed["failed"] == 15


def test_a_pool_is_saturated_when_its_late_median_has_twice_its_objective() -> None:
    assert saturated(result_of([100.0] * 80 + [2001.0] * 20, [1.0] * 100))
    assert not saturated(result_of([9000.0] * 80 + [1999.0] * 20, [1.0] * 100))


def test_capacity_lies_between_what_is_carried_and_what_is_not_even_from_a_wrong_bracket() -> None:
    trace = load_trace("D", 0, 120)
    pods = parse_hardware("a100-8b:1")
    told: list[str] = []
    found = capacity(trace, pods, Search(2.0, 3.0, 0.3), told.append)
    carried = max(float(line.split()[3][:-2]) for line in told if line.endswith("carried"))
    refused = min(float(line.split()[3][:-2]) for line in told if line.endswith("much"))
    assert carried <= found <= refused
    assert refused / carried <= 1.31


def test_a_mixed_pool_carries_the_mean_of_its_kinds() -> None:
    pods = parse_hardware("h100-8b:3,a100-8b:1")
    asked: list[str] = []

    def of_kind(_: object, alike: object) -> float:
        asked.append(describe(tuple(alike)))  # type: ignore[arg-type]
        return 8.0 if asked[-1].startswith("h100") else 4.0

    assert pool_capacity(load_trace("A", 0, 10), pods, of_kind) == pytest.approx(7.0)
    assert asked == ["a100-8b:4", "h100-8b:4"]


def test_hardware_is_read_back_as_it_was_written() -> None:
    pods = parse_hardware("h100-8b:6, a100-8b:2,llama-70b-h200-tp4")
    assert len(pods) == 9
    assert describe(pods) == "h100-8b:6,a100-8b:2,h200-70b:1"


@pytest.mark.parametrize("text", ["", "h100-8b:0", "h900-8b:2", "h100-8b:1001", "h100-8b:600,a100-8b:600", "h100-8b;2"])
def test_hardware_that_is_not_known_is_told(text: str) -> None:
    with pytest.raises(PoolError, match="hardware"):
        parse_hardware(text)


def test_a_count_of_pods_that_is_not_allowed_is_told_with_its_range() -> None:
    with pytest.raises(
        PoolError, match=r"found 'h100-8b:0'; allowed: NAME:COUNT with COUNT 1 to 1000, NAME one of a100"
    ):
        parse_hardware("h100-8b:0")


def test_policies_are_presets_files_or_have_an_oracle() -> None:
    assert policy("token-load").learned is False
    assert policy("leadtime").learned is True
    assert (policy("leadtime+oracle").learned, policy("leadtime+oracle").oracle) == (False, True)
    assert policy("oracle").pipeline().profile == "oracle"
    with pytest.raises(ConfigurationError, match="allowed"):
        policy("best")
    with pytest.raises(ConfigurationError, match="can't be read"):
        policy("missing.yaml")


def test_the_picture_is_wellformed_and_has_a_line_for_each_policy_in_each_panel() -> None:
    rows = [
        {"policy": name, "load": load, "ttft_p90_ms": 100.0 * load * (place + 1), "goodput": 1.0 - load / 5}
        for place, name in enumerate(("one<two", "b"))
        for load in (0.5, 0.8, 0.95)
    ]
    rows.append({"policy": "b", "load": 1.1, "ttft_p90_ms": None, "goodput": None})
    root = ET.fromstring(picture("a & b", rows))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    points = [tuple(map(float, pair.split(","))) for line in lines for pair in (line.get("points") or "").split()]
    assert all(0 <= x <= 920 and 0 <= y <= 300 and math.isfinite(x + y) for x, y in points)
    assert picture("one load", rows[:1])


@pytest.mark.parametrize("count", [1, 3])
def test_a_trace_that_fills_no_pool_is_refused(tmp_path: Path, count: int) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text("".join(f'{{"arrival_ms": {at}, "input_tokens": 10, "output_tokens": 5}}\n' for at in range(count)))
    pods, trace = parse_hardware("h100-8b:2"), load_trace(str(file), 1, count)
    with pytest.raises(ConfigurationError, match=f"found {count} requests, too few or too light to fill h100-8b:2"):
        capacity(trace, pods, guess(trace, pods))
