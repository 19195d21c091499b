"""What came of a run: of each request, and of the run as a whole. Pure data; `measure.py` makes figures of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.samples import Outcome


@dataclass(slots=True)
class Outcomes:
    """What became of each request, in order of arrival; NaN where there is no such thing."""

    arrival_ms: npt.NDArray[np.float64]
    ttft_ms: npt.NDArray[np.float64]
    tpot_ms: npt.NDArray[np.float64]
    e2e_ms: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    ttft_slo_ms: npt.NDArray[np.float64]
    tpot_slo_ms: npt.NDArray[np.float64]
    pod: npt.NDArray[np.int64]
    """-1: rejected"""
    outcome: list[Outcome]
    predicted_ttft_ms: npt.NDArray[np.float64]
    predicted_tpot_ms: npt.NDArray[np.float64]
    predicted_ttft_p90_ms: npt.NDArray[np.float64]
    propensity: npt.NDArray[np.float64]
    attempts: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, count: int) -> "Outcomes":
        def nan() -> npt.NDArray[np.float64]:
            return np.full(count, np.nan)

        def zero() -> npt.NDArray[np.int64]:
            return np.zeros(count, np.int64)

        return cls(
            nan(), nan(), nan(), nan(), zero(), zero(), zero(), nan(), nan(), zero() - 1,
            [Outcome.NO_ENDPOINT] * count, nan(), nan(), nan(), nan(), zero(),
        )  # fmt: skip


@dataclass(slots=True)
class RunResult:
    """A run's outcomes, and what learning and the routers had to say. `ledger_left`: entries at the end, which is 0."""

    policy: str
    outcomes: Outcomes
    virtual_ms: float
    ended: int
    ledger_left: int
    ledger_faults: list[str]
    faults: int
    fits: int
    fits_refused: int
    fit_cpu_ms: float
    first_bundle_ms: float | None
    preemptions: int
