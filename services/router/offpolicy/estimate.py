"""What another policy would have earned, from what one has logged: estimators and their intervals. Pure, numpy alone.

A logged row has a weight w = P(the other policy does what was done) / P(it was done). With rewards r, and a model's
guess q of them for every action:

- IPS: mean of w·r. Unbiased where the logged policy sometimes does all that the other would; noisy.
- SNIPS: sum of w·r / sum of w. A little biased, much less noisy: its weights average 1 by construction.
- DR: mean of (Σ P·q + w·(r − q of what was done)). Right if either the weights or the guesses are; the guesses here are
  the latency model's, scaled to the logged rewards by one factor, and the weights are normalised as SNIPS's are.

Intervals are from the spread of contiguous blocks of rows: requests close in time share queues, so they aren't as many
independent witnesses as there are rows. The wider of that and the row-wise one holds, with Student's quantile.

The overlap is judged by the effective sample size (Σw)² / Σw², and by the mean weight: it is 1 where the logged policy
covers the other, and less by the share of what the other would do that was never tried.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]

_BLOCKS: Final = 32
_LEAST_ROWS_A_BLOCK: Final = 4
LEAST_EFFECTIVE: Final = 100.0
LEAST_EFFECTIVE_SHARE: Final = 0.05
LEAST_COVERED: Final = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval; NaN where it can't be told."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """All estimates of one reward under one other policy. `logged`: what was earned.

    `difference`: DR minus logged, with the interval of the difference itself, in which what both share cancels out.
    `covered`: the mean weight. `warnings`: why not to believe it, in words; empty where nothing speaks against it.
    """

    rows: int
    logged: Estimate
    ips: Estimate
    snips: Estimate
    dr: Estimate
    difference: Estimate
    effective_rows: float
    covered: float
    largest_weight: float
    warnings: tuple[str, ...]


def evaluate(
    rewards: npt.ArrayLike,
    done: npt.ArrayLike,
    expected: npt.ArrayLike,
    guessed_done: npt.ArrayLike,
    guessed_expected: npt.ArrayLike,
    *,
    confidence: float = 0.95,
) -> Verdict:
    """Rows in order of time, all float (n,).

    `done`: propensity with which what was done was done. `expected`: probability with which the other policy does it.
    `guessed_done`: the model's guess of the reward of what was done; `guessed_expected`: of what the other would do,
    over its probabilities. Raises ValueError without rows, or for a propensity that is none.
    """
    r, p, e, q, v = (
        np.asarray(values, np.float64) for values in (rewards, done, expected, guessed_done, guessed_expected)
    )
    n = len(r)
    if n == 0:
        raise ValueError("no rows; allowed: one at least")
    if not ((p > 0.0) & (p <= 1.0)).all():
        raise ValueError("a propensity outside (0, 1]")
    w = e / p
    total = float(w.sum())
    scale = _scale(r, q)
    logged = _mean(r, confidence)
    ips = _mean(w * r, confidence)
    if total > 0.0:
        normal = w * (n / total)
        snips_value = float((normal * r).mean())
        # Linearised: the weights' own noise is in the interval.
        snips = _around(snips_value, normal * (r - snips_value), confidence)
        residual = r - scale * q
        corrected = normal * residual
        value = float((scale * v + corrected).mean())
        influence = scale * v - float((scale * v).mean()) + normal * (residual - float(corrected.mean()))
        dr = _around(value, influence, confidence)
        difference = _around(value - logged.value, influence - (r - logged.value), confidence)
    else:
        snips = dr = difference = Estimate(math.nan, math.nan, math.nan)
    effective = total * total / float((w * w).sum()) if total > 0.0 else 0.0
    covered = _mean(w, confidence)
    return Verdict(
        rows=n,
        logged=logged,
        ips=ips,
        snips=snips,
        dr=dr,
        difference=difference,
        effective_rows=effective,
        covered=covered.value,
        largest_weight=float(w.max()),
        warnings=_warnings(n, effective, covered),
    )


def _warnings(n: int, effective: float, covered: Estimate) -> tuple[str, ...]:
    found = []
    if effective < LEAST_EFFECTIVE:
        found.append(f"the overlap is too thin: {effective:.0f} effective rows of {n} (at least {LEAST_EFFECTIVE:.0f})")
    elif effective < LEAST_EFFECTIVE_SHARE * n:
        found.append(f"few rows carry the estimate: {effective:.0f} effective of {n}")
    if not covered.high >= LEAST_COVERED:
        never = max(1.0 - covered.value, 0.0)
        found.append(
            f"{never:.0%} of what the profile would do was never tried: IPS and SNIPS don't see it, "
            "DR rests on the model there"
        )
    return tuple(found)


def _scale(r: _Floats, q: _Floats) -> float:
    """One factor that makes the guesses' mean the rewards'; a median isn't a mean. 1 where that says nothing."""
    guessed = float(q.sum())
    scale = float(r.sum()) / guessed if guessed > 0.0 else 1.0
    return scale if math.isfinite(scale) and scale > 0.0 else 1.0


def _mean(values: _Floats, confidence: float) -> Estimate:
    mean = float(values.mean())
    return _around(mean, values - mean, confidence)


def _around(value: float, influence: _Floats, confidence: float) -> Estimate:
    """`influence` (n,): each row's part in the estimate's deviation, mean about 0."""
    n = len(influence)
    if n < 2:
        return Estimate(value, -math.inf, math.inf)
    error = float(influence.std(ddof=1)) / math.sqrt(n)
    freedom = n - 1
    blocks = min(_BLOCKS, n // _LEAST_ROWS_A_BLOCK)
    if blocks >= 2:
        means = np.array([part.mean() for part in np.array_split(influence, blocks)])
        by_block = float(means.std(ddof=1)) / math.sqrt(blocks)
        if by_block >= error:
            error, freedom = by_block, blocks - 1
    half = student_quantile(0.5 + confidence / 2.0, freedom) * error
    return Estimate(value, value - half, value + half)


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution, by its expansion about the normal one: within 1 % from 4 degrees on."""
    z = NormalDist().inv_cdf(probability)
    f = float(freedom)
    terms = (
        (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )
    return z + terms
