"""`slo-headroom-tier-filter`: keep the endpoints that are predicted to meet the request's objectives.

Every objective that is stated and predicted must be met (predicted ≤ what is left of it); one that isn't stated isn't
asked for, so a TTFT objective alone works. Where both tiers have members, `exploration_probability` sends a request to
the endpoints that would miss, so that one that has recovered is found. An unpredicted endpoint is of the tier that
would miss. Without an objective or a prediction, and where all or none meet it, everyone stays.
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Branch, Context, Mask
from services.router.scheduling.objectives import Quantile, meets


class SloHeadroomTierConfig(StrictConfig):
    """How often the tier that would miss is tried, and by which prediction it is that."""

    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests sent to endpoints that are predicted to miss, while others would meet the SLO."""
    quantile: Quantile = "p50"
    """Predicted quantile that is held against the objective."""


class SloHeadroomTierFilter:
    """The tier with headroom, or by lot the one without."""

    __slots__ = ("_exploration", "_quantile")

    def __init__(self, config: SloHeadroomTierConfig) -> None:
        self._exploration = config.exploration_probability
        self._quantile: Quantile = config.quantile

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]:
        everyone = (Branch(1.0, alive),)
        met = meets(context, self._quantile)
        if met is None:
            return everyone
        in_time = met & alive
        if int(np.count_nonzero(in_time)) in {0, int(np.count_nonzero(alive))}:
            return everyone
        if self._exploration <= 0.0:
            return (Branch(1.0, in_time),)
        return (Branch(1.0 - self._exploration, in_time), Branch(self._exploration, alive & ~in_time))
