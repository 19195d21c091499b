"""Requests of routers that are silent: they still run, so they count until something says that they are over. Pure.

That is their outcome on the samples' subject, or the endpoint's server, when it has counted fewer requests than the
ledger in a row of scrapes, or at the latest a time. One's own requests and those of peers that live are never given up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.sharing.counts import ShareCounts
from services.router.sharing.follower import Follower
from services.router.sharing.peers import Peer
from services.router.state.pool import PoolState


@dataclass(slots=True)
class _Excess:
    since_ms: float
    least: int


class Orphans:
    """What gives orphans up."""

    def __init__(
        self,
        pool: PoolState,
        peers: Mapping[str, Peer],
        follower: Follower,
        counts: ShareCounts,
        *,
        load_hysteresis_ms: float,
    ) -> None:
        self._pool = pool
        self._peers = peers
        self._follower = follower
        self._counts = counts
        self._load_hysteresis_ms = load_hysteresis_ms
        self._excess: dict[str, _Excess] = {}

    def __len__(self) -> int:
        return sum(len(peer.entries) for peer in self._peers.values() if not peer.live)

    def outcome(self, decision_id: str, *, completed: bool, now_ms: float) -> None:
        """The bus says what became of a request: the end of one whose router can't say so any more."""
        for peer in self._peers.values():
            if not peer.live and decision_id in peer.entries:
                self._follower.count_out(peer, decision_id, now_ms, completed=completed)
                self._counts.orphans_by_outcome += 1

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
        if now_ms - before.since_ms >= self._load_hysteresis_ms:
            del self._excess[address]
            for _, peer, decision_id in sorted(orphans, key=lambda orphan: orphan[0])[: before.least]:
                self._follower.count_out(peer, decision_id, now_ms, completed=False)
                self._counts.orphans_by_load += 1

    def give_up(self, peer: Peer, now_ms: float) -> None:
        """A silent peer's requests can't run any more."""
        for decision_id in list(peer.entries):
            self._follower.count_out(peer, decision_id, now_ms, completed=False)
            self._counts.orphans_by_age += 1

    def prune(self) -> None:
        """Forget addresses that are no endpoints any more."""
        for address in [address for address in self._excess if self._pool.table.get(address) is None]:
            del self._excess[address]
