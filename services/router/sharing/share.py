"""One router's part in the pool's shared ledger: what it tells its peers, and what it makes of what they tell. Pure.

Each router writes its own entries alone: what it dispatched, saw the first token of, and saw end. They travel in
numbered batches; a peer follows them in order, holds back what comes too early, asks for what is missing, and takes a
snapshot where that is too much, where it has just come, or where count and digest of the beat don't agree with what it
has. So a request is counted in once and out once everywhere, whatever the network loses, doubles or reorders.

A peer that has been silent is not believed to hold its requests any more, but they still run: Envoy lets a request go
on whose router has died. Such orphans go at their outcome on the samples' subject, when the endpoint's server has
counted fewer requests than the ledger in a row of scrapes, or at the latest after a time. A peer that returns is asked
for a snapshot, and is the only authority on its entries again. Without any peer nothing is queued.

Scrapes of endpoints are shared out by rendezvous hashing over the routers that live, and their values told with their
age; who hasn't heard of an endpoint for a while scrapes it itself. Readiness and models each router sees for itself.

Bytes in, bytes out, time as an argument: the NATS edge (`bus.py`) and a replay in virtual time run the same class.

Limits: one event loop. Trusts whoever may publish on the bus, within the limits of `messages.py`; at most 64 peers.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from services.router.request.inference_request import InferenceRequest
from services.router.sharing.counts import ShareCounts
from services.router.sharing.messages import (
    Added,
    Ask,
    Batch,
    Beat,
    First,
    Message,
    Moved,
    Part,
    Prefixes,
    Probed,
    decode,
)
from services.router.sharing.peers import DIGEST_MASK, Peer, checksum
from services.router.sharing.rendezvous import owner
from services.router.sharing.telling import MAX_RESENT, Outgoing, Telling, at_another, nameless
from services.router.state.pool import PoolState
from services.router.state.table import Endpoint
from services.router.state.vllm_metrics import Engine, EngineMetrics

_MAX_PEERS: Final = 64
_MAX_BUFFERED: Final = 256
_ENGINES: Final = frozenset(engine.value for engine in Engine)
_SAME_START_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """`beat_ms`: between two signs of life. `silent_ms`: after which a peer is taken for gone. `orphan_ms`: how long
    its requests are believed in after that at most. `forget_ms`: after which nothing of it is remembered.

    `gap_wait_ms`: how long a missing batch may be late before it is asked for; `ask_again_ms`: between two askings,
    doubled twice. `takeover_ms`: how old a peer's word on an endpoint may be. `load_hysteresis_ms`: how long the
    endpoint's server must have counted fewer requests than the ledger before orphans are given up for it.
    """

    beat_ms: float = 250.0
    silent_ms: float = 1_500.0
    orphan_ms: float = 30_000.0
    forget_ms: float = 600_000.0
    gap_wait_ms: float = 20.0
    ask_again_ms: float = 100.0
    takeover_ms: float = 3_000.0
    load_hysteresis_ms: float = 200.0
    max_request_age_ms: float = 3_600_000.0


@dataclass(slots=True)
class _Excess:
    since_ms: float
    least: int


class LedgerShare:
    """See the module. The pool's journal; `flush` what it has to say, `receive` what peers say, `tick` now and then."""

    def __init__(
        self, router: str, pool: PoolState, *, salt: bytes | None = None, config: ShareConfig | None = None
    ) -> None:
        """`router`: a name that no other process has ever had. `salt`: of the prefix hashes where all routers have the
        same; without it prefixes aren't shared.
        """
        self.router = router
        self.counts = ShareCounts()
        self.on_pending: Callable[[], None] | None = None
        """Called when there is something to flush and there was nothing before."""
        self.on_delay: Callable[[float], None] | None = None
        """Called with the ms from the oldest dispatch of a received batch to its counting in here."""
        self._pool = pool
        self._config = config or ShareConfig()
        # Enough bits to show a difference, too few to try out weak salts on.
        self._salt = None if salt is None else int.from_bytes(hashlib.sha256(b"leadtime" + salt).digest()[:2], "big")
        self._peers: dict[str, Peer] = {}
        self._telling = Telling(router, pool, self._salt, self.counts, self._wake)
        self._prefixes_wanted = salt is not None
        self._told_ms: dict[str, float] = {}
        """When the newest probe that a peer told of was made."""
        self._said_ready: dict[tuple[str, str], bool] = {}
        """What a peer last said of an endpoint, by both."""
        self._owners: dict[str, str] = {}
        self._excess: dict[str, _Excess] = {}
        self._beat_ms = float("-inf")
        self._ticked_ms: float | None = None
        pool.journal = self

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def live_peers(self) -> int:
        return sum(peer.live for peer in self._peers.values())

    @property
    def orphans(self) -> int:
        """Requests of routers that are gone."""
        return sum(len(peer.entries) for peer in self._peers.values() if not peer.live)

    @property
    def own_requests(self) -> int:
        """Requests that this router dispatched and that haven't ended."""
        return len(self._telling.requests)

    @property
    def sharing_prefixes(self) -> bool:
        return self._salt is not None

    @property
    def pending(self) -> bool:
        """Whether `flush` would return something."""
        return self._telling.pending

    def describe(self, now_ms: float) -> list[dict[str, object]]:
        """The peers for the admin pages."""
        return [
            {
                "router": peer.router,
                "live": peer.live,
                "silent_ms": round(max(0.0, now_ms - peer.heard_ms), 1),
                "requests": len(peer.entries),
                "batch": peer.sequence,
                "behind": peer.behind,
                "same_salt": peer.salt is not None and peer.salt == self._salt,
            }
            for peer in self._peers.values()
        ]

    @property
    def sequence(self) -> int:
        """The number of this router's last batch."""
        return self._telling.sequence

    def followed(self, router: str) -> tuple[int, frozenset[str]] | None:
        """The number of a peer's batch up to which it was followed, and the requests that it had then. None where that
        can't be said: it isn't known or is silent, or its snapshot is awaited.
        """
        peer = self._peers.get(router)
        if peer is None or not peer.live or peer.snapshot_wanted or peer.sequence is None:
            return None
        return peer.sequence, frozenset(peer.entries)

    def faults(self) -> list[str]:
        """What is inconsistent; empty when all is well. For tests and the debug mode: it looks at every entry."""
        found = list(self._pool.ledger.faults())
        owners: dict[str, str] = dict.fromkeys(self._telling.requests, self.router)
        for peer in self._peers.values():
            if sum(checksum(decision_id) for decision_id in peer.entries) & DIGEST_MASK != peer.digest:
                found.append(f"digest of {peer.router} is not that of its entries")
            if not peer.counted <= peer.entries.keys():
                found.append(f"{peer.router}: counted requests that aren't its own")
            for decision_id in peer.counted:
                if decision_id in owners:
                    found.append(f"{decision_id} is counted for {owners[decision_id]} and for {peer.router}")
                owners[decision_id] = peer.router
        if sum(checksum(decision_id) for decision_id in self._telling.requests) & DIGEST_MASK != self._telling.digest:
            found.append("digest of this router is not that of its entries")
        found += [f"{decision_id} is nobody's" for decision_id in self._pool.ledger.ids() if decision_id not in owners]
        return found

    # --- the journal: what happens here -------------------------------------------------------------------------

    def dispatched(
        self,
        decision_id: str,
        endpoint: Endpoint,
        request: InferenceRequest,
        *,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        names: list[int],
        now_ms: float,
    ) -> None:
        """A request of ours was counted in."""
        self._telling.dispatched(
            Added(
                decision_id,
                endpoint.address,
                endpoint.process_start_s,
                request.model,
                request.text_bytes,
                request.input_tokens,
                uncached_tokens,
                expected_output_tokens,
                predicted_ttft_ms,
                now_ms,
                None if self._salt is None else names,
            )
        )

    def first_token(self, decision_id: str, now_ms: float) -> None:
        """Its first token was seen here."""
        self._telling.first_token(decision_id, now_ms)

    def moved(self, decision_id: str, address: str, predicted_ttft_ms: float | None, now_ms: float) -> None:
        """Another endpoint serves it."""
        self._telling.moved(decision_id, address, predicted_ttft_ms, now_ms)

    def ended(self, decision_id: str, *, completed: bool) -> None:
        """It is over."""
        self._telling.ended(decision_id, completed=completed)

    def outcome(self, decision_id: str, *, completed: bool, now_ms: float) -> None:
        """The bus says what became of a request: the end of one whose router can't say so any more."""
        for peer in self._peers.values():
            if not peer.live and decision_id in peer.entries:
                self._count_out(peer, decision_id, now_ms, completed=completed)
                self.counts.orphans_by_outcome += 1

    def endpoint_added(self, address: str, now_ms: float) -> None:
        """Peers may have dispatched to it before we knew it."""
        for peer in self._peers.values():
            for entry in list(peer.entries.values()):
                if entry.address == address and entry.decision_id not in peer.counted:
                    self._into_ledger(peer, entry, now_ms)

    def load_seen(self, address: str, requests: float, now_ms: float) -> None:
        """A server counts its requests: where there are fewer than in the ledger for a while, orphans are gone."""
        orphans = [
            (entry.dispatched_ms + peer.clock.offset_ms, peer, entry.decision_id)
            for peer in self._peers.values()
            if not peer.live
            for entry in peer.entries.values()
            if entry.address == address and entry.decision_id in peer.counted
        ]
        excess = self._pool.in_flight_at(address) - int(requests) if orphans else 0
        if excess <= 0:
            self._excess.pop(address, None)
            return
        before = self._excess.get(address)
        if before is None:
            self._excess[address] = _Excess(now_ms, excess)
            return
        before.least = min(before.least, excess)
        if now_ms - before.since_ms >= self._config.load_hysteresis_ms:
            del self._excess[address]
            for _, peer, decision_id in sorted(orphans, key=lambda orphan: orphan[0])[: before.least]:
                self._count_out(peer, decision_id, now_ms, completed=False)
                self.counts.orphans_by_load += 1

    # --- probes -------------------------------------------------------------------------------------------------

    def owns(self, address: str, now_ms: float) -> bool:
        """Whether this router is to probe an endpoint: it falls to it, or nobody has told of it for a while."""
        if now_ms - self._told_ms.get(address, float("-inf")) > self._config.takeover_ms:
            return True
        falls_to = self._owners.get(address)
        if falls_to is None:
            routers = [self.router, *(peer.router for peer in self._peers.values() if peer.live)]
            falls_to = self._owners[address] = owner(address, routers)
        return falls_to == self.router

    def probed(self, address: str, now_ms: float, *, ready: bool, metrics: EngineMetrics | None) -> None:
        """This router has probed an endpoint."""
        probe = Probed(
            address,
            now_ms,
            ready,
            metrics.engine.value if metrics else None,
            metrics.waiting_requests if metrics else None,
            metrics.running_requests if metrics else None,
            metrics.kv_cache_utilization if metrics else None,
            metrics.prompt_tokens if metrics else None,
            metrics.first_tokens if metrics else None,
            metrics.process_start_s if metrics else None,
            metrics.kv_capacity_tokens if metrics else None,
        )
        self._telling.probed(probe)

    def _take_probe(self, peer: Peer, probe: Probed, now_ms: float) -> None:
        endpoint = self._pool.table.get(probe.address)
        at_ms = min(peer.clock.here_ms(probe.at_ms), now_ms)
        if endpoint is None or now_ms - at_ms > self._config.takeover_ms:
            return  # unknown here, or a snapshot's of an endpoint that the peer no longer probes
        self._told_ms[probe.address] = max(at_ms, self._told_ms.get(probe.address, at_ms))
        renewed = False
        if probe.engine in _ENGINES:
            metrics = EngineMetrics(
                Engine(probe.engine),
                waiting_requests=probe.waiting_requests,
                running_requests=probe.running_requests,
                kv_cache_utilization=probe.kv_cache_utilization,
                prompt_tokens=probe.prompt_tokens,
                first_tokens=probe.first_tokens,
                process_start_s=probe.process_start_s,
                kv_capacity_tokens=probe.kv_capacity_tokens,
            )
            renewed = self._pool.observe_scrape(probe.address, metrics, at_ms)
        # Whether an endpoint is ready each router sees for itself; a peer's word only has it look.
        changed = self._said_ready.get((peer.router, probe.address)) is not probe.ready
        self._said_ready[peer.router, probe.address] = probe.ready
        if renewed or (changed and probe.ready is not endpoint.ready):
            self._pool.doubt(probe.address)

    # --- out ----------------------------------------------------------------------------------------------------

    def tick(self, now_ms: float) -> None:
        """What time does: signs of life, silence, asking again. A few times a second at least."""
        config = self._config
        paused_ms = 0.0 if self._ticked_ms is None else now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        for peer in list(self._peers.values()):
            if paused_ms > config.silent_ms / 3:
                peer.heard_ms = min(now_ms, peer.heard_ms + paused_ms)  # it was we who heard nothing
            if peer.live:
                if now_ms - peer.heard_ms > config.silent_ms:
                    self._lose(peer)
                else:
                    self._ask_for_missing(peer, now_ms)
                continue
            if now_ms - peer.heard_ms > config.orphan_ms:
                for decision_id in list(peer.entries):
                    self._count_out(peer, decision_id, now_ms, completed=False)
                    self.counts.orphans_by_age += 1
            if now_ms - peer.heard_ms > config.forget_ms:
                del self._peers[peer.router]
        self._telling.expire(now_ms - config.max_request_age_ms)
        if now_ms - self._beat_ms >= config.beat_ms:
            self._beat_ms = now_ms
            self._prune()
            self._telling.beat_next()

    def _prune(self) -> None:
        """Forget addresses that are no endpoints any more: pods come and go for months."""
        table = self._pool.table
        if len(self._telling.probes) + len(self._told_ms) <= 2 * len(table) + 64:
            return
        for memory in (self._telling.probes, self._told_ms, self._owners, self._excess):
            for address in [address for address in memory if table.get(address) is None]:
                del memory[address]
        self._said_ready = {
            key: ready for key, ready in self._said_ready.items() if key[0] in self._peers and table.get(key[1])
        }

    def flush(self, now_ms: float) -> list[Outgoing]:
        """What is to be sent now, in this order."""
        return self._telling.flush(now_ms)

    def leave(self, now_ms: float) -> list[Outgoing]:
        """The last words of a router that stops."""
        return [*self.flush(now_ms), self._telling.beat(now_ms, leaving=True)]

    def _wake(self) -> None:
        if self.on_pending is not None:
            self.on_pending()

    # --- in -----------------------------------------------------------------------------------------------------

    def receive(self, payload: bytes, now_ms: float) -> None:
        """Anything that came from the bus. Never raises for what it holds."""
        message = decode(payload)
        if message is None:
            self.counts.invalid += 1
        elif message.router != self.router:
            self._telling.listen()
            self._take(message, now_ms)

    def _take(self, message: Message, now_ms: float) -> None:
        if isinstance(message, Ask):
            self._telling.answer(message)
            return
        peer = self._heard(message.router, message.sent_ms, now_ms)
        if peer is None:
            return
        if isinstance(message, Batch):
            self._take_batch(peer, message, now_ms)
        elif isinstance(message, Beat):
            self._take_beat(peer, message)
        elif isinstance(message, Part):
            self._take_part(peer, message, now_ms)
        else:
            self._take_prefixes(peer, message)

    def _heard(self, router: str, sent_ms: float, now_ms: float) -> Peer | None:
        peer = self._peers.get(router)
        if peer is None:
            if len(self._peers) >= _MAX_PEERS:
                return None
            peer = self._peers[router] = Peer(router, sent_ms, now_ms)
            self._owners.clear()
            # It may know nothing of us: the sooner it hears, the sooner it asks.
            self._beat_ms = float("-inf")
        elif not peer.live:
            peer.live = True
            peer.snapshot_wanted = True
            self.counts.peers_returned += 1
            self._owners.clear()
        peer.heard_ms = max(now_ms, peer.heard_ms)
        peer.clock.observe(sent_ms, now_ms)
        return peer

    def _lose(self, peer: Peer) -> None:
        """It is silent, or has taken its leave: its requests are orphans."""
        peer.live = False
        peer.buffer.clear()
        peer.parts.clear()
        self.counts.peers_lost += 1
        self._owners.clear()
        self._telling.forget(peer.router)
        if not self.live_peers:
            self._prefixes_wanted = self._salt is not None  # whoever comes next has seen more

    def _take_batch(self, peer: Peer, batch: Batch, now_ms: float) -> None:
        self.counts.batches_received += 1
        peer.told = max(peer.told, batch.sequence)
        if peer.sequence is None and batch.sequence == 1:
            peer.sequence = 0
        if peer.sequence is not None and batch.sequence <= peer.sequence:
            self.counts.duplicates += 1
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
                self._count_out(peer, end.decision_id, now_ms, completed=end.completed)
        for probe in batch.probed:
            self._take_probe(peer, probe, now_ms)
        peer.sequence = batch.sequence
        if batch.added and self.on_delay is not None:
            self.on_delay(max(0.0, now_ms - peer.clock.here_ms(batch.added[0].dispatched_ms)))

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
            self.counts.duplicates += 1
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

    def _count_out(self, peer: Peer, decision_id: str, now_ms: float, *, completed: bool) -> None:
        if not peer.remove(decision_id):
            self.counts.late += 1
        elif decision_id in peer.counted:
            peer.counted.remove(decision_id)
            self._pool.count_out(decision_id, now_ms, completed=completed)

    def _take_beat(self, peer: Peer, beat: Beat) -> None:
        peer.salt = beat.salt
        peer.told = max(peer.told, beat.sequence)
        if beat.leaving:
            self._lose(peer)
        elif peer.sequence is None:
            if beat.sequence == 0 and beat.entries == 0:
                peer.sequence = 0
            else:
                peer.snapshot_wanted = True
        elif beat.sequence == peer.sequence and (len(peer.entries), peer.digest) != (beat.entries, beat.digest):
            if not peer.snapshot_wanted:
                self.counts.mismatches += 1
            peer.snapshot_wanted = True

    def _ask_for_missing(self, peer: Peer, now_ms: float) -> None:
        wanted = self._prefixes_wanted and peer.salt is not None and peer.salt == self._salt
        if not (peer.behind or peer.snapshot_wanted or wanted):
            peer.gap_ms = None
            return
        config = self._config
        if peer.gap_ms is None:
            peer.gap_ms = now_ms
            self.counts.gaps += peer.sequence is not None and peer.behind
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

    def _take_part(self, peer: Peer, part: Part, now_ms: float) -> None:
        if peer.parts and next(iter(peer.parts.values())).sequence != part.sequence:
            peer.parts.clear()
        peer.parts[part.part] = part
        peer.told = max(peer.told, part.sequence)
        if len(peer.parts) < part.parts:
            return
        parts, peer.parts = peer.parts, {}
        if len(parts) != part.parts or (peer.sequence is not None and part.sequence < peer.sequence):
            return  # older than what has been followed meanwhile
        self.counts.snapshots_taken += 1
        peer.snapshot_wanted = False
        entries = {entry.decision_id: entry for number in sorted(parts) for entry in parts[number].entries}
        for decision_id in [decision_id for decision_id in peer.entries if decision_id not in entries]:
            self._count_out(peer, decision_id, now_ms, completed=False)
        for decision_id, entry in entries.items():
            if decision_id not in peer.entries:
                self._count_in(peer, entry, now_ms)
        for one in parts.values():
            self._take_firsts(peer, one.firsts, now_ms)
            for probe in one.probed:
                self._take_probe(peer, probe, now_ms)
        peer.sequence = part.sequence
        self._drain(peer, now_ms)

    def _take_prefixes(self, peer: Peer, chunk: Prefixes) -> None:
        endpoint = self._pool.table.get(chunk.address)
        if endpoint is None or self._salt is None or peer.salt != self._salt:
            return
        start, known = chunk.start_s, endpoint.process_start_s
        if start is not None and known is not None and abs(start - known) > _SAME_START_S:
            return
        self._pool.prefixes.insert_older(chunk.names, endpoint.slot)
        self.counts.prefix_blocks_taken += len(chunk.names)
