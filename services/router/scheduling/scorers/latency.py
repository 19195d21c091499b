"""`latency-scorer`: the published predicted-latency score.

Without an SLO the lowest predicted latency is best: `ttft_weight` × TTFT + `tpot_weight` × TPOT, each scaled by the
alive candidates' spread. With an SLO the headroom (SLO left − predicted) decides: endpoints that meet every stated
objective come first, by `strategy`: `least` takes the smallest headroom (fills endpoints up to the SLO, leaves idle
ones for bursts), `most` the largest; the others get 0. Where none meets them, the one that misses by least is best.

Decisions. An objective that the request doesn't state, or whose latency the bundle doesn't predict, is left out and
the other's weight counts alone. A dimension without spread is left out likewise; if none is left, all get 1. A bundle
without TTFT (traffic that isn't streamed) is scored by end-to-end latency when the request states no objective.
Predicted = objective counts as met. An unpredicted endpoint gets 0, whatever the others get. None where there is no
prediction.
"""

from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores
from services.router.scheduling.objectives import Quantile, headrooms
from services.router.scheduling.scorers.spread import equal, lower_is_better

_Dimensions = list[tuple[npt.NDArray[np.float32], float]]
_ZERO = np.float32(0.0)
# An endpoint that meets the SLO, by however unwelcome a margin, stays above one that doesn't.
_LEAST_SCORE_IN_TIME: Final = np.float32(0.01)


class LatencyConfig(StrictConfig):
    """Weights of the two latencies, and which headroom is preferred."""

    ttft_weight: Annotated[float, Field(ge=0, le=1)] = 0.8
    tpot_weight: Annotated[float, Field(ge=0, le=1)] = 0.2
    strategy: Literal["least", "most"] = "least"
    """Among endpoints that meet the SLO: smallest or largest headroom first."""
    quantile: Quantile = "p50"
    """Predicted quantile that is held against an objective."""


class LatencyScorer:
    """Relative predicted latency or headroom, in [0, 1]."""

    __slots__ = ("_most", "_quantile", "_tpot_weight", "_ttft_weight")

    def __init__(self, config: LatencyConfig) -> None:
        self._ttft_weight = config.ttft_weight
        self._tpot_weight = config.tpot_weight
        self._most = config.strategy == "most"
        self._quantile: Quantile = config.quantile

    def score(self, context: Context, alive: Mask) -> Scores | None:
        if context.prediction is None:
            return None
        weights = {"ttft": self._ttft_weight, "tpot": self._tpot_weight}
        left = [(ms, weights[target]) for target, ms in headrooms(context, self._quantile).items()]
        if left:
            return self._by_headroom(left, alive)
        ttft, tpot = context.prediction.get("ttft_p50"), context.prediction.get("tpot_p50")
        first = context.prediction.get("e2e_p50") if ttft is None else ttft
        latencies: _Dimensions = []
        if first is not None:
            latencies.append((first, self._ttft_weight))
        if tpot is not None:
            latencies.append((tpot, self._tpot_weight))
        if not latencies:
            return None
        return _blend(latencies, alive)

    def _by_headroom(self, left: _Dimensions, alive: Mask) -> Scores:
        in_time = alive.copy()
        for headroom, _ in left:
            in_time &= headroom >= _ZERO
        if not in_time.any():
            return _blend([(np.maximum(-headroom, _ZERO), weight) for headroom, weight in left], alive)
        sign = np.float32(-1.0 if self._most else 1.0)
        scores = _blend([(sign * headroom, weight) for headroom, weight in left], in_time)
        return np.where(in_time, _LEAST_SCORE_IN_TIME + (np.float32(1.0) - _LEAST_SCORE_IN_TIME) * scores, _ZERO)


def _blend(dimensions: _Dimensions, mask: Mask) -> Scores:
    """Weighted mean of the dimensions that differ within `mask`, smaller values better; equal scores if none does.

    Who is unpredicted in any of them gets 0.
    """
    unpredicted = np.zeros(len(mask), np.bool_)
    for values, _ in dimensions:
        unpredicted |= np.isnan(values)
    among = mask & ~unpredicted
    if not among.any():
        return equal(len(mask))
    total: Scores | None = None
    weights = 0.0
    for values, weight in dimensions:
        scores = lower_is_better(values, among) if weight > 0.0 else None
        if scores is not None:
            part = scores * np.float32(weight)
            total = part if total is None else total + part
            weights += weight
    blended = equal(len(mask)) if total is None else total / np.float32(weights)
    return np.where(unpredicted, _ZERO, blended) if unpredicted.any() else blended
