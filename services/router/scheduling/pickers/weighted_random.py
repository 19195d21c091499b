"""`weighted-random-picker`: draws without replacement, each candidate with a probability proportional to its score.

The first pick's propensity is score / sum of scores. Candidates that score 0 come last, in random order; where all do,
everyone is as probable. Note what it costs: with scores spread evenly over 10 endpoints the best is first only once in
five requests.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Mask, Pick, Scores

# Below any score that a scorer means; above it an exponential draw divided by the score stays finite and in order.
_LEAST_WEIGHT: Final = 1e-12
_BEHIND_ALL: Final = 1e100


class WeightedRandomConfig(StrictConfig):
    """No settings."""


class WeightedRandomPicker:
    """Lots in proportion to score."""

    __slots__ = ()

    def __init__(self, config: WeightedRandomConfig) -> None:
        del config

    def pick(self, scores: Scores, alive: Mask, count: int, rng: np.random.Generator) -> Pick:
        chances = self.probabilities(scores, alive)
        # The smallest of exponential draws with these rates comes first with exactly these probabilities.
        draws = rng.standard_exponential(len(chances))
        weighted = chances > 0.0
        keys = np.where(weighted, draws / np.where(weighted, chances, 1.0), _BEHIND_ALL * (1.0 + draws))
        keys[~alive] = np.inf
        order: list[int] = keys.argsort()[: min(count, int(np.count_nonzero(alive)))].tolist()
        return Pick(tuple(order), float(chances[order[0]]))

    def probabilities(self, scores: Scores, alive: Mask) -> npt.NDArray[np.float64]:
        weights = np.where(alive, scores, 0.0).astype(np.float64)
        weights[weights < _LEAST_WEIGHT] = 0.0
        total = weights.sum()
        if not total > 0.0:
            return alive / np.count_nonzero(alive)
        chances: npt.NDArray[np.float64] = weights / total
        return chances
