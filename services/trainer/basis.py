"""The physics basis: what the base of the model is linear in. Pure.

A term is relu(left · row − knot) × relu(right · row), so that the whole basis is two matrix products in float32, the
same in numpy here and in the exported graph. Coefficients are non-negative, hence a base that never falls as load
grows and keeps its slope beyond what was seen, where trees go flat. Hinges on the new tokens follow the measured
knees of prefill kernels (64 to 512 tokens) and the slow growth after them: without hinges the bias beyond the training
range was −10…−16 %, with them 0…−2 %. A column of n² is left out: the fit abuses it for the knee (41–53 % bias).

A hinge that the rows don't reach can't be fitted. It is given a share of the slope below it, `growth_of` the hardware:
kernels of Hopper lose efficiency with size and a straight line falls behind them, A100's don't (DECISIONS.md: chosen
on splits that no report uses).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shared.features import HARDWARE_CLASSES, SCHEMA, FloatMatrix, Schema


@dataclass(frozen=True, slots=True)
class Term:
    """One column of the basis; weights are by feature name. `min_rows` is how many rows it takes to be fitted.

    A term with a `knot` above 0 and no `right` is a hinge of the terms with the same `left`.
    """

    name: str
    left: Mapping[str, float] = field(default_factory=dict)
    knot: float = 0.0
    right: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    min_rows: int = 0
    grows: bool = False
    """Whether a hinge out of the rows' reach has a share of the slope below it, and not 0"""


PREFILL_KNOTS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
BATCH_KNOTS: Final = (64, 128, 256)
# Of hardware that wasn't measured, and of pools that mix classes.
GROWTH: Final = 0.01
GROWTH_OF: Final[Mapping[str, float]] = MappingProxyType({"a100": 0.0, "h100": 0.03, "h200": 0.03})
# From an old GPU to one with little to do per token; without these a backlog of twice the trained was −15…−28 % off.
TOKENS_PER_MS: Final = (4.0, 12.0, 36.0)
# A hinge is in reach where so many rows lie beyond its knot by this factor: a slope needs points along it.
REACH_FACTOR: Final = 1.4
REACH_ROWS: Final = 20

_OWN: Final = {"uncached_tokens": 1.0}
_BACKLOG: Final = {"uncached_tokens": 1.0, "pending_uncached_tokens": 1.0}
_BATCH: Final = {"decoding_requests": 1.0, "pending_requests": 1.0}
_CONTEXT: Final = {"decode_context_tokens": 1.0, "input_tokens": 1.0}
_EXPECTED: Final = {"expected_output_tokens": 1.0}

PREFILL_TERMS: Final = (
    Term("own uncached", _OWN, scale=1e-3),
    Term("pending uncached", {"pending_uncached_tokens": 1.0}, scale=1e-3),
    Term("decoding", {"decoding_requests": 1.0}),
    # New tokens attend to the cached ones and to half of themselves.
    Term("attention", _OWN, right={"input_tokens": 1.0, "uncached_tokens": -0.5}, scale=1e-6, min_rows=50),
    *(Term(f"own uncached over {knot}", _OWN, knot, scale=1e-3, min_rows=50, grows=True) for knot in PREFILL_KNOTS),
    Term("pending", {"pending_requests": 1.0}, min_rows=50),
    Term("decode context", {"decode_context_tokens": 1.0}, scale=1e-3, min_rows=50),
    # Every chunk of the backlog runs beside the decoding batch and pays for its context again.
    Term("backlog beside decodes", _BACKLOG, right={"decoding_requests": 1.0}, scale=1e-3, min_rows=200),
    Term("backlog beside context", _BACKLOG, right={"decode_context_tokens": 1.0}, scale=1e-6, min_rows=200),
    # The oldest pending request has been worked on since it came: at some rate, which the fit picks from three.
    *(
        Term(f"backlog less its age at {rate}", {**_BACKLOG, "oldest_pending_age_ms": -rate}, scale=1e-3, min_rows=200)
        for rate in TOKENS_PER_MS
    ),
    Term("waiting beyond the ledger", {"waiting_requests": 1.0, "pending_requests": -1.0}, min_rows=200),
    Term("step time", {"step_time_ms": 1.0}, min_rows=200),
)
DECODE_TERMS: Final = (
    Term("batch", _BATCH),
    Term("context", _CONTEXT, scale=1e-3),
    *(Term(f"batch over {knot}", _BATCH, knot, min_rows=200) for knot in BATCH_KNOTS),
    # Prefills run in the same steps as this request's decode.
    Term("backlog", _BACKLOG, scale=1e-3, min_rows=50),
    Term("step time", {"step_time_ms": 1.0}, min_rows=50),
)
WHOLE_TERMS: Final = (
    *PREFILL_TERMS,
    Term("expected output", _EXPECTED, scale=1e-2),
    Term("output unknown", {"expected_output_tokens_known": -1.0}, knot=-1.0),
    Term("expected output in batch", _EXPECTED, right=_BATCH, scale=1e-3, min_rows=50),
    Term("expected output with context", _EXPECTED, right=_CONTEXT, scale=1e-6, min_rows=200),
    Term("expected output at step time", _EXPECTED, right={"step_time_ms": 1.0}, scale=1e-3, min_rows=200),
)
TERMS: Final[Mapping[str, tuple[Term, ...]]] = {"ttft": PREFILL_TERMS, "tpot": DECODE_TERMS, "e2e": WHOLE_TERMS}


class Basis:
    """Terms as matrices: `left`, `right` float32 (F, B), `left_offset`, `right_offset` float32 (B,). Column 0 is 1."""

    __slots__ = ("_growth", "_hinges", "left", "left_offset", "min_rows", "names", "right", "right_offset")

    def __init__(
        self,
        terms: Sequence[Term],
        schema: Schema = SCHEMA,
        *,
        growth: float | None = None,
        reach_factor: float = REACH_FACTOR,
    ) -> None:
        """`growth`: of every hardware class; None: each its own."""
        self.names = ("constant", *(term.name for term in terms))
        shape = (len(schema), len(self.names))
        self.left = np.zeros(shape, np.float32)
        self.right = np.zeros(shape, np.float32)
        self.left_offset = np.zeros(shape[1], np.float32)
        self.right_offset = np.ones(shape[1], np.float32)
        self.left_offset[0] = 1.0
        self.min_rows = np.array([0, *(term.min_rows for term in terms)])
        self._growth = growth
        # Column, its height where the reach begins, whether it grows, the columns that make the slope below it.
        self._hinges = [
            (
                column,
                (reach_factor - 1) * term.knot * term.scale,
                term.grows,
                _slope_below(terms, term),
            )
            for column, term in enumerate(terms, start=1)
            if term.knot > 0 and not term.right
        ]
        for column, term in enumerate(terms, start=1):
            for name, weight in term.left.items():
                self.left[schema.index[name], column] = weight * term.scale
            self.left_offset[column] = -term.knot * term.scale
            for name, weight in term.right.items():
                self.right[schema.index[name], column] = weight
            self.right_offset[column] = 0.0 if term.right else 1.0

    def __len__(self) -> int:
        return len(self.names)

    def evaluate(self, rows: FloatMatrix) -> FloatMatrix:
        """float32 (n, F) → float32 (n, B), every value ≥ 0."""
        left = np.maximum(rows @ self.left + self.left_offset, np.float32(0))
        right = np.maximum(rows @ self.right + self.right_offset, np.float32(0))
        return np.asarray(left * right, np.float32)

    def reached(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which columns the evaluated rows (n, B) can fit, (B,): all but hinges with too few rows well beyond them."""
        reached = np.ones(len(self), np.bool_)
        for column, height, _, _ in self._hinges:
            reached[column] = np.count_nonzero(columns[:, column] >= height) >= REACH_ROWS
        return reached

    def grown(
        self, coefficients: npt.NDArray[np.float64], reached: npt.NDArray[np.bool_], code: int
    ) -> npt.NDArray[np.float64]:
        """The coefficients (B,) of a hardware class with hinges out of reach set to their share of the slope below."""
        growth = growth_of(code) if self._growth is None else self._growth
        grown = coefficients.copy()
        for column, _, grows, below in self._hinges:
            if not reached[column]:
                grown[column] = growth * grown[below].sum() if grows else 0.0
        return grown


def growth_of(code: int) -> float:
    """Of the slope below it, what a hinge out of reach has on hardware of this code; 0 is unknown or mixed."""
    return GROWTH_OF.get(HARDWARE_CLASSES[code], GROWTH) if code < len(HARDWARE_CLASSES) else GROWTH


def _slope_below(terms: Sequence[Term], hinge: Term) -> list[int]:
    return [
        column
        for column, term in enumerate(terms, start=1)
        if term.left == hinge.left and term.scale == hinge.scale and not term.right and term.knot < hinge.knot
    ]


def basis_of(target: str, *, growth: float | None = None, reach_factor: float = REACH_FACTOR) -> Basis:
    """The basis of one target of shared.prediction.TARGETS."""
    return Basis(TERMS[target], growth=growth, reach_factor=reach_factor)


# Columns that the trees see beside the raw row; each a sum of two, so that its float32 value is the same everywhere.
TREE_SUMS: Final = (
    ("backlog_tokens", ("uncached_tokens", "pending_uncached_tokens")),
    ("batch_requests", ("decoding_requests", "pending_requests")),
)


def tree_sums(schema: Schema = SCHEMA) -> FloatMatrix:
    """float32 (F, S): a row times this gives the summed columns."""
    weights = np.zeros((len(schema), len(TREE_SUMS)), np.float32)
    for column, (_, parts) in enumerate(TREE_SUMS):
        for name in parts:
            weights[schema.index[name], column] = 1.0
    return weights


def tree_matrix(rows: FloatMatrix) -> FloatMatrix:
    """float32 (n, F) → float32 (n, F + S): what the boosters are trained on and asked with."""
    return np.concatenate([rows, rows @ tree_sums()], axis=1)


def tree_names(schema: Schema = SCHEMA) -> tuple[str, ...]:
    """Names of the columns of `tree_matrix`; the boosters themselves only know f0, f1, …"""
    return (*schema.names, *(name for name, _ in TREE_SUMS))


def backlog_tokens(rows: FloatMatrix, schema: Schema = SCHEMA) -> FloatMatrix:
    """Own + pending uncached tokens, float32 (n,): what calibration bins are cut by."""
    total: FloatMatrix = rows[:, schema.index["uncached_tokens"]] + rows[:, schema.index["pending_uncached_tokens"]]
    return total
