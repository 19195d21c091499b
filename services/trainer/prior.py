"""The physics prior on the basis of the fit: what few samples are blended with. Pure.

The coefficients say what `shared.prior.PriorModel` computes, term by term, so that a model blended of both is one base
like any other and goes through the same graph. Scaled by the median ratio of measured to prior, since the prior knows
the shape of latency better than its size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.trainer.basis import BATCH_KNOTS, PREFILL_KNOTS, TOKENS_PER_MS, Basis, basis_of
from shared.features import HARDWARE_CLASSES, SCHEMA, FloatMatrix
from shared.prior import CHUNK_TOKENS, OUTPUT_TOKENS, STEP_AWAITED, ModelSize, StepTimes, step_times

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PriorBase:
    """Coefficients of one target on its basis, float64 (H, B): one row per hardware class, in the order of its code."""

    basis: Basis
    coefficients: Floats
    units: Floats
    """(H, B): the coefficients, and where the prior has none what one might be"""

    @property
    def held_at(self) -> Floats:
        """The coefficients as multiples of the units, (B,): 1, or 0 where the prior has none."""
        return np.asarray(self.coefficients[0] > 0, np.float64)

    def scale(self, rows: FloatMatrix, y_ms: npt.NDArray[Any]) -> float:
        """The median ratio of measured to prior."""
        return float(np.exp(np.median(np.log(y_ms / self.predict(rows)))))

    def predict(self, rows: FloatMatrix) -> Floats:
        """float32 (n, F) → ms, float64 (n,)."""
        codes = rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)
        known = np.where(codes < len(self.coefficients), codes, 0)
        return np.asarray((self.basis.evaluate(rows) * self.coefficients[known]).sum(axis=1), np.float64)


def prior_base(target: str, size: ModelSize) -> PriorBase:
    """The prior of one target of shared.prediction.TARGETS."""
    basis = basis_of(target)
    times = step_times(size)
    rows, units = [], []
    for name in HARDWARE_CLASSES:
        values, others = _TERMS[target](times[name]), _others(times[name])
        unknown = values.keys() - set(basis.names)
        if unknown:
            raise ValueError(f"the prior of {target} names terms that its basis lacks: {', '.join(sorted(unknown))}")
        rows.append([values.get(term, 0.0) for term in basis.names])
        units.append([values.get(term) or others[term] for term in basis.names])
    return PriorBase(basis, np.array(rows), np.array(units))


def _ttft(times: StepTimes) -> dict[str, float]:
    return {
        "constant": times.prefill_base + STEP_AWAITED * times.decode_base,
        "own uncached": 1e3 * times.prefill_per_token,
        "pending uncached": 1e3 * (times.prefill_per_token + times.prefill_base / CHUNK_TOKENS),
        "attention": 1e6 * 2 * times.prefill_per_square,
        "decoding": (1 + STEP_AWAITED) * times.decode_per_sequence,
        "decode context": 1e3 * (1 + STEP_AWAITED) * times.decode_per_context_token,
        "backlog beside decodes": 1e3 * times.decode_per_sequence / CHUNK_TOKENS,
        "backlog beside context": 1e6 * times.decode_per_context_token / CHUNK_TOKENS,
    }


def _tpot(times: StepTimes) -> dict[str, float]:
    return {
        "constant": times.decode_base,
        "batch": times.decode_per_sequence,
        "context": 1e3 * times.decode_per_context_token,
        "backlog": 1e3 * times.prefill_per_token / OUTPUT_TOKENS,
    }


def _e2e(times: StepTimes) -> dict[str, float]:
    return {
        **_ttft(times),
        "expected output": 1e2 * times.decode_base,
        "output unknown": OUTPUT_TOKENS * times.decode_base,
        "expected output in batch": 1e3 * times.decode_per_sequence,
        "expected output with context": 1e6 * times.decode_per_context_token,
    }


def _others(times: StepTimes) -> dict[str, float]:
    """What the coefficients of terms that the prior doesn't have might be."""
    per_token = 1e3 * times.prefill_per_token
    return {
        **{f"own uncached over {knot}": per_token for knot in PREFILL_KNOTS},
        **{f"backlog less its age at {rate}": per_token for rate in TOKENS_PER_MS},
        **{f"batch over {knot}": times.decode_per_sequence for knot in BATCH_KNOTS},
        "pending": times.prefill_base,
        "waiting beyond the ledger": times.prefill_base,
        "step time": 1.0,
        "expected output at step time": 1e3,
    }


_TERMS: Final[dict[str, Callable[[StepTimes], dict[str, float]]]] = {"ttft": _ttft, "tpot": _tpot, "e2e": _e2e}
