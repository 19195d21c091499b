"""The training window: bounded, stratified, columnar. Pure.

Samples fall into bins of KV-cache utilization (10 %) × prefix hit (0.25); each bin keeps its newest 500, so that a
rare regime isn't pushed out by the common one. A snapshot weighs rows by recency, since a bin may hold rows from long
before a drift. Order is order of arrival: the sender's clock can be wrong, the stream's order can't.

Limits: 44 bins × 500 rows ≈ 22,000 rows, 2.5 MB. NaN stands for "not known" among targets only; it never enters a row.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.features import SCHEMA, FloatMatrix
from shared.prediction import TARGETS

KV_BINS: Final = 10
PREFIX_BINS: Final = 4
BINS: Final = (KV_BINS + 1) * PREFIX_BINS  # one more row of bins where the utilization isn't known
MAX_HELD_OUT: Final = 2000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the window in order of arrival, safe to hand to another thread."""

    rows: FloatMatrix
    """float32 (n, F)"""
    targets: Mapping[str, npt.NDArray[np.float32]]
    """ms, float32 (n,) each; NaN where not known"""
    sequence: npt.NDArray[np.int64]
    """Arrival number, (n,), ascending, from 1"""
    endpoints: tuple[str, ...]
    censored_rows: FloatMatrix
    """float32 (m, F): requests that were cut off"""
    censored_ms: npt.NDArray[np.float32]
    """(m,): what e2e was at least"""
    total: int
    """Samples ever taken, also those that left the window"""

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, target: str) -> npt.NDArray[np.int64]:
        """Positions of rows that have this target, in order of arrival."""
        return np.flatnonzero(~np.isnan(self.targets[target]))

    def weights(self, half_life: float, floor: float) -> npt.NDArray[np.float32]:
        """float32 (n,): halves every `half_life` arrivals, never below `floor`."""
        age = (self.total - self.sequence).astype(np.float64)
        return np.maximum(0.5 ** (age / half_life), floor).astype(np.float32)


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
    """How many of the newest `count` rows are kept for evaluation: the fraction, at least a few, at most 2000."""
    few = min(30, count // 4)
    return min(MAX_HELD_OUT, max(few, round(count * fraction)))


class SampleWindow:
    """Fixed arrays, one ring per bin. Not thread-safe: one task adds, and copies are taken by `snapshot`."""

    __slots__ = ("_bin_rows", "_censored", "_endpoints", "_fill", "_rows", "_sequence", "_targets", "total")

    def __init__(self, *, bin_rows: int = 500, censored: int = 1000) -> None:
        capacity = BINS * bin_rows
        self._bin_rows = bin_rows
        self._rows = np.zeros((capacity, len(SCHEMA)), np.float32)
        self._targets = np.full((capacity, len(TARGETS)), np.nan, np.float32)
        self._sequence = np.zeros(capacity, np.int64)
        self._endpoints = [""] * capacity
        self._fill = np.zeros(BINS, np.int64)
        self._censored: deque[tuple[FloatMatrix, float]] = deque(maxlen=censored)
        self.total = 0

    def __len__(self) -> int:
        return int(np.minimum(self._fill, self._bin_rows).sum())

    @property
    def capacity(self) -> int:
        return len(self._sequence)

    def add(self, row: FloatMatrix, targets: Mapping[str, float], endpoint: str) -> None:
        """Take one row, float32 (F,), with its known targets in ms; from a full bin the oldest leaves."""
        self.total += 1
        bin_number = bin_of(row)
        slot = bin_number * self._bin_rows + int(self._fill[bin_number] % self._bin_rows)
        self._fill[bin_number] += 1
        self._rows[slot] = row
        self._targets[slot] = [targets.get(target, np.nan) for target in TARGETS]
        self._sequence[slot] = self.total
        self._endpoints[slot] = endpoint

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
            endpoints=tuple(self._endpoints[slot] for slot in used),
            censored_rows=np.array([row for row, _ in censored], np.float32).reshape(len(censored), len(SCHEMA)),
            censored_ms=np.array([at_least for _, at_least in censored], np.float32),
            total=self.total,
        )

    def known(self, target: str) -> int:
        """How many rows have this target."""
        column = self._targets[:, TARGETS.index(target)]
        return int(np.count_nonzero(~np.isnan(column) & (self._sequence > 0)))

    def composition(self) -> dict[str, dict[str, int]]:
        """Rows by KV bin and by prefix-hit bin, for people."""
        table = np.minimum(self._fill, self._bin_rows).reshape(KV_BINS + 1, PREFIX_BINS)
        kv_names = [f"{k / KV_BINS:.1f}-{(k + 1) / KV_BINS:.1f}" for k in range(KV_BINS)] + ["unknown"]
        hit_names = [f"{k / PREFIX_BINS:.2f}-{(k + 1) / PREFIX_BINS:.2f}" for k in range(PREFIX_BINS)]
        return {
            "kv_cache_utilization": dict(zip(kv_names, table.sum(axis=1).tolist(), strict=True)),
            "prefix_hit_ratio": dict(zip(hit_names, table.sum(axis=0).tolist(), strict=True)),
        }
