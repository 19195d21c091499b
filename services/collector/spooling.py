"""The spool as the publisher uses it: beside the event loop, counted, and off for a moment after a failure.

One worker thread does all file work, since a slow disk must hold up neither intake nor probes.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import structlog

from services.collector.metrics import CollectorMetrics
from services.collector.settings import CollectorSettings
from services.collector.spool import Position, Record, Spool, SpoolFullError, open_spool
from shared.clock import Clock

_AGAIN_MS: Final = 1_000.0
Result = TypeVar("Result")


class Spooling:
    """Opens the directory of the settings; use `open`."""

    def __init__(self, spool: Spool, worker: ThreadPoolExecutor, metrics: CollectorMetrics, clock: Clock) -> None:
        self._spool = spool
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._settled: list[Position] = []
        self._again_ms = float("-inf")
        self._failing = False
        self._log = structlog.get_logger()
        self.records = spool.records
        self.unread = spool.unread
        self.size_bytes = spool.size_bytes
        metrics.watch_spool(lambda: self.records, lambda: self.size_bytes)
        metrics.spool_damaged.inc(spool.damaged_bytes)
        if spool.records or spool.damaged_bytes:
            self._log.info("spool found", samples=spool.records, damaged_bytes=spool.damaged_bytes)

    @classmethod
    async def open(cls, settings: CollectorSettings, metrics: CollectorMetrics, clock: Clock) -> "Spooling | None":
        """The spool of the settings, with what an earlier process left in it; None where no directory is set."""
        if settings.spool_dir is None:
            return None
        worker = ThreadPoolExecutor(1, thread_name_prefix="spool")
        spool = await asyncio.get_running_loop().run_in_executor(
            worker, partial(open_spool, settings.spool_dir, settings.spool_slots, max_bytes=settings.spool_max_bytes)
        )
        return cls(spool, worker, metrics, clock)

    @property
    def usable(self) -> bool:
        """Whether the last write succeeded, or it is time to try again."""
        return not self._failing or self._clock.monotonic_ms() >= self._again_ms

    async def append(self, records: Sequence[Record]) -> bool:
        """Put them on the disk; False (counted by reason) if that failed, and then none of them is there."""
        try:
            await self._call(lambda: self._spool.append(records))
        except SpoolFullError:
            self._failed("full", None)
        except OSError as error:
            self._failed("no_space" if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else "io", error)
        else:
            if self._failing:
                self._failing = False
                self._log.info("spool takes samples again")
            self._metrics.spool_samples.labels("written").inc(len(records))
            return True
        return False

    async def read(self, limit: int) -> list[tuple[Position, Record]]:
        """The next records to send; none if the disk can't be read."""
        try:
            found = await self._call(lambda: self._spool.read(limit))
        except OSError as error:
            self._failed("io", error)
            return []
        self._metrics.spool_samples.labels("read").inc(len(found))
        return found

    def give_back(self, position: Position) -> None:
        """A record that was read and wasn't delivered after all."""
        self._worker.submit(self._spool.give_back, position)
        self.unread += 1

    def settle(self, position: Position) -> None:
        """A record that was delivered; forgotten with the next `flush`."""
        self._settled.append(position)

    async def flush(self) -> None:
        """Delete what was settled."""
        if not self._settled:
            return
        settled, self._settled = self._settled, []
        self._metrics.spool_samples.labels("settled").inc(len(settled))
        try:
            await self._call(lambda: self._spool.settle(settled))
        except OSError as error:
            self._failed("io", error)

    async def close(self) -> None:
        await self.flush()
        with contextlib.suppress(OSError):
            await self._call(self._spool.close)
        self._worker.shutdown()

    async def _call(self, work: Callable[[], Result]) -> Result:
        """Run it on the worker, then take over the spool's numbers: nobody else touches the spool."""

        def run() -> tuple[Result, tuple[int, int, int]]:
            result = work()
            return result, (self._spool.records, self._spool.unread, self._spool.size_bytes)

        result, numbers = await asyncio.get_running_loop().run_in_executor(self._worker, run)
        self.records, self.unread, self.size_bytes = numbers
        return result

    def _failed(self, reason: str, error: OSError | None) -> None:
        self._metrics.spool_failures.labels(reason).inc()
        self._again_ms = self._clock.monotonic_ms() + _AGAIN_MS
        if not self._failing:
            self._failing = True
            self._log.warning("spool can't be used; samples wait in memory", reason=reason, error=str(error or ""))
