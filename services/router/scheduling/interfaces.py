"""The three kinds of plugin and what they are given. No I/O, no clock, no hidden randomness.

Plugins work on arrays over all n candidates and on a mask of those still alive, never candidate by candidate.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest
from services.router.state.snapshot import Candidates

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a plugin may look at. `prediction` is None on the ladder's last rung.

    `elapsed_ms` is the time already spent since receipt: an SLO's clock starts there.
    """

    request: InferenceRequest
    candidates: Candidates
    prediction: Prediction | None
    rng: np.random.Generator
    elapsed_ms: float = 0.0


class Filter(Protocol):
    """Narrows the candidates. Returns bool (n,), a subset of `alive`; the pipeline ignores an empty one."""

    def keep(self, context: Context, alive: Mask) -> Mask: ...


class Scorer(Protocol):
    """Rates the candidates. Returns float32 (n,) in [0, 1], higher is better; values outside `alive` are ignored.

    None: the scorer has no basis for an opinion (no prediction, nothing scraped), and its weight is left out.
    """

    def score(self, context: Context, alive: Mask) -> Scores | None: ...


@dataclass(frozen=True, slots=True)
class Pick:
    """Candidate indexes, best first, without repetition; `propensity`: probability with which the first was chosen."""

    order: tuple[int, ...]
    propensity: float


class Picker(Protocol):
    """Chooses up to `count` of the alive candidates by their scores."""

    def pick(self, scores: Scores, alive: Mask, count: int, rng: np.random.Generator) -> Pick: ...
