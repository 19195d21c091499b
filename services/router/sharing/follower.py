"""A router follows its peers' batches and snapshots: their requests in its own ledger, in once and out once. Pure.

Batches are followed in order; what comes too early is held back, what is missing is asked for, and a snapshot is taken
where that is too much, where the peer is new, or where count and digest of its beat don't agree with what is here.
"""

from collections.abc import Callable, Iterable
from typing import Final

from services.router.sharing.counts import ShareCounts
from services.router.sharing.limits import ShareConfig
from services.router.sharing.messages import Added, Batch, Beat, First, Moved, Part, Prefixes
from services.router.sharing.peers import Peer
from services.router.sharing.shared_probes import SharedProbes
from services.router.sharing.telling import MAX_RESENT, Telling, at_another, nameless
from services.router.state.pool import PoolState

_MAX_BUFFERED: Final = 256
_SAME_START_S: Final = 0.02


class Follower:
    """Follows every peer that it is handed messages of."""

    def __init__(
        self,
        pool: PoolState,
        telling: Telling,
        probes: SharedProbes,
        salt: int | None,
        counts: ShareCounts,
        config: ShareConfig,
        *,
        on_delay: Callable[[float], None],
    ) -> None:
        """`salt`: some bits of the prefix hashes' salt; None: prefixes aren't shared.

        `on_delay`: called with the ms from the oldest dispatch of a followed batch to its counting in here.
        """
        self._on_delay = on_delay
        self._pool = pool
        self._telling = telling
        self._probes = probes
        self._salt = salt
        self._counts = counts
        self._config = config
        self._prefixes_wanted = salt is not None

    def alone(self) -> None:
        """No peer is left: whoever comes next has seen more."""
        self._prefixes_wanted = self._salt is not None

    # --- batches ------------------------------------------------------------------------------------------------

    def take_batch(self, peer: Peer, batch: Batch, now_ms: float) -> None:
        """Follow a batch, with those behind it that were held back; or hold it back."""
        self._counts.batches_received += 1
        peer.told = max(peer.told, batch.sequence)
        if peer.sequence is None and batch.sequence == 1:
            peer.sequence = 0
        if peer.sequence is not None and batch.sequence <= peer.sequence:
            self._counts.duplicates += 1
            return
        if peer.sequence is None or batch.sequence > peer.sequence + 1:
            if len(peer.buffer) < _MAX_BUFFERED:
                peer.buffer[batch.sequence] = batch
            else:
                peer.buffer.clear()
                peer.snapshot_wanted = True
            return
        self._follow(peer, batch, now_ms)
        self._drain(peer, now_ms)

    def _drain(self, peer: Peer, now_ms: float) -> None:
        """Follow what was held back, as far as it goes on without a gap."""
        sequence = peer.sequence
        if sequence is None:
            return
        if peer.buffer:
            for number in [number for number in peer.buffer if number <= sequence]:
                del peer.buffer[number]
            while (batch := peer.buffer.pop(sequence + 1, None)) is not None:
                self._follow(peer, batch, now_ms)
                sequence += 1
        if not peer.behind:
            peer.gap_ms, peer.asks = None, 0

    def _follow(self, peer: Peer, batch: Batch, now_ms: float) -> None:
        with self._pool.ledger.at_once():
            for entry in batch.added:
                self._count_in(peer, entry, now_ms)
            for move in batch.moved:
                self._take_move(peer, move, now_ms)
            self._take_firsts(peer, batch.firsts, now_ms)
            for end in batch.ended:
                self.count_out(peer, end.decision_id, now_ms, completed=end.completed, failed=end.failed)
        for probe in batch.probed:
            self._probes.take(peer, probe, now_ms)
        peer.sequence = batch.sequence
        if batch.added:
            self._on_delay(max(0.0, now_ms - peer.clock.here_ms(batch.added[0].dispatched_ms)))

    def _take_move(self, peer: Peer, move: Moved, now_ms: float) -> None:
        entry = peer.entries.get(move.decision_id)
        if entry is None:
            return
        peer.entries[move.decision_id] = at_another(entry, move.address, move.predicted_ttft_ms)
        if move.decision_id in peer.counted:
            self._pool.observe_served(
                move.decision_id,
                move.address,
                min(peer.clock.here_ms(move.moved_ms), now_ms),
                predicted_ttft_ms=move.predicted_ttft_ms,
            )

    def _take_firsts(self, peer: Peer, firsts: Iterable[First], now_ms: float) -> None:
        for first in firsts:
            if first.decision_id in peer.counted:
                self._pool.count_first_token(first.decision_id, min(peer.clock.here_ms(first.first_ms), now_ms))

    def _count_in(self, peer: Peer, entry: Added, now_ms: float) -> None:
        if entry.decision_id in peer.entries:
            self._counts.duplicates += 1
            return
        peer.add(entry if entry.names is None else nameless(entry))
        self._into_ledger(peer, entry, now_ms)

    def _into_ledger(self, peer: Peer, entry: Added, now_ms: float) -> None:
        names: list[int] = []
        if entry.names and peer.salt == self._salt:
            names = entry.names
        if self._pool.count_in(
            entry.decision_id,
            entry.address,
            process_start_s=entry.start_s,
            model=entry.model,
            text_bytes=entry.text_bytes,
            input_tokens=entry.input_tokens,
            uncached_tokens=entry.uncached_tokens,
            expected_output_tokens=entry.expected_output_tokens,
            predicted_ttft_ms=entry.predicted_ttft_ms,
            names=names,
            dispatched_ms=min(peer.clock.here_ms(entry.dispatched_ms), now_ms),
            now_ms=now_ms,
        ):
            peer.counted.add(entry.decision_id)

    def endpoint_added(self, peer: Peer, address: str, now_ms: float) -> None:
        """The peer may have dispatched to it before we knew it."""
        for entry in list(peer.entries.values()):
            if entry.address == address and entry.decision_id not in peer.counted:
                self._into_ledger(peer, entry, now_ms)

    def count_out(self, peer: Peer, decision_id: str, now_ms: float, *, completed: bool, failed: bool = False) -> None:
        """A peer's request is over; an end that comes twice, or after it was given up, is counted and nothing else."""
        if not peer.remove(decision_id):
            self._counts.late += 1
        elif decision_id in peer.counted:
            peer.counted.remove(decision_id)
            self._pool.count_out(decision_id, now_ms, completed=completed, failed=failed)

    # --- what is missing ----------------------------------------------------------------------------------------

    def take_beat(self, peer: Peer, beat: Beat) -> None:
        """See whether anything is missing, or not as the peer has it."""
        peer.salt = beat.salt
        peer.told = max(peer.told, beat.sequence)
        if beat.leaving:
            return
        if peer.sequence is None:
            if beat.sequence == 0 and beat.entries == 0:
                peer.sequence = 0
            else:
                peer.snapshot_wanted = True
        elif beat.sequence == peer.sequence and (len(peer.entries), peer.digest) != (beat.entries, beat.digest):
            if not peer.snapshot_wanted:
                self._counts.mismatches += 1
            peer.snapshot_wanted = True

    def ask_for_missing(self, peer: Peer, now_ms: float) -> None:
        """Ask a live peer for batches, for a snapshot, or for its prefix index, when it is time to."""
        wanted = self._prefixes_wanted and peer.salt is not None and peer.salt == self._salt
        if not (peer.behind or peer.snapshot_wanted or wanted):
            peer.gap_ms = None
            return
        config = self._config
        if peer.gap_ms is None:
            peer.gap_ms = now_ms
            self._counts.gaps += peer.sequence is not None and peer.behind
        patience_ms = config.ask_again_ms * 2.0 ** min(peer.asks, 2)
        if now_ms - peer.gap_ms < config.gap_wait_ms or now_ms - peer.asked_ms < patience_ms:
            return
        peer.asked_ms = now_ms
        peer.asks += 1
        first = last = 0
        if peer.sequence is not None and not peer.snapshot_wanted and not wanted and peer.asks <= 2:
            first, last = peer.sequence + 1, min(peer.told, peer.sequence + MAX_RESENT)
        self._prefixes_wanted = self._prefixes_wanted and not wanted
        self._telling.ask(peer.router, first, last, prefixes=wanted)

    def take_part(self, peer: Peer, part: Part, now_ms: float) -> None:
        """A snapshot's part; with the last one the peer's requests are what the snapshot says."""
        if peer.parts and next(iter(peer.parts.values())).sequence != part.sequence:
            peer.parts.clear()
        peer.parts[part.part] = part
        peer.told = max(peer.told, part.sequence)
        if len(peer.parts) < part.parts:
            return
        parts, peer.parts = peer.parts, {}
        if len(parts) != part.parts or (peer.sequence is not None and part.sequence < peer.sequence):
            return  # older than what has been followed meanwhile
        self._counts.snapshots_taken += 1
        peer.snapshot_wanted = False
        entries = {entry.decision_id: entry for number in sorted(parts) for entry in parts[number].entries}
        for decision_id in [decision_id for decision_id in peer.entries if decision_id not in entries]:
            self.count_out(peer, decision_id, now_ms, completed=False)
        for decision_id, entry in entries.items():
            if decision_id not in peer.entries:
                self._count_in(peer, entry, now_ms)
        for one in parts.values():
            self._take_firsts(peer, one.firsts, now_ms)
            for probe in one.probed:
                self._probes.take(peer, probe, now_ms)
        peer.sequence = part.sequence
        self._drain(peer, now_ms)

    def take_prefixes(self, peer: Peer, chunk: Prefixes) -> None:
        """Some of a peer's prefix index, older than what is here."""
        endpoint = self._pool.table.get(chunk.address)
        if endpoint is None or self._salt is None or peer.salt != self._salt:
            return
        start, known = chunk.start_s, endpoint.process_start_s
        if start is not None and known is not None and abs(start - known) > _SAME_START_S:
            return
        self._pool.prefixes.insert_older(chunk.names, endpoint.slot)
        self._counts.prefix_blocks_taken += len(chunk.names)
