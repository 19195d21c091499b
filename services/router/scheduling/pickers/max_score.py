"""`max-score-picker`: the highest score first, then the rest in order of score.

Candidates within `tie_tolerance` of the highest are equals: one of them is drawn, all with the same probability, and
the other equals follow it. With `exploration_probability` the first is instead drawn from all alive candidates.
"""

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Mask, Pick, Scores

_EXCLUDED = np.float32(-np.inf)


class MaxScoreConfig(StrictConfig):
    """What counts as a tie, and how often the best isn't taken."""

    tie_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Scores this close to the highest are equal; score units."""
    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of requests whose first endpoint is drawn from all, whatever their scores."""


class MaxScorePicker:
    """Argmax with a lot among equals."""

    __slots__ = ("_exploration", "_tolerance")

    def __init__(self, config: MaxScoreConfig) -> None:
        self._tolerance = np.float32(config.tie_tolerance)
        self._exploration = config.exploration_probability

    def pick(self, scores: Scores, alive: Mask, count: int, rng: np.random.Generator) -> Pick:
        ranked = np.where(alive, scores, _EXCLUDED)
        best = self._best(ranked)
        ties = len(best)
        turn = int(rng.random() * ties) if ties > 1 else 0
        order = [*best[turn:], *best[:turn]]
        living = int(np.count_nonzero(alive))
        if len(order) < count and len(order) < living:
            taken = set(order)
            by_score: list[int] = (-ranked).argsort(kind="stable")[:living].tolist()
            order += [candidate for candidate in by_score if candidate not in taken]
        first_in_best = 1.0
        exploration = self._exploration
        if exploration > 0.0 and rng.random() < exploration:
            first = int(np.flatnonzero(alive)[int(rng.random() * living)])
            first_in_best = float(first in best)
            order = [first, *(candidate for candidate in order if candidate != first)]
        propensity = (1.0 - exploration) * first_in_best / ties + exploration / living
        return Pick(tuple(order[:count]), propensity)

    def probabilities(self, scores: Scores, alive: Mask) -> npt.NDArray[np.float64]:
        best = self._best(np.where(alive, scores, _EXCLUDED))
        chances = alive * (self._exploration / np.count_nonzero(alive))
        chances[best] += (1.0 - self._exploration) / len(best)
        return chances

    def _best(self, ranked: Scores) -> list[int]:
        best: list[int] = np.flatnonzero(ranked >= ranked.max() - self._tolerance).tolist()
        return best
