"""What the prediction says about holding one request, from its candidates as they are. Pure.

How busy an endpoint is, is told in milliseconds until it would begin on the request: the share of the predicted TTFT
that its backlog has. Where the request states a TPOT objective and the endpoint's batch is too full for it, it begins,
as it were, when enough answers have ended; a TPOT that not even an empty endpoint would meet is left out, since waiting
won't mend it. A prediction takes the batch as it is, and an answer outlives many of its neighbours: a TPOT that is a
little over its objective may be taken to be met (`tpot_tolerance`).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.admission.waiting_room import Outlook, WaitingRoomConfig
from services.router.scheduling.admitters.drain import drain_ms
from services.router.scheduling.decision import Decision
from services.router.scheduling.interfaces import Context
from services.router.scheduling.objectives import headrooms, predicted

_ONE: Final = np.float32(1.0)
# Share of an empty step that one more decode, and one more token of context, adds (as predicted-cost-scorer has it).
_SHARE_PER_REQUEST: Final = np.float32(0.0015)
_SHARE_PER_TOKEN: Final = np.float32(7e-6)
_OUTPUT_TOKENS: Final = 256.0
_Column = npt.NDArray[np.float32]


def outlook(context: Context, decision: Decision, config: WaitingRoomConfig) -> Outlook | None:
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
    tpot, tpot_slo_ms = predicted(prediction, "tpot"), context.request.slo.tpot_ms
    if tpot is not None and tpot_slo_ms is not None:
        start = np.maximum(start, _until_tpot(context, tpot, tpot_slo_ms * (1.0 + config.tpot_tolerance)))
    considered = start[decision.alive & np.isfinite(start)]
    busy = start[chosen] if config.hungry == "chosen" or not len(considered) else considered.min()
    return Outlook(
        start_ms=float(busy),
        service_ms=float(service[chosen]),
        ttft_ms=float(late[chosen]),
        in_time=_in_time(context, config.tpot_tolerance),
        drain_ms=drain_ms(context),
        candidates=len(candidates),
    )


def _in_time(context: Context, tpot_tolerance: float) -> bool:
    """Whether some candidate is predicted to meet every objective, TPOT within the tolerance."""
    met = np.ones(len(context.candidates), np.bool_)
    for target, left in headrooms(context).items():
        tolerated = (context.request.slo.tpot_ms or 0.0) * tpot_tolerance if target == "tpot" else 0.0
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
