"""A TCP proxy in front of a real server that can make it slow: so many bytes a second each way, or none at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE = 1_024


@dataclass
class SlowProxy:
    """`bytes_per_s` None: as fast as it goes; 0: nothing passes, and connections stay open."""

    target_port: int
    bytes_per_s: float | None = None
    port: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        back: asyncio.StreamWriter | None = None
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            for end in (writer, back):
                if end is not None:
                    end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            while self.bytes_per_s == 0:  # noqa: ASYNC110 - a test changes a number, not an event
                await asyncio.sleep(0.02)
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def slow_proxy(target_port: int) -> AsyncIterator[SlowProxy]:
    """A running one on a free port."""
    proxy = SlowProxy(target_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_PIECE)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(proxy.tasks):
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
