"""Predicted latencies against a request's objectives: who meets them, by which quantile, and what is left. Pure.

An objective that isn't stated isn't asked for; one whose latency the bundle doesn't predict can't be judged and is left
out. Whoever judges by the objectives (filter, scorer, admitter) judges by these two functions, so that none of them
takes a missing half for an objective of 0 ms. A candidate whose prediction is NaN is unpredicted: it meets nothing.
"""

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from services.router.predict.types import Prediction
from services.router.scheduling.interfaces import Context

Quantile = Literal["p50", "p90", "p99"]
"""Which predicted quantile is held against an objective; where the bundle lacks it, the median is."""

_MEDIAN: Final[Mapping[str, str]] = {"ttft": "ttft_p50", "tpot": "tpot_p50"}


def predicted(
    prediction: Prediction, target: Literal["ttft", "tpot"], quantile: Quantile = "p50"
) -> npt.NDArray[np.float32] | None:
    """Float32 (n,) ms; None where the bundle doesn't predict the target."""
    column = prediction.get(f"{target}_{quantile}")
    return prediction.get(_MEDIAN[target]) if column is None else column


def headrooms(context: Context, quantile: Quantile = "p50") -> dict[str, npt.NDArray[np.float32]]:
    """Per objective that is stated and predicted (`ttft`, `tpot`): float32 (n,) ms left of it, below 0 for a miss.

    The TTFT objective counts from receipt: the time spent since then is gone.
    """
    left: dict[str, npt.NDArray[np.float32]] = {}
    slo, prediction = context.request.slo, context.prediction
    if prediction is None:
        return left
    if slo.ttft_ms is not None and (ttft := predicted(prediction, "ttft", quantile)) is not None:
        left["ttft"] = np.float32(slo.ttft_ms - context.elapsed_ms) - ttft
    if slo.tpot_ms is not None and (tpot := predicted(prediction, "tpot", quantile)) is not None:
        left["tpot"] = np.float32(slo.tpot_ms) - tpot
    return left


def meets(context: Context, quantile: Quantile = "p50") -> npt.NDArray[np.bool_] | None:
    """Bool (n,): who meets every objective that is stated and predicted (predicted = objective counts as met).

    None where there is nothing to judge by.
    """
    met: npt.NDArray[np.bool_] | None = None
    for left in headrooms(context, quantile).values():
        within = left >= np.float32(0.0)
        met = within if met is None else met & within
    return met
