"""The shared ledger's way over NATS core: what the share has to say is sent in batches, what peers say is handed to it.

What happens within `GAP_S` goes together, so a batch is encoded once and costs the request path nothing. All routers
send at the same instants of the wall clock, as far as their clocks agree: one is woken once by the batches of all
others, where it would be woken by each. Nothing but the cost depends on it.

When NATS is away the router goes on with its own view: batches are dropped and counted, and peers take a snapshot once
it is back.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.router.nats_link import NatsLink
from services.router.sharing.share import LedgerShare
from shared.cancellation import raise_if_cancelled
from shared.clock import Clock
from shared.names import ledger_inbox, ledger_subject
from shared.telemetry import seconds

GAP_S: Final = 0.02
_TICK_S: Final = 0.05
_CHECK_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5
_DELAY_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)


class LedgerBus:
    """Register the subscriptions before the link runs; then `run` until cancelled, and `leave`."""

    def __init__(
        self,
        pool: str,
        share: LedgerShare,
        link: NatsLink,
        clock: Clock,
        registry: CollectorRegistry,
        *,
        checks: bool = False,
    ) -> None:
        """`checks`: look for inconsistencies once a second, at a cost that grows with the requests under way."""
        self._share = share
        self._link = link
        self._clock = clock
        self._checks = checks
        self._all = ledger_subject(pool)
        self._pool = pool
        self._wake = asyncio.Event()
        self._sent_ms = float("-inf")
        self._log = structlog.get_logger()
        self._unsent = Counter(
            "leadtime_router_ledger_unsent_total", "Messages to other routers dropped without NATS.", registry=registry
        )
        self._faults = Counter(
            "leadtime_router_ledger_faults_total", "Inconsistencies found by ledger_checks.", registry=registry
        )
        delay = Histogram(
            "leadtime_router_ledger_delay_seconds",
            "From a dispatch at another router to its counting in here; of a batch its oldest.",
            buckets=_DELAY_BUCKETS_S,
            registry=registry,
        )
        registry.register(_ShareCollector(share))
        share.on_pending = self._wake.set
        share.on_delay = lambda delay_ms: delay.observe(seconds(delay_ms))
        link.subscribe(self._all, self._on_message)
        link.subscribe(ledger_inbox(pool, share.router), self._on_message)

    async def run(self) -> None:
        """Tell and be told until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            group.create_task(self._publish())
            if self._checks:
                group.create_task(self._check())

    async def leave(self) -> None:
        """The last words of a router that stops: peers needn't wait for its silence."""
        for out in self._share.leave(self._clock.monotonic_ms()):
            await self._send(out.to, out.payload)
        await self._link.flush(_LAST_WORDS_S)

    async def _publish(self) -> None:
        while True:
            raise_if_cancelled()
            await self._wake.wait()
            await asyncio.sleep(self._until_next_s())
            self._wake.clear()
            self._sent_ms = self._clock.monotonic_ms()
            for out in self._share.flush(self._sent_ms):
                await self._send(out.to, out.payload)
            if self._share.pending:
                self._wake.set()

    def _until_next_s(self) -> float:
        """Until the next common instant, but for one that comes right after the last sending: a timer's inaccuracy."""
        left_s = GAP_S - self._clock.unix_ms() / 1e3 % GAP_S
        since_s = (self._clock.monotonic_ms() - self._sent_ms) / 1e3
        return left_s if since_s + left_s >= GAP_S / 2 else left_s + GAP_S

    async def _send(self, to: str | None, payload: bytes) -> None:
        subject = self._all if to is None else ledger_inbox(self._pool, to)
        if not await self._link.publish(subject, payload):
            self._unsent.inc()

    async def _tick(self) -> None:
        while True:
            self._share.tick(self._clock.monotonic_ms())
            await asyncio.sleep(_TICK_S)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            faults = self._share.faults()
            if faults:
                self._faults.inc(len(faults))
                self._log.error("ledger inconsistent", faults=faults[:10], count=len(faults))

    def _on_message(self, payload: bytes) -> None:
        self._share.receive(payload, self._clock.monotonic_ms())


class _ShareCollector(Collector):
    """The share's own counts, read when Prometheus asks."""

    def __init__(self, share: LedgerShare) -> None:
        self._share = share

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "leadtime_router_peers", "Other routers of the pool that are heard.", value=self._share.live_peers
        )
        yield GaugeMetricFamily(
            "leadtime_router_own_requests",
            "Requests under way that this router dispatched.",
            value=self._share.own_requests,
        )
        yield GaugeMetricFamily(
            "leadtime_router_orphan_requests",
            "Requests under way of routers that are silent.",
            value=self._share.orphans,
        )
        events = CounterMetricFamily(
            "leadtime_router_sharing_events", "What happened between routers, by kind.", labels=["event"]
        )
        for event, count in asdict(self._share.counts).items():
            events.add_metric([event], count)
        yield events
