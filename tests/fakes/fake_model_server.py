"""A model server that plays a script over real HTTP/1.1: which bytes go out, and how long after the request.

It controls what a simulated model server would not: every write by itself, at a stated instant, with TCP_NODELAY, so
that a test knows the true first-content instant and where the network splits an event.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.servers import free_port


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. `writes` are (milliseconds after the request was read, bytes) in order; headers go out at once."""

    writes: Sequence[tuple[float, bytes]]
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    header_delay_ms: float = 0.0
    refuses: bool = False
    """Reset the connection in place of an answer, after `header_delay_ms`."""
    dies: bool = False
    """Reset the connection after the last write instead of ending the answer."""
    counted: bool = False
    """Say the body's length in place of sending it in chunks."""
    gate: asyncio.Event | None = None
    """Answer nothing before it is set."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.writes)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeModelServer:
    """Plays `choose(request)` for each request."""

    choose: Callable[[Seen], Script]
    written: dict[str, list[float]] = field(default_factory=dict)
    """When each write really went out, ms since the epoch, by the request's `x-request-id`."""
    requests: list[Seen] = field(default_factory=list)
    aborted: int = 0
    address: str = ""
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen; again on the same port after a `stop`."""
        port = int(self.address.rpartition(":")[2] or free_port())
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        """End all connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
        connections = tuple(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self.serve(reader, writer)
        finally:
            self._connections.discard(task)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (seen := await _read_request(reader)) is not None:
                self.requests.append(seen)
                written = self.written.setdefault(seen.headers.get("x-request-id", ""), [])
                if not await self._play(self.choose(seen), written, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            self.aborted += 1
        finally:
            writer.close()

    async def _play(
        self, script: Script, written: list[float], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        loop = asyncio.get_running_loop()
        if script.gate is not None:
            await script.gate.wait()
        begin = loop.time()
        await asyncio.sleep(script.header_delay_ms / 1e3)
        if script.refuses:
            writer.transport.abort()
            return False
        size = f"content-length: {len(script.body)}" if script.counted else "transfer-encoding: chunked"
        lines = [f"HTTP/1.1 {script.status} X", f"content-type: {script.content_type}", size]
        lines += [f"{name}: {value}" for name, value in script.headers]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for at_ms, data in script.writes:
            await asyncio.sleep(max(0.0, begin + at_ms / 1e3 - loop.time()))
            if reader.at_eof() or writer.is_closing():
                self.aborted += 1
                return False
            written.append(time.time() * 1e3)
            writer.write(data if script.counted else b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        if script.dies:
            writer.transport.abort()
            return False
        if not script.counted:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, OSError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while (size := int(await reader.readline(), 16)) > 0:
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, body)


@contextlib.asynccontextmanager
async def fake_model_server(choose: Callable[[Seen], Script]) -> AsyncIterator[FakeModelServer]:
    """A running fake model server on a free loopback port; `address` is its `ip:port`."""
    fake = FakeModelServer(choose)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


def event(document: Any, *, end: str = "\n") -> bytes:
    """One server-sent event with this JSON document, written as compactly as vLLM does."""
    return f"data: {json.dumps(document, separators=(',', ':'))}{end}{end}".encode()


def chat(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One chat completion chunk."""
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **more}]}


ROLE = chat({"role": "assistant", "content": ""})
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 30, "completion_tokens": 21, "prompt_tokens_details": {"cached_tokens": 16}},
}
DONE = b"data: [DONE]\n\n"


def stream_script(
    first: Sequence[tuple[float, bytes]] = ((400.0, event(chat({"content": "tok"}))),),
    before: Sequence[tuple[float, bytes]] = ((100.0, event(ROLE)),),
    *,
    tokens: int = 20,
    gap_ms: float = 10.0,
    usage: bool = True,
    **options: Any,
) -> Script:
    """`before`, then `first`, then `tokens` more content events `gap_ms` apart, then usage and the end mark."""
    start_ms = first[-1][0]
    writes = [*before, *first]
    writes += [(start_ms + gap_ms * n, event(chat({"content": f" t{n}"}))) for n in range(1, tokens + 1)]
    end_ms = start_ms + gap_ms * tokens
    if usage:
        writes.append((end_ms, event(USAGE)))
    writes.append((end_ms, DONE))
    return Script(writes, **options)
