"""The training window: bounded, stratified, columnar. Pure.

The newest 8,000 samples are kept whatever they are. Older ones fall into bins of KV-cache utilization (10 %) × prefix
hit (0.25), each of which keeps its newest 500, so that a rare regime isn't pushed out by the common one. Bins alone are
too few rows where a pool's utilization keeps to two or three of them: 1,000 to 3,000, TTFT error 17.7 % against 15.2.
A snapshot weighs rows by recency, since a bin may hold rows from long before a drift, and those of before a change that
the calibration has seen by 0.3 more. Order is order of arrival: the sender's clock can be wrong, the stream's order
can't.

Limits: 8,000 + 44 bins × 500 rows ≈ 30,000 rows, 3.6 MB. NaN stands for "not known" among targets only; it never
enters a row.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.features import SCHEMA, FloatMatrix
from shared.prediction import TARGETS

KV_BINS: Final = 10
PREFIX_BINS: Final = 4
BINS: Final = (KV_BINS + 1) * PREFIX_BINS  # one more row of bins where the utilization isn't known
# The rows that judge aren't learned from: each one makes the model a sample older.
MAX_HELD_OUT: Final = 300
FEW_HELD_OUT: Final = 30
# What a row of before a change weighs: its level has to be moved, its shape may be another.
BEFORE_CHANGE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the window in order of arrival, safe to hand to another thread."""

    rows: FloatMatrix
    """float32 (n, F)"""
    targets: Mapping[str, npt.NDArray[np.float32]]
    """ms, float32 (n,) each; NaN where not known"""
    sequence: npt.NDArray[np.int64]
    """Arrival number, (n,), ascending, from 1"""
    sent: npt.NDArray[np.int64]
    """How many samples had arrived when it was sent, (n,): what a label tells of"""
    endpoints: tuple[str, ...]
    censored_rows: FloatMatrix
    """float32 (m, F): requests that were cut off"""
    censored_ms: npt.NDArray[np.float32]
    """(m,): what e2e was at least"""
    total: int
    """Samples ever taken, also those that left the window"""
    changed_at: int = 0
    """Requests sent since so many samples had arrived tell of latencies as they are now; 0: all"""
    endpoints_changed_at: Mapping[str, int] = field(default_factory=dict)
    """The same of single endpoints"""

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, target: str) -> npt.NDArray[np.int64]:
        """Positions of rows that have this target, in order of arrival."""
        return np.flatnonzero(~np.isnan(self.targets[target]))

    def weights(self, half_life: float, floor: float) -> npt.NDArray[np.float32]:
        """float32 (n,): halves every `half_life` arrivals, never below `floor`; little before a change."""
        age = (self.total - self.sequence).astype(np.float64)
        weights = np.maximum(0.5 ** (age / half_life), floor)
        return np.where(self.sent < self.changed_at, BEFORE_CHANGE * weights, weights).astype(np.float32)


def bin_of(row: FloatMatrix) -> int:
    """Bin of one row, float32 (F,)."""
    index = SCHEMA.index
    kv = KV_BINS
    if row[index["scrape_known"]] > 0:
        kv = min(KV_BINS - 1, int(row[index["kv_cache_utilization"]] * KV_BINS))
    tokens = max(1.0, float(row[index["input_tokens"]]))
    hit = 1.0 - min(1.0, float(row[index["uncached_tokens"]]) / tokens)
    return kv * PREFIX_BINS + min(PREFIX_BINS - 1, int(hit * PREFIX_BINS))


def held_out_rows(count: int, fraction: float) -> int:
    """How many of the newest `count` rows are kept for evaluation: the fraction, at least a few, at most 300."""
    few = min(FEW_HELD_OUT, count // 4)
    return min(MAX_HELD_OUT, max(few, round(count * fraction)))


class SampleWindow:
    """Fixed arrays: a ring of the newest rows, and a ring per bin of those that left it.

    Not thread-safe: one task adds, and copies are taken by `snapshot`.
    """

    __slots__ = (
        "_bin_rows", "_bins", "_censored", "_endpoints", "_fill", "_recent_rows", "_rows", "_sent", "_sequence",
        "_targets", "changed_at", "endpoints_changed_at", "total",
    )  # fmt: skip

    def __init__(self, *, recent_rows: int = 0, bin_rows: int = 500, censored: int = 1000) -> None:
        """`recent_rows` of the newest whatever their bin, then `bin_rows` per bin of the older ones."""
        capacity = recent_rows + BINS * bin_rows
        self._recent_rows = recent_rows
        self._bin_rows = bin_rows
        self._rows = np.zeros((capacity, len(SCHEMA)), np.float32)
        self._targets = np.full((capacity, len(TARGETS)), np.nan, np.float32)
        self._sequence = np.zeros(capacity, np.int64)
        self._sent = np.zeros(capacity, np.int64)
        self._bins = np.zeros(capacity, np.int64)
        self._endpoints = [""] * capacity
        self._fill = np.zeros(BINS, np.int64)
        self._censored: deque[tuple[FloatMatrix, float]] = deque(maxlen=censored)
        self.total = 0
        self.changed_at = 0
        self.endpoints_changed_at: dict[str, int] = {}

    def __len__(self) -> int:
        return min(self.total, self._recent_rows) + int(np.minimum(self._fill, self._bin_rows).sum())

    @property
    def capacity(self) -> int:
        return len(self._sequence)

    def add(self, row: FloatMatrix, targets: Mapping[str, float], endpoint: str, lag: int = 0) -> None:
        """Take one row, float32 (F,), with its known targets in ms; `lag` samples came while it was under way. What is
        new the longest moves into its bin, and from a full bin the oldest leaves.
        """
        bin_number = bin_of(row)
        if self._recent_rows:
            slot = self.total % self._recent_rows
            if self.total >= self._recent_rows:
                self._retire(slot)
        else:
            slot = self._binned_slot(bin_number)
        self.total += 1
        self._rows[slot] = row
        self._targets[slot] = [targets.get(target, np.nan) for target in TARGETS]
        self._sequence[slot] = self.total
        self._sent[slot] = self.total - lag
        self._bins[slot] = bin_number
        self._endpoints[slot] = endpoint

    def _retire(self, slot: int) -> None:
        """Move a row of the newest into its bin."""
        binned = self._binned_slot(int(self._bins[slot]))
        for column in (self._rows, self._targets, self._sequence, self._sent, self._bins):
            column[binned] = column[slot]
        self._endpoints[binned] = self._endpoints[slot]

    def _binned_slot(self, bin_number: int) -> int:
        """The place of a bin's next row: an empty one, or that of its oldest."""
        place = int(self._fill[bin_number] % self._bin_rows)
        self._fill[bin_number] += 1
        return self._recent_rows + bin_number * self._bin_rows + place

    def add_censored(self, row: FloatMatrix, at_least_ms: float) -> None:
        """Keep a request that was cut off: e2e was at least this. For the evaluation only."""
        self._censored.append((row, at_least_ms))

    def snapshot(self, newer_than: int = 0) -> Snapshot:
        """Copy everything that arrived after number `newer_than`, in order of arrival."""
        used = np.flatnonzero(self._sequence > newer_than)
        used = used[np.argsort(self._sequence[used], kind="stable")]
        targets = self._targets[used]
        censored = list(self._censored)
        return Snapshot(
            rows=self._rows[used],
            targets={target: targets[:, k].copy() for k, target in enumerate(TARGETS)},
            sequence=self._sequence[used],
            sent=self._sent[used],
            endpoints=tuple(self._endpoints[slot] for slot in used),
            censored_rows=np.array([row for row, _ in censored], np.float32).reshape(len(censored), len(SCHEMA)),
            censored_ms=np.array([at_least for _, at_least in censored], np.float32),
            total=self.total,
            changed_at=self.changed_at,
            endpoints_changed_at=dict(self.endpoints_changed_at),
        )

    def known(self, target: str) -> int:
        """How many rows have this target."""
        column = self._targets[:, TARGETS.index(target)]
        return int(np.count_nonzero(~np.isnan(column) & (self._sequence > 0)))

    def composition(self) -> dict[str, dict[str, int]]:
        """Rows by KV bin and by prefix-hit bin, for people."""
        table = np.bincount(self._bins[self._sequence > 0], minlength=BINS).reshape(KV_BINS + 1, PREFIX_BINS)
        kv_names = [f"{k / KV_BINS:.1f}-{(k + 1) / KV_BINS:.1f}" for k in range(KV_BINS)] + ["unknown"]
        hit_names = [f"{k / PREFIX_BINS:.2f}-{(k + 1) / PREFIX_BINS:.2f}" for k in range(PREFIX_BINS)]
        return {
            "kv_cache_utilization": dict(zip(kv_names, table.sum(axis=1).tolist(), strict=True)),
            "prefix_hit_ratio": dict(zip(hit_names, table.sum(axis=0).tolist(), strict=True)),
        }
