"""Samples on their way to JetStream: waiting, or sent and not yet acknowledged. Pure; the publisher moves the bytes.

Nothing leaves before its acknowledgement, so what isn't acknowledged is sent again after a time-out or a lost
connection; the dedup id makes the double vanish at the server. Both queues together are bounded: a new sample pushes
out the oldest waiting one, which is counted. Samples are expendable, memory isn't.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Fate(StrEnum):
    """How a sample left the outbox."""

    ACKNOWLEDGED = "acknowledged"
    DUPLICATE = "duplicate"
    PUSHED_OUT = "pushed_out"
    REFUSED = "refused"
    """JetStream never takes it, and the dead-letter stream didn't either."""
    DEAD_LETTER = "dead_letter"
    """JetStream never takes it; it is in the dead-letter stream, with the reason."""
    ABANDONED = "abandoned"
    SPOOLED = "spooled"
    """On the disk, to be read back when JetStream takes samples again."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One encoded sample. `settled` is called once, when it leaves the outbox."""

    decision_id: str
    subject: str
    payload: bytes
    settled: Callable[[Fate], None] | None = field(default=None, repr=False)
    sent_ms: float = 0.0
    attempts: int = 0
    position: tuple[int, int] | None = None
    """Its place in the spool, for one that was read from there."""


class Outbox:
    """Bounded, ordered, at least once. Times are milliseconds of one monotonic clock."""

    __slots__ = ("_capacity", "_max_outstanding", "_next_token", "_outstanding", "_waiting")

    def __init__(self, capacity: int, max_outstanding: int) -> None:
        self._capacity = capacity
        self._max_outstanding = max_outstanding
        self._waiting: deque[Parcel] = deque()
        self._outstanding: OrderedDict[str, Parcel] = OrderedDict()
        self._next_token = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def empty(self) -> bool:
        return not self._waiting and not self._outstanding

    def offer(self, parcel: Parcel) -> Parcel | None:
        """Take a parcel in; returns the one that it pushed out, if the outbox was full.

        With everything sent and nothing waiting, the new one itself is turned away: it can't overtake.
        """
        if len(self._waiting) + len(self._outstanding) < self._capacity:
            self._waiting.append(parcel)
            return None
        if not self._waiting:
            return parcel
        oldest = self._waiting.popleft()
        self._waiting.append(parcel)
        return oldest

    def sendable(self, now_ms: float) -> Iterator[tuple[str, Parcel]]:
        """Parcels to send now, each with the token that its acknowledgement will carry."""
        while self._waiting and len(self._outstanding) < self._max_outstanding:
            parcel = self._waiting.popleft()
            parcel.sent_ms = now_ms
            parcel.attempts += 1
            token = str(self._next_token)
            self._next_token += 1
            self._outstanding[token] = parcel
            yield token, parcel

    def take_waiting(self, keep: int, limit: int) -> list[Parcel]:
        """Remove up to `limit` of the oldest waiting parcels, as long as more than `keep` wait."""
        count = min(limit, max(0, len(self._waiting) - keep))
        return [self._waiting.popleft() for _ in range(count)]

    def put_back(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Return what `take_waiting` gave to where it was; returns those for which there is no room now, the oldest."""
        room = max(0, self._capacity - len(self._waiting) - len(self._outstanding))
        kept = parcels[max(0, len(parcels) - room) :]
        self._waiting.extendleft(reversed(kept))
        return list(parcels[: len(parcels) - len(kept)])

    def settle(self, token: str) -> Parcel | None:
        """Remove a parcel that was answered; None for an answer that came after it was sent anew."""
        return self._outstanding.pop(token, None)

    def retry(self, token: str) -> None:
        """Put a parcel that must be sent again back in front."""
        if (parcel := self._outstanding.pop(token, None)) is not None:
            self._waiting.appendleft(parcel)

    def retry_expired(self, now_ms: float, timeout_ms: float) -> int:
        """Put back what has waited too long for its acknowledgement; returns how many."""
        expired = []
        for token, parcel in self._outstanding.items():
            if now_ms - parcel.sent_ms < timeout_ms:
                break  # in the order of sending
            expired.append(token)
        for token in reversed(expired):
            self.retry(token)
        return len(expired)

    def retry_all(self) -> int:
        """Put back everything sent: the connection is gone and the acknowledgements with it."""
        count = len(self._outstanding)
        for token in reversed(tuple(self._outstanding)):
            self.retry(token)
        return count

    def abandon(self) -> list[Parcel]:
        """Empty it; returns what was left."""
        left = [*self._outstanding.values(), *self._waiting]
        self._outstanding.clear()
        self._waiting.clear()
        return left
