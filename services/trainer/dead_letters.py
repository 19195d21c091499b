"""The way out for messages that can't be used: to the dead-letter stream, each with its reason. Edge: JetStream.

A message is taken off the samples' stream only once its dead letter is acknowledged; while that fails, JetStream sends
it again later, and the samples behind it go on. A message that was delivered too often without an acknowledgement (it
may have ended a trainer each time) is told by an advisory of the server, and is fetched and moved likewise.

Limits: advisories aren't stored; one that comes while no trainer listens leaves its message where it is, skipped.
"""

from typing import Any, Final

import msgspec
import nats
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from services.trainer.metrics import TrainerMetrics
from shared import names
from shared.settings import StreamSettings
from shared.streams import dead_stream_config, migration

MAX_DELIVER: Final = "max_deliver"
"""The reason of a message that was delivered as often as allowed and never acknowledged."""
CALL_TIMEOUT_S: Final = 2.0
_ERRORS: Final = (nats.errors.Error, TimeoutError, OSError)


class _Advisory(msgspec.Struct):
    """JetStream's notice of a message that it gives up."""

    stream_seq: int


class DeadLetters:
    """One pool's dead letters."""

    def __init__(self, pool: str, settings: StreamSettings, metrics: TrainerMetrics) -> None:
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._advisories = msgspec.json.Decoder(_Advisory)
        self._log = structlog.get_logger()

    async def ensure(self, stream: JetStreamContext) -> None:
        """Make the stream, or bring it to the settings. Raises nats.errors.Error."""
        wanted = dead_stream_config(self._settings.limits())
        try:
            found = (await stream.stream_info(names.DEAD_STREAM)).config
        except NotFoundError:
            await stream.add_stream(StreamConfig(**wanted))
            self._log.info("stream made", stream=names.DEAD_STREAM)
            return
        changes = migration(found, wanted).changes
        if changes and self._settings.migrate:
            try:
                await stream.update_stream(found.evolve(**changes))
            except APIError as error:
                self._log.warning("stream can't be changed", stream=names.DEAD_STREAM, reason=error.description)

    async def send(self, stream: JetStreamContext, data: bytes, reason: str, sequence: int) -> bool:
        """Store one; False (counted) if it isn't stored. `sequence` is the message's own in the samples' stream."""
        source = f"{names.SAMPLES_STREAM}:{sequence}"
        headers = {
            names.DEAD_REASON_HEADER: reason,
            names.DEAD_SOURCE_HEADER: source,
            names.DEDUP_HEADER: f"{source}:{reason}",
        }
        try:
            await stream.publish(names.dead_subject(self._pool), data, timeout=CALL_TIMEOUT_S, headers=headers)
        except _ERRORS:
            self._metrics.dead_letters.labels("failed").inc()
            return False
        self._metrics.dead_letters.labels(reason).inc()
        return True

    async def watch(self, client: Client, stream: JetStreamContext, durable: str) -> Any:
        """Subscribe to the advisories of the pool's durable consumer; returns the subscription."""

        async def on_advisory(message: Msg) -> None:
            await self._given_up(stream, message.data)

        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{names.SAMPLES_STREAM}.{durable}"
        return await client.subscribe(subject, cb=on_advisory)

    async def _given_up(self, stream: JetStreamContext, advisory: bytes) -> None:
        try:
            sequence = self._advisories.decode(advisory).stream_seq
            message = await stream.get_msg(names.SAMPLES_STREAM, sequence)
        except (msgspec.MsgspecError, *_ERRORS):
            self._metrics.dead_letters.labels("failed").inc()
            return
        self._log.warning("a message was delivered too often", sequence=sequence)
        await self.send(stream, message.data or b"", MAX_DELIVER, sequence)
