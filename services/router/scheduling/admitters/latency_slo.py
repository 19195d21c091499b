"""`latency-slo-admitter`: refuse a sheddable request that no endpoint can serve within its objectives.

Refused is only what has a priority below 0, states an objective that is predicted, and finds every candidate predicted
to miss it. Let in is everything else: no prediction or only the physics prior's (a bundle may have a target from it),
an unpredicted candidate (nothing is known of it), an idle one (no request in our ledger, nor on the server by a fresh
scrape: an estimate that only traffic can improve must not keep traffic away). A missing objective isn't one of 0 ms: a
request that states TTFT alone is judged by TTFT alone.

The refusal carries when the request may fare better: `drain.py`.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from services.router.scheduling.admitters.drain import drain_ms
from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Refusal
from services.router.scheduling.objectives import Quantile, headrooms, meets

NAME: Final = "latency-slo-admitter"
REASON: Final = "slo_unreachable"


class LatencySloConfig(StrictConfig):
    """By which prediction an endpoint counts as unable."""

    quantile: Quantile = "p50"
    """Predicted quantile that is held against the objective; p50: the endpoint will more likely miss it than not."""


class LatencySloAdmitter:
    """No to what can't be served in time, where no is allowed."""

    __slots__ = ("_quantile",)

    def __init__(self, config: LatencySloConfig) -> None:
        self._quantile: Quantile = config.quantile

    def admit(self, context: Context) -> Refusal | None:
        if context.request.priority >= 0 or context.prediction is None or context.prediction.low_confidence:
            return None
        context = replace(context, prediction=context.prediction.measured())
        met = meets(context, self._quantile)
        if met is None or met.any() or idle(context).any():
            return None
        if any(np.isnan(left).any() for left in headrooms(context, self._quantile).values()):
            return None
        return Refusal(NAME, REASON, drain_ms(context))


def idle(context: Context) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Bool (n,): nothing in our books, and nothing on the server as far as a fresh scrape says."""
    candidates = context.candidates
    ours = candidates.pending_requests + candidates.decoding_requests
    theirs = candidates.running_requests + candidates.waiting_requests  # 0 where the scrape is unknown
    empty: np.ndarray[tuple[int], np.dtype[np.bool_]] = (ours <= 0.0) & (theirs <= 0.0)
    return empty
