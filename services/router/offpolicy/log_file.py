"""Writes the decision log: a bounded buffer and one file, rotated once. Edge: writes files, beside the request path.

Limits: what is in the buffer dies with the process but for a stop's last flush; a full buffer drops the newest,
counted. Two files of at most `max_bytes` each are kept: the log, and the one before it with `.1` after its name.
Several routers of a host may write into one.
"""

import asyncio
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from services.router.offpolicy.log import LoggedDecision, LoggedOutcome, encode_line
from shared.errors import ConfigurationError, reason_of

_FLUSH_S: Final = 1.0
_CAPACITY: Final = 20_000


class DecisionLogFile:
    """`offer` is what the request path calls; `run` writes."""

    def __init__(self, path: Path, max_bytes: int, registry: CollectorRegistry) -> None:
        """Makes the file where there is none; raises ConfigurationError where it can't be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._waiting: list[LoggedDecision | LoggedOutcome] = []
        self._log = structlog.get_logger()
        self._lines = Counter(
            "leadtime_router_decision_log_lines_total", "Lines of the decision log.", ["fate"], registry=registry
        )
        for fate in ("written", "dropped", "failed"):
            self._lines.labels(fate)
        self._told = False
        try:
            os.close(self._open())
            if path.is_file() and not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # of its rotation
        except OSError as error:
            raise ConfigurationError(
                f"DECISION_LOG: found a path that can't be written ({reason_of(error)}); "
                "allowed: a file in a folder that is there and can be written"
            ) from None

    def offer(self, entry: LoggedDecision | LoggedOutcome) -> None:
        """Never waits, never raises."""
        if len(self._waiting) >= _CAPACITY:
            self._lines.labels("dropped").inc()
            return
        self._waiting.append(entry)

    async def run(self) -> None:
        """Write what waits, every second, until cancelled; then once more."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_S)
                await self.flush()
        finally:
            self._write(self._taken())

    async def flush(self) -> None:
        taken = self._taken()
        if taken:
            await asyncio.to_thread(self._write, taken)

    def _taken(self) -> list[LoggedDecision | LoggedOutcome]:
        taken, self._waiting = self._waiting, []
        return taken

    def _write(self, entries: list[LoggedDecision | LoggedOutcome]) -> None:
        if not entries:
            return
        data = b"".join(map(encode_line, entries))
        try:
            with self._with_room(len(data)) as file:
                file.write(data)
        except OSError as error:
            self._lines.labels("failed").inc(len(entries))
            if not self._told:
                self._told = True
                self._log.warning("the decision log can't be written", error=type(error).__name__)
            return
        self._told = False
        self._lines.labels("written").inc(len(entries))

    def _with_room(self, size: int) -> BinaryIO:
        """The file, rotated where it is full. Locked until it is closed: a router that rotated what another just has
        would lose the file before it.
        """
        while True:
            file = os.fdopen(self._open(), "ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                ours = os.fstat(file.fileno())
                if not stat.S_ISREG(ours.st_mode):
                    return file
                if self._path.exists() and os.path.samestat(ours, self._path.stat()):
                    if not ours.st_size or ours.st_size + size <= self._max_bytes:
                        return file
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
            except BaseException:
                file.close()
                raise
            file.close()

    def _open(self) -> int:
        """A descriptor of the file; only its owner may read it. Nobody is waited for at a pipe's other end."""
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
