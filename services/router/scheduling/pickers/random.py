"""`random-picker`: every alive candidate with the same probability, whatever its score."""

import numpy as np
import numpy.typing as npt

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Mask, Pick, Scores


class RandomConfig(StrictConfig):
    """No settings."""


class RandomPicker:
    """A fair lot."""

    __slots__ = ()

    def __init__(self, config: RandomConfig) -> None:
        del config

    def pick(self, scores: Scores, alive: Mask, count: int, rng: np.random.Generator) -> Pick:
        del scores
        living = np.flatnonzero(alive)
        order: list[int] = rng.permutation(living)[:count].tolist()
        return Pick(tuple(order), 1.0 / len(living))

    def probabilities(self, scores: Scores, alive: Mask) -> npt.NDArray[np.float64]:
        del scores
        return alive / np.count_nonzero(alive)
