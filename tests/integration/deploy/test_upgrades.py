"""A connection that becomes a WebSocket, in both shapes, through the real Envoy and the router's edge: picked like any
request, then bytes pass both ways for as long as it is open, and its end is seen.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, render
from services.router.extproc.server import ExtProcServer
from shared.clock import SystemClock
from tests.fakes.fake_director import FakeDirector
from tests.servers import EnvoyProxy, envoy, free_port, until

HEAD = (
    "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


@contextlib.asynccontextmanager
async def echoing_server() -> AsyncIterator[tuple[int, list[bytes]]]:
    """Upgrades every connection and sends back what it gets; yields its port and the heads that it saw."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()


async def upgraded(proxy: EnvoyProxy, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD.format(path=path).encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return reader, writer


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/chat/completions"])
async def test_an_upgraded_connection_passes_bytes_both_ways_until_its_end(shape: Shape, path: str) -> None:
    async with echoing_server() as (model, heads), asyncio.timeout(30.0):
        director = FakeDirector(f"127.0.0.1:{model}")
        router = ExtProcServer(director, CollectorRegistry(), SystemClock(), max_body_bytes=2_000)
        try:
            port, health = await router.start("127.0.0.1", 0, 0)
            await router.set_ready(True)
            config = EnvoyConfig(
                endpoints=(Address("127.0.0.1", model),),
                routers=(RouterAddress(Address("127.0.0.1", port), health),),
                collectors=(Address("127.0.0.1", free_port()),),
                shape=shape,
            )
            async with envoy(render(config)) as proxy:

                async def healthy() -> bool:
                    return (await proxy.stats("cluster.picker.membership_healthy")).popitem()[1] == 1

                await until(healthy, "the router is healthy")
                reader, writer = await upgraded(proxy, path)
                assert director.asked == 1
                assert b"x-gateway-destination-endpoint: 127.0.0.1:" in heads[0]
                for size in (1, 5_000, 200_000):  # beyond the cap: it isn't a body
                    data = bytes(range(256)) * (size // 256 + 1)
                    writer.write(data)
                    assert await reader.readexactly(len(data)) == data
                assert router.open_streams == 1
                writer.close()
                await until(lambda: router.open_streams == 0, "the router has seen its end")
        finally:
            await router.stop(0.0)
