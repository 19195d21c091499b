"""The routers of a run: each with its own state and decisions; what they tell each other, and what they scrape. Pure.

State, decision core, waiting room and the sharing of the ledger are the router's own code; what its edges do in the
product, the bus and the scraper, is done here in virtual time, at their intervals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.router.admission.waiting_room import Waiter, WaitingRoom
from services.router.core import DecisionCore
from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.sharing.bus import GAP_S
from services.router.sharing.share import LedgerShare
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import ScrapeConfig
from services.router.state.vllm_metrics import Engine as EngineKind
from services.router.state.vllm_metrics import EngineMetrics
from shared.features import hardware_code
from sim.engine import EngineRequest
from sim.replay.events import Events
from sim.replay.learning import POOL
from sim.replay.policies import Policy
from sim.replay.pool import Pod
from sim.replay.trace import ReplayRequest

BYTES_PER_TOKEN: Final = 4
_SALT: Final = b"replay"
_LISTED: Final = 3
# How often the router's own bus looks at its peers.
_SHARE_TICK_MS: Final = 50.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request before its decision."""

    place: int
    request: ReplayRequest
    engine: EngineRequest
    inference: InferenceRequest
    received_ms: float


class Router:
    """One router's state and decisions."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        pods: Sequence[Pod],
        rng: np.random.Generator,
        on_fault: Callable[[str], None],
        max_candidates: int,
        *,
        shared: bool,
    ) -> None:
        config = PoolConfig(max_candidates=max_candidates)
        self.state = PoolState(config, salt=_SALT, tokens=TokenEstimator(BYTES_PER_TOKEN))
        for pod in pods:
            code = hardware_code(pod.spec.profile.hardware_class)
            self.state.add_endpoint(pod.address, hardware_class=code, now_ms=0.0)
        self.name = name
        self.share = LedgerShare(name, self.state, salt=_SALT) if shared else None
        self.flush_due = False
        self.core = DecisionCore(POOL, _LISTED, self.state, policy.pipeline(), rng, on_fault)
        self.room = WaitingRoom(self.core.pipeline.waiting_room)
        self.held: dict[Waiter, Asked] = {}
        self.look_due_ms = math.inf
        self.woken = False
        self.scrape_due: dict[str, float] = {}
        self.scrape_failures: dict[str, int] = {}


class Bus:
    """What routers tell each other, `bus_ms` on its way."""

    def __init__(self, routers: Sequence[Router], events: Events, bus_ms: float) -> None:
        self._routers = routers
        self._events = events
        self._bus_ms = bus_ms

    def begin(self, router: Router) -> None:
        """From now on it speaks, if it shares at all."""
        if router.share is not None:
            router.share.on_pending = lambda: self._flush_soon(router)
            self._events.at(_SHARE_TICK_MS, self._share_tick, router)

    def _flush_soon(self, router: Router) -> None:
        if not router.flush_due:
            router.flush_due = True
            self._events.at(self._events.now_ms, self._share_flush, router)

    def _share_flush(self, now_ms: float, router: Router) -> None:
        """What is pending goes out at once; what comes after it waits for the bus's gap."""
        if router.share is None:
            return
        for out in router.share.flush(now_ms):
            for other in self._routers:
                if other is not router and out.to in {None, other.name}:
                    self._events.at(now_ms + self._bus_ms, self._hear, (other, out.payload))
        self._events.at(now_ms + GAP_S * 1e3, self._share_rested, router)

    def _share_rested(self, _: float, router: Router) -> None:
        router.flush_due = False
        if router.share is not None and router.share.pending:
            self._flush_soon(router)

    def _hear(self, now_ms: float, what: tuple[Router, bytes]) -> None:
        router, payload = what
        if router.share is not None:
            router.share.receive(payload, now_ms)

    def _share_tick(self, now_ms: float, router: Router) -> None:
        if router.share is not None:
            router.share.tick(now_ms)
            self._events.at(now_ms + _SHARE_TICK_MS, self._share_tick, router)

    def settle(self) -> None:
        """What routers still have to say of the last requests is heard."""
        until_ms = self._events.now_ms + 1_000.0
        while any(router.share for router in self._routers) and self._events.next_ms <= until_ms:
            self._events.step()


class Scrapes:
    """Each router's look at each pod, at the scraper's own intervals."""

    def __init__(
        self, by_address: dict[str, Pod], events: Events, rng: np.random.Generator, config: ScrapeConfig
    ) -> None:
        self._by_address = by_address
        self._events = events
        self._rng = rng
        self._config = config

    def begin(self, router: Router) -> None:
        """The first looks, spread over an interval."""
        router.state.on_upstream_failure = lambda address: self.probe_soon(router, address)
        for pod in self._by_address.values():
            self._scrape_at(router, pod, float(self._rng.uniform(0.0, self._config.idle_interval_ms)))

    def _scrape_at(self, router: Router, pod: Pod, due_ms: float) -> None:
        router.scrape_due[pod.address] = due_ms
        self._events.at(due_ms, self._scrape, (router, pod, due_ms))

    def probe_soon(self, router: Router, address: str) -> None:
        self._scrape_at(router, self._by_address[address], self._events.now_ms)

    def _scrape(self, now_ms: float, what: tuple[Router, Pod, float]) -> None:
        router, pod, due_ms = what
        if router.scrape_due[pod.address] != due_ms:  # another one came before it
            return
        config = self._config
        if router.share is not None and not router.share.owns(pod.address, now_ms):
            self._scrape_at(router, pod, now_ms + config.busy_interval_ms)  # a peer asks it, and tells
            return
        if pod.up:
            self.observe(router, pod, now_ms)
            busy = router.state.in_flight_at(pod.address) > 0
            interval_ms = config.busy_interval_ms if busy else config.idle_interval_ms
        else:
            failures = router.scrape_failures.get(pod.address, 0) + 1
            router.scrape_failures[pod.address] = failures
            router.state.set_ready(pod.address, ready=False)
            if router.share is not None:
                router.share.probed(pod.address, now_ms, ready=False, metrics=None)
            interval_ms = min(config.busy_interval_ms * 2.0 ** min(failures - 1, 16), config.max_backoff_ms)
        self._scrape_at(router, pod, now_ms + interval_ms * float(self._rng.uniform(0.9, 1.1)))

    def observe(self, router: Router, pod: Pod, now_ms: float) -> None:
        engine = pod.engine
        if engine is None:
            return
        seen = engine.metrics(now_ms)
        router.scrape_failures.pop(pod.address, None)
        metrics = EngineMetrics(
            EngineKind.VLLM,
            waiting_requests=seen.waiting_requests,
            running_requests=seen.running_requests,
            kv_cache_utilization=seen.kv_used_ratio,
            prefix_hit_tokens=seen.prefix_hit_tokens,
            prefix_query_tokens=seen.prefix_queried_tokens,
            prompt_tokens=seen.prompt_tokens,
            computed_prompt_tokens=seen.prompt_tokens - seen.cached_prompt_tokens,
            generation_tokens=seen.generated_tokens,
            first_tokens=engine.first_tokens,
            preemptions=seen.preemptions,
            process_start_s=pod.started_s,
            kv_capacity_tokens=pod.spec.limits.num_blocks * pod.spec.limits.block_tokens,
            block_tokens=pod.spec.limits.block_tokens,
        )
        router.state.observe_scrape(pod.address, metrics, now_ms)
        router.state.set_ready(pod.address, ready=True)
        if router.share is not None:
            router.share.probed(pod.address, now_ms, ready=True, metrics=metrics)
