"""The router's one connection to NATS: subscriptions that outlive it, and plain publishing.

Waits for NATS as long as it takes, comes back with it, and makes another client where nats-py closes one for good.
Nothing is kept while NATS is away: what was to be published is dropped, and the caller told so.

Messages are handled where they are read, and what comes within a few milliseconds is read together. A router that hears
three others is woken by each of their batches else, goes through nats-py's queue and task for each subscription, and
finds its caches cold each time, which costs several times what is done (`bench/sharing.py`). What isn't read stays in
the sockets, and NATS ends a connection on which too much piles up; then it is made anew.

Limits: relies on two inner seams of nats-py's client, its parser and `_process_msg`; the integration tests hold it to
them.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import Parser
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.cancellation import raise_if_cancelled

_FIRST_DELAY_S: Final = 0.2
_LAST_DELAY_S: Final = 5.0
_GATHER_S: Final = 0.004

Handler = Callable[[bytes], None]
"""Takes a message's payload; it may not wait. What it raises is counted and logged, and the next message is read."""


class _GatheringParser(Parser):  # type: ignore[misc]
    """Waits a little for more, before it takes what came after a pause."""

    def __init__(self, client: Client, gather_s: float) -> None:
        super().__init__(client)
        self._gather_s = gather_s
        self._taken_s = 0.0

    async def parse(self, data: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._taken_s > self._gather_s:
            await asyncio.sleep(self._gather_s)
        await super().parse(data)
        self._taken_s = loop.time()


class _DirectClient(Client):  # type: ignore[misc]
    """Hands messages of some subjects to functions of this process, the others to their subscriptions."""

    def __init__(self, handlers: Mapping[bytes, Handler]) -> None:
        super().__init__()
        self._handlers = handlers
        self._ps = _GatheringParser(self, _GATHER_S)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._handlers.get(subject)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            handler(data)


async def _never(_: Msg) -> None:
    """Of a subscription whose messages don't come to it."""


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
        self._failed: type[Exception] | None = None
        """The last error of a handler that was logged."""
        self._up = Gauge("leadtime_router_nats_connected", "Whether NATS is connected, 0 or 1.", registry=registry)
        self._unhandled = Counter(
            "leadtime_router_nats_unhandled_total", "Messages whose handling failed.", registry=registry
        )

    def subscribe(self, subject: str, handler: Handler) -> None:
        """Have every message of a subject (no wildcard) handled, on each connection there will be. Before `run`."""
        self._handlers[subject] = handler

    def _handle(self, handler: Handler, payload: bytes) -> None:
        try:
            handler(payload)
        except Exception as error:  # raised further it would end the reading of all others
            self._unhandled.inc()
            if type(error) is not self._failed:
                self._failed = type(error)
                self._log.exception("message not handled")

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

        handlers = {
            subject.encode(): functools.partial(self._handle, handler) for subject, handler in self._handlers.items()
        }
        client = _DirectClient(handlers)
        await client.connect(
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
            for subject in self._handlers:
                await client.subscribe(subject, cb=_never)
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
        # nats-py reports every attempt, twice a second while the server is away: once says it all.
        if type(error) is not self._told:
            self._told = type(error)
            self._log.info("nats error", error=type(error).__name__)
