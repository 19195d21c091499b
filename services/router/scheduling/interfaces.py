"""The five kinds of plugin and what they are given. No I/O, no clock, no hidden randomness.

In order: the producer says what the prediction means for this request, admitters may refuse it, filters narrow, scorers
rate, one picker orders. Plugins work on arrays over all n candidates and on a mask of those still alive, never
candidate by candidate.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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

    A value of it that is NaN is unknown for that candidate: the endpoint is unpredicted. Each plugin says what it makes
    of that.

    `elapsed_ms` is the time already spent since receipt: an SLO's clock starts there. `expected_output_tokens` is what
    answers of this kind were seen to take; None where nothing is known.
    """

    request: InferenceRequest
    candidates: Candidates
    prediction: Prediction | None
    rng: np.random.Generator
    elapsed_ms: float = 0.0
    expected_output_tokens: float | None = None


class Producer(Protocol):
    """Says which predictions decide on a request, and against which objectives: the first step of a profile."""

    @property
    def predicts(self) -> bool:
        """Whether the model is to be asked at all."""
        ...

    def produce(self, context: Context) -> Context:
        """The context that the other plugins see."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An admitter's no. `reason`: a word of a closed list. `retry_after_ms`: when it may go better, as predicted."""

    plugin: str
    reason: str
    retry_after_ms: float


class Admitter(Protocol):
    """Lets a request in (None), or refuses it before any endpoint is chosen."""

    def admit(self, context: Context) -> Refusal | None: ...


class Filter(Protocol):
    """Narrows the candidates. Returns bool (n,), a subset of `alive`; the pipeline ignores an empty one.

    The same input gives the same answer: a filter that draws lots is an `ExploringFilter`.
    """

    def keep(self, context: Context, alive: Mask) -> Mask: ...


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to narrow, and the probability with which it is taken. `keep` is bool (n,), a subset of `alive`."""

    probability: float
    keep: Mask


@runtime_checkable
class ExploringFilter(Protocol):
    """Narrows by lot. It states its branches; the pipeline draws, so that it can tell a pick's exact propensity.

    Probabilities sum to 1; a single branch means that nothing is left to chance.
    """

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]: ...


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

    def probabilities(self, scores: Scores, alive: Mask) -> npt.NDArray[np.float64]:
        """Float64 (n,): how probably `pick` puts each candidate first. Sums to 1; 0 outside `alive`."""
        ...
