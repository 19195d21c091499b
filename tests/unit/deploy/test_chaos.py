"""What the chaos suite makes of what it saw: its truth about requests under way, its judgement, its table."""

import copy
import os
import subprocess
import sys
import time

import pytest

from deploy.local.chaos.harm import Clock
from deploy.local.chaos.load import Fate, Load
from deploy.local.chaos.report import failures, quantile, table
from deploy.local.chaos.storm import shut_out, storms
from deploy.local.chaos.suite import Looks, all_faults, is_the_endpoints

FAULT = {
    "fault": "kill -9: nats",
    "requests": 30,
    "failed_by_leadtime": 0,
    "failed_by_endpoint": 1,
    "reasons": [],
    "p99_added_ms": 12,
    "ledger_error_max": 3,
    "ledger_settle_s": 0.1,
    "samples_acknowledged": 10,
    "samples_lost": 0,
    "samples_doubled": 0,
    "predictions_checked": 20,
    "bundles_mixed": 0,
    "predictions_unexplained": 0,
    "stuck": [],
}
RESULT = {
    "faults": [FAULT],
    "ledger_faults": 0,
    "samples": {"not_seen_by_trainer": 0, "trained_twice": 0},
    "predictions": {"unseen": 1, "unexplained": []},
}


def test_what_held_is_no_failure() -> None:
    assert failures(RESULT) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("requests", 0, "no request"),
        ("failed_by_leadtime", 1, "failed by Leadtime"),
        ("samples_lost", 2, "samples_lost is 2"),
        ("samples_doubled", 1, "samples_doubled is 1"),
        ("bundles_mixed", 1, "bundles_mixed is 1"),
        ("stuck", ["a router follows 2 of 3 others"], "stuck: a router follows 2 of 3 others"),
        ("ledger_settle_s", 1.2, "exact within 1 s"),
        ("ledger_settle_s", None, "exact within 1 s"),
    ],
)
def test_each_promise_that_broke_is_named_with_its_fault(key: str, value: object, said: str) -> None:
    result = copy.deepcopy(RESULT)
    result["faults"][0][key] = value
    (found,) = failures(result)
    assert found.startswith("kill -9: nats: ")
    assert said in found


@pytest.mark.parametrize("key", ["not_seen_by_trainer", "trained_twice"])
def test_a_sample_that_was_trained_never_or_twice_is_a_failure(key: str) -> None:
    assert len(failures({**RESULT, "samples": {**RESULT["samples"], key: 1}})) == 1
    assert len(failures({**RESULT, "ledger_faults": 1})) == 1


def test_a_prediction_that_nothing_explains_is_a_failure() -> None:
    (found,) = failures({**RESULT, "predictions": {"unseen": 0, "unexplained": ["0190 by 17-ab"]}})
    assert "0190 by 17-ab" in found


def test_the_table_has_a_line_a_fault_and_a_dash_for_the_unknown() -> None:
    lines = table([FAULT, {**FAULT, "ledger_settle_s": None}]).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("kill -9: nats")
    assert "–" in lines[2]


def test_every_part_is_killed_frozen_and_restarted_and_the_short_run_kills_each() -> None:
    names = [fault.name for fault in all_faults()]
    assert len(names) == len(set(names)) == 7 * 3 + 4
    short = [fault.name for fault in all_faults() if fault.short]
    assert sum(name.startswith("kill") for name in short) == 7


def test_requests_under_way_are_bounded_over_a_span() -> None:
    load = Load(None, "", "m", 1.0)  # type: ignore[arg-type]
    load._instants.extend([(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)])
    assert load.bounds(2.5, 3.5) == (1, 2)
    assert load.bounds(1.5, 1.8) == (1, 1)
    assert load.bounds(3.9, 9.0) == (0, 1)
    assert load.bounds(0.1, 0.5) == (0, 0)


def test_ledgers_have_settled_at_the_first_of_three_looks_without_an_error() -> None:
    looks = Looks([(1.0, 0), (2.0, 3), (3.0, 0), (4.0, 1), (5.0, 0), (6.0, 0), (7.0, 0)])
    assert looks.settled_s(1.5) == 3.5
    assert looks.settled_s(5.5) is None
    assert looks.worst(1.0, 3.5) == 3


@pytest.mark.parametrize(
    ("fate", "theirs"),
    [
        (Fate(0.0, status=200, served_by="endpoint-2"), True),
        (Fate(0.0, status=503, reason='{"error": {"code": "upstream_reset"}}'), True),
        (Fate(0.0, status=200, served_by="endpoint-1"), False),
        (Fate(0.0, status=503, reason="no_endpoint"), False),
        (Fate(0.0, status=500), False),
    ],
)
def test_a_failure_is_the_endpoints_only_where_it_was_the_one(fate: Fate, theirs: bool) -> None:
    assert is_the_endpoints(fate, "endpoint-2") is theirs


def test_a_quantile_of_nothing_is_unknown() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_the_wall_clock_of_a_service_jumps_and_its_monotonic_one_does_not(tmp_path) -> None:
    clock = Clock(tmp_path / "clock")
    clock.jump(-3_600.0)
    program = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"
    before = (time.time(), time.monotonic())
    told = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **clock.environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wall, wall_ns, monotonic = map(float, told)
    assert wall == pytest.approx(before[0] - 3_600.0, abs=60.0)
    assert wall_ns == pytest.approx(wall, abs=1.0)
    assert monotonic >= before[1]


def test_storms_of_a_minute_fill_the_time_each_with_a_seed_of_its_own() -> None:
    assert [fault.name for fault in storms(180.0, 5)] == ["storm 5", "storm 6", "storm 7"]
    assert [fault.name for fault in storms(10.0, 1)] == ["storm 1"]


def test_hosts_that_envoy_holds_for_failed_are_named_with_the_reason() -> None:
    def host(port: int, **health: object) -> dict[str, object]:
        return {"address": {"socket_address": {"port_value": port}}, "health_status": health}

    page = {
        "cluster_statuses": [
            {"name": "models", "host_statuses": [host(1, eds_health_status="HEALTHY")]},
            {"name": "router", "host_statuses": [host(2, eds_health_status="HEALTHY", failed_outlier_check=True)]},
            {"name": "empty"},
        ]
    }
    assert shut_out(page) == ["Envoy holds 2 of router for failed: {'failed_outlier_check'}"]
    assert shut_out({"cluster_statuses": page["cluster_statuses"][:1]}) == []
