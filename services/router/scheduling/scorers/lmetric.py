"""`lmetric-scorer`: new prefill tokens × batch size, smaller is better (arXiv 2603.15202); no weights to tune.

Score = (pending uncached + own uncached tokens) × (requests in flight + 1), relative to the alive candidates' spread;
no spread: 1. From the ledger and the prefix index alone; never None.
"""

import numpy as np

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.scorers.spread import equal, lower_is_better

_ONE = np.float32(1.0)


class LmetricConfig(StrictConfig):
    """No settings."""


class LmetricScorer:
    """1 for the smallest product, 0 for the largest."""

    __slots__ = ()

    def __init__(self, config: LmetricConfig) -> None:
        del config

    def score(self, context: Context, alive: Mask) -> Scores | None:
        candidates = context.candidates
        batch = candidates.pending_requests + candidates.decoding_requests + _ONE
        scores = lower_is_better((candidates.pending_uncached_tokens + candidates.uncached_tokens) * batch, alive)
        return equal(len(candidates)) if scores is None else scores
