"""How parts are harmed without touching them: a TCP connection that can be cut, and a clock that can jump.

The clock is that of Python services started with `Clock.environment`: a `sitecustomize` in front of their path adds
what a file says to `time.time`; the monotonic clock stays. Edges, for the chaos suite alone.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

_CLOCK_VARIABLE: Final = "CHAOS_CLOCK_FILE"
_SITECUSTOMIZE: Final = f'''"""Shifts the wall clock by the seconds that a file names. Of the chaos suite."""
import os
import time

_path = os.environ.get("{_CLOCK_VARIABLE}")
if _path:
    _time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
    _known = [0.0, -1.0]

    def _shift():
        now = _monotonic()
        if now - _known[1] > 0.05:
            _known[1] = now
            try:
                with open(_path) as file:
                    _known[0] = float(file.read() or 0)
            except (OSError, ValueError):
                pass
        return _known[0]

    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
'''


class Clock:
    """The file that services started with `environment` add to their wall clock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / "shift"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        self.jump(0.0)

    @property
    def environment(self) -> dict[str, str]:
        path = [str(self._directory), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), _CLOCK_VARIABLE: str(self._file)}

    def jump(self, seconds: float) -> None:
        """So far ahead of the machine's (or behind it) from here on."""
        swap = self._directory / "shift.new"
        swap.write_text(str(seconds))
        swap.replace(self._file)


class Link:
    """A TCP relay on loopback, which can be cut: connections end, and new ones are refused until it is mended."""

    def __init__(self, target_port: Callable[[], int]) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Link"]:
        await self.mend()
        try:
            yield self
        finally:
            await self.cut()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port())
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            self._writers -= {writer, back}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
