"""prefix-cache-affinity-filter: threshold, load gate at its edge, exploration, and every missing input."""

import pytest

from services.router.scheduling.filters.prefix_cache_affinity import (
    PrefixCacheAffinityConfig,
    PrefixCacheAffinityFilter,
)
from tests.unit.router.scheduling.builders import candidates, context, everyone, only, prediction


def branches(ctx, alive=None, **config):
    plugin = PrefixCacheAffinityFilter(PrefixCacheAffinityConfig(**({"exploration_probability": 0.0} | config)))
    found = plugin.branches(ctx, everyone(len(ctx.candidates)) if alive is None else alive)
    return [(branch.probability, branch.keep.tolist()) for branch in found]


WARM_FIRST = {"uncached_tokens": [100, 1000, 1000]}
ALL = [(1.0, [True, True, True])]
FIRST = [(1.0, [True, False, False])]


def test_warm_endpoints_are_kept():
    assert branches(context(candidates(3, **WARM_FIRST))) == FIRST


def test_exactly_the_threshold_is_warm():
    assert branches(context(candidates(2, uncached_tokens=[250, 251])), affinity_threshold=0.75) == [
        (1.0, [True, False])
    ]


@pytest.mark.parametrize("uncached", [[1000, 900, 800], [0, 10, 20]])
def test_where_none_or_all_are_warm_everyone_stays(uncached):
    assert branches(context(candidates(3, uncached_tokens=uncached)), exploration_probability=0.5) == ALL


def test_a_prompt_without_tokens_is_let_through():
    assert branches(context(candidates(3, **WARM_FIRST), input_tokens=0)) == ALL


@pytest.mark.parametrize(("warm_ttft_ms", "expected"), [(5850, FIRST), (5900, FIRST), (5900.01, ALL), (5950, ALL)])
def test_the_load_gate_breaks_only_strictly_above_its_limit(warm_ttft_ms, expected):
    """B02: limit 5000 ms, best of all 900 ms."""
    predicted = prediction(ttft_p50=[warm_ttft_ms, 900, 1500])
    assert branches(context(candidates(3, **WARM_FIRST), predicted), max_ttft_penalty_ms=5000.0) == expected


def test_the_best_warm_endpoint_decides_the_gate():
    endpoints = candidates(3, uncached_tokens=[0, 0, 1000])
    predicted = prediction(ttft_p50=[60_000, 3000, 100])
    assert branches(context(endpoints, predicted)) == [(1.0, [True, True, False])]


def test_null_keeps_affinity_at_any_price():
    predicted = prediction(ttft_p50=[90_000, 1, 1])
    assert branches(context(candidates(3, **WARM_FIRST), predicted), max_ttft_penalty_ms=None) == FIRST


@pytest.mark.parametrize(("pending_tokens", "expected"), [(70_000, FIRST), (100_000, ALL)])
@pytest.mark.parametrize("predicted", [None, prediction(tpot_p50=[1, 1, 1])])
def test_without_a_ttft_the_gate_reads_the_backlog(predicted, pending_tokens, expected):
    """15,928 tokens/s: 70,100 tokens are 4.4 s, 100,100 are 6.3 s; the others need 63 ms."""
    endpoints = candidates(3, **WARM_FIRST, pending_uncached_tokens=[pending_tokens, 0, 0])
    assert branches(context(endpoints, predicted)) == expected


def test_the_backlog_can_be_chosen_as_the_gate_s_source():
    predicted = prediction(ttft_p50=[90_000, 1, 1])
    assert branches(context(candidates(3, **WARM_FIRST), predicted), ttft_source="prefill-throughput") == FIRST


def test_exploration_is_a_branch_with_its_probability():
    found = branches(context(candidates(3, **WARM_FIRST)), exploration_probability=0.25)
    assert found == [(0.75, [True, False, False]), (0.25, [True, True, True])]


def test_only_alive_endpoints_are_considered():
    assert branches(context(candidates(3, **WARM_FIRST)), only(3, 1, 2)) == [(1.0, [False, True, True])]


def test_a_single_candidate_stays():
    assert branches(context(candidates(1, uncached_tokens=[1000]))) == [(1.0, [True])]
