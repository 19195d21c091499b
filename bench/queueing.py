"""Synthetic completed requests that queue: what benchmarks and tests of the model train on.

A small event simulation of pods with chunked prefill and continuous batching under a load that swings and bursts, so
that TTFT depends on what is pending, TPOT on the batch, and scraped gauges are as old as a scrape makes them. Rows are
as an exact ledger would write them at decision time.

Limits: the ledger and the prefix hit are exact, no request fails, no KV pressure, no network. Errors measured on it
compare models; they do not foretell a cluster.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.features import SCHEMA, FloatMatrix, hardware_code
from shared.samples import LatencySample, Outcome, Rung, TtftSource

EPOCH_UNIX_MS = 1_700_000_000_000.0
SCRAPE_INTERVAL_MS = 200.0
KV_CAPACITY_TOKENS = 200_000.0


@dataclass(frozen=True, slots=True)
class PodSpeed:
    """Step time in ms: fixed + per prefill token (+ attention) + per decoding request + per context token."""

    hardware: str
    fixed_ms: float
    prefill_ms_per_token: float
    attention_ms_per_token2: float
    decode_ms_per_request: float
    context_ms_per_token: float


# Fits to measured kernels: a 70B model on four H100 or four A100.
H100_70B = PodSpeed("h100", 12.1, 0.0547, 1.03e-6, 0.0295, 2.92e-5)
A100_70B = PodSpeed("a100", 18.5, 0.157, 1.21e-6, 0.0945, 6.04e-5)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One pool under one load. `slowdown_at` multiplies every label by `slowdown` from that request on."""

    pods: Sequence[PodSpeed] = (H100_70B, H100_70B, H100_70B, H100_70B)
    requests_per_s: float = 20.0
    prefill_budget_tokens: int = 2048
    streamed_share: float = 1.0
    step_noise: float = 0.04
    slowdown: float = 1.0
    slowdown_at: int = 1 << 60


@dataclass(slots=True)
class _Request:
    number: int
    arrived_ms: float
    input_tokens: int
    uncached_tokens: int
    output_tokens: int
    left_tokens: int
    first_ms: float = 0.0
    last_ms: float = 0.0


@dataclass(slots=True)
class _Pod:
    speed: PodSpeed
    now_ms: float = 0.0
    steps: int = 0
    context_tokens: int = 0
    pending: deque[_Request] = field(default_factory=deque)
    decoding: list[tuple[int, int, _Request]] = field(default_factory=list)
    step_time_ms: float = 0.0
    scraped_ms: float = -math.inf
    scraped: tuple[float, float, float] = (0.0, 0.0, 0.0)
    inflight_input_tokens: int = 0

    def scrape(self) -> None:
        if self.now_ms - self.scraped_ms >= SCRAPE_INTERVAL_MS:
            self.scraped_ms = self.now_ms
            batch = len(self.decoding) + (1 if self.pending else 0)
            kv = min(1.0, self.context_tokens / KV_CAPACITY_TOKENS)
            self.scraped = (max(0.0, len(self.pending) - 1.0), float(batch), kv)

    def advance(self, until_ms: float, budget: int, noise: float, rng: np.random.Generator) -> None:
        """Run steps that begin before `until_ms`; a step under way ends after it."""
        while self.now_ms < until_ms:
            self.scrape()
            if not self.pending and not self.decoding:
                self.now_ms = until_ms
                return
            room, attention, finished = budget - len(self.decoding), 0.0, []
            while self.pending and room > 0:
                request = self.pending[0]
                chunk = min(room, request.left_tokens)
                done = request.input_tokens - request.left_tokens
                attention += chunk * (done + chunk / 2)
                request.left_tokens -= chunk
                room -= chunk
                if request.left_tokens:
                    break
                finished.append(self.pending.popleft())
            prefilled = budget - len(self.decoding) - room
            speed = self.speed
            step_ms = (
                speed.fixed_ms
                + speed.prefill_ms_per_token * prefilled
                + speed.attention_ms_per_token2 * attention
                + speed.decode_ms_per_request * len(self.decoding)
                + speed.context_ms_per_token * self.context_tokens
            )
            self.now_ms += step_ms * math.exp(rng.normal(0.0, noise))
            self.steps += 1
            self.context_tokens += len(self.decoding)
            for request in finished:
                request.first_ms = self.now_ms
                self.context_tokens += request.input_tokens + 1
                heapq.heappush(self.decoding, (self.steps + request.output_tokens - 1, request.number, request))
            while self.decoding and self.decoding[0][0] <= self.steps:
                request = heapq.heappop(self.decoding)[2]
                request.last_ms = self.now_ms
                self.context_tokens -= request.input_tokens + request.output_tokens
                self.inflight_input_tokens -= request.input_tokens
                tpot_ms = (request.last_ms - request.first_ms) / max(1, request.output_tokens - 1)
                self.step_time_ms = tpot_ms if not self.step_time_ms else 0.8 * self.step_time_ms + 0.2 * tpot_ms


@dataclass(frozen=True, slots=True)
class Observations:
    """Aligned arrays of `n` completed requests, in order of completion."""

    rows: FloatMatrix
    """float32 (n, F)"""
    ttft_ms: npt.NDArray[np.float64]
    tpot_ms: npt.NDArray[np.float64]
    """NaN for a single output token."""
    e2e_ms: npt.NDArray[np.float64]
    arrived_ms: npt.NDArray[np.float64]
    output_tokens: npt.NDArray[np.int64]
    pod: npt.NDArray[np.int64]
    streamed: npt.NDArray[np.bool_]
    inflight_input_tokens: npt.NDArray[np.float64]
    """Prompt tokens of every request on the endpoint: a counter that the incumbent's features have and ours don't."""

    def __len__(self) -> int:
        return len(self.rows)


def observe(count: int, *, seed: int, scenario: Scenario | None = None) -> Observations:
    """Simulate until `count` requests have completed."""
    scenario = scenario or Scenario()
    rng = np.random.default_rng(seed)
    pods = [_Pod(speed) for speed in scenario.pods]
    columns: dict[str, list[float]] = {name: [] for name in SCHEMA.names}
    requests: list[_Request] = []
    chosen: list[int] = []
    inflight: list[float] = []
    now_ms = 0.0
    while len(requests) < count:
        phase = now_ms / 1e3
        burst = 2.2 if phase % 37.0 < 4.0 else 1.0
        rate = scenario.requests_per_s * burst * (1.0 + 0.5 * math.sin(2 * math.pi * phase / 120.0))
        now_ms += rng.exponential(1e3 / rate)
        for pod in pods:
            pod.advance(now_ms, scenario.prefill_budget_tokens, scenario.step_noise, rng)
        input_tokens = int(np.clip(rng.lognormal(6.6, 1.1), 8, 16_000))
        cached_share = rng.uniform(0.3, 0.98) if rng.random() < 0.45 else 0.0
        uncached = max(1, input_tokens - int(input_tokens * cached_share) // 16 * 16)
        output_tokens = int(np.clip(rng.lognormal(4.9, 0.9), 1, 1500))
        index = int(rng.integers(len(pods)))
        pod = pods[index]
        known = float(rng.random() < 0.5)
        age = min(now_ms - pod.scraped_ms, 60_000.0)
        row = {
            "input_tokens": input_tokens,
            "uncached_tokens": uncached,
            "pending_uncached_tokens": sum(r.uncached_tokens for r in pod.pending),
            "pending_requests": len(pod.pending),
            "oldest_pending_age_ms": now_ms - pod.pending[0].arrived_ms if pod.pending else 0.0,
            "decoding_requests": len(pod.decoding),
            "decode_context_tokens": pod.context_tokens,
            "expected_output_tokens": known * round(output_tokens * rng.uniform(1.0, 1.6)),
            "expected_output_tokens_known": known,
            "step_time_ms": pod.step_time_ms,
            "step_time_known": float(pod.step_time_ms > 0),
            "waiting_requests": pod.scraped[0],
            "running_requests": pod.scraped[1],
            "kv_cache_utilization": pod.scraped[2],
            "scrape_age_ms": age,
            "scrape_known": 1.0,
            "hardware_class": hardware_code(pod.speed.hardware),
        }
        for name, values in columns.items():
            values.append(float(row[name]))
        inflight.append(pod.inflight_input_tokens)
        pod.inflight_input_tokens += input_tokens
        request = _Request(len(requests), now_ms, input_tokens, uncached, output_tokens, uncached)
        pod.pending.append(request)
        requests.append(request)
        chosen.append(index)
    for pod in pods:
        pod.advance(now_ms + 3e6, scenario.prefill_budget_tokens, scenario.step_noise, rng)
    return _observations(scenario, columns, requests, chosen, inflight, rng)


def _observations(
    scenario: Scenario,
    columns: dict[str, list[float]],
    requests: list[_Request],
    chosen: list[int],
    inflight: list[float],
    rng: np.random.Generator,
) -> Observations:
    n = len(requests)
    rows = SCHEMA.rows(n, {name: np.asarray(values, np.float32) for name, values in columns.items()})
    arrived = np.array([r.arrived_ms for r in requests])
    first = np.array([r.first_ms for r in requests])
    last = np.array([r.last_ms for r in requests])
    outputs = np.array([r.output_tokens for r in requests])
    factor = np.where(np.arange(n) >= scenario.slowdown_at, scenario.slowdown, 1.0)
    tpot = np.where(outputs > 1, (last - first) / np.maximum(1, outputs - 1), np.nan)
    order = np.argsort(last, kind="stable")
    return Observations(
        rows[order],
        ((first - arrived) * factor)[order],
        (tpot * factor)[order],
        ((last - arrived) * factor)[order],
        arrived[order],
        outputs[order],
        np.array(chosen)[order],
        (rng.random(n) < scenario.streamed_share)[order],
        np.array(inflight)[order],
    )


def as_samples(observations: Observations, *, pool: str = "default", model: str = "sim-model") -> list[LatencySample]:
    """The same observations as the collector would publish them."""
    return [
        LatencySample(
            decision_id=f"decision-{i:08d}",
            pool=pool,
            model=model,
            endpoint=f"10.0.0.{observations.pod[i] + 1}:8000",
            outcome=Outcome.OK,
            status=200,
            streamed=bool(observations.streamed[i]),
            received_unix_ms=EPOCH_UNIX_MS + float(observations.arrived_ms[i]),
            completed_unix_ms=EPOCH_UNIX_MS + float(observations.arrived_ms[i] + observations.e2e_ms[i]),
            rung=Rung.HEURISTIC,
            schema_hash=SCHEMA.hash,
            features=[float(value) for value in observations.rows[i]],
            ttft_ms=float(observations.ttft_ms[i]) if observations.streamed[i] else None,
            tpot_ms=(
                float(observations.tpot_ms[i])
                if observations.streamed[i] and observations.output_tokens[i] > 1
                else None
            ),
            e2e_ms=float(observations.e2e_ms[i]),
            ttft_source=TtftSource.ACCESS_LOG if observations.streamed[i] else None,
            input_tokens=int(observations.rows[i, SCHEMA.index["input_tokens"]]),
            output_tokens=int(observations.output_tokens[i]),
        )
        for i in range(len(observations))
    ]
