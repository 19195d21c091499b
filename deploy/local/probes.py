"""Is a child of the stack ready? By HTTP, by a connection taken, by Redis's PING; each a `Probe` of `processes.py`."""

import asyncio
import contextlib
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from deploy.local.ports import LOOPBACK
from deploy.local.processes import Probe

PROBE_TIMEOUT_S: Final = 2.0


def http_probe(http: aiohttp.ClientSession, url: str) -> Probe:
    """Ready when GET answers 200; else why not, with the start of the body."""

    async def probe() -> str | None:
        try:
            async with http.get(url) as response:
                if response.status == 200:
                    return None
                body = (await response.text(errors="replace"))[:300]
                return f"{urlsplit(url).path} answers {response.status} {body}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{urlsplit(url).path} doesn't answer ({type(error).__name__})"

    return probe


def tcp_probe(port: int) -> Probe:
    """Ready when a connection is taken."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
        except (OSError, TimeoutError) as error:
            return f"port {port} takes no connection ({type(error).__name__})"
        writer.close()
        return None

    return probe


def redis_probe(port: int) -> Probe:
    """Ready when PING is answered with PONG."""

    async def probe() -> str | None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.write(b"PING\r\n")
                answer = await reader.readline()
            return None if answer.startswith(b"+PONG") else f"PING is answered with {answer[:80]!r}"
        except (OSError, TimeoutError) as error:
            return f"PING isn't answered ({type(error).__name__})"
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    return probe
