"""Samples that JetStream refuses for what they are: to the dead-letter stream, each with its reason. Edge: JetStream.

The stream is made if it isn't there, as the trainer makes it. A sample is kept as far as a message holds it: whoever
looks into it wants to know what it was.

Limits: tries three times within some seconds; a sample that isn't stored then is the caller's to count.
"""

import asyncio
from typing import Final

import nats
import structlog
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import NoStreamResponseError

from shared import names
from shared.settings import StreamSettings
from shared.streams import MAX_SAMPLE_BYTES, dead_stream_config

_TRIES: Final = 3
_CALL_TIMEOUT_S: Final = 2.0
_AGAIN_S: Final = 0.5
_HEADER_BYTES: Final = 1_024
_ERRORS: Final = (nats.errors.Error, TimeoutError, OSError)


class DeadLetters:
    """One pool's, as the collector writes them."""

    def __init__(self, pool: str, settings: StreamSettings) -> None:
        self._subject = names.dead_subject(pool)
        self._wanted = dead_stream_config(settings.limits())
        self._log = structlog.get_logger()

    async def send(self, client: Client, decision_id: str, payload: bytes, reason: str) -> bool:
        """Store one, cut to what a message holds; whether JetStream acknowledged it."""
        body = payload[: max(0, min(MAX_SAMPLE_BYTES, client.max_payload - _HEADER_BYTES))]
        headers = {
            names.DEAD_REASON_HEADER: reason,
            names.DEAD_SOURCE_HEADER: f"collector:{decision_id}",
            names.DEDUP_HEADER: f"{decision_id}:{reason}",
        }
        streams = client.jetstream(timeout=_CALL_TIMEOUT_S)
        for tried in range(_TRIES):
            if tried:
                await asyncio.sleep(_AGAIN_S)
            try:
                await streams.publish(self._subject, body, timeout=_CALL_TIMEOUT_S, headers=headers)
            except NoStreamResponseError:
                try:
                    await streams.add_stream(StreamConfig(**self._wanted))
                except _ERRORS as error:
                    self._log.warning("dead-letter stream can't be made", error=type(error).__name__)
            except _ERRORS as error:
                self._log.warning("dead letter not stored", error=type(error).__name__)
            else:
                self._log.warning("a sample that JetStream refuses is a dead letter", reason=reason)
                return True
        return False
