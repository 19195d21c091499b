"""Held-out errors, and the gate that a challenger must pass. Pure.

Champion and challenger answer for the same newest rows, which neither was fitted on (a split in time). Per row the
error is |log(predicted / actual)|, which one mad label can't dominate; a challenger is refused when its mean is higher
than the champion's by more than noise (1.64 standard errors of the paired difference) and by more than 2 %. Metrics of
an empty set are absent, not NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.trainer.basis import backlog_tokens
from shared.bundle import TargetMetrics
from shared.features import FloatMatrix
from shared.prediction import IN_RANGE, TARGETS

Z: Final = 1.64
TOLERANCE: Final = 0.02
# An error of e^1.5 = 4.5 × on average tells nothing about an endpoint: no champion is better.
HOPELESS_LOG_ERROR: Final = 1.5
MIN_ROWS: Final = 2


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The newest rows that have a target: float32 (n, F) and ms (n,)."""

    rows: FloatMatrix
    actual_ms: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the challenger replaces the champion; `reason` is a short code, `detail` is for people."""

    accepted: bool
    reason: str
    detail: str = ""
    log_error: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    """per target: challenger's mean |log error|, champion's"""


def metrics(predictions: FloatMatrix, outputs: Sequence[str], target: str, held_out: HeldOut) -> TargetMetrics:
    """MAPE, median signed bias and P90 coverage, as ratios."""
    count = len(held_out.actual_ms)
    if not count or f"{target}_p50" not in outputs:
        return TargetMetrics(samples=0)
    relative = predictions[:, outputs.index(f"{target}_p50")] / held_out.actual_ms - 1.0
    covered = held_out.actual_ms <= predictions[:, outputs.index(f"{target}_p90")]
    return TargetMetrics(
        samples=count,
        mape=_finite(np.abs(relative).mean()),
        bias=_finite(np.median(relative)),
        p90_coverage=_finite(covered.mean()),
    )


def breakdown(
    predictions: FloatMatrix, outputs: Sequence[str], target: str, held_out: HeldOut, edges_tokens: Sequence[float]
) -> dict[str, TargetMetrics]:
    """The same by backlog bin, and inside and outside of the trained range; empty groups are left out."""
    bins = np.searchsorted(np.asarray(edges_tokens), backlog_tokens(held_out.rows), side="right")
    inside = predictions[:, outputs.index(IN_RANGE)] > 0.5
    groups: dict[str, npt.NDArray[np.bool_]] = {"in_range": inside, "out_of_range": ~inside}
    bounds = ["0", *(f"{edge:g}" for edge in edges_tokens), "∞"]
    groups |= {f"backlog {bounds[k]}-{bounds[k + 1]} tokens": bins == k for k in range(len(edges_tokens) + 1)}
    return {
        name: metrics(predictions[mask], outputs, target, HeldOut(held_out.rows[mask], held_out.actual_ms[mask]))
        for name, mask in groups.items()
        if mask.any()
    }


def censored_beyond_p90(
    predictions: FloatMatrix, outputs: Sequence[str], censored_ms: npt.NDArray[np.float32]
) -> float | None:
    """Share of cut-off requests that had already outlived their predicted e2e P90: above 0.1 the model is too low."""
    if not len(censored_ms) or "e2e_p90" not in outputs:
        return None
    return float((censored_ms > predictions[:, outputs.index("e2e_p90")]).mean())


def log_errors(predictions: FloatMatrix, outputs: Sequence[str], target: str, actual_ms: npt.NDArray[Any]) -> Any:
    """|log(predicted / actual)| of the median, float64 (n,)."""
    predicted = predictions[:, outputs.index(f"{target}_p50")].astype(np.float64)
    return np.abs(np.log(np.maximum(predicted, 1e-6) / actual_ms))


def judge(
    held_out: Mapping[str, HeldOut],
    challenger: Mapping[str, FloatMatrix],
    challenger_outputs: Sequence[str],
    champion: Mapping[str, FloatMatrix] | None,
    champion_outputs: Sequence[str],
) -> Verdict:
    """Compare target by target. `challenger[target]` and `champion[target]` are predictions (n, K) for its rows."""
    seen: dict[str, tuple[float, float | None]] = {}
    for target in TARGETS:
        if f"{target}_p50" not in challenger_outputs or target not in held_out:
            continue
        actual = held_out[target].actual_ms
        if not np.isfinite(challenger[target]).all():
            return Verdict(False, "not_finite", f"{target}: the challenger's predictions aren't finite", seen)
        if len(actual) < MIN_ROWS:
            continue
        ours = log_errors(challenger[target], challenger_outputs, target, actual)
        if champion is None or f"{target}_p50" not in champion_outputs:
            seen[target] = (float(ours.mean()), None)
            if ours.mean() > HOPELESS_LOG_ERROR:
                return Verdict(False, "hopeless", f"{target}: mean |log error| {ours.mean():.2f}", seen)
            continue
        theirs = log_errors(champion[target], champion_outputs, target, actual)
        seen[target] = (float(ours.mean()), float(theirs.mean()))
        difference = ours - theirs
        noise = Z * float(difference.std(ddof=1)) / np.sqrt(len(difference))
        if difference.mean() > max(noise, TOLERANCE * float(theirs.mean())):
            return Verdict(
                False,
                f"worse_{target}",
                f"{target}: mean |log error| {ours.mean():.4f} against the champion's {theirs.mean():.4f} "
                f"on {len(actual)} rows, noise {noise:.4f}",
                seen,
            )
    return Verdict(True, "accepted", "", seen)


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
