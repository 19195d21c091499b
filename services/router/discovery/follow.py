"""Keeps the pool's endpoints equal to what the sources list together.

An endpoint that is listed anew is not ready until the scraper has had its health and model list; one that is listed no
longer is no candidate from the same instant. Where two sources list an address, the first one's word counts. Sources go
on with what they know when they can't ask; how old that is, is exported and told in `/readyz`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge

from services.router.discovery.endpoints import Listed, Listing
from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.lifecycle import Readiness
from shared.telemetry import seconds

_LOOK_S: Final = 1.0


class Source(Protocol):
    """Where endpoints come from."""

    name: str

    @property
    def listing(self) -> Listing:
        """What it knows, however old."""
        ...

    @property
    def confirmed_ms(self) -> float | None:
        """When that was last known to be right, monotonic ms; None: never yet."""
        ...

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep the listing up to date until cancelled; call `changed` after each change."""
        ...


class Discovery:
    """`run` until cancelled."""

    def __init__(
        self,
        pool: PoolState,
        sources: Sequence[Source],
        *,
        clock: Clock,
        registry: CollectorRegistry,
        readiness: Readiness,
        old_after_ms: float = 60_000.0,
    ) -> None:
        """`old_after_ms`: from when on a source that can't be asked is told as degraded."""
        self._pool = pool
        self._sources = tuple(sources)
        self._clock = clock
        self._readiness = readiness
        self._old_after_ms = old_after_ms
        self._started_ms = clock.monotonic_ms()
        self._listed: dict[str, Listed] = {}
        self._changed = asyncio.Event()
        self._log = structlog.get_logger()
        age = Gauge(
            "leadtime_router_discovery_age_seconds",
            "How long ago a source of endpoints was last known to be right.",
            ["source"],
            registry=registry,
        )
        for source in self._sources:
            age.labels(source.name).set_function(lambda source=source: seconds(self.age_ms(source)))  # type: ignore[misc]

    def age_ms(self, source: Source) -> float:
        """How old a source's knowledge is; since the start, while it has none."""
        confirmed_ms = source.confirmed_ms
        since_ms = self._started_ms if confirmed_ms is None else confirmed_ms
        return max(0.0, self._clock.monotonic_ms() - since_ms)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(source.run(self._changed.set), name=f"discovery {source.name}")
            while True:
                self._changed.clear()
                self.apply()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    self._tell_ages()

    def apply(self) -> None:
        """Tell the pool the difference between what is listed and what was."""
        listed: dict[str, Listed] = {}
        for source in self._sources:
            for address, what in source.listing.items():
                listed.setdefault(address, what)
        now_ms = self._clock.monotonic_ms()
        for address in self._listed.keys() - listed.keys():
            self._pool.remove_endpoint(address)
            self._log.info("endpoint no longer listed", endpoint=address)
        for address, what in listed.items():
            if self._listed.get(address) != what:
                self._pool.add_endpoint(
                    address, hardware_class=what.hardware_class, role=what.role, identity=what.identity, now_ms=now_ms
                )
                self._log.info("endpoint listed", endpoint=address)
        self._listed = listed
        self._tell_ages()

    def _tell_ages(self) -> None:
        for source in self._sources:
            age_ms = self.age_ms(source)
            old = age_ms > self._old_after_ms
            reason = f"not confirmed for {seconds(age_ms):.0f} s; going on with what was known" if old else None
            self._readiness.degraded(f"discovery: {source.name}", reason)
