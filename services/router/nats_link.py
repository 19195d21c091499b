"""The router's one connection to NATS: subscriptions that outlive it, and plain publishing.

Waits for NATS as long as it takes, comes back with it, and makes another client where nats-py closes one for good.
Nothing is kept while NATS is away: what was to be published is dropped, and the caller told so.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.cancellation import raise_if_cancelled

_FIRST_DELAY_S: Final = 0.2
_LAST_DELAY_S: Final = 5.0
# What a stalled router lets pile up of one subscription; beyond it nats-py drops.
_PENDING_MESSAGES: Final = 16_384
_PENDING_BYTES: Final = 16 * 1024 * 1024

Handler = Callable[[Msg], Awaitable[None]]


class NatsLink:
    """Subscribe first, then `run` until cancelled."""

    def __init__(self, options: dict[str, Any], registry: CollectorRegistry) -> None:
        """`options`: of nats-py's `connect`."""
        self._options = options
        self._handlers: dict[str, Handler] = {}
        self._client: Client | None = None
        self._log = structlog.get_logger()
        self._told: type[Exception] | None = None
        """The error of this outage that was logged."""
        self._up = Gauge("leadtime_router_nats_connected", "Whether NATS is connected, 0 or 1.", registry=registry)
        self._slow = Counter(
            "leadtime_router_nats_slow_total",
            "Messages that came faster than the router read and were dropped, or a piled-up connection's end.",
            registry=registry,
        )

    def subscribe(self, subject: str, handler: Handler) -> None:
        """Have every message of a subject handled, on each connection there will be. Before `run`."""
        self._handlers[subject] = handler

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Send, or say that it can't be sent now."""
        client = self._client
        if client is None or not client.is_connected:
            return False
        try:
            await client.publish(subject, payload)
        except (OSError, nats.errors.Error):
            return False
        return True

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was published has left, for so long at most."""
        client = self._client
        if client is not None and client.is_connected:
            with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
                await client.flush(timeout=timeout_s)

    async def run(self) -> None:
        """Connect and stay until cancelled. A client that closes for good (the server said -ERR) is replaced."""
        delay_s = _FIRST_DELAY_S
        while True:
            closed = asyncio.Event()
            try:
                client = await self._connect(closed)
            except (OSError, nats.errors.Error, TimeoutError) as error:
                await self._on_error(error)
            else:
                delay_s = _FIRST_DELAY_S
                await self._read_until(closed, client)
                self._log.warning("nats connection closed; connecting anew")
            self._up.set(0)
            raise_if_cancelled()
            await asyncio.sleep(delay_s)
            delay_s = min(_LAST_DELAY_S, delay_s * 2)

    async def _connect(self, closed: asyncio.Event) -> Client:
        async def on_closed() -> None:
            closed.set()

        client = await nats.connect(
            **self._options,
            name="leadtime-router",
            no_echo=True,  # what this router says isn't news to it
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=on_closed,
            error_cb=self._on_error,
        )
        self._up.set(1)
        return client

    async def _read_until(self, closed: asyncio.Event, client: Client) -> None:
        try:
            raise_if_cancelled()  # dropped while it connected, it would be missed in the endless wait
            for subject, handler in self._handlers.items():
                await client.subscribe(
                    subject, cb=handler, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
                )
            self._client = client
            await closed.wait()
        finally:
            self._client = None
            with contextlib.suppress(Exception):  # closing a connection that is already gone
                await client.close()

    async def _on_disconnect(self) -> None:
        self._up.set(0)

    async def _on_reconnect(self) -> None:
        self._up.set(1)
        self._told = None
        self._log.info("nats answers again")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._slow.inc()
        # nats-py reports every attempt, twice a second while the server is away: once says it all.
        if type(error) is not self._told:
            self._told = type(error)
            self._log.info("nats error", error=type(error).__name__)
