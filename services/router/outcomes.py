"""Outcomes coming back: plain NATS subscriptions to the pool's samples, and to its requests that made none.

Every router sees every outcome of its pool and corrects its own view by it. No acknowledgements: what is lost while
NATS is away is lost to the router and kept for the trainer.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.cancellation import raise_if_cancelled
from shared.errors import FieldError
from shared.names import samples_subject, unsampled_subject
from shared.samples import LatencySample, decode_sample
from shared.verdicts import Unsampled, decode_unsampled

_FIRST_DELAY_S: Final = 0.2
_LAST_DELAY_S: Final = 5.0


class OutcomeSubscriber:
    """Feeds each sample of the pool to `observe`, and how other requests ended to `observe_end`. Waits for NATS as long
    as it takes, and comes back with it.
    """

    def __init__(
        self,
        pool: str,
        options: dict[str, Any],
        observe: Callable[[LatencySample], None],
        registry: CollectorRegistry,
        observe_end: Callable[[Unsampled], None] = lambda _: None,
    ) -> None:
        self._observe_end = observe_end
        self._pool = pool
        self._options = options
        self._observe = observe
        self._log = structlog.get_logger()
        self._told: type[Exception] | None = None
        """The error of this outage that was logged."""
        self._received = Counter("leadtime_router_outcomes_total", "Outcomes read back.", ["result"], registry=registry)
        self._connected = Gauge(
            "leadtime_router_nats_connected", "Whether NATS is connected, 0 or 1.", registry=registry
        )

    async def run(self) -> None:
        """Subscribe and stay until cancelled. A client that closes for good (the server said -ERR) is replaced."""
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
            self._connected.set(0)
            raise_if_cancelled()
            await asyncio.sleep(delay_s)
            delay_s = min(_LAST_DELAY_S, delay_s * 2)

    async def _connect(self, closed: asyncio.Event) -> Client:
        async def on_closed() -> None:
            closed.set()

        client = await nats.connect(
            **self._options,
            name="leadtime-router",
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=on_closed,
            error_cb=self._on_error,
        )
        self._connected.set(1)
        return client

    async def _read_until(self, closed: asyncio.Event, client: Client) -> None:
        try:
            raise_if_cancelled()  # dropped while it connected, it would be missed in the endless wait
            await client.subscribe(samples_subject(self._pool), cb=self._on_sample)
            await client.subscribe(unsampled_subject(self._pool), cb=self._on_end)
            await closed.wait()
        finally:
            with contextlib.suppress(Exception):  # closing a connection that is already gone
                await client.close()

    async def _on_sample(self, message: Msg) -> None:
        try:
            sample = decode_sample(message.data)
        except FieldError:
            self._received.labels("invalid").inc()
            return
        self._received.labels("ok").inc()
        self._observe(sample)

    async def _on_end(self, message: Msg) -> None:
        try:
            end = decode_unsampled(message.data)
        except FieldError:
            self._received.labels("invalid").inc()
            return
        self._received.labels("no_sample").inc()
        self._observe_end(end)

    async def _on_disconnect(self) -> None:
        self._connected.set(0)

    async def _on_reconnect(self) -> None:
        self._connected.set(1)
        self._told = None
        self._log.info("nats answers again")

    async def _on_error(self, error: Exception) -> None:
        # nats-py reports every attempt, twice a second while the server is away: once says it all.
        if type(error) is not self._told:
            self._told = type(error)
            self._log.info("nats error", error=type(error).__name__)
