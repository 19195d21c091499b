"""What one router tells the others: its own requests, in numbered batches that it can repeat. Pure.

It alone writes its entries. What happens is queued and goes out as one batch at the next `flush`; after it come signs
of life with count and digest of what is under way, answers to those who missed something, and portions of the prefix
index for a newcomer. While nobody listens nothing is queued.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.router.sharing.counts import ShareCounts
from services.router.sharing.messages import (
    MAX_ENTRIES,
    MAX_NAMES,
    Added,
    Ask,
    Batch,
    Beat,
    Ended,
    First,
    Moved,
    Part,
    Prefixes,
    Probed,
    encode,
)
from services.router.sharing.peers import DIGEST_MASK, checksum
from services.router.state.pool import PoolState

MAX_RESENT: Final = 64
_HISTORY: Final = 1_024
_HISTORY_BYTES: Final = 4 * 1024 * 1024
_PREFIX_CHUNK: Final = 2_048


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for one router (`to`) or for all (None)."""

    to: str | None
    payload: bytes


class Telling:
    """One router's own part. The journal's calls fill it, `flush` empties it."""

    def __init__(
        self, router: str, pool: PoolState, salt: int | None, counts: ShareCounts, on_pending: Callable[[], None]
    ) -> None:
        """`salt`: some bits of the prefix hashes' salt; None: no index is told. `on_pending`: there is something."""
        self.requests: OrderedDict[str, Added] = OrderedDict()
        """Own requests under way, the oldest dispatch first."""
        self.digest = 0
        self.sequence = 0
        """The number of the last batch."""
        self.probes: dict[str, Probed] = {}
        """The last of each endpoint that this router probed itself."""
        self._router = router
        self._pool = pool
        self._salt = salt
        self._counts = counts
        self._on_pending = on_pending
        self._firsts: dict[str, float] = {}
        self._listened = False
        self._untold = False
        self._history: deque[tuple[int, bytes]] = deque()
        self._history_bytes = 0
        self._new_added: list[Added] = []
        self._new_firsts: list[First] = []
        self._new_ended: list[Ended] = []
        self._new_moved: list[Moved] = []
        self._new_probed: list[Probed] = []
        self._outbox: list[Outgoing] = []
        self._snapshot_for: dict[str, None] = {}
        self._prefixes_for: dict[str, list[str]] = {}
        """Endpoints whose blocks a router is still to be sent, and of the first how many are left."""
        self._prefixes_left: dict[str, list[int]] = {}

    @property
    def pending(self) -> bool:
        """Whether `flush` would return something."""
        return bool(
            self._new_added
            or self._new_ended
            or self._new_firsts
            or self._new_moved
            or self._new_probed
            or self._outbox
            or self._snapshot_for
            or self._prefixes_for
        )

    def listen(self) -> None:
        """There is another: from here on it is told. A number that no batch has stands for what it wasn't told."""
        if not self._listened:
            self._listened = True
            self.sequence += self._untold

    # --- what happens here --------------------------------------------------------------------------------------

    def dispatched(self, entry: Added) -> None:
        """A request of ours was counted in."""
        self.requests[entry.decision_id] = entry
        self.digest = (self.digest + checksum(entry.decision_id)) & DIGEST_MASK
        if self._listened:
            self._new_added.append(entry)
            self._on_pending()
        else:
            self._untold = True

    def first_token(self, decision_id: str, now_ms: float) -> None:
        """Its first token was seen here."""
        if decision_id in self.requests and decision_id not in self._firsts:
            self._firsts[decision_id] = now_ms
            if self._listened:
                self._new_firsts.append(First(decision_id, now_ms))
                self._on_pending()

    def moved(self, decision_id: str, address: str, predicted_ttft_ms: float | None, now_ms: float) -> None:
        """Another endpoint serves it."""
        entry = self.requests.get(decision_id)
        if entry is None:
            return
        self.requests[decision_id] = at_another(entry, address, predicted_ttft_ms)
        if self._listened:
            self._new_moved.append(Moved(decision_id, address, predicted_ttft_ms, now_ms))
            self._on_pending()

    def ended(self, decision_id: str, *, completed: bool, failed: bool = False) -> None:
        """It is over."""
        if self.requests.pop(decision_id, None) is None:
            return
        self._firsts.pop(decision_id, None)
        self.digest = (self.digest - checksum(decision_id)) & DIGEST_MASK
        if self._listened:
            self._new_ended.append(Ended(decision_id, completed, failed))
            self._on_pending()

    def probed(self, probe: Probed) -> None:
        """This router has probed an endpoint."""
        self.probes[probe.address] = probe
        if self._listened:
            self._new_probed.append(probe)
            self._on_pending()

    def expire(self, before_ms: float) -> None:
        """Give up what was dispatched before an instant: its end never came."""
        while self.requests:
            decision_id, entry = next(iter(self.requests.items()))
            if entry.dispatched_ms >= before_ms:
                return
            self.ended(decision_id, completed=False)

    def prune(self) -> None:
        """Forget probes of addresses that are no endpoints any more."""
        for address in [address for address in self.probes if self._pool.table.get(address) is None]:
            del self.probes[address]

    # --- to others ----------------------------------------------------------------------------------------------

    def ask(self, router: str, first: int, last: int, *, prefixes: bool) -> None:
        """Ask a router for its batches, or for a snapshot where `first` is 0, with the next `flush`."""
        self._outbox.append(Outgoing(router, encode(Ask(self._router, first, last, prefixes))))
        self._on_pending()

    def beat_next(self) -> None:
        """A sign of life with the next `flush`, after the batch that it counts."""
        self._outbox.append(Outgoing(None, b""))
        self._on_pending()

    def answer(self, ask: Ask) -> None:
        """Send a router what it has missed: batches from memory, or a snapshot."""
        if ask.prefixes and self._salt is not None:
            self._prefixes_for[ask.router] = [endpoint.address for endpoint in self._pool.table]
            self._prefixes_left.pop(ask.router, None)
        kept = {number: payload for number, payload in self._history if ask.first <= number <= ask.last}
        if ask.first and len(kept) == ask.last - ask.first + 1 <= MAX_RESENT:
            self._outbox += [Outgoing(ask.router, kept[number]) for number in sorted(kept)]
            self._counts.resent += len(kept)
        else:
            self._snapshot_for[ask.router] = None
        self._on_pending()

    def forget(self, router: str) -> None:
        """It is gone: what it was to be sent isn't any more."""
        self._snapshot_for.pop(router, None)
        self._prefixes_for.pop(router, None)
        self._prefixes_left.pop(router, None)

    def flush(self, now_ms: float) -> list[Outgoing]:
        """What is to be sent now, in this order."""
        sent: list[Outgoing] = []
        while self._new_added or self._new_firsts or self._new_ended or self._new_probed or self._new_moved:
            sent.append(self._batch(now_ms))
        waiting, self._outbox = self._outbox, []
        sent += [out if out.payload else self.beat(now_ms, leaving=False) for out in waiting]
        for router in self._snapshot_for:
            sent += self._snapshot(router, now_ms)
        self._snapshot_for.clear()
        for router in list(self._prefixes_for):
            chunk = self._prefix_chunk(router, now_ms)
            if chunk is not None:
                sent.append(chunk)
        return sent

    def _batch(self, now_ms: float) -> Outgoing:
        added = self._new_added
        if len(added) > MAX_ENTRIES or sum(len(entry.names or ()) for entry in added) > MAX_NAMES:
            fitting, names = 0, 0
            for entry in added[:MAX_ENTRIES]:
                names += len(entry.names or ())
                if fitting and names > MAX_NAMES:
                    break
                fitting += 1
            self._new_added = added[fitting:]
            # Ends go with the last one: an end never comes before its dispatch.
            batch = Batch(self._router, self.sequence + 1, now_ms, added[:fitting], [], [], [], [])
        else:
            batch = Batch(
                self._router,
                self.sequence + 1,
                now_ms,
                added,
                self._new_firsts,
                self._new_ended,
                self._new_probed,
                self._new_moved,
            )
            self._new_added, self._new_firsts, self._new_ended = [], [], []
            self._new_probed, self._new_moved = [], []
        self.sequence += 1
        self._counts.batches_sent += 1
        payload = encode(batch)
        self._history.append((self.sequence, payload))
        self._history_bytes += len(payload)
        while self._history_bytes > _HISTORY_BYTES or len(self._history) > _HISTORY:
            self._history_bytes -= len(self._history.popleft()[1])
        return Outgoing(None, payload)

    def beat(self, now_ms: float, *, leaving: bool) -> Outgoing:
        """A sign of life. `leaving`: the last."""
        beat = Beat(self._router, self.sequence, now_ms, len(self.requests), self.digest, self._salt, leaving)
        return Outgoing(None, encode(beat))

    def _snapshot(self, to: str, now_ms: float) -> list[Outgoing]:
        self._counts.snapshots_sent += 1
        entries = [nameless(entry) for entry in self.requests.values()]
        portions = [entries[i : i + MAX_ENTRIES] for i in range(0, len(entries), MAX_ENTRIES)] or [[]]
        parts = []
        for number, portion in enumerate(portions):
            firsts = [
                First(e.decision_id, self._firsts[e.decision_id]) for e in portion if e.decision_id in self._firsts
            ]
            probed = list(self.probes.values()) if number == 0 else []
            part = Part(self._router, self.sequence, now_ms, number, len(portions), portion, firsts, probed)
            parts.append(Outgoing(to, encode(part)))
        return parts

    def _prefix_chunk(self, to: str, now_ms: float) -> Outgoing | None:
        """The next portion of the prefix index for a router, most recently used first."""
        addresses = self._prefixes_for[to]
        while addresses:
            endpoint = self._pool.table.get(addresses[-1])
            if to not in self._prefixes_left:
                self._prefixes_left[to] = self._pool.prefixes.held_names(endpoint.slot) if endpoint else []
            left = self._prefixes_left[to]
            if endpoint is None or not left:
                addresses.pop()
                del self._prefixes_left[to]
                continue
            names = left[-_PREFIX_CHUNK:]
            del left[-_PREFIX_CHUNK:]
            return Outgoing(
                to, encode(Prefixes(self._router, now_ms, endpoint.address, endpoint.process_start_s, names))
            )
        del self._prefixes_for[to]
        self._prefixes_left.pop(to, None)
        return None


def at_another(entry: Added, address: str, predicted_ttft_ms: float | None) -> Added:
    """The request at another endpoint, of whose process nothing is said."""
    return Added(
        entry.decision_id,
        address,
        None,
        entry.model,
        entry.text_bytes,
        entry.input_tokens,
        entry.uncached_tokens,
        entry.expected_output_tokens,
        predicted_ttft_ms,
        entry.dispatched_ms,
        None,
    )


def nameless(entry: Added) -> Added:
    """For keeping: names are only of use on arrival."""
    if entry.names is None:
        return entry
    return Added(
        entry.decision_id,
        entry.address,
        entry.start_s,
        entry.model,
        entry.text_bytes,
        entry.input_tokens,
        entry.uncached_tokens,
        entry.expected_output_tokens,
        entry.predicted_ttft_ms,
        entry.dispatched_ms,
        None,
    )
