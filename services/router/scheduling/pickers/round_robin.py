"""`round-robin-picker`: the alive candidates in turn, whatever their scores.

It counts turns, the one state a picker has. The count begins at a random turn, so that several routers don't march in
step, and so that the propensity is 1/n: which turn it is has nothing to do with the request.
"""

import numpy as np
import numpy.typing as npt

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Mask, Pick, Scores


class RoundRobinConfig(StrictConfig):
    """No settings."""


class RoundRobinPicker:
    """One after the other."""

    __slots__ = ("_turn",)

    def __init__(self, config: RoundRobinConfig) -> None:
        del config
        self._turn: int | None = None

    def pick(self, scores: Scores, alive: Mask, count: int, rng: np.random.Generator) -> Pick:
        del scores
        living: list[int] = np.flatnonzero(alive).tolist()
        turn = int(rng.integers(1 << 30)) if self._turn is None else self._turn
        self._turn = turn + 1
        start = turn % len(living)
        return Pick(tuple((living[start:] + living[:start])[:count]), 1.0 / len(living))

    def probabilities(self, scores: Scores, alive: Mask) -> npt.NDArray[np.float64]:
        del scores
        return alive / np.count_nonzero(alive)
