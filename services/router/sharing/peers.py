"""What one router knows of another: its clock, how far its batches were followed, its requests under way. Pure.

A peer alone writes its own entries, in numbered batches; whoever has followed all of them up to a number has exactly
the peer's entries at that number. `digest` sums a checksum of their ids, so that count and digest show a difference.
"""

from collections import OrderedDict
from typing import Final
from zlib import crc32

from services.router.sharing.messages import Added, Batch, Part

DIGEST_MASK: Final = (1 << 63) - 1
# Two machines' clocks drift apart by 100 ppm at most: 12 ms in this time.
_CLOCK_WINDOW_MS: Final = 120_000.0


def checksum(decision_id: str) -> int:
    """The id's part of a digest."""
    return crc32(decision_id.encode())


class PeerClock:
    """The smallest difference between the receiver's clock at arrival and the sender's at sending, of the last minutes.

    It exceeds the true difference by the quickest message's time under way, some 100 µs on one network.
    """

    __slots__ = ("_before_ms", "_since_ms", "offset_ms")

    def __init__(self, sent_ms: float, now_ms: float) -> None:
        self.offset_ms = self._before_ms = now_ms - sent_ms
        self._since_ms = now_ms

    def observe(self, sent_ms: float, now_ms: float) -> None:
        """A message that was sent at `sent_ms` of the peer's clock has just come."""
        difference_ms = now_ms - sent_ms
        if now_ms - self._since_ms > _CLOCK_WINDOW_MS:
            self._since_ms, self._before_ms = now_ms, self.offset_ms
            self.offset_ms = difference_ms
        self.offset_ms = min(self.offset_ms, difference_ms)

    def here_ms(self, there_ms: float) -> float:
        """An instant of the peer's as one of ours."""
        return there_ms + min(self.offset_ms, self._before_ms)


class Peer:
    """One other router. `sequence`: the last batch that was followed; None before the first snapshot or batch 1."""

    __slots__ = (
        "asked_ms",
        "asks",
        "buffer",
        "clock",
        "counted",
        "digest",
        "entries",
        "gap_ms",
        "heard_ms",
        "live",
        "parts",
        "router",
        "salt",
        "sequence",
        "snapshot_wanted",
        "told",
    )

    def __init__(self, router: str, sent_ms: float, now_ms: float) -> None:
        self.router = router
        self.clock = PeerClock(sent_ms, now_ms)
        self.heard_ms = now_ms
        self.live = True
        self.salt: int | None = None
        self.sequence: int | None = None
        self.told = 0
        """The highest number of a batch that it is known to have sent."""
        self.entries: OrderedDict[str, Added] = OrderedDict()
        self.counted: set[str] = set()
        """Of its entries those that our ledger was given; the others' endpoints aren't ours, or had a newer process."""
        self.digest = 0
        self.buffer: dict[int, Batch] = {}
        """Batches that came before one that is missing."""
        self.snapshot_wanted = False
        self.gap_ms: float | None = None
        """Since when something is missing."""
        self.asked_ms = float("-inf")
        self.asks = 0
        self.parts: dict[int, Part] = {}

    def add(self, entry: Added) -> None:
        self.entries[entry.decision_id] = entry
        self.digest = (self.digest + checksum(entry.decision_id)) & DIGEST_MASK

    def remove(self, decision_id: str) -> bool:
        """Whether it was among its entries."""
        if self.entries.pop(decision_id, None) is None:
            return False
        self.digest = (self.digest - checksum(decision_id)) & DIGEST_MASK
        return True

    @property
    def behind(self) -> bool:
        """Whether batches are missing."""
        return self.sequence is None or self.sequence < self.told
