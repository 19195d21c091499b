"""Requests on an endpoint's server that no router dispatched: others use it, or a gateway passes the router by. Pure.

A server's own count and the ledger never mean the same instant, so what counts is the least by which the server was
ahead within some seconds: at an endpoint that all requests come to through routers that is none.
"""

from dataclasses import dataclass
from typing import Final

_WINDOW_MS: Final = 5_000.0


@dataclass(slots=True)
class _Least:
    """Of this window and of the one before, which is None at first."""

    since_ms: float
    now: float
    before: float | None = None


class ForeignRequests:
    """By the endpoint's slot in the table."""

    __slots__ = ("_least",)

    def __init__(self) -> None:
        self._least: dict[int, _Least] = {}

    def seen(self, slot: int, ahead: float, now_ms: float) -> None:
        """A scrape found the server `ahead` of the ledger by so many requests; less than none where it is behind."""
        least = self._least.get(slot)
        if least is None:
            self._least[slot] = _Least(now_ms, ahead)
        elif now_ms - least.since_ms > _WINDOW_MS:
            least.since_ms, least.before, least.now = now_ms, least.now, ahead
        else:
            least.now = min(least.now, ahead)

    def requests(self, slot: int) -> int:
        """How many there were all the time; 0 before that can be said."""
        least = self._least.get(slot)
        if least is None or least.before is None:
            return 0
        return max(0, int(min(least.now, least.before)))

    def forget(self, slot: int) -> None:
        """Another process has the slot, or none."""
        self._least.pop(slot, None)
