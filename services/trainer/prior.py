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

from services.trainer.basis import Basis, basis_of
from shared.features import HARDWARE_CLASSES, SCHEMA, FloatMatrix
from shared.prior import CHUNK_TOKENS, OUTPUT_TOKENS, ModelSize, StepTimes, step_times

Floats = npt.NDArray[np.float64]

SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the own fit in a blend"""


@dataclass(frozen=True, slots=True)
class PriorBase:
    """Coefficients of one target on its basis, float64 (H, B): one row per hardware class, in the order of its code."""

    basis: Basis
    coefficients: Floats

    def predict(self, rows: FloatMatrix) -> Floats:
        """float32 (n, F) → ms, float64 (n,)."""
        codes = rows[:, SCHEMA.index["hardware_class"]].astype(np.int64)
        known = np.where(codes < len(self.coefficients), codes, 0)
        return np.asarray((self.basis.evaluate(rows) * self.coefficients[known]).sum(axis=1), np.float64)


def prior_base(target: str, size: ModelSize) -> PriorBase:
    """The prior of one target of shared.prediction.TARGETS."""
    basis = basis_of(target)
    times = step_times(size)
    rows = []
    for name in HARDWARE_CLASSES:
        values = _TERMS[target](times[name])
        unknown = values.keys() - set(basis.names)
        if unknown:
            raise ValueError(f"the prior of {target} names terms that its basis lacks: {', '.join(sorted(unknown))}")
        rows.append([values.get(term, 0.0) for term in basis.names])
    return PriorBase(basis, np.array(rows))


def _ttft(times: StepTimes) -> dict[str, float]:
    return {
        "constant": times.prefill_base,
        "own uncached": 1e3 * times.prefill_per_token,
        "pending uncached": 1e3 * (times.prefill_per_token + times.prefill_base / CHUNK_TOKENS),
        "attention": 1e6 * 2 * times.prefill_per_square,
        "decoding": times.decode_per_sequence,
        "decode context": 1e3 * times.decode_per_context_token,
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


_TERMS: Final[dict[str, Callable[[StepTimes], dict[str, float]]]] = {"ttft": _ttft, "tpot": _tpot, "e2e": _e2e}


def blend_share(own: Floats, prior: Floats, y_ms: Floats) -> float:
    """How much of the own fit to take, by predictions of rows that neither has seen, (n,) each.

    The least mean log error decides. The prior wins ties: a fit on rows that are all alike knows nothing of others.
    """
    errors = [
        float(np.abs(np.log(np.maximum(share * own + (1.0 - share) * prior, 1e-6) / y_ms)).mean()) for share in SHARES
    ]
    return SHARES[int(np.argmin(np.round(errors, 3)))]


def scale_of(prior_ms: Floats, y_ms: npt.NDArray[Any]) -> float:
    """The median ratio of measured to prior."""
    return float(np.exp(np.median(np.log(y_ms / prior_ms))))
