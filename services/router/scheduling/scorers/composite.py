"""`composite-scorer`: the published stand-in for a prediction: free KV cache, short queue and prefix hits, blended.

score = (kv_weight · (1 − KV utilization) + queue_weight · (longest queue − queue) / longest queue + prefix_weight · hit
ratio) / sum of weights. A part that can't be told (no candidate scraped, a prompt without tokens) is left out and the
others count alone; a single candidate without a scrape gets the mean of the known. No queue anywhere: that part is 1
for all. None where no part can be told.
"""

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.scorers.kv_cache_utilization import KvCacheUtilizationConfig, KvCacheUtilizationScorer
from services.router.scheduling.scorers.prefix import hit_ratio

_ONE = np.float32(1.0)
_Weight = Annotated[float, Field(ge=0, le=1_000_000)]


class CompositeConfig(StrictConfig):
    """Weights of the three parts; at least one above 0."""

    kv_weight: _Weight = 1.0
    queue_weight: _Weight = 1.0
    prefix_weight: _Weight = 1.0

    @model_validator(mode="after")
    def _some(self) -> "CompositeConfig":
        if not self.kv_weight + self.queue_weight + self.prefix_weight > 0.0:
            raise ValueError("kv_weight, queue_weight, prefix_weight: all 0; allowed: one above 0 at least")
        return self


class CompositeScorer:
    """Mean of three shares."""

    __slots__ = ("_config", "_kv")

    def __init__(self, config: CompositeConfig) -> None:
        self._config = config
        self._kv = KvCacheUtilizationScorer(KvCacheUtilizationConfig())

    def score(self, context: Context, alive: Mask) -> Scores | None:
        config = self._config
        parts: list[tuple[float, Scores | None]] = [
            (config.kv_weight, self._kv.score(context, alive)),
            (config.queue_weight, _queue(context, alive)),
            (config.prefix_weight, hit_ratio(context)),
        ]
        told = [(weight, part) for weight, part in parts if part is not None and weight > 0.0]
        if not told:
            return None
        total = np.zeros(len(alive), np.float32)
        for weight, part in told:
            total += np.float32(weight) * part
        scores: Scores = np.minimum(total / np.float32(sum(weight for weight, _ in told)), _ONE)
        return scores


def _queue(context: Context, alive: Mask) -> Scores | None:
    candidates = context.candidates
    known = candidates.scrape_known > 0.0
    rated = known & alive
    if not rated.any():
        return None
    longest = candidates.waiting_requests[rated].max()
    if not longest > 0.0:
        return np.ones(len(alive), np.float32)
    scores: Scores = np.maximum(np.float32(0.0), (longest - candidates.waiting_requests) / longest)
    if not known.all():
        scores[~known] = scores[rated].mean()
    return scores
