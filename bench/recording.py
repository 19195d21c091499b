"""One load on simulated pods, written down once: who was sent where and when, first tokens, ends, scrapes. Pure.

The pods are `sim.engine`'s in virtual time. Which endpoint serves a request doesn't depend on any prediction (a turn of
a conversation goes back to its endpoint four times in five, everything else to the less loaded of two drawn ones), so
one recording can be watched by several ledgers, feature sets and models: all of them see the same samples.

Prefix hits are what the endpoint's cache holds at dispatch; 2 % of requests are aborted. A `Shift` changes the pods'
speed while they run. Limits: one router, no network beyond half a millisecond each way, no failed server.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.engine import Engine, EngineLimits, EngineRequest, RequestState
from sim.hardware import PROFILES, HardwareProfile

TO_SERVER_MS = 0.5
FAST_SCRAPE_MS = 50.0
ABORTED_SHARE = 0.02
BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 32_768
HIDDEN = math.inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pool under a load. Pods are named by `sim.hardware.PROFILES`; `requests_per_s` is the mean over all."""

    name: str
    pods: Sequence[str]
    requests_per_s: float
    budget_tokens: int = 2048
    bursts: bool = False
    """4 s in 37 at 2.2 times the rate, over a swing of ±50 % in 120 s"""
    conversations: float = 0.0
    """Share of arrivals that open a conversation of four turns in the mean"""
    step_noise: float = 0.04


_H100 = "llama-70b-h100-tp4"
_A100 = "llama-70b-a100-tp4"

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario("poisson-2048", (_H100,) * 4, 17.0),
            Scenario("bursty-8192", (_H100,) * 4, 15.0, budget_tokens=8192, bursts=True),
            Scenario("multi-turn-2048", (_H100,) * 4, 19.0, bursts=True, conversations=0.3),
            Scenario("mixed-2048", (_H100, _H100, _A100, _A100), 10.5, bursts=True, conversations=0.3),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Shift:
    """From `begins_ms` on the pods in `pods` take `factor` times as long, reached evenly over `ramp_ms`."""

    begins_ms: float
    factor: float
    ramp_ms: float = 0.0
    pods: Sequence[int] | None = None
    dilates: bool = False
    """Arrivals slow down with the pods, so that queues stay what they were and latencies alone are `factor` times"""

    def at(self, now_ms: float) -> float:
        """How many times as long steps take."""
        if now_ms < self.begins_ms:
            return 1.0
        if self.ramp_ms <= 0:
            return self.factor
        return 1.0 + (self.factor - 1.0) * min(1.0, (now_ms - self.begins_ms) / self.ramp_ms)


class Kind(IntEnum):
    """What happened; the order is that of events at the same instant."""

    FIRST = 0
    END = 1
    ABORT = 2
    SCRAPE = 3
    DISPATCH = 4


@dataclass(frozen=True, slots=True)
class Scrape:
    """A pod's gauges and counters at an instant."""

    pod: int
    waiting_requests: int
    running_requests: int
    kv_cache_utilization: float
    prompt_tokens: int
    first_tokens: int
    number: int
    """Of this pod, from 0, every 50 ms"""


@dataclass(frozen=True, slots=True)
class Event:
    """`what` is a request's number, or a `Scrape`."""

    at_ms: float
    kind: Kind
    what: Any


@dataclass(frozen=True, slots=True)
class Recording:
    """Arrays of n requests in order of dispatch, and everything that happened in order of time."""

    scenario: Scenario
    events: Sequence[Event]
    dispatched_ms: npt.NDArray[np.float64]
    first_ms: npt.NDArray[np.float64]
    """NaN without a first token"""
    end_ms: npt.NDArray[np.float64]
    aborted: npt.NDArray[np.bool_]
    input_tokens: npt.NDArray[np.int64]
    uncached_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    max_tokens: npt.NDArray[np.int64]
    """0 where the client set none"""
    pod: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pod)

    @property
    def ttft_ms(self) -> npt.NDArray[np.float64]:
        return self.first_ms - self.dispatched_ms

    @property
    def e2e_ms(self) -> npt.NDArray[np.float64]:
        return self.end_ms - self.dispatched_ms

    @property
    def tpot_ms(self) -> npt.NDArray[np.float64]:
        """NaN below two tokens."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.end_ms - self.first_ms) / gaps


@dataclass(slots=True)
class _Request:
    number: int
    session: int
    turns_left: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    pod: int = -1
    uncached_tokens: int = 0
    dispatched_ms: float = math.nan
    first_ms: float = math.nan
    end_ms: float = math.nan
    aborted: bool = False


@dataclass(slots=True)
class _Pod:
    engine: Engine
    profile: HardwareProfile
    first_tokens: int = 0
    prompt_tokens: int = 0
    in_flight: int = 0
    scrapes: int = 0


class _Load:
    """Draws requests: two kinds of single ones (chat, code), and conversations that grow."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._rng = random.Random(f"load/{scenario.name}/{seed}")
        self._scenario = scenario
        self._sessions = 0
        self.count = 0

    def gap_ms(self, now_ms: float) -> float:
        scenario = self._scenario
        # A conversation brings its later turns by itself.
        rate = scenario.requests_per_s / (1.0 + 3.0 * scenario.conversations)
        if scenario.bursts:
            seconds = now_ms / 1e3
            rate *= (2.2 if seconds % 37.0 < 4.0 else 1.0) * (1.0 + 0.5 * math.sin(2 * math.pi * seconds / 120.0))
        return self._rng.expovariate(rate) * 1e3

    def single(self) -> _Request:
        rng = self._rng
        self._sessions += 1
        code = rng.random() < 0.3
        prompt, spread, output = (1_500, 0.9, 15) if code else (1_000, 1.0, 130)
        turns = 1 + min(11, int(rng.expovariate(1 / 3.0))) if rng.random() < self._scenario.conversations else 1
        return self._request(turns, rng.lognormvariate(math.log(prompt), spread), output)

    def next_turn(self, before: _Request) -> _Request:
        question = self._rng.lognormvariate(math.log(150), 0.9)
        request = self._request(before.turns_left, before.prompt_tokens + before.output_tokens + question, 130)
        request.session = before.session
        return request

    def think_ms(self) -> float:
        return self._rng.expovariate(1 / 6_000.0) + 500.0

    def abort_after_ms(self) -> float:
        return self._rng.expovariate(1 / 800.0) if self._rng.random() < ABORTED_SHARE else HIDDEN

    def _request(self, turns: int, prompt_tokens: float, output_median: float) -> _Request:
        rng = self._rng
        prompt = min(max(int(prompt_tokens), 8), 16_000)
        output = min(max(int(rng.lognormvariate(math.log(output_median), 0.8)), 1), 1_000)
        cap = rng.random()
        max_tokens = (
            0 if cap < 0.4 else 1_024 if cap < 0.7 else max(16, math.ceil(output * rng.uniform(1, 3) / 16) * 16)
        )
        number = self.count
        self.count += 1
        return _Request(number, self._sessions, turns - 1, prompt, output, max_tokens)


def record(scenario: Scenario, count: int, seed: int, shift: Shift | None = None) -> Recording:
    """Run the load until `count` requests have been dispatched and all of them have ended."""
    return _Run(scenario, count, seed, shift).recording()


@dataclass(slots=True)
class _Run:
    scenario: Scenario
    count: int
    seed: int
    shift: Shift | None
    _queue: list[tuple[float, int, str, Any]] = field(default_factory=list)
    _order: int = 0
    _events: list[Event] = field(default_factory=list)
    _requests: list[_Request] = field(default_factory=list)
    _homes: dict[int, int] = field(default_factory=dict)

    def recording(self) -> Recording:
        scenario = self.scenario
        load = _Load(scenario, self.seed)
        rng = random.Random(f"pods/{scenario.name}/{self.seed}")
        pods = [self._pod(name, rng) for name in scenario.pods]
        self._schedule(load.gap_ms(0.0), "arrival", None)
        for index in range(len(pods)):
            self._schedule(FAST_SCRAPE_MS * (1 + index / len(pods)), "scrape", index)
        under_way = 0
        while self._queue:
            now_ms, _, kind, what = heapq.heappop(self._queue)
            if kind == "arrival":
                if len(self._requests) >= self.count:
                    continue
                request = load.single() if what is None else what
                if what is None:
                    gap_ms = load.gap_ms(now_ms)
                    if self.shift is not None and self.shift.dilates:
                        gap_ms *= self.shift.at(now_ms)
                    self._schedule(now_ms + gap_ms, "arrival", None)
                self._dispatch(request, pods, rng, now_ms)
                self._schedule(now_ms + load.abort_after_ms(), "abort", request)
                under_way += 1
            elif kind == "submit":
                pod = pods[what.pod]
                pod.engine.submit(self._engine_request(what), now_ms)
                if pod.engine.current_step is None:
                    self._schedule(now_ms, "step", what.pod)
            elif kind == "step":
                engine = pods[what].engine
                if self.shift is not None and (self.shift.pods is None or what in self.shift.pods):
                    engine.profile = pods[what].profile.scaled(1.0 / self.shift.at(now_ms))
                if engine.current_step is None and (step := engine.start_step(max(now_ms, engine.now_ms))) is not None:
                    self._schedule(step.end_ms, "stepped", what)
            elif kind == "stepped":
                under_way -= self._stepped(pods, what, load, now_ms)
                self._schedule(now_ms, "step", what)
            elif kind == "abort":
                under_way -= self._abort(pods, what, now_ms)
            elif kind == "scrape":
                self._scrape(pods, what, now_ms)
                if under_way or len(self._requests) < self.count:
                    self._schedule(now_ms + FAST_SCRAPE_MS, "scrape", what)
        return self._recording()

    def _schedule(self, at_ms: float, kind: str, what: Any) -> None:
        if at_ms < math.inf:
            self._order += 1
            heapq.heappush(self._queue, (at_ms, self._order, kind, what))

    def _pod(self, name: str, rng: random.Random) -> _Pod:
        profile = PROFILES[name]
        limits = EngineLimits(
            num_blocks=profile.kv_capacity_tokens // BLOCK_TOKENS,
            max_batched_tokens=self.scenario.budget_tokens,
            max_model_tokens=MAX_MODEL_TOKENS,
        )
        return _Pod(Engine(profile, limits, random.Random(rng.random()), self.scenario.step_noise), profile)

    @staticmethod
    def _hashes(request: _Request) -> range:
        """Blocks of a conversation are named by it and their place, so a later turn finds those of an earlier one."""
        start = request.session << 16
        return range(start, start + (request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS)

    def _engine_request(self, request: _Request) -> EngineRequest:
        return EngineRequest(str(request.number), request.prompt_tokens, request.output_tokens, self._hashes(request))

    def _dispatch(self, request: _Request, pods: Sequence[_Pod], rng: random.Random, now_ms: float) -> None:
        home = self._homes.get(request.session)
        if home is not None and rng.random() < 0.8:
            index = home
        else:
            first, second = rng.randrange(len(pods)), rng.randrange(len(pods))
            index = first if pods[first].in_flight <= pods[second].in_flight else second
        if request.turns_left:
            self._homes[request.session] = index
        pool = pods[index].engine.pool
        hits, _ = pool.match(self._hashes(request), (request.prompt_tokens - 1) // BLOCK_TOKENS)
        request.number = len(self._requests)
        request.pod, request.dispatched_ms = index, now_ms
        request.uncached_tokens = request.prompt_tokens - len(hits) * BLOCK_TOKENS
        pods[index].in_flight += 1
        self._requests.append(request)
        self._events.append(Event(now_ms, Kind.DISPATCH, request.number))
        self._schedule(now_ms + TO_SERVER_MS, "submit", request)

    def _stepped(self, pods: Sequence[_Pod], index: int, load: _Load, now_ms: float) -> int:
        """End a pod's step; returns how many requests it finished."""
        pod = pods[index]
        result = pod.engine.finish_step()
        seen_ms = now_ms + TO_SERVER_MS
        for state in result.emitted:
            if state.generated_tokens == 1:
                request = self._requests[int(state.request.request_id)]
                pod.first_tokens += 1
                pod.prompt_tokens += request.prompt_tokens
                request.first_ms = seen_ms
                self._events.append(Event(seen_ms, Kind.FIRST, request.number))
        for state in result.finished:
            request = self._requests[int(state.request.request_id)]
            request.end_ms = seen_ms
            pod.in_flight -= 1
            self._events.append(Event(seen_ms, Kind.END, request.number))
            if request.turns_left:
                self._schedule(now_ms + load.think_ms(), "arrival", load.next_turn(request))
        return len(result.finished)

    def _abort(self, pods: Sequence[_Pod], request: _Request, now_ms: float) -> int:
        pod = pods[request.pod]
        if not math.isnan(request.end_ms):
            return 0
        state: RequestState | None = pod.engine.abort(str(request.number), now_ms)
        if state is None:
            return 0
        request.aborted, request.end_ms = True, now_ms
        pod.in_flight -= 1
        self._events.append(Event(now_ms, Kind.ABORT, request.number))
        return 1

    def _scrape(self, pods: Sequence[_Pod], index: int, now_ms: float) -> None:
        pod = pods[index]
        gauges = pod.engine.metrics()
        scrape = Scrape(
            index,
            gauges.waiting_requests,
            gauges.running_requests,
            gauges.kv_used_ratio,
            pod.prompt_tokens,
            pod.first_tokens,
            pod.scrapes,
        )
        pod.scrapes += 1
        self._events.append(Event(now_ms, Kind.SCRAPE, scrape))

    def _recording(self) -> Recording:
        requests = self._requests
        return Recording(
            self.scenario,
            sorted(self._events, key=lambda event: (event.at_ms, event.kind)),
            np.array([r.dispatched_ms for r in requests]),
            np.array([r.first_ms for r in requests]),
            np.array([r.end_ms for r in requests]),
            np.array([r.aborted for r in requests], np.bool_),
            np.array([r.prompt_tokens for r in requests]),
            np.array([r.uncached_tokens for r in requests]),
            np.array([r.output_tokens for r in requests]),
            np.array([r.max_tokens for r in requests]),
            np.array([r.pod for r in requests]),
        )
