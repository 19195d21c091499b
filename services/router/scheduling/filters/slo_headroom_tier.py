"""`slo-headroom-tier-filter`: keep the endpoints that are predicted to meet the request's objectives.

Every objective that is stated and predicted must be met (predicted ≤ what is left of it); one that isn't stated isn't
asked for, so a TTFT objective alone works. Where both tiers have members, `exploration_probability` sends a request to
the endpoints that would miss, so that one that has recovered is found. Without an objective or a prediction, and where
all or none meet it, everyone stays.
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Branch, Context, Mask


class SloHeadroomTierConfig(StrictConfig):
    """How often the tier that would miss is tried."""

    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests sent to endpoints that are predicted to miss, while others would meet the SLO."""


class SloHeadroomTierFilter:
    """The tier with headroom, or by lot the one without."""

    __slots__ = ("_exploration",)

    def __init__(self, config: SloHeadroomTierConfig) -> None:
        self._exploration = config.exploration_probability

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]:
        everyone = (Branch(1.0, alive),)
        slo, prediction = context.request.slo, context.prediction
        if prediction is None:
            return everyone
        in_time = alive.copy()
        if slo.ttft_ms is not None and (ttft := prediction.get("ttft_p50")) is not None:
            in_time &= ttft <= np.float32(slo.ttft_ms - context.elapsed_ms)
        if slo.tpot_ms is not None and (tpot := prediction.get("tpot_p50")) is not None:
            in_time &= tpot <= np.float32(slo.tpot_ms)
        if int(np.count_nonzero(in_time)) in {0, int(np.count_nonzero(alive))}:
            return everyone
        if self._exploration <= 0.0:
            return (Branch(1.0, in_time),)
        return (Branch(1.0 - self._exploration, in_time), Branch(self._exploration, alive & ~in_time))
