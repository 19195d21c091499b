"""Virtual time: what is to happen when, in order of time and, at one instant, in order of its making. Pure."""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Events:
    """`now_ms` is that of the event under way, or of the last one."""

    __slots__ = ("_heap", "_order", "now_ms")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self.now_ms = 0.0

    @property
    def next_ms(self) -> float:
        """When the next one is due; infinity: none is."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, at_ms: float, act: Callable[..., None], what: Any) -> None:
        """Have `act(at_ms, what)` called then."""
        heapq.heappush(self._heap, (at_ms, next(self._order), act, what))

    def step(self) -> None:
        """Let the next one happen."""
        self.now_ms, _, act, what = heapq.heappop(self._heap)
        act(self.now_ms, what)
