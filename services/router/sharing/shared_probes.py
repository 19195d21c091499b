"""Scrapes shared out among routers: who makes them, and what becomes of a value that another one tells. Pure.

Rendezvous hashing over the routers that live says who scrapes an endpoint; who hasn't heard of one for a while scrapes
it itself. Values come with their instants. Readiness and models each router sees for itself: another one's word has
it look, and no more.
"""

from collections.abc import Callable, Mapping
from typing import Final

from services.router.sharing.messages import Probed
from services.router.sharing.peers import Peer
from services.router.sharing.rendezvous import owner
from services.router.state.pool import PoolState
from services.router.state.vllm_metrics import Engine, EngineMetrics

_ENGINES: Final = frozenset(engine.value for engine in Engine)


class SharedProbes:
    """What was heard of which endpoint when, and whose it is."""

    def __init__(
        self,
        router: str,
        pool: PoolState,
        peers: Mapping[str, Peer],
        tell: Callable[[Probed], None],
        *,
        takeover_ms: float,
    ) -> None:
        """`peers`: all that are known, kept up to date by its owner. `tell`: has the others told of a probe.

        `takeover_ms`: how old a peer's word on an endpoint may be.
        """
        self._router = router
        self._pool = pool
        self._peers = peers
        self._tell = tell
        self._takeover_ms = takeover_ms
        self._told_ms: dict[str, float] = {}
        """When the newest probe that a peer told of was made."""
        self._said_ready: dict[tuple[str, str], bool] = {}
        """What a peer last said of an endpoint, by both."""
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        """Addresses that were told of."""
        return len(self._told_ms)

    def routers_changed(self) -> None:
        """One came, went or is back: the endpoints are shared out anew."""
        self._owners.clear()

    def owns(self, address: str, now_ms: float) -> bool:
        """Whether this router is to probe an endpoint: it falls to it, or nobody has told of it for a while."""
        if now_ms - self._told_ms.get(address, float("-inf")) > self._takeover_ms:
            return True
        falls_to = self._owners.get(address)
        if falls_to is None:
            routers = [self._router, *(peer.router for peer in self._peers.values() if peer.live)]
            falls_to = self._owners[address] = owner(address, routers)
        return falls_to == self._router

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
        self._tell(probe)

    def take(self, peer: Peer, probe: Probed, now_ms: float) -> None:
        """A peer tells of a probe of its own."""
        endpoint = self._pool.table.get(probe.address)
        at_ms = min(peer.clock.here_ms(probe.at_ms), now_ms)
        if endpoint is None or now_ms - at_ms > self._takeover_ms:
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

    def prune(self) -> None:
        """Forget addresses that are no endpoints any more, and routers that are nobody's peers."""
        table = self._pool.table
        for memory in (self._told_ms, self._owners):
            for address in [address for address in memory if table.get(address) is None]:
                del memory[address]
        self._said_ready = {
            key: ready for key, ready in self._said_ready.items() if key[0] in self._peers and table.get(key[1])
        }
