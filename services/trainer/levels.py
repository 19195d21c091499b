"""Labels brought to one level before a fit: of before a change of the pool, and of endpoints that differ. Pure.

What a row says of the shape is worth something at any level. The level of some rows is the median log error of the
champion on them; where the difference isn't one factor, recency forgets the older rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.trainer.champion import Champion
from services.trainer.train import weighted_quantile
from services.trainer.window import Snapshot
from shared.prediction import plausible

# Rows before a change by which the level of before is measured, and the least number on either side.
LEVEL_ROWS: Final = 500
LEVEL_MIN_ROWS: Final = 20
# Less than what counts as a change is what a target's error wanders by.
LEVEL_LEAST_LOG: Final = 0.2
# Newest rows by which endpoints are told apart, and what is no difference: little, or no more than chance. Neighbours
# in a queue err together, so that four rows tell as much as one, and three deviations are doubled.
ENDPOINT_ROWS: Final = 4000
ENDPOINT_LEAST_LOG: Final = 0.1
ENDPOINT_DEVIATIONS: Final = 6.0

Floats = npt.NDArray[Any]


def leveled(snapshot: Snapshot, champion: Champion | None) -> Snapshot:
    """The snapshot with labels of before a change raised (or lowered) to the level of those since, per target."""
    if champion is None or not snapshot.changed_at:
        return snapshot
    old = snapshot.sent < snapshot.changed_at
    # Before the change the newest rows; since, all.
    start = max(0, int(np.count_nonzero(old)) - LEVEL_ROWS)
    targets = dict(snapshot.targets)
    for target, errors in _log_errors(snapshot, champion, start):
        before, since = _known(errors[old[start:]]), _known(errors[~old[start:]])
        if min(len(before), len(since)) < LEVEL_MIN_ROWS:
            continue
        shift = float(np.median(since) - np.median(before))
        if abs(shift) >= LEVEL_LEAST_LOG:
            targets[target] = _moved(targets[target], old, shift)
    return replace(snapshot, targets=targets)


def without_endpoints(snapshot: Snapshot, champion: Champion | None) -> Snapshot:
    """The snapshot with labels of endpoints that differ from the pool brought to the pool's level, per target.

    An endpoint that has changed has two levels. Trees would find it by its step time or its queue, and be wrong of
    every other endpoint that once looks like it.
    """
    if champion is None or len(set(snapshot.endpoints)) < 2:
        return snapshot
    start = max(0, len(snapshot) - ENDPOINT_ROWS)
    names, of = np.unique(np.array(snapshot.endpoints), return_inverse=True)
    changed_at = np.array([snapshot.endpoints_changed_at.get(name, 0) for name in names.tolist()])
    # Two groups an endpoint: rows of before its change, and rows since.
    group = 2 * of + (snapshot.sent >= changed_at[of])
    targets = dict(snapshot.targets)
    for target, errors in _log_errors(snapshot, champion, start):
        known = ((number, _known(errors[group[start:] == number])) for number in np.unique(group[start:]).tolist())
        levels = {number: (float(np.median(own)), len(own)) for number, own in known if len(own) >= LEVEL_MIN_ROWS}
        if not levels:
            continue
        # Where most of the rows lie: a mean, or a median of all rows, leans towards those that differ.
        found, rows = np.array(list(levels.values())).T
        pool = weighted_quantile(found, rows, 0.5)
        deviation = 1.4826 * float(np.median(np.abs(_known(errors) - pool)))
        for number, (level, count) in levels.items():
            if abs(level - pool) >= max(ENDPOINT_LEAST_LOG, ENDPOINT_DEVIATIONS * deviation / count**0.5):
                targets[target] = _moved(targets[target], group == number, pool - level)
    return replace(snapshot, targets=targets)


def _log_errors(snapshot: Snapshot, champion: Champion, start: int) -> Iterator[tuple[str, Floats]]:
    """Per target that the champion has: log(actual / predicted) from position `start` on; NaN without a label."""
    rows = snapshot.rows[start:]
    answers = champion.model.predict(rows) if len(rows) else None
    if answers is None or not plausible(answers):
        return
    for target, labels in snapshot.targets.items():
        if f"{target}_p50" in champion.model.outputs:
            predicted = answers[:, champion.model.outputs.index(f"{target}_p50")]
            yield target, np.log(labels[start:]) - np.log(predicted)


def _known(errors: Floats) -> Floats:
    return errors[np.isfinite(errors)]


def _moved(labels: npt.NDArray[np.float32], where: npt.NDArray[np.bool_], shift: float) -> npt.NDArray[np.float32]:
    return np.where(where, labels * np.float32(np.exp(shift)), labels).astype(np.float32)
