"""The chaos suite's relay: what is cut ends, and what is mended carries again on the same port."""

import asyncio
import contextlib

import pytest

from deploy.local.chaos.harm import Link


async def test_a_link_carries_until_it_is_cut_and_again_when_it_is_mended() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        link = Link(lambda: server.sockets[0].getsockname()[1])
        async with link.open():
            port = link.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
            await link.cut()
            with contextlib.suppress(ConnectionError):  # a reset, or the end
                assert await reader.read(1) == b""
            writer.close()
            with pytest.raises(OSError, match=r"refused|Connect"):
                await asyncio.open_connection("127.0.0.1", port)
            await link.mend()
            assert link.port == port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"after")
            assert await reader.readexactly(5) == b"after"
            writer.close()
