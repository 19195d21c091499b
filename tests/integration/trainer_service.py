"""A whole trainer in this process, and a publisher of samples, for integration tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import nats
import orjson
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from services.trainer.main import serve
from services.trainer.settings import TrainerSettings
from shared.names import DEDUP_HEADER, samples_subject
from shared.samples import LatencySample, encode_sample
from shared.settings import NatsSettings, RedisSettings
from shared.streams import samples_stream_config
from tests.servers import fetch, free_port, until


@dataclass(slots=True)
class RunningTrainer:
    url: str
    task: asyncio.Task[None]
    stop: asyncio.Event

    async def model(self) -> dict[str, Any]:
        """`/v1/model`, or an empty object while nobody answers."""
        status, body = await fetch(f"{self.url}/v1/model")
        return orjson.loads(body) if status == 200 else {}

    async def metric(self, line: str) -> float:
        """Value of the metric whose line begins so; 0 where there is none yet."""
        _, body = await fetch(f"{self.url}/metrics")
        found = (float(text.rsplit(" ", 1)[1]) for text in body.decode().splitlines() if text.startswith(line + " "))
        return next(found, 0.0)

    async def taken(self, count: int) -> None:
        """Await that the window took so many samples."""

        async def enough() -> bool:
            return (await self.model()).get("window", {}).get("taken") == count

        await until(enough, f"{count} samples taken")

    async def published(self, *, after: str | None = None) -> str:
        """Await a published bundle other than `after`, and return its version."""

        async def other() -> str | None:
            bundle = (await self.model()).get("bundle") or {}
            return bundle["version"] if bundle.get("published") and bundle["version"] != after else None

        return await until(other, "a new bundle is published")

    async def end(self) -> None:
        """Stop as SIGTERM does."""
        self.stop.set()
        await self.task


@contextlib.asynccontextmanager
async def running_trainer(
    nats_url: str | NatsSettings, redis_url: str | RedisSettings, **settings: Any
) -> AsyncIterator[RunningTrainer]:
    """A trainer that fits every 200 ms, on a free port."""
    port = free_port()
    key = settings.pop("signing_key", None)
    chosen = TrainerSettings(
        **{"retrain_interval_ms": 200, "calibration_interval_ms": 100, "store_check_interval_ms": 300, "rounds": 10}
        | settings,
        http_port=port,
        nats=nats_url if isinstance(nats_url, NatsSettings) else NatsSettings(servers=nats_url),
        redis=redis_url if isinstance(redis_url, RedisSettings) else RedisSettings(url=redis_url, signing_key=key),
    )
    stop = asyncio.Event()
    task = asyncio.create_task(serve(chosen, stop))
    trainer = RunningTrainer(f"http://127.0.0.1:{port}", task, stop)
    try:
        yield trainer
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def stream(url: str) -> AsyncIterator[JetStreamContext]:
    """JetStream with the sample stream, as the collector makes it."""
    client = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        context = client.jetstream(timeout=5)
        await context.add_stream(StreamConfig(**samples_stream_config()))
        yield context
    finally:
        await client.close()


async def publish(context: JetStreamContext, samples: Sequence[LatencySample]) -> None:
    """Publish samples of the default pool as the collector does, and await every acknowledgement."""
    for start in range(0, len(samples), 200):
        await asyncio.gather(
            *(
                context.publish(
                    samples_subject("default"), encode_sample(sample), headers={DEDUP_HEADER: sample.decision_id}
                )
                for sample in samples[start : start + 200]
            )
        )
