"""composite-scorer: the mean of three shares, of those that can be told."""

import pytest

from services.router.scheduling.scorers.composite import CompositeConfig, CompositeScorer
from tests.unit.router.scheduling.builders import candidates, context, everyone


def scores(endpoints, *, input_tokens=1000.0, **config):
    found = CompositeScorer(CompositeConfig(**config)).score(
        context(endpoints, input_tokens=input_tokens), everyone(len(endpoints))
    )
    return None if found is None else pytest.approx(found.tolist(), abs=1e-6)


def test_it_is_the_mean_of_free_cache_short_queue_and_prefix_hits():
    endpoints = candidates(2, kv_cache_utilization=[0.2, 0.8], waiting_requests=[0, 5], uncached_tokens=[1000, 500])
    assert scores(endpoints) == [(0.8 + 1 + 0) / 3, (0.2 + 0 + 0.5) / 3]


def test_the_published_case_an_emptier_endpoint_beats_a_fuller_one():
    endpoints = candidates(2, kv_cache_utilization=[0.2, 0.8], waiting_requests=[0, 5], uncached_tokens=[1000, 1000])
    found = scores(endpoints).expected
    assert found[0] > found[1]


def test_weights_count():
    endpoints = candidates(2, kv_cache_utilization=[0.2, 0.8], uncached_tokens=[1000, 500])
    assert scores(endpoints, kv_weight=0, queue_weight=0) == [0.0, 0.5]


def test_without_a_scrape_the_prefix_alone_decides_and_without_a_prompt_nobody_does():
    unknown = candidates(2, scrape_known=[0, 0], uncached_tokens=[1000, 0])
    assert scores(unknown) == [0.0, 1.0]
    assert scores(unknown, input_tokens=0.0) is None


def test_one_unknown_scrape_gets_the_mean_of_the_others():
    endpoints = candidates(
        3, scrape_known=[1, 1, 0], kv_cache_utilization=[0, 1, 0], waiting_requests=[0, 4, 0], uncached_tokens=[0, 0, 0]
    )
    assert scores(endpoints, prefix_weight=0) == [1.0, 0.0, 0.5]


def test_weights_of_nothing_are_refused():
    with pytest.raises(ValueError, match="all 0"):
        CompositeConfig(kv_weight=0, queue_weight=0, prefix_weight=0)
