"""The edge to JetStream: publishes samples with their dedup id and settles each by its acknowledgement.

Samples come from access logs (`offer`, which never blocks and never fails) and from POSTs (`deliver`, which returns
after the acknowledgement). One task pumps the outbox: as many in flight as the cap allows, acknowledgements over one
inbox. The stream is made if it isn't there, again after every reconnect and after an answer that it is gone; one that
exists with another configuration is reported and left alone.

Limits: while NATS is away samples wait in the bounded outbox; after a restart of the collector those are gone, as are
entries that Envoy could not send. Delivery is at least once, doubles vanish within the stream's window of 2 minutes.
"""

import asyncio
import contextlib
from typing import Any, Final

import msgspec
import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from services.collector.metrics import CollectorMetrics
from services.collector.outbox import Fate, Outbox, Parcel
from services.collector.settings import CollectorSettings
from shared import names
from shared.clock import Clock
from shared.lifecycle import Readiness
from shared.samples import LatencySample, encode_sample
from shared.streams import samples_stream_config

READY_CONDITION: Final = "nats"
_TICK_S: Final = 0.5
_RETRY_S: Final = 1.0
_NO_RESPONDERS: Final = "503"
_BAD_REQUEST: Final = 400
"""JetStream's code for a message that is itself at fault: no repetition makes it acceptable."""


class NotDeliveredError(Exception):
    """A sample that JetStream didn't acknowledge; says why."""


class _Ack(msgspec.Struct):
    """JetStream's answer to a publish: an acknowledgement or an error."""

    duplicate: bool = False
    error: dict[str, Any] | None = None


def differences(found: StreamConfig) -> list[str]:
    """What an existing stream has otherwise than we would make it, as `field: found, wanted`."""
    return [
        f"{field}: {getattr(found, field)}, wanted {wanted}"
        for field, wanted in samples_stream_config().items()
        if getattr(found, field) != wanted
    ]


class Publisher:
    """Owns the connection to NATS and the outbox. `run` is its one task; the other methods are for the same loop."""

    def __init__(
        self, settings: CollectorSettings, metrics: CollectorMetrics, readiness: Readiness, clock: Clock
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._readiness = readiness
        self._clock = clock
        self._outbox = Outbox(settings.queue_samples, settings.max_outstanding_acks)
        self._wake = asyncio.Event()
        self._client: Client | None = None
        self._stream_known = False
        self._closing = False
        self._ensured_ms = 0.0
        self._next_attempt_ms = 0.0
        self._inbox = ""
        self._decoder = msgspec.json.Decoder(_Ack)
        self._log = structlog.get_logger()
        metrics.watch_outbox(lambda: self._outbox.waiting, lambda: self._outbox.outstanding)

    @property
    def connected(self) -> bool:
        """Whether a sample offered now can be sent."""
        return self._client is not None and self._client.is_connected and self._stream_known

    def offer(self, sample: LatencySample) -> None:
        """Queue a sample; the oldest waiting one goes if there is no room."""
        self._enqueue(_parcel(sample))

    async def deliver(self, samples: list[LatencySample]) -> list[bool]:
        """Publish and await every acknowledgement; says of each whether it was new. Raises NotDeliveredError."""
        if not self.connected:
            raise NotDeliveredError("no connection to NATS, or no stream there")
        loop = asyncio.get_running_loop()
        fates: list[asyncio.Future[Fate]] = []
        for sample in samples:
            parcel = _parcel(sample)
            fate: asyncio.Future[Fate] = loop.create_future()
            parcel.settled = lambda outcome, fate=fate: None if fate.done() else fate.set_result(outcome)
            fates.append(fate)
            self._enqueue(parcel)
        try:
            async with asyncio.timeout(2 * self._settings.ack_timeout_ms / 1e3):
                settled = await asyncio.gather(*fates)
        except TimeoutError:
            raise NotDeliveredError("JetStream didn't acknowledge in time") from None
        lost = [fate for fate in settled if fate not in {Fate.ACKNOWLEDGED, Fate.DUPLICATE}]
        if lost:
            raise NotDeliveredError(f"{len(lost)} of {len(samples)} samples: {lost[0]}")
        return [fate is Fate.ACKNOWLEDGED for fate in settled]

    async def run(self, stop: asyncio.Event) -> None:
        """Connect, and pump until `stop` is set and the outbox is empty or the drain's time is over."""
        connecting = asyncio.create_task(self._connect(), name="nats connect")
        stopping = asyncio.create_task(self._wake_at(stop), name="publisher stop")
        try:
            while not stop.is_set():
                if connecting.done():
                    connecting.result()  # settings with which no connection can ever be made end the service
                    if self._client is not None and self._client.is_closed:
                        connecting = asyncio.create_task(self._connect_again(), name="nats connect")
                await self._pump()
                await self._pause()
            deadline_ms = self._clock.monotonic_ms() + self._settings.drain_timeout_ms
            while not self._outbox.empty and self._clock.monotonic_ms() < deadline_ms:
                await self._pump()
                await self._pause()
        finally:
            for task in (connecting, stopping):
                task.cancel()
            left = self._outbox.abandon()
            for parcel in left:
                self._leave(parcel, Fate.ABANDONED)
            if left:
                self._log.warning("samples left undelivered at the stop", samples=len(left))
            self._closing = True
            if self._client is not None:
                with contextlib.suppress(Exception):
                    await self._client.close()

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()

    async def _connect(self) -> None:
        client = Client()
        # Set at once: nats-py's `connect` returns only when a server answered, however long that takes.
        self._client = client
        self._inbox = ""
        await client.connect(
            **self._settings.nats.connect_options(),
            name=f"leadtime-collector-{self._settings.pool}",
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
        )
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        self._log.info("connected to NATS")
        self._wake.set()

    async def _connect_again(self) -> None:
        """nats-py closes for good after most errors that a server sends; the cause may pass."""
        self._log.warning("the connection to NATS was closed for good; connecting anew")
        await asyncio.sleep(_RETRY_S)
        await self._connect()

    async def _on_error(self, error: Exception) -> None:
        self._metrics.nats_errors.inc()
        if self._client is None or not self._client.is_connected:
            self._readiness.unmet(READY_CONDITION, type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._stream_known = False
        again = self._outbox.retry_all()
        self._readiness.unmet(READY_CONDITION, "disconnected")
        if not self._closing:
            self._log.warning("disconnected from NATS", to_send_again=again)

    async def _on_reconnected(self) -> None:
        self._log.info("reconnected to NATS")
        self._next_attempt_ms = 0.0
        self._wake.set()

    async def _pause(self) -> None:
        """Sleep until there is something to do; at most one tick, for time-outs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
        self._wake.clear()

    async def _pump(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if expired := self._outbox.retry_expired(now_ms, self._settings.ack_timeout_ms):
            self._metrics.publish_retries.labels("timeout").inc(expired)
        client = self._client
        if client is None or not client.is_connected or not self._inbox or now_ms < self._next_attempt_ms:
            return
        if not self._stream_known and not await self._ensure_stream(client):
            self._next_attempt_ms = self._clock.monotonic_ms() + _RETRY_S * 1e3
            return
        for token, parcel in self._outbox.sendable(now_ms):
            try:
                await client.publish(
                    parcel.subject,
                    parcel.payload,
                    reply=f"{self._inbox}.{token}",
                    headers={names.DEDUP_HEADER: parcel.decision_id},
                )
            except nats.errors.MaxPayloadError:
                if (refused := self._outbox.settle(token)) is not None:
                    self._leave(refused, Fate.REFUSED)
            except (nats.errors.Error, OSError):
                self._outbox.retry(token)
                self._next_attempt_ms = self._clock.monotonic_ms() + _RETRY_S * 1e3
                return

    async def _ensure_stream(self, client: Client) -> bool:
        """Make the stream if it isn't there. True when samples can be stored."""
        streams = client.jetstream(timeout=2.0)
        try:
            try:
                found = (await streams.stream_info(names.SAMPLES_STREAM)).config
            except NotFoundError:
                found = (await streams.add_stream(StreamConfig(**samples_stream_config()))).config
                self._log.info("stream made", stream=names.SAMPLES_STREAM)
        except (APIError, nats.errors.Error, TimeoutError, OSError) as error:
            reason = getattr(error, "description", None) or type(error).__name__
            self._readiness.unmet(READY_CONDITION, f"stream {names.SAMPLES_STREAM}: {reason}")
            self._log.warning("stream can't be used", stream=names.SAMPLES_STREAM, reason=str(reason))
            return False
        other = differences(found)
        self._metrics.stream_differs.set(bool(other))
        if other:
            self._log.warning("stream is configured otherwise and stays so", differences=other)
        self._stream_known = True
        self._ensured_ms = self._clock.monotonic_ms()
        self._readiness.met(READY_CONDITION)
        return True

    async def _on_answer(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        self._wake.set()
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            self._stream_lost(token, "no_stream")
            return
        try:
            ack = self._decoder.decode(message.data)
        except (msgspec.MsgspecError, RecursionError):
            self._metrics.publish_retries.labels("bad_answer").inc()
            return  # the time-out sends it again
        if ack.error is None:
            if (parcel := self._outbox.settle(token)) is not None:
                self._leave(parcel, Fate.DUPLICATE if ack.duplicate else Fate.ACKNOWLEDGED)
        elif ack.error.get("code") == _BAD_REQUEST:
            if (parcel := self._outbox.settle(token)) is not None:
                self._leave(parcel, Fate.REFUSED)
                self._log.warning("JetStream refused a sample", error=ack.error.get("description"))
        else:
            self._stream_lost(token, "error")

    def _stream_lost(self, token: str, reason: str) -> None:
        """The stream is gone or can't store at the moment: look at it again before more is sent."""
        self._metrics.publish_retries.labels(reason).inc()
        self._outbox.retry(token)
        if self._stream_known:
            self._stream_known = False
            self._readiness.unmet(READY_CONDITION, f"stream {names.SAMPLES_STREAM}: {reason}")
            # At once, unless a look just now found nothing wrong.
            self._next_attempt_ms = self._ensured_ms + _RETRY_S * 1e3

    def _enqueue(self, parcel: Parcel) -> None:
        if (pushed_out := self._outbox.offer(parcel)) is not None:
            self._leave(pushed_out, Fate.PUSHED_OUT)
        self._wake.set()

    def _leave(self, parcel: Parcel, fate: Fate) -> None:
        self._metrics.published.labels(fate.value).inc()
        if parcel.settled is not None:
            parcel.settled(fate)


def _parcel(sample: LatencySample) -> Parcel:
    return Parcel(sample.decision_id, names.samples_subject(sample.pool), encode_sample(sample))
