"""`running-requests-scorer`: fewer requests at the endpoint are better, relative to the alive candidates' spread.

By default it counts what the ledger has in flight, exact for traffic through our routers. `scraped` counts what the
server reports (running + waiting), which sees traffic that isn't ours and is as old as the scrape; None where the
scrape of an alive candidate is unknown. No spread: all get 1.
"""

from typing import Literal

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.scorers.spread import equal, lower_is_better


class RunningRequestsConfig(StrictConfig):
    """Whose count is used."""

    source: Literal["ledger", "scraped"] = "ledger"
    """`ledger`: requests in flight by our own books; `scraped`: running + waiting by the server's metrics."""


class RunningRequestsScorer:
    """1 for the fewest requests, 0 for the most."""

    __slots__ = ("_scraped",)

    def __init__(self, config: RunningRequestsConfig) -> None:
        self._scraped = config.source == "scraped"

    def score(self, context: Context, alive: Mask) -> Scores | None:
        candidates = context.candidates
        if self._scraped:
            if not candidates.scrape_known[alive].min() > 0.0:
                return None
            requests = candidates.running_requests + candidates.waiting_requests
        else:
            requests = candidates.pending_requests + candidates.decoding_requests
        scores = lower_is_better(requests, alive)
        return equal(len(candidates)) if scores is None else scores
