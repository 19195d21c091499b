"""`kv-cache-utilization-scorer`: free KV cache is better: score = 1 − utilization as scraped.

A candidate whose scrape is unknown gets the mean of the known ones, so that not knowing neither draws nor repels.
None where no alive candidate's scrape is known.
"""

import numpy as np

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


class KvCacheUtilizationConfig(StrictConfig):
    """No settings."""


class KvCacheUtilizationScorer:
    """The share of the KV cache that is free."""

    __slots__ = ()

    def __init__(self, config: KvCacheUtilizationConfig) -> None:
        del config

    def score(self, context: Context, alive: Mask) -> Scores | None:
        candidates = context.candidates
        known = candidates.scrape_known > 0.0
        rated = known & alive
        free: Scores = np.maximum(_ZERO, np.minimum(_ONE, _ONE - candidates.kv_cache_utilization))
        if known.all():
            return free
        if not rated.any():
            return None
        free[~known] = free[rated].mean()
        return free
