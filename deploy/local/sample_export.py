"""`leadtime samples`: the samples that JetStream still holds of a pool, one JSON object a line. Edge: NATS, a file.

Read without acknowledgements by a consumer of its own: trainer and routers lose nothing by it. What comes in while it
runs is left to the next export.
"""

from pathlib import Path
from typing import Final

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from shared.errors import ConfigurationError, reason_of
from shared.names import SAMPLES_STREAM, samples_subject
from shared.settings import NatsSettings

_BATCH: Final = 500
_IDLE_S: Final = 60.0
_ANSWER_S: Final = 10.0


async def _silent(error: Exception) -> None:
    """nats-py would log a trace of what is raised as well."""
    del error


def _said(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error) or type(error).__name__


async def export_samples(settings: NatsSettings, pool: str, file: Path) -> int:
    """Write them, oldest first; how many. Raises ConfigurationError where NATS or the stream isn't there."""
    options = settings.connect_options() | {"allow_reconnect": False, "max_reconnect_attempts": 1, "error_cb": _silent}
    try:
        client = await nats.connect(**options, name="leadtime-samples")
    except (OSError, nats.errors.Error, TimeoutError) as error:
        raise ConfigurationError(f"nats {settings.servers}: can't be reached ({_said(error)})") from None
    written = 0
    try:
        stream = client.jetstream(timeout=_ANSWER_S)
        try:
            consumer = await stream.add_consumer(
                SAMPLES_STREAM,
                ConsumerConfig(
                    filter_subject=samples_subject(pool),
                    deliver_policy=DeliverPolicy.ALL,
                    ack_policy=AckPolicy.NONE,
                    inactive_threshold=_IDLE_S,
                    mem_storage=True,
                ),
            )
        except NotFoundError:
            raise ConfigurationError(f"nats {settings.servers}: there is no stream {SAMPLES_STREAM}") from None
        left = consumer.num_pending or 0
        subscription = await stream.pull_subscribe_bind(consumer.name, SAMPLES_STREAM)
        with file.open("wb") as out:
            while written < left:
                for message in await subscription.fetch(min(_BATCH, left - written), timeout=_ANSWER_S):
                    out.write(message.data + b"\n")
                    written += 1
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise ConfigurationError(f"nats {settings.servers}: the export broke off ({_said(error)})") from None
    finally:
        await client.close()
    return written
