"""Reads the pool's samples as they pass on NATS, beside the trainer and the routers: a plain subscription, no acks.

An edge for the demo, which counts samples and compares each prediction with its label. What passes while NATS is away
is lost to it, and to it alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import nats
from nats.aio.msg import Msg

from shared.errors import FieldError
from shared.names import samples_subject
from shared.samples import LatencySample, decode_sample


class SampleWatch:
    """Samples in order of arrival, all of the run: a demo's few thousand, a kilobyte each."""

    __slots__ = ("_arrived", "samples", "unreadable")

    def __init__(self) -> None:
        self.samples: list[LatencySample] = []
        self.unreadable = 0
        self._arrived = asyncio.Event()

    def received_since(self, unix_ms: float) -> tuple[LatencySample, ...]:
        """Samples of requests that a router received at or after this time."""
        return tuple(sample for sample in self.samples if sample.received_unix_ms >= unix_ms)

    async def until(self, count: int, since_unix_ms: float, timeout_s: float) -> None:
        """Wait for `count` samples received since then; the time running out is no error, the count tells."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.received_since(since_unix_ms)) < count:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def observe(self, message: Msg) -> None:
        try:
            self.samples.append(decode_sample(message.data))
        except FieldError:
            self.unreadable += 1
        self._arrived.set()


@contextlib.asynccontextmanager
async def watch_samples(nats_url: str, pool: str) -> AsyncIterator[SampleWatch]:
    """Subscribe while the context is open."""
    watch = SampleWatch()
    client = await nats.connect(nats_url, name="leadtime-demo", connect_timeout=2, max_reconnect_attempts=-1)
    try:
        await client.subscribe(samples_subject(pool), cb=watch.observe)
        await client.flush()
        yield watch
    finally:
        await client.close()
