"""The physics part of a fit: non-negative least squares on the basis, held by the prior where rows say nothing. Pure.

Quick answers come back first, so a pool's first rows are short and met no queue: they show what an idle endpoint takes
and nothing of a backlog or of a full batch. A free fit gives such terms the coefficient 0, and a proportion of two
models is judged by the same rows. Here each coefficient by itself is drawn towards the prior's, brought to the level
that the rows show, as strongly as `anchor_rows` rows of a usual latency would: what the rows span follows the rows, the
rest stays where it was. The hold fades as rows come: the prior may be of another model, and from `FREE_ROWS` on they
stand alone. No row at all leaves the prior.

Fitted are multiples of the prior's coefficients, so that one set holds for a pool of unlike hardware; then, around that
and brought to its own level, each hardware class that has rows. A class without rows keeps the pool's multiples.
Without a prior it is a free fit: of the pool, of each class with rows enough, a shrunk multiple of the pool's for the
others.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from services.trainer.basis import Basis
from services.trainer.prior import PriorBase
from shared.features import SCHEMA, FloatMatrix

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

HARDWARE_CODES: Final = 256
QR_BLOCK_ROWS: Final = 2048
FREE_ROWS: Final = 2000
# From so many rows on a class has a level, and without a prior coefficients, of its own.
CLASS_LEVEL_ROWS: Final = 10
CLASS_MIN_ROWS: Final = 200
# Rows that hold a class at its pool's level, and a pool at the prior's.
CLASS_DOUBT_ROWS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Base:
    """The physics part of one target."""

    basis: Basis
    coefficients: FloatMatrix
    """float32 (S, B), one row for a hardware class or several"""
    slots: npt.NDArray[np.int64]
    """(256,): hardware code → row of `coefficients`"""
    floor_ms: np.float32

    def predict(self, rows: FloatMatrix) -> FloatMatrix:
        """float32 (n, F) → ms, float32 (n,)."""
        slots = self.slots[rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)]
        products = self.basis.evaluate(rows) * self.coefficients[slots]
        return np.asarray(np.maximum(products.sum(axis=1, dtype=np.float32), self.floor_ms), np.float32)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Evaluated rows: columns (n, B), ms (n,), weights (n,) and hardware codes (n,)."""

    basis: Basis
    columns: Floats
    y: Floats
    weights: Floats
    codes: npt.NDArray[np.int64]

    def of(self, code: int) -> "_Rows":
        own = self.codes == code
        return _Rows(self.basis, self.columns[own], self.y[own], self.weights[own], self.codes[own])

    def solve(self, units: Floats, held_at: Floats, anchor_rows: float) -> tuple[Floats, Flags]:
        """Multiples of `units`, (B,), ≥ 0, held at `held_at`, (B,), and which hinges the rows reach, (B,)."""
        reached = self.basis.reached(self.columns)
        fitted = (self.basis.min_rows <= len(self.y)) & reached
        rows_held = anchor_rows * max(0.0, 1.0 - len(self.y) / FREE_ROWS)
        if rows_held:
            fitted |= held_at > 0
        pull = rows_held * float(self.weights.mean()) * float(np.average(self.y, weights=self.weights))
        return _nonnegative(
            self.columns * units, self.y, np.sqrt(self.weights / self.y), fitted, held_at, pull
        ), reached


def fit_base(
    basis: Basis,
    rows: FloatMatrix,
    y_ms: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    prior: PriorBase | None,
    anchor_rows: float,
) -> Base:
    """The base of n ≥ 1 rows: float32 (n, F), positive latencies (n,), weights (n,)."""
    codes = rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)
    columns = basis.evaluate(rows).astype(np.float64)
    data = _Rows(basis, columns, y_ms.astype(np.float64), weights.astype(np.float64), codes)
    floor_ms = np.float32(max(1e-3, 0.25 * float(y_ms.min())))
    if prior is None:
        return _free(data, floor_ms)
    known = np.where(codes < len(prior.coefficients), codes, 0)
    level = prior.scale(rows, y_ms)
    units = level * prior.units
    multiples, reached = data.solve(units[known], prior.held_at, anchor_rows)
    coefficients = [basis.grown(multiples * own, reached, code) for code, own in enumerate(units)]
    present = np.unique(known)
    for code in present.tolist():
        own = data.of(code)
        if len(present) == 1 or len(own.y) < CLASS_LEVEL_ROWS:
            continue
        own_units = units[code] * _level(own, coefficients[code], float(floor_ms))
        own_multiples, reached = own.solve(own_units, multiples, anchor_rows)
        coefficients[code] = basis.grown(own_multiples * own_units, reached, code)
    return _by_class(basis, np.array(coefficients), floor_ms)


def unfitted(prior: PriorBase) -> Base:
    """The prior as it is, for want of rows."""
    return _by_class(prior.basis, prior.coefficients, np.float32(1e-3))


def _by_class(basis: Basis, coefficients: Floats, floor_ms: np.float32) -> Base:
    """One row of coefficients, (H, B), a hardware class; codes that none of them has take the first."""
    slots = np.zeros(HARDWARE_CODES, np.int64)
    slots[: len(coefficients)] = np.arange(len(coefficients))
    return Base(basis, coefficients.astype(np.float32), slots, floor_ms)


def _free(data: _Rows, floor_ms: np.float32) -> Base:
    """The fit of rows alone."""
    units, held_at = np.ones(len(data.basis)), np.zeros(len(data.basis))
    present, counts = np.unique(data.codes, return_counts=True)
    fitted, reached = data.solve(units, held_at, 0.0)
    pooled = data.basis.grown(fitted, reached, int(present[0]) if len(present) == 1 else 0)
    coefficients = [pooled]
    slots = np.zeros(HARDWARE_CODES, np.int64)
    for code, count in zip(present.tolist(), counts.tolist(), strict=True):
        if len(present) == 1 or count < CLASS_LEVEL_ROWS:
            continue
        own = data.of(code)
        slots[code] = len(coefficients)
        if count >= CLASS_MIN_ROWS:
            coefficients.append(data.basis.grown(*own.solve(units, held_at, 0.0), code))
        else:
            level = _level(own, pooled, float(floor_ms))
            coefficients.append(data.basis.grown(level * fitted, reached, code))
    return Base(data.basis, np.array(coefficients, np.float32), slots, floor_ms)


def _level(own: _Rows, coefficients: Floats, floor_ms: float) -> float:
    """How much slower a class is than these coefficients say, shrunk: at 10 rows a third of it is believed, at 200 ten
    elevenths.
    """
    ratio = float(np.median(np.log(own.y) - np.log(np.maximum(own.columns @ coefficients, floor_ms))))
    return float(np.exp(ratio * len(own.y) / (len(own.y) + CLASS_DOUBT_ROWS)))


def _nonnegative(
    columns: Floats, y: Floats, row_weights: Floats, fitted: Flags, held_at: Floats, pull: float
) -> Floats:
    """Coefficients ≥ 0, (B,), of weighted least squares; columns that aren't `fitted` stay 0. Each is drawn towards its
    `held_at`, (B,), with a weight of `pull` on the squared difference.
    """
    allowed = np.flatnonzero(fitted)
    weighted = columns[:, allowed] * row_weights[:, None]
    norms = np.sqrt(np.square(weighted).sum(axis=0) + pull)
    norms[norms == 0] = 1.0
    system = np.column_stack([weighted / norms, y * row_weights])
    # The triangle of a QR holds all that the fit needs of n rows, so that nnls works on B × B. Built block by block:
    # one QR of 22,000 rows held the interpreter lock, and with it the event loop, for 20 ms (130 on a busy machine).
    triangle = np.zeros((0, system.shape[1]))
    if pull:
        triangle = np.sqrt(pull) * np.column_stack([np.diag(1.0 / norms), held_at[allowed]])
    for start in range(0, len(system), QR_BLOCK_ROWS):
        block = np.concatenate([triangle, system[start : start + QR_BLOCK_ROWS]])
        triangle = np.asarray(np.linalg.qr(block, mode="r"))
    solution, _ = nnls(triangle[:, :-1], triangle[:, -1], maxiter=100 * len(allowed))
    coefficients = np.zeros(columns.shape[1])
    coefficients[allowed] = solution / norms
    return coefficients
