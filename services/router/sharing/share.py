"""One router's part in the pool's shared ledger: what it tells its peers, and what it makes of what they tell. Pure.

Each router writes its own entries alone: what it dispatched, saw the first token of, and saw end. They travel in
numbered batches; a peer follows them in order, holds back what comes too early, asks for what is missing, and takes a
snapshot where that is too much, where it has just come, or where count and digest of the beat don't agree with what it
has. So a request is counted in once and out once everywhere, whatever the network loses, doubles or reorders.

A peer that has been silent is not believed to hold its requests any more, but they still run (`orphans.py`). A peer
that returns is asked for a snapshot, and is the only authority on its entries again. Without a peer nothing is queued.

Its parts: `telling.py` what it says, `follower.py` what it makes of what others say, `orphans.py`, `shared_probes.py`.

Bytes in, bytes out, time as an argument: the NATS edge (`bus.py`) and a replay in virtual time run the same class.

Limits: one event loop. Trusts whoever may publish on the bus, within the limits of `messages.py`; at most 64 peers.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from services.router.request.inference_request import InferenceRequest
from services.router.sharing.counts import ShareCounts
from services.router.sharing.follower import Follower
from services.router.sharing.limits import ShareConfig
from services.router.sharing.messages import Added, Ask, Batch, Beat, Message, Part, decode
from services.router.sharing.orphans import Orphans
from services.router.sharing.peers import DIGEST_MASK, Peer, checksum
from services.router.sharing.shared_probes import SharedProbes
from services.router.sharing.telling import Outgoing, Telling
from services.router.state.pool import PoolState
from services.router.state.table import Endpoint
from services.router.state.vllm_metrics import EngineMetrics

_MAX_PEERS: Final = 64


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
        limits = self._config
        self._probes = SharedProbes(router, pool, self._peers, self._telling.probed, takeover_ms=limits.takeover_ms)
        self._follower = Follower(
            pool, self._telling, self._probes, self._salt, self.counts, limits, on_delay=self._delayed
        )
        self._orphans = Orphans(
            pool, self._peers, self._follower, self.counts, load_hysteresis_ms=limits.load_hysteresis_ms
        )
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
        return len(self._orphans)

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

    def ended(self, decision_id: str, *, completed: bool, failed: bool = False) -> None:
        """It is over."""
        self._telling.ended(decision_id, completed=completed, failed=failed)

    def outcome(self, decision_id: str, *, completed: bool, now_ms: float) -> None:
        """The bus says what became of a request: the end of one whose router can't say so any more."""
        self._orphans.outcome(decision_id, completed=completed, now_ms=now_ms)

    def endpoint_added(self, address: str, now_ms: float) -> None:
        """Peers may have dispatched to it before we knew it."""
        for peer in self._peers.values():
            self._follower.endpoint_added(peer, address, now_ms)

    def load_seen(self, address: str, requests: float, now_ms: float) -> None:
        """A server counts its requests: where there are fewer than in the ledger for a while, orphans are gone."""
        self._orphans.load_seen(address, requests, now_ms)

    # --- probes -------------------------------------------------------------------------------------------------

    def owns(self, address: str, now_ms: float) -> bool:
        """Whether this router is to probe an endpoint: it falls to it, or nobody has told of it for a while."""
        return self._probes.owns(address, now_ms)

    def probed(self, address: str, now_ms: float, *, ready: bool, metrics: EngineMetrics | None) -> None:
        """This router has probed an endpoint."""
        self._probes.probed(address, now_ms, ready=ready, metrics=metrics)

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
                    self._follower.ask_for_missing(peer, now_ms)
                continue
            if now_ms - peer.heard_ms > config.orphan_ms:
                self._orphans.give_up(peer, now_ms)
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
        if len(self._telling.probes) + len(self._probes) <= 2 * len(table) + 64:
            return
        self._telling.prune()
        self._probes.prune()
        self._orphans.prune()

    def flush(self, now_ms: float) -> list[Outgoing]:
        """What is to be sent now, in this order."""
        return self._telling.flush(now_ms)

    def leave(self, now_ms: float) -> list[Outgoing]:
        """The last words of a router that stops."""
        return [*self.flush(now_ms), self._telling.beat(now_ms, leaving=True)]

    def _wake(self) -> None:
        if self.on_pending is not None:
            self.on_pending()

    def _delayed(self, delay_ms: float) -> None:
        if self.on_delay is not None:
            self.on_delay(delay_ms)

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
            self._follower.take_batch(peer, message, now_ms)
        elif isinstance(message, Beat):
            self._follower.take_beat(peer, message)
            if message.leaving:
                self._lose(peer)
        elif isinstance(message, Part):
            self._follower.take_part(peer, message, now_ms)
        else:
            self._follower.take_prefixes(peer, message)

    def _heard(self, router: str, sent_ms: float, now_ms: float) -> Peer | None:
        peer = self._peers.get(router)
        if peer is None:
            if len(self._peers) >= _MAX_PEERS:
                return None
            peer = self._peers[router] = Peer(router, sent_ms, now_ms)
            self._probes.routers_changed()
            # It may know nothing of us: the sooner it hears, the sooner it asks.
            self._beat_ms = float("-inf")
        elif not peer.live:
            peer.live = True
            peer.snapshot_wanted = True
            self.counts.peers_returned += 1
            self._probes.routers_changed()
        peer.heard_ms = max(now_ms, peer.heard_ms)
        peer.clock.observe(sent_ms, now_ms)
        return peer

    def _lose(self, peer: Peer) -> None:
        """It is silent, or has taken its leave: its requests are orphans."""
        peer.live = False
        peer.buffer.clear()
        peer.parts.clear()
        self.counts.peers_lost += 1
        self._probes.routers_changed()
        self._telling.forget(peer.router)
        if not self.live_peers:
            self._follower.alone()
