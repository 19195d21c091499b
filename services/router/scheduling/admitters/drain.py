"""When a request that would miss its objectives may fare better: how long the least loaded endpoint needs to drain.
Pure.

A queue shrinks by a millisecond a millisecond, so a TTFT that is predicted x ms too late is in time x ms from now, as
long as our own prefill fits into the objective; where it doesn't, the endpoint is as good as it gets when it is empty.
TPOT falls as answers end: the share of the batch that has to leave, times what an answer takes.
"""

from typing import Final

import numpy as np

from services.router.scheduling.interfaces import Context
from services.router.scheduling.objectives import predicted

_LEAST_MS: Final = 1.0
_OUTPUT_TOKENS: Final = 256.0
"""Length of an answer of which nothing is known."""
MAX_DRAIN_MS: Final = 600_000.0


def drain_ms(context: Context) -> float:
    """Milliseconds until the best candidate is predicted to meet the objectives, from 1 to `MAX_DRAIN_MS`."""
    prediction, slo, candidates = context.prediction, context.request.slo, context.candidates
    if prediction is None:
        return _LEAST_MS
    wait = np.zeros(len(candidates), np.float32)
    ttft = predicted(prediction, "ttft")
    if slo.ttft_ms is not None and ttft is not None:
        backlog = candidates.pending_uncached_tokens
        ahead = ttft * backlog / np.maximum(backlog + candidates.uncached_tokens, np.float32(1.0))
        wait = np.maximum(wait, np.minimum(ttft - np.float32(max(slo.ttft_ms - context.elapsed_ms, 0.0)), ahead))
    tpot = predicted(prediction, "tpot")
    if slo.tpot_ms is not None and tpot is not None:
        tokens = np.float32(context.expected_output_tokens or _OUTPUT_TOKENS)
        wait = np.maximum(wait, np.maximum(tpot - np.float32(slo.tpot_ms), np.float32(0.0)) * tokens)
    known = wait[np.isfinite(wait)]
    least = float(known.min()) if len(known) else _LEAST_MS
    return min(max(least, _LEAST_MS), MAX_DRAIN_MS)
