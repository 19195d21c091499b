"""`queue-scorer`: fewer requests that wait for their turn are better, relative to the alive candidates' spread.

Depth is the larger of the scraped waiting count and the ledger's count of requests in prefill: between two scrapes
(up to 2 s on an idle endpoint) the gauge doesn't see what was just sent, and a herd would follow it. Where the scrape
of any alive candidate is unknown, all are rated by the ledger's requests in flight instead, since a waiting count of
one and an in-flight count of another can't be compared. No spread: all get 1. Never None.
"""

import numpy as np

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.scorers.spread import equal, lower_is_better


class QueueConfig(StrictConfig):
    """No settings."""


class QueueScorer:
    """1 for the shortest queue, 0 for the longest."""

    __slots__ = ()

    def __init__(self, config: QueueConfig) -> None:
        del config

    def score(self, context: Context, alive: Mask) -> Scores | None:
        candidates = context.candidates
        if candidates.scrape_known[alive].min() > 0.0:
            depth = np.maximum(candidates.waiting_requests, candidates.pending_requests)
        else:
            depth = candidates.pending_requests + candidates.decoding_requests
        scores = lower_is_better(depth, alive)
        return equal(len(candidates)) if scores is None else scores
