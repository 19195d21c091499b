"""The edge to JetStream: rebuilds the window by a replay, then follows the stream with the pool's durable consumer.

A start reads the newest samples through an ephemeral consumer without acknowledgements; the durable one goes on from
there. Messages are acknowledged once the window holds them, never after training, so that a long fit causes no
redelivery. A message that can't be a sample becomes a dead letter, is terminated and counted, and blocks nothing; at a
pool's very first start, when there is no durable consumer yet, those that the replay meets too. A durable consumer that
is there is brought to the settings, in place where JetStream allows it.

Limits: nats-py's fetch of a partly filled batch returns only at its timeout, hence short ones; a silent consumer is
asked about every 5 s, because a deleted one may give no sign. NATS may be away at the start or at any time.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError

from services.trainer.dead_letters import DeadLetters
from services.trainer.intake import POISON, Intake, Reject, Taken
from services.trainer.metrics import TrainerMetrics
from services.trainer.settings import TrainerSettings
from shared.cancellation import raise_if_cancelled
from shared.clock import Clock
from shared.names import SAMPLES_STREAM, samples_subject, trainer_durable
from shared.streams import migration, samples_stream_config

RETRY_S: Final = 0.5
IDLE_CHECK_S: Final = 5.0
CALL_TIMEOUT_S: Final = 2.0
REPLAY_IDLE_S: Final = 30.0
_BACKOFF_STEPS: Final = 4
# How much later JetStream sends a message again whose dead letter couldn't be stored.
DEAD_LETTER_AGAIN_S: Final = 5.0
# What a call of NATS may raise while it is away or at fault.
_ERRORS: Final = (nats.errors.Error, TimeoutError, OSError)

Sink = Callable[[Sequence[Taken], bool], None]


class SampleConsumer:
    """Reads one pool's samples. `run` is its one task; the sink is called in the same loop."""

    def __init__(
        self,
        settings: TrainerSettings,
        intake: Intake,
        sink: Sink,
        on_rebuilt: Callable[[], None],
        metrics: TrainerMetrics,
        clock: Clock,
    ) -> None:
        """`sink(taken, replayed)` gets what was taken of each batch, `on_rebuilt` is called when a replay is over."""
        self._settings = settings
        self._intake = intake
        self._sink = sink
        self._on_rebuilt = on_rebuilt
        self._metrics = metrics
        self._clock = clock
        self._dead_letters = DeadLetters(settings.pool, settings.stream, metrics)
        self._log = structlog.get_logger()
        self._subject = samples_subject(settings.pool)
        self._durable = trainer_durable(settings.pool)
        self.rebuilt = False
        """Whether the replay of this run is over."""
        self._last_sequence = 0
        self._poison: deque[tuple[int, Reject]] = deque()
        """Sequence numbers of what a replay met and no durable consumer has dealt with; at most the stream's length."""
        self._stream_created: Any = None
        self._failing = False
        self.connected = False
        """Whether the last call of JetStream succeeded."""

    async def run(self) -> None:
        """Consume until cancelled."""
        self.rebuilt = False
        while True:
            try:
                async with self._connection() as client:
                    # nats-py closes for good after most errors that a server sends: then another client takes over.
                    while not client.is_closed:
                        await self._until_it_fails(client)
            except _ERRORS as error:
                self._failed(error)
            raise_if_cancelled()
            await asyncio.sleep(RETRY_S)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Client]:
        async def on_error(error: Exception) -> None:
            self._failed(error)

        client = await nats.connect(
            name=f"leadtime-trainer-{self._settings.pool}", error_cb=on_error, **self._settings.nats.connect_options()
        )
        try:
            yield client
        finally:
            self.connected = False
            with contextlib.suppress(*_ERRORS):
                await client.flush(1)
            with contextlib.suppress(*_ERRORS):
                await client.close()

    async def _until_it_fails(self, client: Client) -> None:
        raise_if_cancelled()
        try:
            await self._session(client)
        except _ERRORS as error:
            raise_if_cancelled()
            self._failed(error)
            await asyncio.sleep(RETRY_S)

    async def _session(self, client: Client) -> None:
        """Ensure, replay once, follow; ends only by an error."""
        stream = client.jetstream(timeout=CALL_TIMEOUT_S)
        await self._ensure_stream(stream)
        if not self.rebuilt:
            await self._replay(stream)
            self.rebuilt = True
            self._on_rebuilt()
        await self._dead_letters.ensure(stream)
        await self._bury_replayed(stream)
        await self._ensure_durable(stream)
        advisories = await self._dead_letters.watch(client, stream, self._durable)
        subscription = await stream.pull_subscribe_bind(durable=self._durable, stream=SAMPLES_STREAM)
        try:
            self._recovered()
            await self._follow(stream, subscription)
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
                await advisories.unsubscribe()

    async def _ensure_stream(self, stream: JetStreamContext) -> None:
        try:
            info = await stream.stream_info(SAMPLES_STREAM)
        except NotFoundError:
            info = await stream.add_stream(StreamConfig(**samples_stream_config(self._settings.stream.limits())))
            self._log.info("stream made", stream=SAMPLES_STREAM)
        if info.created != self._stream_created:
            # Another stream than before counts from 1 again.
            self._stream_created = info.created
            self._last_sequence = 0
            self._poison.clear()

    async def _ensure_durable(self, stream: JetStreamContext) -> None:
        start: dict[str, Any] = {}
        if self._last_sequence:
            # Poison that isn't buried yet comes again, with the samples behind it, which are known as doubles.
            first = self._poison[0][0] if self._poison else self._last_sequence + 1
            start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": first}
        ack_wait_s = self._settings.ack_wait_ms / 1e3
        again = range(min(self._settings.max_deliver - 1, _BACKOFF_STEPS))
        wanted = {
            "filter_subject": self._subject,
            "ack_policy": AckPolicy.EXPLICIT,
            "ack_wait": ack_wait_s,
            # A sample that ends the trainer must not do so as often as it can be started.
            "backoff": [ack_wait_s * 2.0**step for step in again],
            "max_deliver": self._settings.max_deliver,
            "max_ack_pending": self._settings.max_ack_pending,
        }
        with contextlib.suppress(NotFoundError):
            info = await stream.consumer_info(SAMPLES_STREAM, self._durable)
            if not await self._migrated(stream, info, wanted):
                # What it had acknowledged stays so: its successor begins behind it.
                after = info.ack_floor.stream_seq if info.ack_floor else 0
                await stream.delete_consumer(SAMPLES_STREAM, self._durable)
                start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": after + 1}
                await self._make_durable(stream, wanted, start)
            return
        await self._make_durable(stream, wanted, start)

    async def _make_durable(self, stream: JetStreamContext, wanted: dict[str, Any], start: dict[str, Any]) -> None:
        await stream.add_consumer(SAMPLES_STREAM, ConsumerConfig(durable_name=self._durable, **wanted, **start))
        self._log.info("durable consumer made", durable=self._durable, **start)

    async def _migrated(self, stream: JetStreamContext, info: ConsumerInfo, wanted: dict[str, Any]) -> bool:
        """Bring the durable consumer that is there to the settings; False if it must be made anew."""
        found = info.config
        if found is None:
            return False
        change = migration(found, wanted, fixed=frozenset({"ack_policy"}))
        if not change:
            return True
        if change.fixed:
            return False
        try:
            await stream.add_consumer(SAMPLES_STREAM, found.evolve(**change.changes))
        except APIError as error:
            self._log.warning("durable consumer can't be changed in place", reason=error.description)
            return False
        self._log.info("durable consumer changed to the settings", durable=self._durable, **change.changes)
        return True

    async def _replay(self, stream: JetStreamContext) -> None:
        """Hand the newest samples of the stream to the sink, without acknowledgements; remember all poison."""
        self._poison.clear()
        info = await stream.add_consumer(
            SAMPLES_STREAM,
            ConsumerConfig(
                filter_subject=self._subject,
                ack_policy=AckPolicy.NONE,
                inactive_threshold=REPLAY_IDLE_S,
                mem_storage=True,
            ),
        )
        total = info.num_pending or 0
        skipped = max(0, total - self._settings.replay_samples)
        subscription = await stream.pull_subscribe_bind(consumer=info.name, stream=SAMPLES_STREAM)
        received, taken = 0, 0
        try:
            while received < total:
                size = min(self._settings.fetch_samples, total - received)
                messages = await _fetch(subscription, size, CALL_TIMEOUT_S)
                if not messages:
                    # The rest may have aged out of the stream since it was counted.
                    left = await stream.consumer_info(SAMPLES_STREAM, info.name)
                    if not left.num_pending:
                        break
                    continue
                old = messages[: max(0, skipped - received)]
                fresh = messages[len(old) :]
                received += len(messages)
                self._last_sequence = messages[-1].metadata.sequence.stream
                self._remember_poison(old, self._poison_of(old))
                count, poison = self._examine(fresh, replayed=True)
                taken += count
                self._remember_poison(fresh, poison)
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
                await stream.delete_consumer(SAMPLES_STREAM, info.name)
        self._log.info("window rebuilt from the stream", messages=received, skipped=skipped, taken=taken)

    def _poison_of(self, messages: Sequence[Msg]) -> dict[int, Reject]:
        """The poison among messages that are too old to teach, by position."""
        now_unix_ms = self._clock.unix_ms()
        outcomes = [self._intake.examine(message.data, now_unix_ms) for message in messages]
        return {place: it for place, it in enumerate(outcomes) if isinstance(it, Reject) and it in POISON}

    def _remember_poison(self, messages: Sequence[Msg], poison: dict[int, Reject]) -> None:
        self._poison += [(messages[place].metadata.sequence.stream, poison[place]) for place in sorted(poison)]

    async def _bury_replayed(self, stream: JetStreamContext) -> None:
        """Poison that the durable consumer will never bring, since it begins behind it, becomes dead letters here.

        Where that consumer is there already, it has brought what came before, and will bring what comes after.
        """
        if not self._poison:
            return
        try:
            await stream.consumer_info(SAMPLES_STREAM, self._durable)
        except NotFoundError:
            pass
        else:
            self._poison.clear()
        while self._poison:
            sequence, reason = self._poison[0]
            with contextlib.suppress(NotFoundError):  # aged out meanwhile
                message = await stream.get_msg(SAMPLES_STREAM, sequence)
                if not await self._dead_letters.send(stream, message.data or b"", reason.value, sequence):
                    return
            self._poison.popleft()

    async def _follow(self, stream: JetStreamContext, subscription: JetStreamContext.PullSubscription) -> None:
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while True:
            messages = await _fetch(subscription, self._settings.fetch_samples, self._settings.fetch_timeout_ms / 1e3)
            if messages:
                self._recovered()
                self._last_sequence = max(self._last_sequence, messages[-1].metadata.sequence.stream)
                self._metrics.redeliveries.inc(sum(message.metadata.num_delivered > 1 for message in messages))
                _, poison = self._examine(messages, replayed=False)
                for position, message in enumerate(messages):
                    if position not in poison:
                        await message.ack()
                for position, reason in poison.items():
                    await self._bury(stream, messages[position], reason)
                checked_s = loop.time()
            elif loop.time() - checked_s > IDLE_CHECK_S:
                await subscription.consumer_info()
                self._recovered()
                checked_s = loop.time()

    async def _bury(self, stream: JetStreamContext, message: Msg, reason: Reject) -> None:
        """Out of the stream's way, after the samples of its batch: a dead letter first, and again later if it fails."""
        if await self._dead_letters.send(stream, message.data, reason.value, message.metadata.sequence.stream):
            await message.term()
        else:
            await message.nak(delay=DEAD_LETTER_AGAIN_S)

    def _examine(self, messages: Sequence[Msg], *, replayed: bool) -> tuple[int, dict[int, Reject]]:
        """Hand on what teaches; returns how many did, and the poison by its position."""
        taken: list[Taken] = []
        poison: dict[int, Reject] = {}
        now_unix_ms = self._clock.unix_ms()
        for position, message in enumerate(messages):
            outcome = self._intake.examine(message.data, now_unix_ms)
            if isinstance(outcome, Taken):
                taken.append(outcome)
                continue
            # After a replay the durable consumer brings the same samples once more; that is no fault of the sender.
            if outcome is not Reject.DUPLICATE or not replayed:
                self._metrics.rejected(outcome)
            if outcome in POISON:
                poison[position] = outcome
        if taken:
            self._sink(taken, replayed)
        return len(taken), poison

    def _failed(self, error: Exception) -> None:
        self._metrics.stream_failed()
        self.connected = False
        if not self._failing:
            self._failing = True
            self._log.warning("samples can't be read; retrying", error=type(error).__name__, detail=str(error)[:200])

    def _recovered(self) -> None:
        self.connected = True
        if self._failing:
            self._failing = False
            self._log.info("samples are read again")


async def _fetch(subscription: JetStreamContext.PullSubscription, size: int, timeout_s: float) -> list[Msg]:
    """Up to `size` messages; none when the time is over. Raises nats.errors.Error."""
    messages: list[Msg] = []
    with contextlib.suppress(TimeoutError):
        messages = list(await subscription.fetch(size, timeout=timeout_s))
    raise_if_cancelled()
    return messages
