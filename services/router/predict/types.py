"""Predictions as the scheduler sees them: one array per output, one entry per candidate. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    def get(self, output: str) -> Column | None:
        """The output's column, or None where the bundle doesn't have it."""
        return self.columns.get(output)

    def of(self, candidate: int) -> dict[str, float]:
        """One candidate's predictions as plain numbers."""
        return {name: float(column[candidate]) for name, column in self.columns.items()}
