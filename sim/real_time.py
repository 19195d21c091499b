"""Runs an `Engine` in real time on an event loop: one timer per engine, not per request.

The next step begins where the last one was *planned* to end, so a late timer delays tokens but does not slow the server
down; how late is recorded, since it is the simulation's own error. When the process falls more than a step behind, the
missed steps run at once and their tokens go out together.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.engine import Engine, EngineRequest, RequestState, StepResult

# libuv and epoll timers tick in milliseconds: half a tick early is as near as half a tick late.
_EARLY_MS = 0.5
_LATENESS_SAMPLES = 32_768


@dataclass(frozen=True, slots=True)
class LatenessSummary:
    """How long after its planned end each step ended, in milliseconds; percentiles over the last 32,768 steps."""

    steps: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class LatenessRecorder:
    """A ring of the latest values, with exact count, sum and maximum."""

    def __init__(self) -> None:
        self.ring = array("d")
        self._next = 0
        self.steps = 0
        self.sum_ms = 0.0
        self.max_ms = 0.0

    def record(self, lateness_ms: float) -> None:
        if len(self.ring) < _LATENESS_SAMPLES:
            self.ring.append(lateness_ms)
        else:
            self.ring[self._next] = lateness_ms
            self._next = (self._next + 1) % _LATENESS_SAMPLES
        self.steps += 1
        self.sum_ms += lateness_ms
        self.max_ms = max(self.max_ms, lateness_ms)

    @staticmethod
    def summary(recorders: "Sequence[LatenessRecorder]") -> LatenessSummary:
        """One or several recorders, as one."""
        ordered = sorted(value for recorder in recorders for value in recorder.ring)
        if not ordered:
            return LatenessSummary(0, 0.0, 0.0, 0.0, 0.0)
        last = len(ordered) - 1
        steps = sum(recorder.steps for recorder in recorders)
        return LatenessSummary(
            steps=steps,
            mean_ms=sum(recorder.sum_ms for recorder in recorders) / steps,
            p50_ms=ordered[round(0.5 * last)],
            p99_ms=ordered[round(0.99 * last)],
            max_ms=max(recorder.max_ms for recorder in recorders),
        )


def monotonic_ms() -> float:
    return time.monotonic() * 1000


class RealTimeEngine:
    """`on_step` is called for every finished step, in order, and `on_flush` once after each burst of them."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[StepResult], None],
        on_flush: Callable[[], None],
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self.engine = engine
        self.lateness = LatenessRecorder()
        self._clock_ms = clock_ms
        self._loop = loop
        self._on_step = on_step
        self._on_flush = on_flush
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def submit(self, request: EngineRequest) -> RequestState:
        state = self.engine.submit(request, self._clock_ms())
        if self._timer is None:
            # Not at once: what else arrives in this turn of the loop joins the same step.
            self._timer = self._loop.call_soon(self._advance)
        return state

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id, self._clock_ms())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _advance(self) -> None:
        engine = self.engine
        now_ms = self._clock_ms()
        step = engine.current_step
        start_ms = max(now_ms, engine.now_ms)
        finished_any = False
        while True:
            if step is not None:
                if step.end_ms > now_ms + _EARLY_MS:
                    break
                self.lateness.record(max(0.0, now_ms - step.end_ms))
                start_ms = step.end_ms
                self._on_step(engine.finish_step())
                finished_any = True
            step = engine.start_step(start_ms)
            if step is None:
                if engine.is_idle:
                    break
                # All that waits arrived after the planned end of the last step: begin at the present.
                start_ms = max(start_ms, now_ms)
                step = engine.start_step(start_ms)
                if step is None:
                    break
        if finished_any:
            self._on_flush()
        if step is None:
            # A flush can bring the next request of a pipelining client, which found the timer set.
            self._timer = None if engine.is_idle else self._loop.call_soon(self._advance)
            return
        delay_ms = step.end_ms - self._clock_ms()
        if delay_ms > 0:
            self._timer = self._loop.call_later(delay_ms / 1000, self._advance)
        else:
            self._timer = self._loop.call_soon(self._advance)
