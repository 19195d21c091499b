"""Rows of several waiting requests → one call, and each request its own part of the answer.

The rule that predictor and router share: call at once when none is in flight, else gather for at most
the window or up to the row cap. Used by the predictor in front of the model and by the router in front of the wire.

Limits: no I/O of its own, one event loop, no locks. "At once" is the end of the loop's current pass, so that requests
read in one pass share a call. A single request larger than the row cap is one call by itself, never split.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from shared.errors import LeadtimeError
from shared.features import FloatMatrix

Tag = TypeVar("Tag")


class OverloadedError(LeadtimeError):
    """More rows wait than the bound allows; nothing was queued."""

    def __init__(self, waiting_rows: int, max_waiting_rows: int) -> None:
        super().__init__(f"{waiting_rows} rows are waiting; the bound is {max_waiting_rows}")
        self.waiting_rows = waiting_rows
        self.max_waiting_rows = max_waiting_rows


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Coalescer(Generic[Tag]):
    """Merges `submit`ted rows into calls.

    `call` takes float32 (n, F) and gives float32 (n, K) in the same order with a tag that every request of the call
    receives (the bundle that answered, say). What `call` raises is raised to every request of that call alone.
    """

    __slots__ = (
        "_call", "_call_later", "_closed", "_due", "_in_flight", "_max_in_flight", "_max_rows", "_max_waiting_rows",
        "_scheduled", "_tasks", "_timer", "_waiting", "_window_s", "waiting_rows",
    )  # fmt: skip

    def __init__(
        self,
        call: Callable[[FloatMatrix], Awaitable[tuple[FloatMatrix, Tag]]],
        *,
        window_ms: float,
        max_rows: int,
        max_waiting_rows: int,
        max_in_flight: int,
        call_later: CallLater | None = None,
    ) -> None:
        """`call_later` (seconds, callback) stands in for the loop's own in tests."""
        self._call = call
        self._call_later = call_later
        self._window_s = window_ms / 1e3
        self._max_rows = max_rows
        self._max_waiting_rows = max_waiting_rows
        self._max_in_flight = max_in_flight
        self._waiting: deque[tuple[FloatMatrix, asyncio.Future[tuple[FloatMatrix, Tag]]]] = deque()
        self.waiting_rows = 0
        self._in_flight = 0
        self._timer: Timer | None = None
        self._scheduled = False
        self._due = False
        self._closed = False
        # The loop holds tasks weakly: a call must not be collected while it is in flight.
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, rows: FloatMatrix) -> "asyncio.Future[tuple[FloatMatrix, Tag]]":
        """Queue float32 (n, F), n ≥ 1; the future gives float32 (n, K) and the call's tag.

        Raises OverloadedError. A future that is cancelled before its call starts takes no part in it.
        """
        count = len(rows)
        if self.waiting_rows and self.waiting_rows + count > self._max_waiting_rows:
            raise OverloadedError(self.waiting_rows, self._max_waiting_rows)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[FloatMatrix, Tag]] = loop.create_future()
        if self._closed:
            future.cancel()
            return future
        self._waiting.append((rows, future))
        self.waiting_rows += count
        if self._in_flight == 0 or self.waiting_rows >= self._max_rows:
            self._dispatch_soon()
        elif self._timer is None and not self._due:
            self._timer = (self._call_later or loop.call_later)(self._window_s, self._window_over)
        return future

    async def close(self) -> None:
        """Cancel what waits and what is in flight, and await its end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self.waiting_rows = 0
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _window_over(self) -> None:
        self._timer = None
        self._due = True
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        if not self._scheduled and self._in_flight < self._max_in_flight:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        while self._waiting and self._in_flight < self._max_in_flight:
            batch = self._take()
            if batch:
                self._in_flight += 1
                task = asyncio.get_running_loop().create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if not self._waiting:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _take(self) -> "list[tuple[FloatMatrix, asyncio.Future[tuple[FloatMatrix, Tag]]]]":
        batch: list[tuple[FloatMatrix, asyncio.Future[tuple[FloatMatrix, Tag]]]] = []
        total = 0
        while self._waiting:
            rows, future = self._waiting[0]
            if batch and total + len(rows) > self._max_rows:
                break
            self._waiting.popleft()
            self.waiting_rows -= len(rows)
            if not future.done():
                batch.append((rows, future))
                total += len(rows)
        return batch

    async def _run(self, batch: "list[tuple[FloatMatrix, asyncio.Future[tuple[FloatMatrix, Tag]]]]") -> None:
        rows = batch[0][0] if len(batch) == 1 else np.concatenate([rows for rows, _ in batch])
        try:
            values, tag = await self._call(rows)
            if len(values) != len(rows):
                raise ValueError(f"{len(values)} answers for {len(rows)} rows")
        except asyncio.CancelledError:
            # Only closing, or the end of the loop, cancels a call: no other may start after it.
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            start = 0
            for part, future in batch:
                end = start + len(part)
                if not future.done():
                    future.set_result((values[start:end], tag))
                start = end
        self._in_flight -= 1
        if self._waiting and (self._in_flight == 0 or self._due or self.waiting_rows >= self._max_rows):
            self._dispatch_soon()
