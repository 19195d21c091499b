"""What the prediction says about holding one request, from its candidates as they are. Pure.

How busy an endpoint is, is told in milliseconds until it would begin on the request: the share of the predicted TTFT
that its backlog has. Where the request states a TPOT objective and the endpoint's batch is too full for it, it begins,
as it were, when enough answers have ended; a TPOT that not even an empty endpoint would meet is left out, since waiting
won't mend it. A prediction takes the batch as it is, and an answer outlives many of its neighbours: a TPOT a tenth over
its objective is still taken to be met.
"""

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from services.router.admission.waiting_room import Outlook
from services.router.scheduling.admitters.drain import drain_ms
from services.router.scheduling.decision import Decision
from services.router.scheduling.interfaces import Context
from services.router.scheduling.objectives import headrooms, predicted

_ONE: Final = np.float32(1.0)
# Share of an empty step that one more decode, and one more token of context, adds (as predicted-cost-scorer has it).
_SHARE_PER_REQUEST: Final = np.float32(0.0015)
_SHARE_PER_TOKEN: Final = np.float32(7e-6)
_OUTPUT_TOKENS: Final = 256.0
# Of the objective. Without it scenario B at 110 % has goodput 0.96 (0.998 without a room) and TTFT P90 ×1.3 of that;
# where TPOT holds nobody, batches fill (Mooncake at 110 %: goodput 0.34 instead of 0.70).
_TPOT_TOLERANCE: Final = 0.1
_Column = npt.NDArray[np.float32]


def outlook(context: Context, decision: Decision, hungry: Literal["any", "chosen"]) -> Outlook | None:
    """None where nothing is predicted for the endpoint that the policy would choose: such a request isn't held."""
    prediction, candidates = context.prediction, context.candidates
    if prediction is None:
        return None
    ttft = predicted(prediction, "ttft")
    late = predicted(prediction, "ttft", "p90")
    chosen = decision.order[0]
    if ttft is None or late is None or not np.isfinite(ttft[chosen]):
        return None
    backlog = candidates.pending_uncached_tokens
    start = ttft * backlog / np.maximum(backlog + candidates.uncached_tokens, _ONE)
    service = ttft - start
    tpot = predicted(prediction, "tpot")
    if tpot is not None and context.request.slo.tpot_ms is not None:
        start = np.maximum(start, _until_tpot(context, tpot, context.request.slo.tpot_ms * (1.0 + _TPOT_TOLERANCE)))
    considered = start[decision.alive & np.isfinite(start)]
    busy = start[chosen] if hungry == "chosen" or not len(considered) else considered.min()
    return Outlook(
        start_ms=float(busy),
        service_ms=float(service[chosen]),
        ttft_ms=float(late[chosen]),
        in_time=_in_time(context),
        drain_ms=drain_ms(context),
        candidates=len(candidates),
    )


def _in_time(context: Context) -> bool:
    """Whether some candidate is predicted to meet every objective, TPOT within the tolerance."""
    met = np.ones(len(context.candidates), np.bool_)
    for target, left in headrooms(context).items():
        tolerated = (context.request.slo.tpot_ms or 0.0) * _TPOT_TOLERANCE if target == "tpot" else 0.0
        met &= left >= np.float32(-tolerated)
    return bool(met.any())


def _until_tpot(context: Context, tpot: _Column, limit_ms: float) -> _Column:
    """Float32 (n,) ms until enough of the batch has ended for the objective; 0 where it is met, or never can be."""
    candidates = context.candidates
    batch = (
        _ONE + _SHARE_PER_REQUEST * candidates.decoding_requests + _SHARE_PER_TOKEN * candidates.decode_context_tokens
    )
    limit = np.float32(limit_ms)
    hopeless = tpot / batch > limit
    tokens = np.float32(context.expected_output_tokens or _OUTPUT_TOKENS)
    wait: _Column = np.where(hopeless, np.float32(0.0), np.maximum(tpot - limit, np.float32(0.0)) * tokens)
    return wait
