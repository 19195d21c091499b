"""The scraper's client against servers that behave, and servers that don't, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.router.state.page_client import PageBrokenError, PageClient, PageTooLargeError
from tests.servers import free_port

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Plays one answer per request; counts connections and keeps the requests."""

    def __init__(self, *answers: bytes, close_after: int | None = None, pause_s: float = 0.0) -> None:
        self.answers = answers
        self.close_after = close_after
        self.pause_s = pause_s
        self.connections = 0
        self.requests: list[bytes] = []
        self.port = free_port()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        served = 0
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for part in self.answers:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)
                served += 1
                if served == self.close_after:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def asking(server: Server, *, timeout_ms: float = 5_000.0, max_bytes: int = 1_000) -> AsyncIterator[PageClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", server.port)
    client = PageClient(f"127.0.0.1:{server.port}", {"Accept": "*/*"}, timeout_ms=timeout_ms, max_bytes=max_bytes)
    try:
        yield client
    finally:
        client.close()
        listening.close()


async def test_one_connection_serves_many_requests():
    server = Server(OK)
    async with asking(server) as client:
        for path in ("/metrics", "/health", "/metrics"):
            assert await client.get(path) == (200, b"hello")
    assert server.connections == 1
    assert (
        server.requests[1] == f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAccept: */*\r\n\r\n".encode()
    )


async def test_a_connection_that_the_server_closed_while_idle_is_made_anew():
    server = Server(OK, close_after=1)
    async with asking(server) as client:
        for _ in range(3):
            assert await client.get("/metrics") == (200, b"hello")
    assert server.connections == 3


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
        (OK[:30], OK[30:47], OK[47:]),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",),
    ],
)
async def test_answers_are_put_together_however_they_come(parts):
    async with asking(Server(*parts, pause_s=0.01)) as client:
        assert await client.get("/metrics") == (200, b"hello")
        assert await client.get("/metrics") == (200, b"hello")


async def test_an_answer_without_a_length_ends_with_the_connection():
    async with asking(Server(b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", close_after=1)) as client:
        assert await client.get("/metrics") == (200, b"hello")
        assert await client.get("/metrics") == (200, b"hello")


async def test_a_status_is_told_with_its_body():
    async with asking(Server(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")) as client:
        assert await client.get("/metrics") == (404, b"")


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",), PageBrokenError),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",), PageBrokenError),
        ((b"SSH-2.0-OpenSSH\r\n",), PageBrokenError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n",), PageTooLargeError),
        (
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"),
            PageTooLargeError,
        ),
        ((b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 2_000,), PageTooLargeError),
        ((), ConnectionResetError),
    ],
)
async def test_an_answer_that_is_none_is_an_error_and_the_next_one_is_asked_on_a_fresh_connection(parts, error):
    server = Server(*parts, close_after=1)
    async with asking(server) as client:
        with pytest.raises(error):
            await client.get("/metrics")
        server.answers = (OK,)
        assert await client.get("/metrics") == (200, b"hello")


async def test_a_silent_server_times_out_and_its_late_answer_is_nobodys():
    server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", b"late!", pause_s=0.3)
    async with asking(server, timeout_ms=100.0) as client:
        with pytest.raises(TimeoutError):
            await client.get("/metrics")
        server.answers, server.pause_s = (OK,), 0.0
        assert await client.get("/metrics") == (200, b"hello")
    assert server.connections == 2


async def test_two_answers_to_one_request_break_the_connection_and_nothing_else():
    async with asking(Server(OK + OK)) as client:
        assert await client.get("/metrics") == (200, b"hello")
        assert await client.get("/metrics") == (200, b"hello")


async def test_a_refused_connection_says_so():
    client = PageClient(f"127.0.0.1:{free_port()}", {}, timeout_ms=1_000.0, max_bytes=100)
    with pytest.raises(ConnectionRefusedError):
        await client.get("/metrics")
