"""The edge to JetStream: publishes samples with their dedup id and settles each by its acknowledgement.

Samples come from access logs (`offer`, which never blocks and never fails) and from POSTs (`deliver`, which returns
after the acknowledgement). One task pumps the outbox: as many in flight as the cap allows, acknowledgements over one
inbox. The stream is made if it isn't there, again after every reconnect and after an answer that it is gone; one that
exists with another configuration is brought to the settings in place.

While JetStream can't take samples, or too many wait, they go to the spool, where one is set: on disk, so that they
survive this process, and a POST is answered once they are there. They come back through the outbox.

Limits: without a spool, or when it is full, samples wait in the bounded outbox and die with the process; entries that
Envoy could not send are gone. Delivery is at least once, doubles vanish within the stream's window of 2 minutes, later
ones at the trainer, which remembers ids.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from services.collector.dead_letters import DeadLetters
from services.collector.metrics import CollectorMetrics
from services.collector.outbox import Fate, Outbox, Parcel
from services.collector.settings import CollectorSettings
from services.collector.spool import Record
from services.collector.spooling import Spooling
from shared import names
from shared.clock import Clock
from shared.lifecycle import Readiness
from shared.samples import LatencySample, encode_sample
from shared.streams import migration, samples_stream_config
from shared.verdicts import Unsampled, encode_unsampled

READY_CONDITION: Final = "nats"
_TICK_S: Final = 0.5
_RETRY_S: Final = 1.0
_NO_RESPONDERS: Final = "503"
_TOO_LARGE: Final = 10_054
"""JetStream's error of a message over the stream's limit: no repetition makes it acceptable. All other errors are the
stream's (full and set to discard new ones, sealed, without a quorum), and the sample is kept until it can store again.
"""
_TOO_LARGE_REASON: Final = "too_large"
_MAX_BURIALS: Final = 64

_KEPT: Final = frozenset({Fate.ACKNOWLEDGED, Fate.DUPLICATE, Fate.SPOOLED, Fate.DEAD_LETTER})
_DONE: Final = frozenset({Fate.ACKNOWLEDGED, Fate.DUPLICATE, Fate.DEAD_LETTER})
_SPOOL_BATCH: Final = 1_000
_MAX_TOLD: Final = 1_000
"""Messages to routers that wait while there is no connection: the newest."""


class NotDeliveredError(Exception):
    """A sample that JetStream didn't acknowledge; says why."""


class _Ack(msgspec.Struct):
    """JetStream's answer to a publish: an acknowledgement or an error."""

    duplicate: bool = False
    error: dict[str, Any] | None = None


class Publisher:
    """Owns the connection to NATS and the outbox. `run` is its one task; the other methods are for the same loop."""

    def __init__(
        self,
        settings: CollectorSettings,
        metrics: CollectorMetrics,
        readiness: Readiness,
        clock: Clock,
        spooling: Spooling | None = None,
    ) -> None:
        self._spooling = spooling
        self._draining = False
        self._settings = settings
        self._metrics = metrics
        self._readiness = readiness
        self._clock = clock
        self._told: deque[Unsampled] = deque(maxlen=_MAX_TOLD)
        self._told_errors: set[str] = set()
        self._dead_letters = DeadLetters(settings.pool, settings.stream)
        self._burials: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(settings.queue_samples, settings.max_outstanding_acks)
        self._wake = asyncio.Event()
        self._client: Client | None = None
        self._stream_known = False
        self._closing = False
        self._ensured_ms = 0.0
        self._next_attempt_ms = 0.0
        self._inbox = ""
        self._wanted = samples_stream_config(settings.stream.limits())
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

    def tell(self, end: Unsampled) -> None:
        """Let routers know of a request without a sample, once, if NATS is there: nothing depends on it."""
        self._metrics.untold.inc(len(self._told) == _MAX_TOLD)  # the oldest makes room
        self._told.append(end)
        self._wake.set()

    async def deliver(self, samples: list[LatencySample]) -> list[Fate]:
        """Publish and await every acknowledgement, or the disk, or the dead letter's; says of each which.

        Raises NotDeliveredError.
        """
        if not self.connected and (self._spooling is None or not self._spooling.usable):
            raise NotDeliveredError("no connection to NATS, or no stream there, and no room on disk")
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
        lost = [fate for fate in settled if fate not in _KEPT]
        if lost:
            raise NotDeliveredError(f"{len(lost)} of {len(samples)} samples: {lost[0]}")
        return settled

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
            self._draining = True
            deadline_ms = self._clock.monotonic_ms() + self._settings.drain_timeout_ms
            while not self._outbox.empty and self._clock.monotonic_ms() < deadline_ms:
                await self._pump()
                await self._pause()
        finally:
            for task in (connecting, stopping):
                task.cancel()
            if self._burials:
                await asyncio.wait(self._burials, timeout=_RETRY_S)
                for task in list(self._burials):
                    task.cancel()
                await asyncio.gather(*self._burials, return_exceptions=True)
            left = await self._spooled(self._outbox.abandon())
            for parcel in left:
                self._leave(parcel, Fate.ABANDONED)
            if self._spooling is not None:
                await self._spooling.close()
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
        self._told_errors.clear()
        self._wake.set()

    async def _connect_again(self) -> None:
        """nats-py closes for good after most errors that a server sends; the cause may pass."""
        self._log.warning("the connection to NATS was closed for good; connecting anew")
        await asyncio.sleep(_RETRY_S)
        await self._connect()

    async def _on_error(self, error: Exception) -> None:
        self._metrics.nats_errors.inc()
        # nats-py tells every attempt, twice a second while the server is away: once of a kind says it all.
        if (kind := type(error).__name__) not in self._told_errors:
            self._told_errors.add(kind)
            self._log.warning("error of the NATS client", error=kind)
        if self._client is None or not self._client.is_connected:
            self._unmet(type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._stream_known = False
        again = self._outbox.retry_all()
        self._unmet("disconnected")
        if not self._closing:
            self._log.warning("disconnected from NATS", to_send_again=again)

    async def _on_reconnected(self) -> None:
        self._log.info("reconnected to NATS")
        self._told_errors.clear()
        self._next_attempt_ms = 0.0
        self._wake.set()

    async def _pause(self) -> None:
        """Sleep until there is something to do; at most one tick, for time-outs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_TICK_S, self._settings.ack_timeout_ms / 4e3)):
                await self._wake.wait()
        self._wake.clear()

    async def _pump(self) -> None:
        now_ms = self._clock.monotonic_ms()
        stalled = self._outbox.retry_expired(now_ms, self._settings.ack_timeout_ms)
        if stalled:
            self._metrics.publish_retries.labels("timeout").inc(stalled)
        client = self._client
        able = client is not None and client.is_connected and bool(self._inbox) and now_ms >= self._next_attempt_ms
        if able and client is not None:
            await self._tell(client)
        if able and client is not None and not self._stream_known and not await self._ensure_stream(client):
            self._next_attempt_ms = self._clock.monotonic_ms() + _RETRY_S * 1e3
            able = False
        if self._spooling is not None:
            # What wasn't acknowledged in time goes to the disk: a stream that stalls must not hold a POST for long.
            await self._exchange(self._spooling, sending=able and not stalled)
        if not able or client is None:
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
                self._refused(token)
            except (nats.errors.Error, OSError):
                self._outbox.retry(token)
                self._next_attempt_ms = self._clock.monotonic_ms() + _RETRY_S * 1e3
                return

    async def _exchange(self, spooling: Spooling, *, sending: bool) -> None:
        """Move to the disk what can't be sent now, or is too much to hold; read back when there is room."""
        await spooling.flush()
        half = self._settings.queue_samples // 2
        while spooling.usable and (batch := self._outbox.take_waiting(half if sending else 0, _SPOOL_BATCH)):
            if not_stored := await self._spooled(batch):
                for parcel in self._outbox.put_back(not_stored):
                    self._leave(parcel, Fate.PUSHED_OUT)
                break
        if not sending or self._draining:
            return
        room = min(self._settings.max_outstanding_acks, half) - self._outbox.waiting
        if spooling.unread and room > 0:
            for position, record in await spooling.read(room):
                parcel = Parcel(record.decision_id, record.subject, record.payload, position=position)
                self._enqueue(parcel)

    async def _spooled(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Put parcels on the disk, or leave them there; returns those that aren't."""
        spooling = self._spooling
        if spooling is None:
            return list(parcels)
        fresh = [parcel for parcel in parcels if parcel.position is None]
        for parcel in parcels:
            if parcel.position is not None:
                self._leave(parcel, Fate.SPOOLED)
        if not fresh:
            return []
        if not await spooling.append([Record(each.decision_id, each.subject, each.payload) for each in fresh]):
            return fresh
        for parcel in fresh:
            self._leave(parcel, Fate.SPOOLED)
        return []

    async def _tell(self, client: Client) -> None:
        subject = names.unsampled_subject(self._settings.pool)
        with contextlib.suppress(nats.errors.Error, OSError):
            while self._told:
                await client.publish(subject, encode_unsampled(self._told.popleft()))

    async def _ensure_stream(self, client: Client) -> bool:
        """Make the stream if it isn't there. True when samples can be stored."""
        streams = client.jetstream(timeout=2.0)
        try:
            try:
                found = (await streams.stream_info(names.SAMPLES_STREAM)).config
            except NotFoundError:
                found = (await streams.add_stream(StreamConfig(**self._wanted))).config
                self._log.info("stream made", stream=names.SAMPLES_STREAM)
            found = await self._migrated(streams, found)
        except (APIError, nats.errors.Error, TimeoutError, OSError) as error:
            reason = getattr(error, "description", None) or type(error).__name__
            self._unmet(f"stream {names.SAMPLES_STREAM}: {reason}")
            self._log.warning("stream can't be used", stream=names.SAMPLES_STREAM, reason=str(reason))
            return False
        other = migration(found, self._wanted)
        self._metrics.stream_differs.set(bool(other))
        if other:
            self._log.warning("stream is configured otherwise and stays so", differences=other.describe())
        self._stream_known = True
        self._ensured_ms = self._clock.monotonic_ms()
        self._readiness.met(READY_CONDITION)
        self._readiness.degraded(READY_CONDITION, None)
        return True

    async def _migrated(self, streams: JetStreamContext, found: StreamConfig) -> StreamConfig:
        """Bring a stream that is there to the settings; it stays as it is where JetStream won't have that."""
        changes = migration(found, self._wanted).changes
        if not changes or not self._settings.stream.migrate:
            return found
        try:
            changed: StreamConfig = (await streams.update_stream(found.evolve(**changes))).config
        except APIError as error:
            self._log.warning("stream can't be changed", reason=error.description, changes=dict(changes))
            return found
        self._log.info("stream changed to the settings", stream=names.SAMPLES_STREAM, changes=dict(changes))
        return changed

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
        elif ack.error.get("err_code") == _TOO_LARGE:
            self._refused(token)
        else:
            self._stream_lost(token, "error")

    def _refused(self, token: str) -> None:
        """JetStream will never take this one: it becomes a dead letter, beside the samples behind it."""
        parcel, client = self._outbox.settle(token), self._client
        if parcel is None:
            return
        if client is None or len(self._burials) >= _MAX_BURIALS:
            self._leave(parcel, Fate.REFUSED)
            return
        task = asyncio.create_task(self._bury(client, parcel), name="dead letter")
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _bury(self, client: Client, parcel: Parcel) -> None:
        fate = Fate.REFUSED
        try:
            if await self._dead_letters.send(client, parcel.decision_id, parcel.payload, _TOO_LARGE_REASON):
                fate = Fate.DEAD_LETTER
        finally:
            self._leave(parcel, fate)

    def _stream_lost(self, token: str, reason: str) -> None:
        """The stream is gone or can't store at the moment: look at it again before more is sent."""
        self._metrics.publish_retries.labels(reason).inc()
        self._outbox.retry(token)
        if self._stream_known:
            self._stream_known = False
            self._unmet(f"stream {names.SAMPLES_STREAM}: {reason}")
            # At once, unless a look just now found nothing wrong.
            self._next_attempt_ms = self._ensured_ms + _RETRY_S * 1e3

    def _unmet(self, reason: str) -> None:
        """JetStream can't take samples. With a spool that is no reason to be left out: nobody else could either."""
        if self._spooling is None:
            self._readiness.unmet(READY_CONDITION, reason)
        else:
            self._readiness.degraded(READY_CONDITION, reason)

    def _enqueue(self, parcel: Parcel) -> None:
        if (pushed_out := self._outbox.offer(parcel)) is not None:
            self._leave(pushed_out, Fate.PUSHED_OUT)
        self._wake.set()

    def _leave(self, parcel: Parcel, fate: Fate) -> None:
        self._metrics.published.labels(fate.value).inc()
        if parcel.position is not None and self._spooling is not None:
            if fate in _DONE:
                self._spooling.settle(parcel.position)
            else:
                self._spooling.give_back(parcel.position)
        if parcel.settled is not None:
            parcel.settled(fate)


def _parcel(sample: LatencySample) -> Parcel:
    return Parcel(sample.decision_id, names.samples_subject(sample.pool), encode_sample(sample))
