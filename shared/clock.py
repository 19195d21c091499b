"""Time as an argument: a protocol, and the real clock behind it.

Durations use the monotonic clock, stamps in messages the wall clock. Both are in milliseconds.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for edges; pure cores take plain numbers."""

    def monotonic_ms(self) -> float:
        """Milliseconds from an arbitrary zero; never steps back."""
        ...

    def unix_ms(self) -> float:
        """Milliseconds since the epoch; may step."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1e6

    def unix_ms(self) -> float:
        return time.time_ns() / 1e6
