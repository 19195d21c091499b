"""A run in virtual time: fixed by its seed, the router's own decisions, every request ends once."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.router.core import DecisionCore
from services.router.request.inference_request import InferenceRequest
from shared.samples import Outcome
from sim.replay import routers
from sim.replay.cluster import run
from sim.replay.learning import LearningOptions
from sim.replay.options import Failure, RunOptions, SloRule, Speed
from sim.replay.outcomes import RunResult
from sim.replay.policies import policy
from sim.replay.pool import parse_hardware
from sim.replay.trace import Piece, ReplayRequest, Trace, load_trace

PODS = parse_hardware("h100-8b:2,a100-8b:2")
OPTIONS = RunOptions(seed=3, slo=SloRule(1000.0, 40.0, 4096))


def trace(count: int = 300, rate: float = 8.0) -> Trace:
    return load_trace("A", 5, count).at_rate(rate)


def assert_sound(result: RunResult, count: int) -> None:
    assert (result.ended, result.ledger_left, result.ledger_faults, result.faults) == (count, 0, [], 0)


@pytest.mark.parametrize("name", ["random", "predicted-latency", "oracle"])
def test_the_same_seed_gives_the_same_outcomes(name: str) -> None:
    one, again = (run(trace(150), PODS, policy(name), OPTIONS) for _ in range(2))
    assert np.array_equal(one.outcomes.ttft_ms, again.outcomes.ttft_ms)
    assert np.array_equal(one.outcomes.pod, again.outcomes.pod)
    other = run(trace(150), PODS, policy(name), replace(OPTIONS, seed=4))
    assert not np.array_equal(one.outcomes.ttft_ms, other.outcomes.ttft_ms)


@pytest.mark.parametrize(
    "name", ["round-robin", "random", "least-request", "load-prefix", "token-load", "lmetric", "leadtime", "oracle"]
)
def test_every_request_ends_once_and_the_ledger_with_it(name: str) -> None:
    result = run(trace(), PODS, policy(name), OPTIONS)
    assert_sound(result, 300)
    assert set(result.outcomes.outcome) == {Outcome.OK}
    assert np.isfinite(result.outcomes.ttft_ms).all()
    assert (result.outcomes.e2e_ms >= result.outcomes.ttft_ms).all()


def test_a_learned_policy_learns_inside_the_run() -> None:
    options = replace(OPTIONS, learning=LearningOptions(retrain_ms=5_000.0))
    result = run(load_trace("sharegpt", 1, 800).at_rate(15.0), PODS, policy("leadtime"), options)
    assert_sound(result, 800)
    assert result.fits - result.fits_refused >= 1
    assert result.first_bundle_ms is not None
    known = np.isfinite(result.outcomes.predicted_ttft_ms)
    assert known.all()  # before the first bundle by the prior
    error = np.abs(result.outcomes.predicted_ttft_ms / result.outcomes.ttft_ms - 1.0)[-200:]
    assert np.median(error) < 0.6


def test_an_oracle_knows_a_lone_requests_time() -> None:
    result = run(trace(40, 0.2), PODS, policy("oracle"), replace(OPTIONS, noise=0.0))
    assert result.outcomes.predicted_ttft_ms == pytest.approx(result.outcomes.ttft_ms, rel=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_several_routers_end_with_empty_ledgers(shared: bool) -> None:
    result = run(trace(), PODS, policy("token-load"), replace(OPTIONS, routers=3, share_ledgers=shared))
    assert_sound(result, 300)
    assert set(result.outcomes.outcome) == {Outcome.OK}


def test_routers_that_share_their_ledgers_decide_nearly_as_one() -> None:
    load = load_trace("D", 11, 300).at_rate(5.8)
    pods = parse_hardware("h100-8b:8")
    one, sharing, apart = (
        float(np.quantile(run(load, pods, policy("token-load"), options).outcomes.ttft_ms, 0.9))
        for options in (OPTIONS, replace(OPTIONS, routers=4), replace(OPTIONS, routers=4, share_ledgers=False))
    )
    assert sharing < 1.15 * one
    assert apart > 1.3 * one


@pytest.mark.parametrize("name", ["token-load", "leadtime"])
def test_a_pod_that_fails_loses_only_answers_under_way_and_is_used_again_when_it_is_back(name: str) -> None:
    options = replace(OPTIONS, failures=(Failure(0, 8_000.0, 20_000.0), Failure(3, 15_000.0)))
    result = run(trace(), PODS, policy(name), options)
    assert_sound(result, 300)
    outcomes = result.outcomes
    lost = [o is Outcome.UPSTREAM_RESET for o in outcomes.outcome]
    assert 0 < sum(lost) < 80
    assert sum(o is Outcome.OK for o in outcomes.outcome) == 300 - sum(lost)
    down = (outcomes.arrival_ms > 8_600.0) & (outcomes.arrival_ms < 19_900.0)
    assert not (outcomes.pod[down] == 0).any()
    assert (outcomes.pod[outcomes.arrival_ms > 21_000.0] == 0).any()
    assert not (outcomes.pod[outcomes.arrival_ms > 16_000.0] == 3).any()
    assert outcomes.attempts.max() >= 2


def test_an_endpoint_that_was_slow_is_rediscovered_though_others_are_idle() -> None:
    """Six times as slow for two minutes: it gets nothing while it is, and its share again some minutes later."""
    requests = [
        ReplayRequest(place * 400.0 + place % 7 * 30.0, (Piece(place, 1_000 + 13 * (place % 40)),), 12, 10**6 + place)
        for place in range(1_500)
    ]
    options = replace(
        OPTIONS,
        speeds=(Speed(0, 0.0, 1 / 6), Speed(0, 120_000.0, 1.0)),
        learning=LearningOptions(retrain_ms=60_000.0),
    )
    result = run(Trace("calm", tuple(requests)), parse_hardware("h100-8b:2"), policy("leadtime"), options)
    assert_sound(result, 1_500)
    slow = result.outcomes.pod[150:300] == 0
    assert slow.mean() < 0.2
    assert (result.outcomes.pod[-200:] == 0).mean() > 0.3
    propensity = result.outcomes.propensity[200:]
    assert (propensity[result.outcomes.pod[200:] == 0] < 0.05).any()


@pytest.mark.parametrize("learned", [False, True])
def test_many_requests_with_one_long_prefix_at_once_spread_over_an_idle_pool(learned: bool) -> None:
    before = load_trace("B", 5, 350).at_rate(6.0).requests if learned else ()
    start_ms = before[-1].arrival_ms + 120_000.0 if before else 0.0
    burst = [
        ReplayRequest(start_ms + place, (Piece(10**6, 8000), Piece(10**6 + 1 + place, 50)), 200, 2 * 10**6 + place)
        for place in range(40)
    ]
    result = run(Trace("burst", (*before, *burst)), parse_hardware("h100-8b:4"), policy("leadtime"), OPTIONS)
    assert (result.fits > result.fits_refused) == learned
    assert len(set(result.outcomes.pod[-40:].tolist())) >= 3


def test_without_any_pod_requests_are_turned_away() -> None:
    options = replace(OPTIONS, failures=(Failure(0, 2_000.0, math.inf),))
    result = run(trace(100), PODS[:1], policy("round-robin"), options)
    assert_sound(result, 100)
    assert sum(o is Outcome.NO_ENDPOINT for o in result.outcomes.outcome) > 50


def test_decisions_are_those_of_the_routers_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay asks the core that the director asks; it has no policy code of its own."""
    asked: list[InferenceRequest] = []
    orders: list[tuple[int, ...]] = []

    class Watched(DecisionCore):
        def prepare(self, request, subset, now_ms):  # type: ignore[no-untyped-def]
            asked.append(request)
            return super().prepare(request, subset, now_ms)

        def schedule(self, prepared, prediction, elapsed_ms):  # type: ignore[no-untyped-def]
            decision = super().schedule(prepared, prediction, elapsed_ms)
            orders.append(decision.order)
            return decision

    monkeypatch.setattr(routers, "DecisionCore", Watched)
    result = run(trace(60), PODS, policy("lmetric"), OPTIONS)
    assert len(asked) == 60
    assert [order[0] for order in orders] == result.outcomes.pod.tolist()
    assert all(request.input_tokens == len(request.prompt) / 4 for request in asked)


WAITING = """
name: waiting
scorers: [{plugin: predicted-cost-scorer}]
picker: {plugin: max-score-picker}
waiting_room: {mode: MODE, enough_work_ms: 100, ttl_ms: 20000, hungry: any}
fallback: token-load
"""


@pytest.mark.parametrize("mode", ["overload", "late-binding", "smallest-first"])
def test_requests_are_held_in_overload_and_every_one_ends_once(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "waiting.yaml"
    path.write_text(WAITING.replace("MODE", mode))
    busy = trace(300, 40.0)
    result = run(busy, PODS, policy(f"{path}+oracle"), OPTIONS)
    assert_sound(result, 300)
    assert set(result.outcomes.outcome) == {Outcome.OK}, "priority 0 is never shed"
    greedy = run(busy, PODS, policy("leadtime+oracle"), OPTIONS)
    assert not np.array_equal(result.outcomes.ttft_ms, greedy.outcomes.ttft_ms), "some were held"


def test_at_low_load_nobody_is_held(tmp_path: Path) -> None:
    path = tmp_path / "waiting.yaml"
    path.write_text(WAITING.replace("MODE", "late-binding"))
    plain = tmp_path / "plain.yaml"
    plain.write_text("\n".join(line for line in path.read_text().splitlines() if "waiting_room" not in line))
    held, greedy = (run(trace(60, 0.5), PODS, policy(f"{p}+oracle"), OPTIONS) for p in (path, plain))
    assert np.array_equal(held.outcomes.ttft_ms, greedy.outcomes.ttft_ms)
