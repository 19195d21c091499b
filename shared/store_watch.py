"""Keeping in step with what is published in Redis: a notice on a channel, or the poll where notices are lost. Edge.

    notice or poll → look (the caller's: read keys, verify, take into use) → wait for the next

Redis may be away, restarted or emptied: the loss is counted, logged once and told to the caller, what is in use stays,
and the watch goes on by itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from shared.bundle import notice_concerns
from shared.cancellation import raise_if_cancelled
from shared.clock import Clock
from shared.telemetry import seconds

_RECONNECT_S: Final = 0.5


class StoreMetrics:
    """How a service gets on with Redis; series begin with `prefix`."""

    def __init__(self, prefix: str, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        self._errors = Counter(f"{prefix}_store_errors_total", "Failed calls of Redis.", registry=registry)
        self._contact = Gauge(
            f"{prefix}_store_contact_age_seconds", "Time since Redis last answered.", registry=registry
        )
        self.errors = 0

    def failed(self) -> None:
        self.errors += 1
        self._errors.inc()

    def answered(self) -> None:
        at_ms = self._clock.monotonic_ms()
        self._contact.set_function(lambda: seconds(self._clock.monotonic_ms() - at_ms))


class StoreWatch:
    """Calls `look` at once, after each notice that concerns `pools`, and every `poll_ms`."""

    def __init__(
        self,
        redis: Redis,
        channels: Collection[str],
        pools: Collection[str],
        metrics: StoreMetrics,
        clock: Clock,
        *,
        poll_ms: float,
    ) -> None:
        """`redis` stays the caller's to close."""
        self.metrics = metrics
        self._redis = redis
        self._channels = tuple(channels)
        self._pools = frozenset(pools)
        self._clock = clock
        self._poll_ms = poll_ms
        self._log = structlog.get_logger()
        self._connected = True

    @property
    def connected(self) -> bool:
        """Whether Redis answered when it was last asked."""
        return self._connected

    async def get(self, key: str) -> bytes | None:
        """A key's value; None: there is none. Raises what Redis raises."""
        value = await self._redis.get(key)
        return value.encode() if isinstance(value, str) else value

    async def run(
        self, look: Callable[[], Awaitable[None]], on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        """Watch until cancelled. What Redis raises inside `look` is a loss of contact; anything else comes out."""
        while True:
            try:
                async with self._redis.pubsub() as notices:
                    await notices.subscribe(*self._channels)
                    while True:
                        await look()
                        self._answered()
                        await self._next(notices)
            except (RedisError, OSError, TimeoutError) as error:
                self._lost(error)
                if on_lost is not None:
                    on_lost(error)
                raise_if_cancelled()
                await asyncio.sleep(_RECONNECT_S)

    async def _next(self, notices: PubSub) -> None:
        """Wait for a notice of our pools or for the poll, whichever comes first."""
        due_ms = self._clock.monotonic_ms() + self._poll_ms
        while (left_ms := due_ms - self._clock.monotonic_ms()) > 0:
            raise_if_cancelled()
            message = await notices.get_message(ignore_subscribe_messages=True, timeout=left_ms / 1e3)
            if message is not None and notice_concerns(message["data"], self._pools):
                return

    def _answered(self) -> None:
        self.metrics.answered()
        if not self._connected:
            self._connected = True
            self._log.info("redis answers again")

    def _lost(self, error: Exception) -> None:
        self.metrics.failed()
        if self._connected:
            self._connected = False
            self._log.warning("redis is away; what is in use stays", error=type(error).__name__)
