"""What has to be known of a dispatched request when its outcome comes back, for as many as there is room. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from services.router.state.prefix_index import PrefixMatch

_MAX_RECORDS: Final = 16_384
# Block names of requests whose outcome isn't known, 40 bytes each: for those that another endpoint serves in the end.
_MAX_HELD_BLOCKS: Final = 262_144


@dataclass(slots=True)
class DispatchRecord:
    """One dispatched request.

    `passed_over`: another endpoint served it than the one that it was dispatched to, the first in the list. `own`: this
    router dispatched it, no peer. `judged`: that it failed was counted against its endpoint already.
    """

    address: str
    slot: int
    incarnations: int
    model: str
    text_bytes: int
    ahead_tokens: int
    matched_tokens: float
    alone: bool
    input_tokens: float
    own: bool
    dispatched_ms: float
    backlog_tokens: float
    passed_over: bool = False
    judged: bool = False
    finished_ms: float | None = None


class DispatchRecords:
    """By decision id; the oldest go first. A record's prefix is kept as long as there is room for its blocks."""

    __slots__ = ("_matches", "_records", "held_blocks")

    def __init__(self) -> None:
        self._records: OrderedDict[str, DispatchRecord] = OrderedDict()
        self._matches: OrderedDict[str, PrefixMatch] = OrderedDict()
        self.held_blocks = 0
        """Block names of all prefixes that are kept."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, decision_id: str, record: DispatchRecord, match: PrefixMatch) -> None:
        self._records[decision_id] = record
        if len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        if match.names:
            self._matches[decision_id] = match
            self.held_blocks += len(match.names)
            while self.held_blocks > _MAX_HELD_BLOCKS:
                self.held_blocks -= len(self._matches.popitem(last=False)[1].names)

    def get(self, decision_id: str) -> DispatchRecord | None:
        return self._records.get(decision_id)

    def match(self, decision_id: str) -> PrefixMatch | None:
        """Its prompt's prefix as it was when it was dispatched."""
        return self._matches.get(decision_id)

    def settle(self, decision_id: str) -> DispatchRecord | None:
        """Its outcome is known: the record goes, with its prefix."""
        match = self._matches.pop(decision_id, None)
        if match is not None:
            self.held_blocks -= len(match.names)
        return self._records.pop(decision_id, None)
