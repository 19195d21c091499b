"""The jumping engine does what the stepping one does, instant by instant."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import Engine, EngineError, EngineLimits, EngineRequest, RequestTooLongError
from sim.hardware import PROFILES
from sim.jump_engine import JumpEngine, Noise, Running

PROFILE = PROFILES["llama-8b-a100"]


class SameDraws(random.Random):
    """`gauss` from the same normal numbers as `Noise`."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._rng = np.random.default_rng(seed)
        self._normals: list[float] = []

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        if not self._normals:
            self._normals = self._rng.standard_normal(4096).tolist()
        return mu + sigma * self._normals.pop(0)


def stepped(load: list[tuple[float, EngineRequest]], limits: EngineLimits, noise: float, seed: int):
    """The stepping engine's results: id → (first, last, cached, preemptions), and its metrics."""
    engine = Engine(PROFILE, limits, SameDraws(seed), noise)
    states = []
    now_ms, at = 0.0, 0
    while at < len(load) or not engine.is_idle:
        if engine.is_idle:
            now_ms = max(now_ms, load[at][0])
        while at < len(load) and load[at][0] <= now_ms:
            states.append(engine.submit(load[at][1], load[at][0]))
            at += 1
        result = engine.step(now_ms)
        now_ms = result.step.end_ms if result else load[at][0]
    return (
        {s.request.request_id: (s.first_token_ms, s.last_token_ms, s.cached_tokens, s.preemptions) for s in states},
        engine.metrics(),
    )


def jumped(load: list[tuple[float, EngineRequest]], limits: EngineLimits, noise: float, seed: int):
    """The jumping engine's results in the same form."""
    told: list[tuple[str, float]] = []
    engine = JumpEngine(
        PROFILE,
        limits,
        Noise(noise, np.random.default_rng(seed)),
        lambda running, now_ms: told.append((running.request.request_id, now_ms)),
        lambda running, now_ms: told.append((running.request.request_id, now_ms)),
    )
    runs: list[Running] = []
    for at_ms, request in load:
        while engine.wake_ms < at_ms:
            engine.advance(engine.wake_ms)
        engine.metrics(at_ms)  # a scrape changes nothing
        runs.append(engine.submit(request, at_ms))
    while engine.wake_ms < math.inf:
        engine.advance(engine.wake_ms)
    assert [at_ms for _, at_ms in told] == sorted(at_ms for _, at_ms in told)
    assert len(told) == 2 * len(load)
    return (
        {r.request.request_id: (r.first_token_ms, r.finished_ms, r.cached_tokens, r.preemptions) for r in runs},
        engine.metrics(math.inf),
    )


def load_of(seed: int, count: int, gap_ms: float, longest: int) -> list[tuple[float, EngineRequest]]:
    """Requests that share prefixes by group; an answer's tokens are hashed too."""
    rng = random.Random(seed)
    load, now_ms = [], 0.0
    for number in range(count):
        now_ms += rng.expovariate(1 / gap_ms)
        prompt, output = rng.randint(1, longest), rng.randint(1, 120)
        group = rng.randrange(3)
        shared = min(prompt // 16, 40)
        hashes = [group * 1000 + i for i in range(shared)] + [10_000 * (number + 1) + i for i in range(200)]
        load.append((now_ms, EngineRequest(f"r{number}", prompt, output, hashes[: (prompt + output) // 16])))
    return load


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("blocks", "seqs", "gap_ms"), [(4000, 256, 60.0), (300, 256, 20.0), (150, 256, 40.0), (4000, 6, 30.0)]
)
def test_every_request_has_the_same_times_cache_hits_and_preemptions(
    noise: float, blocks: int, seqs: int, gap_ms: float
) -> None:
    limits = EngineLimits(blocks, max_num_seqs=seqs, max_batched_tokens=512, max_model_tokens=2000)
    load = load_of(1, 150, gap_ms, 1500)
    expected, their_metrics = stepped(load, limits, noise, 7)
    found, our_metrics = jumped(load, limits, noise, 7)
    for request_id, (first, last, cached, preemptions) in expected.items():
        ours = found[request_id]
        assert ours[2:] == (cached, preemptions), request_id
        assert ours[:2] == pytest.approx((first, last), rel=1e-12), request_id
    if blocks == 150:
        assert sum(preemptions for *_, preemptions in expected.values()) > 0
    assert our_metrics.kv_used_ratio == their_metrics.kv_used_ratio == 0.0
    for name in ("prefix_hit_tokens", "prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions"):
        assert getattr(our_metrics, name) == getattr(their_metrics, name), name
    assert our_metrics.steps == their_metrics.steps


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(130, 1000), st.floats(1.0, 80.0))
def test_the_two_engines_agree_whatever_the_load(seed: int, blocks: int, gap_ms: float) -> None:
    limits = EngineLimits(blocks, max_num_seqs=64, max_batched_tokens=256, max_model_tokens=2000)
    load = load_of(seed, 40, gap_ms, 1200)
    expected, _ = stepped(load, limits, 0.0, 1)
    found, _ = jumped(load, limits, 0.0, 1)
    assert {key: value[2:] for key, value in found.items()} == {key: value[2:] for key, value in expected.items()}
    for request_id, times in expected.items():
        assert found[request_id][:2] == pytest.approx(times[:2], rel=1e-9)


def test_a_killed_engine_gives_back_what_it_held_and_starts_empty() -> None:
    engine = JumpEngine(PROFILE, EngineLimits(3000), Noise(0.0, np.random.default_rng(0)), _ignore, _ignore)
    for number in range(5):
        engine.submit(EngineRequest(f"r{number}", 1500, 50), float(number))
    lost = engine.kill()
    assert [running.request.request_id for running in lost] == [f"r{number}" for number in range(5)]
    metrics = engine.metrics(10.0)
    assert (metrics.running_requests, metrics.waiting_requests, metrics.kv_used_ratio) == (0, 0, 0.0)
    assert engine.wake_ms == math.inf


def test_a_forecast_is_what_happens_when_nothing_else_comes() -> None:
    firsts: list[float] = []
    engine = JumpEngine(
        PROFILE,
        EngineLimits(20_000),
        Noise(0.0, np.random.default_rng(0)),
        lambda _, now_ms: firsts.append(now_ms),
        _ignore,
    )
    for number in range(8):
        engine.submit(EngineRequest(f"r{number}", 3000, 400), 0.0)
    while engine.wake_ms <= 700.0:
        engine.advance(engine.wake_ms)
    request = EngineRequest("new", 2500, 100)
    forecast = engine.forecast(request, 700.0)
    running = engine.submit(request, 700.0)
    while running.finished_ms is None:
        engine.advance(engine.wake_ms)
    assert running.first_token_ms is not None
    assert forecast.ttft_ms == pytest.approx(running.first_token_ms - 700.0, rel=1e-9)
    tpot_ms = (running.finished_ms - running.first_token_ms) / 99
    assert forecast.tpot_ms == pytest.approx(tpot_ms, rel=0.1)


def test_what_cannot_be_run_is_refused() -> None:
    engine = JumpEngine(PROFILE, EngineLimits(3000), Noise(0.0, np.random.default_rng(0)), _ignore, _ignore)
    with pytest.raises(RequestTooLongError):
        engine.submit(EngineRequest("long", 32_000, 1000), 0.0)
    with pytest.raises(EngineError):
        engine.submit(EngineRequest("empty", 0, 1), 0.0)
    with pytest.raises(EngineError):
        JumpEngine(
            PROFILE, EngineLimits(3000, max_batched_tokens=100), Noise(0.0, np.random.default_rng(0)), _ignore, _ignore
        )
    with pytest.raises(EngineError):
        Noise(1.0, np.random.default_rng(0))


def _ignore(_: Running, __: float) -> None: ...
