"""Model servers as a scraper sees them: one real metrics page for every address of this machine's loopback network.

`bench/scale.py` starts `main` with the page's path in a process of its own, so that what it costs isn't counted there.
It binds a free port on all of 127/8, prints it, and answers until its input ends.
"""

import asyncio
import sys
from pathlib import Path
from typing import Final

MODELS: Final = b'{"object":"list","data":[{"id":"bench-model"}]}'


def answer(body: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


class Pages(asyncio.Protocol):
    """Answers by path, from bytes that were made once."""

    answers: dict[bytes, bytes]

    def __init__(self) -> None:
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            path = self._pending.split(b" ", 2)[1]
            self._pending = self._pending[end + 4 :]
            if self._transport is not None:
                self._transport.write(self.answers.get(path, answer(b"", b"text/plain")))


async def serve(page: bytes) -> None:
    Pages.answers = {
        b"/metrics": answer(page, b"text/plain"),
        b"/v1/models": answer(MODELS, b"application/json"),
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Pages, "0.0.0.0", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it is done, or gone


def main() -> None:
    asyncio.run(serve(Path(sys.argv[1]).read_bytes()))
