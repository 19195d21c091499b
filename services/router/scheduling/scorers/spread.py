"""Values → scores relative to the alive candidates' spread: the smallest gets 1, the largest 0. Pure.

This is min–max scaling: it keeps the order and throws the size of the differences away (1 ms and 10 s of spread score
alike), so a policy that needs the size works in milliseconds instead (`predicted_cost`).
"""

import numpy as np
import numpy.typing as npt

from services.router.scheduling.interfaces import Mask, Scores

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def lower_is_better(values: npt.NDArray[np.float32], alive: Mask) -> Scores | None:
    """float32 (n,) → float32 (n,) in [0, 1]; None where the alive values don't differ, so that nothing can be said.

    Values outside `alive` are held to the alive range.
    """
    among = values[alive]
    low = among.min()
    spread = among.max() - low
    if not spread > 0.0:
        return None
    scores: Scores = np.maximum(_ZERO, np.minimum(_ONE, _ONE - (values - low) / spread))
    return scores


def equal(count: int) -> Scores:
    """Float32 (count,): everyone is as good."""
    return np.ones(count, np.float32)
