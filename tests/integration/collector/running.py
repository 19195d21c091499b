"""A real collector in this process, on free ports, against a real NATS."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import nats
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from nats.js.errors import NotFoundError

from services.collector.entry import AccessLogEntry
from services.collector.main import build
from services.collector.settings import CollectorSettings
from shared import names
from shared.samples import LatencySample, decode_sample
from shared.settings import NatsSettings
from tests.fakes.entries import make_message
from tests.servers import fetch, free_port, until


@dataclass
class RunningCollector:
    """Addresses of a collector that serves, and a way to stop it as SIGTERM does."""

    settings: CollectorSettings
    stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.http_port}"

    async def stop(self) -> None:
        self.stop_event.set()
        assert self.task is not None
        await self.task

    async def ready(self) -> bool:
        return (await fetch(f"{self.url}/readyz"))[0] == 200

    async def metric(self, line: str) -> float:
        """Value of the one sample whose name and labels are written exactly so; 0 before it exists."""
        _, body = await fetch(f"{self.url}/metrics")
        for text in body.decode().splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
        return 0.0

    async def log(self, *entries: AccessLogEntry) -> None:
        """Send entries as Envoy does, one message on a stream of its own, and await the stream's end."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.settings.als_port}") as channel:
            message = als_pb2.StreamAccessLogsMessage()
            message.http_logs.log_entry.extend(make_message(entry) for entry in entries)
            await als_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs(iter([message]))

    async def post(self, body: Any, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30.0) as client:
            return await client.post(f"{self.url}/v1/samples", content=body, headers=headers)


@contextlib.asynccontextmanager
async def running_collector(nats_url: str, *, ready: bool = True, **settings: Any) -> AsyncIterator[RunningCollector]:
    """Start a collector; `ready=False` doesn't wait for NATS."""
    collector = RunningCollector(
        CollectorSettings(
            **{
                "nats": NatsSettings(servers=nats_url),
                "als_port": free_port(),
                "http_port": free_port(),
                **settings,
            }
        )
    )
    collector.task = asyncio.create_task(build(collector.settings, collector.stop_event))

    async def serves() -> bool:
        assert collector.task is not None
        assert not collector.task.done(), collector.task
        return (await collector.ready()) if ready else (await fetch(f"{collector.url}/healthz"))[0] == 200

    try:
        await until(serves, "the collector serves")
        yield collector
    finally:
        await collector.stop()


async def stored(url: str) -> list[tuple[str, LatencySample]]:
    """Everything in the stream: (dedup id, sample), oldest first."""
    client = await nats.connect(url)
    try:
        streams = client.jetstream()
        state = (await streams.stream_info(names.SAMPLES_STREAM)).state
        found = []
        for sequence in range(state.first_seq, state.last_seq + 1 if state.messages else state.first_seq):
            message = await streams.get_msg(names.SAMPLES_STREAM, sequence)
            assert message.data is not None
            found.append(((message.headers or {}).get(names.DEDUP_HEADER, ""), decode_sample(message.data)))
        return found
    finally:
        await client.close()


async def stored_count(url: str) -> int:
    """Messages in the stream; 0 while nobody has made it."""
    client = await nats.connect(url)
    try:
        return int((await client.jetstream().stream_info(names.SAMPLES_STREAM)).state.messages)
    except NotFoundError:
        return 0
    finally:
        await client.close()


async def stored_ids(url: str) -> list[str]:
    """Dedup ids in the stream, oldest first."""
    return [dedup_id for dedup_id, _ in await stored(url)]
