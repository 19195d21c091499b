"""The scorers that need no prediction: queue, KV cache, prefix, token load, LMetric, running requests."""

import pytest

from services.router.scheduling.scorers.kv_cache_utilization import KvCacheUtilizationConfig, KvCacheUtilizationScorer
from services.router.scheduling.scorers.lmetric import LmetricConfig, LmetricScorer
from services.router.scheduling.scorers.prefix import PrefixConfig, PrefixScorer
from services.router.scheduling.scorers.queue import QueueConfig, QueueScorer
from services.router.scheduling.scorers.running_requests import RunningRequestsConfig, RunningRequestsScorer
from services.router.scheduling.scorers.token_load import TokenLoadConfig, TokenLoadScorer
from tests.unit.router.scheduling.builders import candidates, context, everyone, only

QUEUE = QueueScorer(QueueConfig())
KV = KvCacheUtilizationScorer(KvCacheUtilizationConfig())
PREFIX = PrefixScorer(PrefixConfig())
TOKENS = TokenLoadScorer(TokenLoadConfig())
LMETRIC = LmetricScorer(LmetricConfig())
RUNNING = RunningRequestsScorer(RunningRequestsConfig())
SCRAPED = RunningRequestsScorer(RunningRequestsConfig(source="scraped"))


@pytest.mark.parametrize(
    ("scorer", "columns", "expected"),
    [
        (QUEUE, {"waiting_requests": [0, 5, 10]}, [1.0, 0.5, 0.0]),
        # What was sent since the last scrape counts.
        (QUEUE, {"waiting_requests": [0, 0, 0], "pending_requests": [4, 0, 2]}, [0.0, 1.0, 0.5]),
        # One unknown scrape: all by the ledger's requests in flight.
        (
            QUEUE,
            {
                "waiting_requests": [9, 0, 0],
                "scrape_known": [1, 0, 1],
                "pending_requests": [0, 1, 0],
                "decoding_requests": [0, 3, 2],
            },
            [1.0, 0.0, 0.5],
        ),
        (QUEUE, {"waiting_requests": [3, 3, 3]}, [1.0, 1.0, 1.0]),
        (KV, {"kv_cache_utilization": [0.25, 1.0, 0.0]}, [0.75, 0.0, 1.0]),
        (KV, {"kv_cache_utilization": [0.5, 0.0, 0.0], "scrape_known": [1, 0, 1]}, [0.5, 0.75, 1.0]),
        (KV, {"kv_cache_utilization": [0.0, 0.0, 0.0], "scrape_known": [0, 0, 0]}, None),
        (PREFIX, {"uncached_tokens": [1000, 250, 0]}, [0.0, 0.75, 1.0]),
        # An estimate of the prompt below the index's count is no negative ratio.
        (PREFIX, {"uncached_tokens": [1200, 1000, 1000]}, [0.0, 0.0, 0.0]),
        (
            TOKENS,
            {"uncached_tokens": [100, 500, 300], "pending_uncached_tokens": [400, 0, 900]},
            [1.0, 1.0, 0.0],
        ),
        (TOKENS, {"uncached_tokens": [100, 100, 100], "decoding_requests": [0, 2, 1]}, [1.0, 0.0, 0.5]),
        (TOKENS, {"uncached_tokens": [7, 7, 7]}, [1.0, 1.0, 1.0]),
        (LMETRIC, {"uncached_tokens": [100, 100, 100], "decoding_requests": [0, 2, 1]}, [1.0, 0.0, 0.5]),
        (LMETRIC, {"uncached_tokens": [0, 0, 0]}, [1.0, 1.0, 1.0]),
        (RUNNING, {"pending_requests": [1, 0, 0], "decoding_requests": [3, 2, 0]}, [0.0, 0.5, 1.0]),
        (RUNNING, {"running_requests": [9, 0, 0]}, [1.0, 1.0, 1.0]),
        (SCRAPED, {"running_requests": [4, 0, 0], "waiting_requests": [0, 2, 0]}, [0.0, 0.5, 1.0]),
        (SCRAPED, {"scrape_known": [1, 0, 1]}, None),
    ],
)
def test_scores(scorer, columns, expected):
    scores = scorer.score(context(candidates(3, **columns)), everyone(3))
    assert (None if scores is None else scores.tolist()) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("scorer", [QUEUE, KV, PREFIX, TOKENS, LMETRIC, RUNNING, SCRAPED])
def test_a_single_candidate_has_a_score(scorer):
    scores = scorer.score(context(candidates(1, uncached_tokens=[10])), everyone(1))
    assert 0.0 <= scores[0] <= 1.0


@pytest.mark.parametrize(
    ("scorer", "name"),
    [(QUEUE, "waiting_requests"), (TOKENS, "pending_uncached_tokens"), (RUNNING, "decoding_requests")],
)
def test_only_alive_candidates_make_the_range_and_the_others_stay_within_it(scorer, name):
    scores = scorer.score(context(candidates(4, **{name: [10, 20, 9000, 0]})), only(4, 0, 1))
    assert scores.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_an_unknown_scrape_outside_the_alive_ones_does_not_matter():
    endpoints = candidates(3, waiting_requests=[4, 0, 0], scrape_known=[1, 1, 0], decoding_requests=[0, 9, 9])
    assert QUEUE.score(context(endpoints), only(3, 0, 1)).tolist()[:2] == [0.0, 1.0]
    assert SCRAPED.score(context(endpoints), only(3, 0, 1)) is not None


def test_a_prompt_without_tokens_has_no_prefix_to_share():
    assert PREFIX.score(context(candidates(2), input_tokens=0), everyone(2)) is None


def test_tokens_per_request_can_weigh_requests_against_tokens():
    scorer = TokenLoadScorer(TokenLoadConfig(tokens_per_request=1000))
    endpoints = candidates(2, uncached_tokens=[0, 1500], decoding_requests=[3, 0])
    assert scorer.score(context(endpoints), everyone(2)).tolist() == [0.0, 1.0]
