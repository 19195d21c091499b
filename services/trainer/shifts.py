"""Has a level changed for good, and since when? A watch over one target's log errors, or one endpoint's. Pure.

A label speaks of the time when its request was sent, and it arrives when the request ends: for seconds after a change,
labels of before and after come mixed. Sorted by when they were sent they fall apart, so the watch keeps the newest
errors in that order and asks of every run of newest ones whether it lies off the reference by more than chance: the sum
of errors in units of the usual one, each cut at three, against the square root of their number. The run that stands out
the most is what lies after the change; its first request tells the onset, its median the new level.

"When sent" is a number: how many labels had arrived by then (`Arrivals`). It needs no sender's clock.

Limits: errors that come in bursts (a queue that is mispredicted as a whole) look like short changes, hence a least
number of errors and a least size. A slow ramp is seen as several small changes.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final, Generic, TypeVar

import numpy as np

# What stands out: the sum of m errors, cut at CUT usual ones each, over √m.
STANDS_OUT: Final = 8.0
CUT: Final = 3.0
LEAST_SCALE: Final = 0.05

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class Shift(Generic[Note]):
    """A change: the number at which the first request after it was sent, the level since, the notes of those errors."""

    onset: int
    level: float
    notes: tuple[Note, ...]


class ShiftWatch(Generic[Note]):
    """The newest `span` errors in order of sending; a run of at least `least` of them may stand out."""

    __slots__ = ("_entries", "_least", "_order", "_span", "_total")

    def __init__(self, *, span: int, least: int) -> None:
        self._span = span
        self._least = least
        self._order = 0
        # (sent, order of arrival, distance from the reference, error, note)
        self._entries: list[tuple[int, int, float, float, Note]] = []
        self._total = 0.0

    def observe(
        self, sent: int, error: float, note: Note, *, reference: float, scale: float, least_log: float
    ) -> Shift[Note] | None:
        """Take one log error; the change that is seen by it, if any, after which the watch begins anew.

        `reference` is where errors lay, `scale` their usual distance from it; what is less than `least_log` isn't one.
        """
        distance = min(CUT, max(-CUT, (error - reference) / max(scale, LEAST_SCALE)))
        # Orders differ, so that notes are never compared.
        insort(self._entries, (sent, self._order, distance, error, note))
        self._order += 1
        self._total += distance
        if len(self._entries) > self._span:
            self._total -= self._entries.pop(0)[2]
        if abs(self._total) < STANDS_OUT * self._least**0.5 / 2:
            return None  # no run can stand out but by chance of the others: a look at every sample would cost 10 µs
        first, best, total = None, STANDS_OUT, 0.0
        for count, entry in enumerate(reversed(self._entries), start=1):
            total += entry[2]
            if count >= self._least and abs(total) / count**0.5 > best:
                first, best = len(self._entries) - count, abs(total) / count**0.5
        if first is None:
            return None
        after = self._entries[first:]
        level = median(entry[3] for entry in after)
        if abs(level - reference) < least_log:
            return None
        self.clear()
        return Shift(after[0][0], level, tuple(entry[4] for entry in after))

    def clear(self) -> None:
        """What was seen belongs to a reference that is none any more."""
        self._entries = []
        self._total = 0.0


class Arrivals:
    """How many labels had arrived at an instant, for the last `kept` batches; instants in ms of one monotonic clock."""

    __slots__ = ("_totals",)

    def __init__(self, kept: int = 600) -> None:
        self._totals: deque[tuple[float, int]] = deque(maxlen=kept)

    def lags(self, now_ms: float, durations_ms: list[float]) -> list[int]:
        """For each label of a batch that is taken at `now_ms`, in order of arrival: how many have come since its
        request was sent, itself among them. `durations_ms`: how long each took; NaN where that isn't known: a lag of 0.
        """
        begin_ms, before = self._totals[-1] if self._totals else (now_ms, 0)
        # A batch's labels came one by one since the batch before, or in the last second of a quiet time.
        begin_ms = min(now_ms, max(begin_ms, now_ms - 1_000.0))
        count = len(durations_ms)
        self._totals.append((begin_ms, before))
        self._totals.append((now_ms, before + count))
        instants, totals = (np.array(column) for column in zip(*self._totals, strict=True))
        places = np.arange(1, count + 1)
        came_ms = begin_ms + (now_ms - begin_ms) * places / max(1, count)
        sent_ms = came_ms - np.asarray(durations_ms, np.float64)
        sent = np.interp(sent_ms, instants, totals)
        lags = np.where(np.isfinite(sent), before + places - sent, 0.0)
        return [max(0, int(lag)) for lag in lags]
