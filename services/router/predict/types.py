"""Predictions as the scheduler sees them: one array per output, one entry per candidate. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.features import FloatMatrix
from shared.inference import CompiledCalibration, as_columns
from shared.prior import is_prior
from shared.samples import Rung

Column = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Calibrated predictions for n candidates.

    `columns`: output name of `shared.prediction.OUTPUTS` → float32 (n,), ms (`in_range`: 0 or 1); an untrained target
    is absent. `rung` says which step of the ladder answered.
    """

    columns: Mapping[str, Column]
    bundle_version: str
    rung: Rung
    prior_targets: frozenset[str] = frozenset()
    """Targets of a bundle that rest on the physics prior, for want of samples."""

    @property
    def low_confidence(self) -> bool:
        """Whether nothing was learned of this pool yet: good for an order of endpoints, not for a refusal."""
        return is_prior(self.bundle_version)

    def measured(self) -> "Prediction":
        """Without what rests on the prior alone: what a refusal may go by."""
        if not self.prior_targets:
            return self
        columns = {name: own for name, own in self.columns.items() if name.partition("_")[0] not in self.prior_targets}
        return replace(self, columns=columns)

    def get(self, output: str) -> Column | None:
        """The output's column, or None where the bundle doesn't have it."""
        return self.columns.get(output)

    def of(self, candidate: int) -> dict[str, float]:
        """One candidate's predictions as plain numbers."""
        return {name: float(column[candidate]) for name, column in self.columns.items()}


def calibrated(
    raw: FloatMatrix,
    outputs: Sequence[str],
    bundle_version: str,
    rung: Rung,
    calibration: CompiledCalibration | None,
    backlog_tokens: npt.NDArray[Any],
    addresses: Sequence[str],
    prior_targets: frozenset[str] = frozenset(),
) -> Prediction:
    """A model's answer, float32 (n, K), as the scheduler gets it; `calibration` is the bundle's own, or None."""
    values = raw if calibration is None else calibration.apply(raw, backlog_tokens, addresses)
    return Prediction(as_columns(values, outputs), bundle_version, rung, prior_targets)
