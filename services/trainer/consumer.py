"""The edge to JetStream: rebuilds the window by a replay, then follows the stream with the pool's durable consumer.

A start reads the newest samples through an ephemeral consumer without acknowledgements; the durable one goes on from
there. Messages are acknowledged once the window holds them, never after training, so that a long fit causes no
redelivery. A message that can't be a sample is terminated and counted, and blocks nothing.

Limits: nats-py's fetch of a partly filled batch returns only at its timeout, hence short ones; a silent consumer is
asked about every 5 s, because a deleted one may give no sign. NATS may be away at the start or at any time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamConfig
from nats.js.errors import NotFoundError

from services.trainer.intake import POISON, Intake, Reject, Taken
from services.trainer.metrics import TrainerMetrics
from services.trainer.settings import TrainerSettings
from shared.cancellation import raise_if_cancelled
from shared.names import SAMPLES_STREAM, samples_subject, trainer_durable
from shared.streams import samples_stream_config

RETRY_S: Final = 0.5
IDLE_CHECK_S: Final = 5.0
CALL_TIMEOUT_S: Final = 2.0
REPLAY_IDLE_S: Final = 30.0
MAX_ACK_PENDING: Final = 5_000
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
    ) -> None:
        """`sink(taken, replayed)` gets what was taken of each batch, `on_rebuilt` is called when a replay is over."""
        self._settings = settings
        self._intake = intake
        self._sink = sink
        self._on_rebuilt = on_rebuilt
        self._metrics = metrics
        self._log = structlog.get_logger()
        self._subject = samples_subject(settings.pool)
        self._durable = trainer_durable(settings.pool)
        self.rebuilt = False
        """Whether the replay of this run is over."""
        self._last_sequence = 0
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
        await self._ensure_durable(stream)
        subscription = await stream.pull_subscribe_bind(durable=self._durable, stream=SAMPLES_STREAM)
        try:
            self._recovered()
            await self._follow(subscription)
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _ensure_stream(self, stream: JetStreamContext) -> None:
        try:
            info = await stream.stream_info(SAMPLES_STREAM)
        except NotFoundError:
            info = await stream.add_stream(StreamConfig(**samples_stream_config()))
            self._log.info("stream made", stream=SAMPLES_STREAM)
        if info.created != self._stream_created:
            # Another stream than before counts from 1 again.
            self._stream_created = info.created
            self._last_sequence = 0

    async def _ensure_durable(self, stream: JetStreamContext) -> None:
        with contextlib.suppress(NotFoundError):
            await stream.consumer_info(SAMPLES_STREAM, self._durable)
            return
        start: dict[str, Any] = {}
        if self._last_sequence:
            start = {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": self._last_sequence + 1}
        await stream.add_consumer(
            SAMPLES_STREAM,
            ConsumerConfig(
                durable_name=self._durable,
                filter_subject=self._subject,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._settings.ack_wait_ms / 1e3,
                max_deliver=self._settings.max_deliver,
                max_ack_pending=MAX_ACK_PENDING,
                **start,
            ),
        )
        self._log.info("durable consumer made", durable=self._durable, **start)

    async def _replay(self, stream: JetStreamContext) -> None:
        """Hand the newest samples of the stream to the sink, without acknowledgements."""
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
                fresh = messages[max(0, skipped - received) :]
                received += len(messages)
                self._last_sequence = messages[-1].metadata.sequence.stream
                taken += self._examine(fresh, replayed=True)[0]
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
                await stream.delete_consumer(SAMPLES_STREAM, info.name)
        self._log.info("window rebuilt from the stream", messages=received, skipped=skipped, taken=taken)

    async def _follow(self, subscription: JetStreamContext.PullSubscription) -> None:
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
                    await (message.term() if position in poison else message.ack())
                checked_s = loop.time()
            elif loop.time() - checked_s > IDLE_CHECK_S:
                await subscription.consumer_info()
                self._recovered()
                checked_s = loop.time()

    def _examine(self, messages: Sequence[Msg], *, replayed: bool) -> tuple[int, frozenset[int]]:
        """Hand on what teaches; returns how many did, and the positions of poison."""
        taken: list[Taken] = []
        poison: list[int] = []
        for position, message in enumerate(messages):
            outcome = self._intake.examine(message.data)
            if isinstance(outcome, Taken):
                taken.append(outcome)
                continue
            # After a replay the durable consumer brings the same samples once more; that is no fault of the sender.
            if outcome is not Reject.DUPLICATE or not replayed:
                self._metrics.rejected(outcome)
            if outcome in POISON:
                poison.append(position)
        if taken:
            self._sink(taken, replayed)
        return len(taken), frozenset(poison)

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
