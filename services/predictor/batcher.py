"""Requests of one pool → model runs. Between the HTTP edge and the model; no I/O.

Rows are checked before they are merged, so a bad request can't fail its neighbours; an answer that can't be true fails
the request whose rows it belongs to and no other.

A small run stays on the event loop: handing 100 rows to a thread costs more than it frees (see the README's figures).
A large one, and any on an accelerator, leaves it for the one worker thread, so that probes and small requests go on.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.predictor.metrics import PredictorMetrics
from services.predictor.slot import Served, Slot
from shared.clock import Clock
from shared.coalescing import CallLater, Coalescer
from shared.errors import LeadtimeError
from shared.features import FloatMatrix
from shared.inference import CPU_PROVIDER
from shared.prediction import plausible


class NoBundleError(LeadtimeError):
    """The pool has no verified bundle yet."""


class ModelFaultError(LeadtimeError):
    """The model failed on rows that were checked."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The batcher's part of the settings."""

    window_ms: float
    max_rows: int
    inline_max_rows: int
    max_waiting_rows: int


@dataclass(frozen=True, slots=True)
class Answer:
    """float32 (n, K) of the bundle that `served` names, and the wait for the run."""

    values: FloatMatrix
    served: Served
    queue_ms: float


@dataclass(frozen=True, slots=True)
class _Run:
    served: Served
    started_ms: float


class Batcher:
    """One pool's way to the model."""

    def __init__(
        self,
        slot: Slot,
        limits: BatchLimits,
        worker: ThreadPoolExecutor,
        metrics: PredictorMetrics,
        clock: Clock,
        *,
        call_later: CallLater | None = None,
    ) -> None:
        self.slot = slot
        self._inline_max_rows = limits.inline_max_rows
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._coalescer: Coalescer[_Run] = Coalescer(
            self._run,
            window_ms=limits.window_ms,
            max_rows=limits.max_rows,
            max_waiting_rows=limits.max_waiting_rows,
            # One in the worker and one on the loop: a large request doesn't hold up small ones.
            max_in_flight=2,
            call_later=call_later,
        )

    def waiting_rows(self) -> int:
        return self._coalescer.waiting_rows

    async def predict(self, rows: FloatMatrix) -> Answer:
        """Answer checked rows, float32 (n, F).

        Raises NoBundleError, ModelFaultError, or OverloadedError when too many rows wait.
        """
        if self.slot.current is None:
            raise NoBundleError(f"pool {self.slot.pool} has no verified bundle yet")
        submitted_ms = self._clock.monotonic_ms()
        values, run = await self._coalescer.submit(rows)
        if not plausible(values):
            raise ModelFaultError(f"bundle {run.served.manifest.version} answered a value that no latency can have")
        return Answer(values, run.served, run.started_ms - submitted_ms)

    async def close(self) -> None:
        await self._coalescer.close()

    async def _run(self, rows: FloatMatrix) -> tuple[FloatMatrix, _Run]:
        served = self.slot.current
        if served is None:
            raise NoBundleError(f"pool {self.slot.pool} has no verified bundle yet")
        run = _Run(served, self._clock.monotonic_ms())
        model = served.model_for(len(rows))
        try:
            if len(rows) <= self._inline_max_rows and model.provider == CPU_PROVIDER:
                values = model.predict(rows)
            else:
                values = await asyncio.get_running_loop().run_in_executor(self._worker, model.predict, rows)
        except Exception as error:  # ONNX Runtime raises bare Exceptions of many classes
            raise ModelFaultError(f"bundle {served.manifest.version} failed: {type(error).__name__}") from error
        self._metrics.ran(model.rendering, len(rows), self._clock.monotonic_ms() - run.started_ms)
        return values, run
