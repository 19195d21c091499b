"""`prefix-cache-affinity-filter`: keep to the endpoints that hold most of the prompt in their prefix cache.

Keeps candidates whose prefix-hit ratio is at least `affinity_threshold`; where none or all are, it keeps everyone. With
`exploration_probability` it lets everyone through for one request.

Load gate: affinity is given up for a request when the warm endpoints' best TTFT is more than `max_ttft_penalty_ms`
above the best of all; exactly that much still keeps it. TTFT is the prediction; without one (or with `ttft_source:
prefill-throughput`) it is the backlog divided by `peak_prefill_tokens_per_s`, so the gate is never without a basis. A
prompt without tokens is let through. An unpredicted endpoint counts as late as can be: it neither holds affinity nor
breaks it.
"""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Branch, Context, Mask
from services.router.scheduling.scorers.prefix import hit_ratio

_NEVER_MS = 1e30


class PrefixCacheAffinityConfig(StrictConfig):
    """When an endpoint counts as warm, and when warmth isn't worth its queue."""

    affinity_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Least prefix-hit ratio of a warm endpoint."""
    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests that ignore affinity."""
    max_ttft_penalty_ms: Annotated[float, Field(ge=0, le=3_600_000)] | None = 5000.0
    """How much later than elsewhere a warm endpoint may answer; null: affinity at any price."""
    ttft_source: Literal["prediction", "prefill-throughput"] = "prediction"
    """What the load gate reads."""
    peak_prefill_tokens_per_s: Annotated[float, Field(gt=0, le=100_000_000)] = 15_928.0
    """Prefill speed by which a backlog becomes a TTFT; the default is one published for a 32B model on two H100."""


class PrefixCacheAffinityFilter:
    """Warm endpoints, unless they are too busy."""

    __slots__ = ("_config",)

    def __init__(self, config: PrefixCacheAffinityConfig) -> None:
        self._config = config

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]:
        config = self._config
        everyone = (Branch(1.0, alive),)
        ratio = hit_ratio(context)
        if ratio is None:
            return everyone
        warm = (ratio >= np.float32(config.affinity_threshold)) & alive
        count = int(np.count_nonzero(warm))
        if count in {0, int(np.count_nonzero(alive))} or self._too_busy(context, warm, alive):
            return everyone
        exploration = config.exploration_probability
        if exploration <= 0.0:
            return (Branch(1.0, warm),)
        return (Branch(1.0 - exploration, warm), Branch(exploration, alive))

    def _too_busy(self, context: Context, warm: Mask, alive: Mask) -> bool:
        limit_ms = self._config.max_ttft_penalty_ms
        if limit_ms is None:
            return False
        ttft = self._ttft_ms(context)
        return float(ttft[warm].min()) - float(ttft[alive].min()) > limit_ms

    def _ttft_ms(self, context: Context) -> npt.NDArray[np.float32]:
        if self._config.ttft_source == "prediction" and context.prediction is not None:
            predicted = context.prediction.get("ttft_p50")
            if predicted is not None:
                return np.where(np.isnan(predicted), np.float32(_NEVER_MS), predicted)
        backlog = context.candidates.pending_uncached_tokens + context.candidates.uncached_tokens
        return backlog * np.float32(1e3 / self._config.peak_prefill_tokens_per_s)
