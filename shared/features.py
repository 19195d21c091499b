"""The feature schema: what the latency model sees of one request on one endpoint, in which order and unit.

The router builds rows from it, the sample carries a row, the trainer fits on it, the graph starts from it. A change
of the table changes `SCHEMA_HASH`, by which bundles are keyed, so two versions live side by side in a rolling deploy.

Limits: float32 throughout (hist thresholds are values of the data: comparing them in float64 changed 59 % of rows,
measured). NaN and infinity never enter a row: unknown is 0 with a `…_known` column beside it. Endpoint identity is no
feature; the hardware class is. The strongest columns come from the router's own ledger, not from scraped gauges
(TTFT error 33 → 16 % in the queueing experiments).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.errors import FieldError

FloatMatrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Feature:
    """One column: name, unit, allowed range (inclusive), value when unknown, meaning."""

    name: str
    unit: str
    low: float
    high: float
    default: float
    meaning: str


_TOKENS = 16_777_216.0  # 2**24: the largest count that float32 holds exactly
_MS = 86_400_000.0

FEATURES: Final[tuple[Feature, ...]] = (
    Feature("input_tokens", "tokens", 0, _TOKENS, 0, "prompt length, estimated before the tokenizer sees it"),
    Feature("uncached_tokens", "tokens", 0, _TOKENS, 0, "of these, not in this endpoint's prefix cache by our index"),
    Feature("pending_uncached_tokens", "tokens", 0, _TOKENS, 0, "ledger: uncached tokens of requests still in prefill"),
    Feature("pending_requests", "requests", 0, 65_536, 0, "ledger: requests still in prefill"),
    Feature("oldest_pending_age_ms", "ms", 0, _MS, 0, "ledger: age of the oldest of them"),
    Feature("decoding_requests", "requests", 0, 65_536, 0, "ledger: requests past their first token"),
    Feature("decode_context_tokens", "tokens", 0, _TOKENS, 0, "ledger: tokens in the context of those"),
    Feature("expected_output_tokens", "tokens", 0, _TOKENS, 0, "asked for (max_tokens) or learned for the route"),
    Feature("expected_output_tokens_known", "0 or 1", 0, 1, 0, "whether the column before holds a value"),
    Feature("step_time_ms", "ms", 0, _MS, 0, "recent time per output token on this endpoint, from outcomes"),
    Feature("step_time_known", "0 or 1", 0, 1, 0, "whether the column before holds a value"),
    Feature("waiting_requests", "requests", 0, 65_536, 0, "scraped: requests queued in the server"),
    Feature("running_requests", "requests", 0, 65_536, 0, "scraped: requests in its batch"),
    Feature("kv_cache_utilization", "ratio", 0, 1, 0, "scraped: share of KV blocks in use"),
    Feature("scrape_age_ms", "ms", 0, _MS, 0, "age of the scraped values"),
    Feature("scrape_known", "0 or 1", 0, 1, 0, "whether the scraped columns hold values young enough to be facts"),
    Feature("hardware_class", "code", 0, 255, 0, "code of HARDWARE_CLASSES; 0 unknown"),
)

# Append only: a code is stored in samples and learned by trees.
HARDWARE_CLASSES: Final[tuple[str, ...]] = (
    "unknown", "a100", "h100", "h200", "b200", "gb200", "l4", "l40s", "a10", "t4", "v100", "mi300x", "mi325x", "mi355x",
    "gaudi2", "gaudi3", "tpu-v5e", "tpu-v5p", "tpu-v6e", "cpu", "class-a", "class-b", "class-c", "class-d",
)  # fmt: skip


class Schema:
    """An ordered list of features with its hash; turns columns into rows and checks rows from the wire."""

    __slots__ = ("_defaults", "_high", "_low", "features", "hash", "index", "names")

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        self.names = tuple(feature.name for feature in self.features)
        if len(set(self.names)) != len(self.names):
            raise ValueError("feature names must differ")
        self.index: Mapping[str, int] = {name: column for column, name in enumerate(self.names)}
        text = "\n".join(f"{f.name}|{f.unit}|{f.low}|{f.high}|{f.default}" for f in self.features)
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._low = np.array([f.low for f in self.features], np.float32)
        self._high = np.array([f.high for f in self.features], np.float32)
        self._defaults = np.array([f.default for f in self.features], np.float32)

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, count: int, columns: Mapping[str, npt.ArrayLike]) -> FloatMatrix:
        """Build float32 (count, F) from named columns: scalars or arrays of `count`; the rest take their default.

        Values are clipped to the feature's range: the caller's numbers are measurements, and a row out of range
        would be refused by the predictor. Raises KeyError for a name outside the schema.
        """
        rows = np.empty((count, len(self.features)), np.float32)
        rows[:] = self._defaults
        for name, values in columns.items():
            rows[:, self.index[name]] = values
        np.nan_to_num(rows, copy=False, nan=0.0)
        return np.clip(rows, self._low, self._high, out=rows)

    def check(self, rows: FloatMatrix) -> None:
        """Raise FieldError naming row and column for the first value that is not finite or out of range.

        `rows` is float32 (n, F).
        """
        if rows.ndim != 2 or rows.shape[1] != len(self.features):
            raise FieldError("rows", f"an array of shape {rows.shape}", f"n rows of {len(self.features)} columns")
        bad = ~((rows >= self._low) & (rows <= self._high))
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            feature = self.features[column]
            raise FieldError(
                f"rows[{row}].{feature.name}",
                f"{rows[row, column]}",
                f"a finite number of {feature.unit} from {feature.low:g} to {feature.high:g}",
            )


SCHEMA: Final = Schema(FEATURES)
SCHEMA_HASH: Final = SCHEMA.hash


def hardware_code(name: str) -> int:
    """Code of a hardware class by name; raises FieldError for one that isn't in the table."""
    try:
        return HARDWARE_CLASSES.index(name.lower())
    except ValueError:
        raise FieldError("hardware_class", f"'{name[:32]}'", ", ".join(HARDWARE_CLASSES)) from None
