"""The default policy against round robin and load + prefix, on simulated servers in virtual time.

Two fast and two slow servers, prompts that share prefixes, an exact ledger, gauges scraped every 250 ms, predictions
computed from the engines' own state without what arrives later. It guards the order of the policies, not their
distance: the replay measures that.
"""

import math
import random
from dataclasses import astuple, dataclass

import numpy as np
import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.pipeline import Pipeline
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from sim.engine import Engine, EngineLimits, EngineRequest, RequestState
from sim.hardware import PROFILES as HARDWARE
from tests.unit.router.scheduling.builders import candidates, context, prediction

BLOCK = 16
FAST, SLOW = HARDWARE["llama-8b-h100"], HARDWARE["llama-8b-a100"]
HARDWARE_CLASSES = [1, 1, 2, 2]
SLO = Slo(ttft_ms=1000, tpot_ms=40)
PROFILES = Profiles(load_presets(Registry()))


@dataclass
class Result:
    ttft_p90_ms: float
    tpot_p90_ms: float
    goodput: float


def workload(seed: int, count: int, rate_per_s: float, question_tokens: int) -> list[tuple[float, EngineRequest]]:
    """Poisson arrivals; six system prompts of 1000 tokens, questions of their own, answers of about 300 tokens."""
    source, now_ms, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        now_ms += source.expovariate(rate_per_s) * 1e3
        group = source.randrange(6)
        own = max(BLOCK, int(source.gauss(question_tokens, 0.3 * question_tokens)))
        shared = [hash((group, i)) for i in range(1000 // BLOCK)]
        blocks = [*shared, *(hash((number, -i)) for i in range(1, own // BLOCK))]
        answer = max(8, int(source.gauss(300, 90)))
        arrivals.append((now_ms, EngineRequest(str(number), 1000 + own, answer, blocks)))
    return arrivals


class Server:
    """One engine, with what a router's ledger, scraper and a perfect model would know of it."""

    def __init__(self, profile, seed):
        limits = EngineLimits(num_blocks=profile.kv_capacity_tokens // BLOCK)
        self.profile, self.engine = profile, Engine(profile, limits, random.Random(seed), 0.04)
        self.step_ends_ms: float | None = None
        self.gauges = self.engine.metrics()

    def start(self, now_ms):
        step = self.engine.start_step(now_ms)
        self.step_ends_ms = None if step is None else step.end_ms

    def submit(self, request, now_ms) -> RequestState:
        state = self.engine.submit(request, now_ms)
        if self.step_ends_ms is None:
            self.start(now_ms)
        return state

    def uncached(self, request) -> int:
        hits, _ = self.engine.pool.match(request.block_hashes, (request.prompt_tokens - 1) // BLOCK)
        return request.prompt_tokens - len(hits) * BLOCK

    def view(self, request, now_ms):
        uncached, pending, context_tokens, square, prefilling, decoding = self.uncached(request), 0, 0, 0, 0, 0
        square += uncached * (2 * request.prompt_tokens - uncached)
        for state in self.engine.states():
            if state.token_times_ms:
                decoding += 1
                context_tokens += state.computed_tokens
                continue
            prompt = state.request.prompt_tokens
            waits = state.scheduled_ms is None
            left = self.uncached(state.request) if waits else prompt - state.computed_tokens - state.step_tokens
            prefilling, pending, square = prefilling + 1, pending + left, square + left * (2 * prompt - left)
        profile, tokens = self.profile, pending + uncached
        steps = math.ceil(tokens / max(1, 2048 - decoding))
        ttft = (self.step_ends_ms or now_ms) - now_ms + profile.step_ms(tokens, square, 0, 0)
        ttft += (steps - 1) * profile.prefill_base_ms + steps * profile.decode_ms(decoding, context_tokens)
        tpot = profile.decode_ms(decoding + 1, context_tokens + request.prompt_tokens)
        return uncached, pending, prefilling, decoding, context_tokens, ttft, tpot


def simulate(pipeline: Pipeline, arrivals: list[tuple[float, EngineRequest]]) -> Result:
    servers = [Server(profile, seed) for seed, profile in enumerate((FAST, FAST, SLOW, SLOW))]
    states: list[RequestState] = []
    scraped_ms = -math.inf

    def advance(until_ms):
        while True:
            busy = [server for server in servers if server.step_ends_ms is not None]
            server = min(busy, key=lambda server: server.step_ends_ms, default=None)
            if server is None or server.step_ends_ms > until_ms:
                return
            ended_ms = server.step_ends_ms
            server.engine.finish_step()
            server.start(ended_ms)

    for now_ms, request in arrivals:
        advance(now_ms)
        if now_ms - scraped_ms >= 250.0:
            scraped_ms = now_ms
            for server in servers:
                server.gauges = server.engine.metrics()
        views = list(zip(*(server.view(request, now_ms) for server in servers), strict=True))
        endpoints = candidates(
            len(servers),
            hardware_class=HARDWARE_CLASSES,
            uncached_tokens=views[0],
            pending_uncached_tokens=views[1],
            pending_requests=views[2],
            decoding_requests=views[3],
            decode_context_tokens=views[4],
            waiting_requests=[server.gauges.waiting_requests for server in servers],
            kv_cache_utilization=[server.gauges.kv_used_ratio for server in servers],
        )
        ttft, tpot = np.array(views[5]), np.array(views[6])
        outputs = prediction(ttft_p50=ttft, ttft_p90=1.1 * ttft, tpot_p50=tpot, tpot_p90=1.1 * tpot)
        seed = len(states)
        decision = pipeline.run(
            context(
                endpoints, outputs, input_tokens=request.prompt_tokens, slo=SLO, expected_output_tokens=300, seed=seed
            )
        )
        states.append(servers[decision.order[0]].submit(request, now_ms))
    advance(math.inf)

    counted = states[len(states) // 5 :]
    ttft = np.array([state.first_token_ms - state.arrival_ms for state in counted])
    tpot = np.array([(s.last_token_ms - s.first_token_ms) / max(1, s.generated_tokens - 1) for s in counted])
    good = (ttft <= SLO.ttft_ms) & (tpot <= SLO.tpot_ms)
    return Result(float(np.quantile(ttft, 0.9)), float(np.quantile(tpot, 0.9)), float(good.mean()))


@pytest.mark.parametrize(
    ("question_tokens", "rate_per_s"), [(30, 60.0), (3000, 18.0)], ids=["short questions", "long questions"]
)
def test_leadtime_beats_round_robin_clearly_and_load_prefix_never_loses_to_it(question_tokens, rate_per_s):
    loads = [workload(seed, 300, rate_per_s, question_tokens) for seed in (1, 2, 3)]
    ours, turns, heuristic = (
        mean([simulate(PROFILES.pipeline(name), arrivals) for arrivals in loads])
        for name in ("leadtime", "round-robin", "load-prefix")
    )
    assert ours.ttft_p90_ms <= 0.95 * turns.ttft_p90_ms
    assert ours.ttft_p90_ms <= heuristic.ttft_p90_ms
    assert ours.tpot_p90_ms <= 0.85 * min(turns.tpot_p90_ms, heuristic.tpot_p90_ms)
    assert ours.goodput >= max(turns.goodput, heuristic.goodput)


def mean(results: list[Result]) -> Result:
    return Result(*np.mean([astuple(result) for result in results], axis=0).tolist())
