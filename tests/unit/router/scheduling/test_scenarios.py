"""Reported failures of other routers, replayed on small pools: herds, starvation, and misses sent to the busiest.

The pool here is arithmetic: prefills one after the other at a fixed speed, decodes of a fixed length beside them. The
prefix index counts a prompt as cached from its dispatch on, which is what makes herds.
"""

from collections import Counter

import numpy as np
import pytest

from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from tests.unit.router.scheduling.builders import candidates, context, prediction

PROFILES = Profiles(load_presets(Registry()))
PREFILL_MS_PER_TOKEN = 0.05
DECODE_MS = 2000.0


class Pool:
    """Endpoints with an exact ledger and exact predictions of their arithmetic."""

    def __init__(self, count):
        self.count = count
        self.work = [[] for _ in range(count)]  # (prefill ends, request ends, uncached tokens, input tokens)
        self.cached = [set() for _ in range(count)]

    def context(self, now_ms, prefix, prefix_tokens, tokens, *, predicted, seed):
        self.work = [[job for job in jobs if job[1] > now_ms] for jobs in self.work]
        pending = [[job for job in jobs if job[0] > now_ms] for jobs in self.work]
        decoding = [[job for job in jobs if job[0] <= now_ms] for jobs in self.work]
        self.uncached = [tokens - prefix_tokens * (prefix in cached) for cached in self.cached]
        waits = [max((job[0] - now_ms for job in jobs), default=0.0) for jobs in pending]
        endpoints = candidates(
            self.count,
            uncached_tokens=self.uncached,
            pending_uncached_tokens=[sum(job[2] for job in jobs) for jobs in pending],
            pending_requests=[len(jobs) for jobs in pending],
            decoding_requests=[len(jobs) for jobs in decoding],
            decode_context_tokens=[sum(job[3] for job in jobs) for jobs in decoding],
        )
        ttft = np.array(waits) + np.array(self.uncached) * PREFILL_MS_PER_TOKEN + 5.0
        tpot = [10.0 + 0.1 * len(jobs) for jobs in decoding]
        outputs = prediction(ttft_p50=ttft, ttft_p90=ttft * 1.2, tpot_p50=tpot, tpot_p90=tpot)
        return context(endpoints, outputs if predicted else None, input_tokens=tokens, seed=seed)

    def dispatch(self, endpoint, now_ms, prefix, tokens):
        uncached = self.uncached[endpoint]
        free_ms = max((job[0] for job in self.work[endpoint]), default=now_ms)
        ready_ms = max(now_ms, free_ms) + uncached * PREFILL_MS_PER_TOKEN
        self.work[endpoint].append((ready_ms, ready_ms + DECODE_MS, uncached, tokens))
        self.cached[endpoint].add(prefix)

    def next_end_ms(self):
        return min(job[1] for jobs in self.work for job in jobs)

    @property
    def in_flight(self):
        return sum(len(jobs) for jobs in self.work)


RUNGS = pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "last rung"])


@RUNGS
@pytest.mark.parametrize("own_tokens", [0, 100, 1000])
def test_a_burst_with_one_prefix_does_not_herd_onto_one_idle_endpoint(predicted, own_tokens):
    """B21: 4 empty endpoints, 40 requests with the same 8k-token prefix at once."""
    pool, pipeline = Pool(4), PROFILES.pipeline("leadtime")
    shares = Counter()
    for number in range(40):
        now_ms = number * 1.0
        ctx = pool.context(now_ms, "shared", 8000, 8000 + own_tokens, predicted=predicted, seed=number)
        first = pipeline.run(ctx).order[0]
        pool.dispatch(first, now_ms, "shared", 8000 + own_tokens)
        shares[first] += 1
    assert len(shares) >= 3
    assert max(shares.values()) <= 25


@RUNGS
@pytest.mark.parametrize(
    "name", ["leadtime", "predicted-latency", "load-prefix", "token-load", "lmetric", "least-request"]
)
def test_unrelated_prompts_starve_nobody(name, predicted):
    """B14: 5 endpoints, 500 unrelated prompts, 64 at a time: no endpoint gets 3 times another's share."""
    pool, pipeline = Pool(5), PROFILES.pipeline(name)
    lengths = np.random.default_rng(3).integers(100, 3000, 500)
    shares, now_ms = Counter(), 0.0
    for number, tokens in enumerate(lengths.tolist()):
        if pool.in_flight >= 64:
            now_ms = pool.next_end_ms()
        ctx = pool.context(now_ms, number, 0, tokens, predicted=predicted, seed=number)
        first = pipeline.run(ctx).order[0]
        pool.dispatch(first, now_ms, number, tokens)
        shares[first] += 1
    assert len(shares) == 5
    assert max(shares.values()) <= 3 * min(shares.values())


@RUNGS
@pytest.mark.parametrize(
    "name", ["leadtime", "predicted-latency", "load-prefix", "token-load", "lmetric", "least-request"]
)
def test_a_miss_goes_to_the_endpoint_without_a_queue(name, predicted):
    """B13: nobody has the prefix; A has 30 waiting, B none."""
    endpoints = candidates(
        2,
        uncached_tokens=[1000, 1000],
        pending_uncached_tokens=[30_000, 0],
        pending_requests=[30, 0],
        waiting_requests=[30, 0],
    )
    outputs = prediction(ttft_p50=[1600, 60], ttft_p90=[2000, 70], tpot_p50=[13, 10], tpot_p90=[15, 12])
    pipeline = PROFILES.pipeline(name)
    firsts = [
        pipeline.run(context(endpoints, outputs if predicted else None, seed=seed)).order[0] for seed in range(100)
    ]
    assert firsts.count(1) >= 90


def test_a_warm_endpoint_is_used_while_it_is_worth_its_queue_and_left_when_it_is_not():
    pipeline = PROFILES.pipeline("leadtime")
    for pending_tokens, expected in ((2000, 0), (40_000, 1)):
        endpoints = candidates(
            2, uncached_tokens=[200, 8000], pending_uncached_tokens=[pending_tokens, 0], pending_requests=[2, 0]
        )
        ttft = [(pending_tokens + 200) * PREFILL_MS_PER_TOKEN + 5, 8000 * PREFILL_MS_PER_TOKEN + 5]
        decision = pipeline.run(context(endpoints, prediction(ttft_p50=ttft), input_tokens=8000))
        assert decision.order[0] == expected


def test_the_faster_hardware_is_preferred_until_it_is_the_busier():
    pipeline = PROFILES.pipeline("leadtime")
    for fast_wait_ms, expected in ((0, 0), (150, 0), (400, 1)):
        endpoints = candidates(
            2,
            hardware_class=[1, 2],
            uncached_tokens=[4000, 4000],
            pending_requests=[fast_wait_ms > 0, 0],
            pending_uncached_tokens=[50 * fast_wait_ms, 0],
        )
        decision = pipeline.run(context(endpoints, prediction(ttft_p50=[80 + fast_wait_ms, 280])))
        assert decision.order[0] == expected
