"""`token-load-scorer`: fewer tokens to prefill before our first one are better: pending uncached + own uncached tokens.

Both come from the ledger and the prefix index, so nothing scraped is needed; never None. It knows no hardware: on a
mixed pool it treats a slow endpoint as a fast one. Scores are relative to the alive candidates' spread; no spread: 1.
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.scorers.spread import equal, lower_is_better


class TokenLoadConfig(StrictConfig):
    """How requests in flight count beside tokens."""

    tokens_per_request: Annotated[float, Field(ge=0, le=100_000)] = 1.0
    """Tokens added per request in flight; the default only breaks ties."""


class TokenLoadScorer:
    """1 for the smallest backlog with this request in it, 0 for the largest."""

    __slots__ = ("_tokens_per_request",)

    def __init__(self, config: TokenLoadConfig) -> None:
        self._tokens_per_request = np.float32(config.tokens_per_request)

    def score(self, context: Context, alive: Mask) -> Scores | None:
        candidates = context.candidates
        in_flight = candidates.pending_requests + candidates.decoding_requests
        tokens = candidates.pending_uncached_tokens + candidates.uncached_tokens + self._tokens_per_request * in_flight
        scores = lower_is_better(tokens, alive)
        return equal(len(candidates)) if scores is None else scores
