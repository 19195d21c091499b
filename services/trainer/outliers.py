"""Labels that can't be believed: rows whose latency is off by a factor that the physics doesn't know. Pure.

A label ×100 among ten bends a least-squares fit and widens every quantile. After a first fit of the base, rows whose
log error lies further from the median than `LOG_LIMIT` and six robust deviations are left out, and the base is fitted
again. Nothing is left out that may be the truth: where a third of the newest rows lie out, the pool has changed, and an
endpoint most of whose rows lie out is slow.

Limits: who lies about more than half of an endpoint's requests is believed. Errors by less than a factor of 12 are left
to the fit: of 40,000 rows of the queueing simulations none was off by more against the base alone.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LOG_LIMIT: Final = 2.5
DEVIATIONS: Final = 6.0
NEWEST_ROWS: Final = 200
CHANGED_SHARE: Final = 0.33
SLOW_SHARE: Final = 0.5
PASSES: Final = 3
_DEVIATION_OF_MAD: Final = 1.4826

Mask = npt.NDArray[np.bool_]


def believed(
    errors_of: Callable[[Mask], npt.NDArray[Any]], endpoints: npt.NDArray[np.int64], *, passes: int = PASSES
) -> Mask:
    """Which rows to fit on, (n,), in order of arrival.

    `errors_of(kept)` fits the base on the rows `kept` and returns the log errors of all, (n,). `endpoints`: a number
    per endpoint, (n,).
    """
    kept = np.ones(len(endpoints), np.bool_)
    for _ in range(passes):
        out = false_labels(errors_of(kept), endpoints)
        if np.array_equal(kept, ~out):
            break
        kept = ~out
    return kept


def false_labels(errors: npt.NDArray[Any], endpoints: npt.NDArray[np.int64]) -> Mask:
    """Rows whose log error no honest label explains, (n,); `errors` and `endpoints` in order of arrival."""
    distance = np.abs(errors - np.median(errors))
    out: Mask = distance > max(LOG_LIMIT, DEVIATIONS * _DEVIATION_OF_MAD * float(np.median(distance)))
    if not out.any():
        return out
    if out[-NEWEST_ROWS:].mean() > CHANGED_SHARE:
        return np.zeros_like(out)
    rows = np.bincount(endpoints)
    slow = np.bincount(endpoints, weights=out) > SLOW_SHARE * rows
    return np.asarray(out & ~slow[endpoints], np.bool_)
