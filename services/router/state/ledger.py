"""The router's own bookkeeping: one entry per dispatched request, prefill → decode → gone. Pure.

An entry goes in at dispatch and out exactly once, at the end of its ext-proc stream; every change is O(1) and lands in
the table's columns at once. Where the response doesn't pass through the router nobody sees the first token, so an entry
moves to decode

1. by a timer at the predicted median TTFT, but not before those that were dispatched ahead of it,
2. corrected at each scrape: servers count first tokens (a histogram's `_count`), hence first tokens − dispatches =
   requests still in prefill, whatever the timer believed; without that counter by prompt tokens, or by the waiting
   count as a lower bound,
3. corrected by other requests: servers work first come, first served, so a finished request says that all that were
   dispatched to it before have had their first token,
4. exactly, where somebody has seen it (`observe_first_token`).

What is pending is told less what the request at the head has probably had computed since its turn came: counted whole
until its first token, a long prompt made TTFT errors of 16 % where 11 % are within reach.

A peer's entry is heard of late, after a scrape that has counted it: what a scrape shows beyond what is known is kept in
mind for half a second and put down to entries that were dispatched before it. Expected once more, each of them would
leave a request in prefill that isn't there, for as long as the endpoint is busy.

Each entry belongs to an endpoint's incarnation: `drop` empties an endpoint's lane when its process is another one.

`lane.py` holds an endpoint's entries, `scrape_evidence.py` reads its counters.

Limits: traffic of others is recognised by the server's request count and taken out in proportion; several engines
behind one address, or a server that isn't first come first served, make (2) and (3) approximate. `bench/ledger.py`
measures the distance from the exact ledger.
"""

import contextlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.router.state.lane import Entry, Lane
from services.router.state.scrape_evidence import (
    expect_first_token,
    own_share,
    pending_by_first_tokens,
    pending_by_prompt_tokens,
    remember_unheard,
)
from services.router.state.table import EndpointTable
from services.router.state.vllm_metrics import EngineMetrics

_RATE_GAIN: Final = 0.1
# Of the request whose turn it is, the ledger believes at most this share computed before its first token is certain.
_HEAD_MOST: Final = 0.95
# A scrape shows a request in prefill that is overdue: this share of its own time is still to come (in recordings of
# `bench/model.py` TTFT error 11.2 % with 0.05, 11.3 % with 0.15, 12.1 % with 0.3; exact 10.8 %).
_OVERDUE_LEFT: Final = 0.05
# A scrape shows one done before it was due: those behind it are due earlier by this share of the difference.
_EARLY_SHARE: Final = 0.5
# Keeps the share of the work ahead that is left meaningful where that work is a handful of tokens.
_AHEAD_FLOOR_TOKENS: Final = 64.0
# An answer that ends before this share of its predicted TTFT, while nobody has seen its first token, is no answer.
_PLAUSIBLE_SHARE: Final = 0.25
# A request dispatched this recently may not have reached the server that was scraped.
_UNDER_WAY_MS: Final = 50.0
# Ids of entries that a reset dropped are remembered, so that their ends aren't counted as unknown.
_MAX_DROPPED: Final = 8_192


@dataclass(slots=True)
class LedgerCounts:
    """Since the start: what came, went, and went wrong. `late`: ends of entries that a reset had dropped;
    `moved_elsewhere`: entries of requests that another endpoint served than the one picked first.
    """

    added: int = 0
    removed: int = 0
    duplicates: int = 0
    unknown: int = 0
    late: int = 0
    dropped: int = 0
    expired: int = 0
    moved_by_timer: int = 0
    moved_by_scrape: int = 0
    moved_back: int = 0
    moved_elsewhere: int = 0


class Ledger:
    """All entries of this router. Belongs to one event loop; times are monotonic ms."""

    def __init__(self, table: EndpointTable, *, max_age_ms: float = 3_600_000.0) -> None:
        """`max_age_ms`: an entry whose end never comes is given up after this long, and counted."""
        self.counts = LedgerCounts()
        self._table = table
        self._max_age_ms = max_age_ms
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._lanes: dict[int, Lane] = {}
        self._timers: list[tuple[float, int, Entry]] = []
        self._sequence = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._held_back: dict[int, Lane] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, decision_id: str) -> bool:
        return decision_id in self._entries

    def slot_of(self, decision_id: str) -> int | None:
        """Where a request was dispatched to; None if it isn't in."""
        entry = self._entries.get(decision_id)
        return None if entry is None else entry.lane.slot

    def ids(self) -> Iterator[str]:
        """Of all entries; for tests and checks."""
        return iter(self._entries)

    def in_flight(self, slot: int) -> int:
        """Requests dispatched to the endpoint and not ended."""
        lane = self._lanes.get(slot)
        return lane.in_flight if lane else 0

    def in_flight_tokens(self, slot: int) -> int:
        """Prompt tokens of those."""
        lane = self._lanes.get(slot)
        return lane.pending_input_tokens + lane.decode_input_tokens if lane else 0

    def pending(self, slot: int) -> tuple[int, int]:
        """Requests believed to be in prefill, and their uncached tokens."""
        lane = self._lanes.get(slot)
        return (len(lane.pending), lane.pending_tokens) if lane else (0, 0)

    def faults(self) -> list[str]:
        """What is inconsistent: sums against a recount, order, membership. Empty when all is well; for tests."""
        found: list[str] = []
        for slot, lane in self._lanes.items():
            own = [entry for entry in self._entries.values() if entry.lane is lane]
            pending = [entry for entry in own if not entry.decoding]
            decoding = [entry for entry in own if entry.decoding]
            unconfirmed = [entry for entry in own if not entry.confirmed]
            recount = {
                "pending_tokens": sum(entry.uncached_tokens for entry in pending),
                "pending_input_tokens": sum(entry.input_tokens for entry in pending),
                "decoding": len(decoding),
                "decode_input_tokens": sum(entry.input_tokens for entry in decoding),
                "decode_since_sum_ms": sum(entry.first_ms for entry in decoding),
            }
            found += [
                f"slot {slot}: {name} is {getattr(lane, name)}, recounted {value}"
                for name, value in recount.items()
                if getattr(lane, name) != value
            ]
            if list(lane.unconfirmed.values()) != unconfirmed:
                found.append(f"slot {slot}: unconfirmed entries are not those in order of dispatch")
            if list(lane.pending.values()) != pending:
                found.append(f"slot {slot}: pending entries are not those in order of dispatch")
            if pending != unconfirmed[len(unconfirmed) - len(pending) :]:
                found.append(f"slot {slot}: pending entries are not the youngest unconfirmed ones")
        lost = sum(entry.lane is not self._lanes.get(entry.lane.slot) for entry in self._entries.values())
        if lost:
            found.append(f"{lost} entries belong to no lane")
        counts = self.counts
        if counts.added - counts.removed - counts.dropped - counts.expired != len(self._entries):
            found.append(f"{counts} don't add up to {len(self._entries)} entries")
        return found

    # --- the life of an entry -----------------------------------------------------------------------------------

    def add(
        self,
        decision_id: str,
        slot: int,
        *,
        input_tokens: float,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        now_ms: float,
    ) -> bool:
        """Count a request in, at its dispatch. False (and nothing is changed) if the id is in already."""
        if decision_id in self._entries:
            self.counts.duplicates += 1
            return False
        self._enter(decision_id, slot, input_tokens, uncached_tokens, expected_output_tokens, predicted_ttft_ms, now_ms)
        self.counts.added += 1
        return True

    def move(
        self, decision_id: str, slot: int, *, uncached_tokens: float, predicted_ttft_ms: float | None, now_ms: float
    ) -> bool:
        """Another endpoint serves it than the one it was counted to: there it counts as dispatched now, and here as one
        that had no first token. False if the id isn't in, or is there already.
        """
        entry = self._entries.get(decision_id)
        if entry is None or entry.lane.slot == slot:
            return False
        lane = entry.lane
        if not entry.confirmed:
            lane.expected_first_tokens -= 1
        del self._entries[decision_id]
        self._take_out(entry)
        self._publish(lane)
        self._enter(
            decision_id,
            slot,
            entry.input_tokens,
            uncached_tokens,
            entry.expected_output_tokens,
            predicted_ttft_ms,
            now_ms,
        )
        self.counts.moved_elsewhere += 1
        return True

    def _enter(
        self,
        decision_id: str,
        slot: int,
        input_tokens: float,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        now_ms: float,
    ) -> None:
        lane = self._lanes.get(slot)
        if lane is None:
            lane = self._lanes[slot] = Lane(slot)
        uncached = round(uncached_tokens)
        if predicted_ttft_ms is None or not predicted_ttft_ms >= 0.0:  # NaN too: it would jam the timers
            predicted_ttft_ms = (lane.pending_tokens + uncached) * lane.ms_per_token
        entry = Entry(
            decision_id, lane, round(input_tokens), uncached, expected_output_tokens, predicted_ttft_ms, now_ms
        )
        self._entries[decision_id] = entry
        lane.pending[decision_id] = entry
        lane.unconfirmed[decision_id] = entry
        lane.pending_tokens += entry.uncached_tokens
        lane.pending_input_tokens += entry.input_tokens
        if expect_first_token(lane, entry):
            self._confirm(entry, min(entry.due_ms, lane.scraped_ms))
        self._publish(lane)

    def in_prefill(self, decision_id: str) -> bool:
        """Whether it is in, and believed not to have had its first token."""
        entry = self._entries.get(decision_id)
        return entry is not None and not entry.decoding

    def observe_first_token(self, decision_id: str, now_ms: float) -> bool:
        """Its first token has been seen. False if the id isn't in the ledger."""
        entry = self._entries.get(decision_id)
        if entry is None:
            return False
        if not entry.confirmed:
            self._confirm(entry, now_ms)
            self._publish(entry.lane)
        return True

    def remove(self, decision_id: str, now_ms: float, *, completed: bool = True) -> bool:
        """Count a request out, at its end. False (counted) if it isn't in: unknown, or out already.

        `completed`: its answer came to its end, so it had a first token; else aborted, reset or refused.
        """
        entry = self._entries.pop(decision_id, None)
        if entry is None:
            if self._dropped.pop(decision_id, self) is None:
                self.counts.late += 1
            else:
                self.counts.unknown += 1
            return False
        lane = entry.lane
        if completed and not entry.decoding:
            # Far too early for an answer: an error of the server's (a 400, a 503), which says nothing about the queue.
            completed = now_ms - entry.dispatched_ms >= _PLAUSIBLE_SHARE * entry.predicted_ttft_ms
        if completed:
            self._confirm_before(entry, now_ms)
            if not entry.confirmed:
                lane.finished_prompt_tokens += entry.input_tokens
        elif not entry.decoding:
            lane.expected_first_tokens -= 1
        self._take_out(entry)
        self.counts.removed += 1
        self._publish(lane)
        return True

    def drop(self, slot: int) -> int:
        """The endpoint's process is gone, and its requests with it. Returns how many entries that were."""
        lane = self._lanes.pop(slot, None)
        if lane is None:
            return 0
        gone = [entry for entry in self._entries.values() if entry.lane is lane] if lane.in_flight else []
        for entry in gone:
            del self._entries[entry.decision_id]
            self._take_out(entry)
            self._dropped[entry.decision_id] = None
        while len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)
        self.counts.dropped += len(gone)
        self._publish(lane)
        return len(gone)

    def advance(self, now_ms: float) -> None:
        """Let the timers run up to `now_ms`."""
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            due_ms, _, entry = heapq.heappop(timers)
            lane = entry.lane
            if lane.armed is not entry or lane.armed_ms != due_ms:  # another is at the head, or it is due later
                continue
            lane.armed = None
            self._to_decode(entry, due_ms)
            self.counts.moved_by_timer += 1
            self._publish(lane, due_ms)
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if now_ms - oldest.dispatched_ms <= self._max_age_ms:
                break
            del self._entries[oldest.decision_id]
            self._take_out(oldest)
            self.counts.expired += 1
            self._publish(oldest.lane)

    def learn_ttft(self, slot: int, ahead_tokens: float, ttft_ms: float) -> None:
        """A finished request's TTFT, and the uncached tokens (its own too) that it found: the timer's pace where there
        is no prediction.
        """
        lane = self._lanes.get(slot)
        if lane is not None:
            pace = ttft_ms / (ahead_tokens + _AHEAD_FLOOR_TOKENS)
            lane.ms_per_token += _RATE_GAIN * (pace - lane.ms_per_token)

    # --- corrections by the scrape ------------------------------------------------------------------------------

    def correct(self, slot: int, metrics: EngineMetrics, now_ms: float) -> None:
        """Bring the endpoint's lane in line with what its server said at `now_ms`, unless it has said more since."""
        lane = self._lanes.get(slot)
        if lane is None:
            lane = self._lanes[slot] = Lane(slot)
        if now_ms < lane.scraped_ms:
            return
        lane.scraped_ms = now_ms
        share = own_share(lane, metrics)
        waiting = math.floor((metrics.waiting_requests or 0.0) * share)
        pending = pending_by_first_tokens(lane, metrics, share)
        if pending is None:
            pending = pending_by_prompt_tokens(lane, metrics, share)
        counted = pending
        if metrics.waiting_requests == 0 and metrics.running_requests == 0:
            # Nothing is on the server: what isn't under way to it has had its first token.
            pending = sum(now_ms - entry.dispatched_ms < _UNDER_WAY_MS for entry in lane.unconfirmed.values())
        if pending is None:
            self._raise_pending(lane, waiting, now_ms)
        else:
            pending = min(max(pending, waiting, 0), len(lane.unconfirmed))
            lane.expected_first_tokens = (lane.first_tokens or 0.0) + pending
            if counted is not None:
                remember_unheard(lane, max(-counted, 0), max(pending - max(counted, 0), 0), now_ms)
            self._set_pending(lane, pending, now_ms)
        self._publish(lane)

    def _set_pending(self, lane: Lane, pending: int, now_ms: float) -> None:
        """Make exactly the youngest `pending` unconfirmed entries those in prefill."""
        shift_ms = 0.0
        for _ in range(len(lane.unconfirmed) - pending):
            entry = next(iter(lane.unconfirmed.values()))
            if not entry.decoding:
                self.counts.moved_by_scrape += 1
                shift_ms = min(shift_ms, now_ms - entry.due_ms)
            self._confirm(entry, now_ms)
        for entry in reversed([entry for entry in lane.unconfirmed.values() if entry.decoding]):
            self._to_prefill(entry)
            shift_ms = max(0.0, now_ms - entry.due_ms + self._left(entry))
        # What the server says is what was believed: the predictions stand.
        if shift_ms:
            self._shift(lane, shift_ms, now_ms)

    def _raise_pending(self, lane: Lane, waiting: int, now_ms: float) -> None:
        """The server has more waiting than we believe in prefill: the timers ran too fast for the youngest."""
        if len(lane.pending) >= waiting:
            return
        shift_ms = 0.0
        for entry in reversed(list(lane.unconfirmed.values())):
            if entry.decoding:
                self._to_prefill(entry)
                shift_ms = now_ms - entry.due_ms + self._left(entry)
            if len(lane.pending) >= waiting:
                break
        self._shift(lane, shift_ms, now_ms)

    @staticmethod
    def _left(entry: Entry) -> float:
        """What an entry that is overdue may still take, in ms."""
        share = (entry.uncached_tokens + _AHEAD_FLOOR_TOKENS) / (entry.ahead_tokens + _AHEAD_FLOOR_TOKENS)
        return entry.predicted_ttft_ms * share * _OVERDUE_LEFT

    @staticmethod
    def _shift(lane: Lane, shift_ms: float, now_ms: float) -> None:
        """All in prefill are due so much later (or earlier) than believed: they wait for one another."""
        if shift_ms < 0:
            shift_ms *= _EARLY_SHARE
        for entry in lane.pending.values():
            entry.due_ms = max(entry.due_ms + shift_ms, now_ms)

    # --- moves --------------------------------------------------------------------------------------------------

    def _arm(self, lane: Lane, not_before_ms: float) -> None:
        """One timer a lane, for the request at its head."""
        head = next(iter(lane.pending.values()))
        due_ms = max(head.due_ms, not_before_ms)
        if lane.armed is head and lane.armed_ms == due_ms:
            return
        lane.armed, lane.armed_ms = head, due_ms
        self._sequence += 1
        heapq.heappush(self._timers, (due_ms, self._sequence, head))
        if len(self._timers) > 64 + 4 * len(self._lanes):
            self._timers = [
                timer
                for timer in self._timers
                if timer[2].lane.armed is timer[2] and timer[2].lane.armed_ms == timer[0]
            ]
            heapq.heapify(self._timers)

    def _confirm(self, entry: Entry, now_ms: float) -> None:
        entry.confirmed = True
        entry.lane.unconfirmed.pop(entry.decision_id, None)
        if not entry.decoding:
            self._to_decode(entry, now_ms)

    def _confirm_before(self, entry: Entry, now_ms: float) -> None:
        """First come, first served: what was dispatched before a finished request has had its first token."""
        unconfirmed = entry.lane.unconfirmed
        while unconfirmed:
            first = next(iter(unconfirmed.values()))
            if first is entry or first.dispatched_ms > entry.dispatched_ms:
                return
            self._confirm(first, now_ms)

    def _to_decode(self, entry: Entry, first_ms: float) -> None:
        lane = entry.lane
        entry.decoding = True
        entry.first_ms = round(first_ms)
        lane.head_free_ms = max(lane.head_free_ms, first_ms)
        lane.pending.pop(entry.decision_id, None)
        lane.pending_tokens -= entry.uncached_tokens
        lane.pending_input_tokens -= entry.input_tokens
        lane.decoding += 1
        lane.decode_input_tokens += entry.input_tokens
        lane.decode_since_sum_ms += entry.first_ms

    def _to_prefill(self, entry: Entry) -> None:
        """Back: it wasn't there yet. Calls go from the youngest to the oldest, so the order of dispatch is kept."""
        lane = entry.lane
        entry.decoding = False
        lane.decoding -= 1
        lane.decode_input_tokens -= entry.input_tokens
        lane.decode_since_sum_ms -= entry.first_ms
        lane.pending[entry.decision_id] = entry
        lane.pending.move_to_end(entry.decision_id, last=False)
        lane.pending_tokens += entry.uncached_tokens
        lane.pending_input_tokens += entry.input_tokens
        self.counts.moved_back += 1

    def _take_out(self, entry: Entry) -> None:
        lane = entry.lane
        lane.unconfirmed.pop(entry.decision_id, None)
        if entry.decoding:
            lane.decoding -= 1
            lane.decode_input_tokens -= entry.input_tokens
            lane.decode_since_sum_ms -= entry.first_ms
        else:
            del lane.pending[entry.decision_id]
            lane.pending_tokens -= entry.uncached_tokens
            lane.pending_input_tokens -= entry.input_tokens

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Write what many changes come to into the table once, when the block is left; nothing may read it before."""
        self._held_back = {}
        try:
            yield
        finally:
            lanes, self._held_back = self._held_back, None
            for lane in lanes.values():
                if self._lanes.get(lane.slot, lane) is lane:  # else another process is there by now
                    self._publish(lane)

    def _publish(self, lane: Lane, not_before_ms: float = -math.inf) -> None:
        if self._held_back is not None:
            self._held_back[lane.slot] = lane
            return
        since_ms = rate = head_tokens = 0.0
        if lane.pending:
            head = next(iter(lane.pending.values()))
            oldest_ms = head.dispatched_ms
            self._arm(lane, not_before_ms)
            since_ms = max(oldest_ms, lane.head_free_ms)
            head_tokens = head.uncached_tokens * _HEAD_MOST
            takes_ms = head.due_ms - since_ms
            if not 0.0 < takes_ms < math.inf:
                takes_ms = (head.uncached_tokens + _AHEAD_FLOOR_TOKENS) * lane.ms_per_token
            rate = head.uncached_tokens / max(takes_ms, 1.0)
        else:
            oldest_ms, lane.armed = math.inf, None
        self._table.set_load(
            lane.slot,
            pending_tokens=lane.pending_tokens,
            pending_requests=len(lane.pending),
            oldest_pending_ms=oldest_ms,
            decoding_requests=lane.decoding,
            decode_input_tokens=lane.decode_input_tokens,
            decode_since_sum_ms=lane.decode_since_sum_ms,
            head_tokens=head_tokens,
            head_since_ms=since_ms,
            head_tokens_per_ms=rate,
        )
