"""The ladder: remote predictor → this process's own bundle → the physics prior → None, for the heuristic scorers.

One call for all candidates of a decision. Never raises into the request path, and the steps share one deadline: the
remote step leaves the own bundle the time it needs. Each step is counted, and the last failure of each kept for people.
Calibration is applied here, once, whichever step answered. The prior answers only while this process has seen no
bundle: where one was learned, its failure is no reason to believe in less.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy.typing as npt
import structlog

from services.router.predict.bundles import BundleWatcher
from services.router.predict.client import PredictorClient, RawAnswer
from services.router.predict.errors import FailureReason, PredictError
from services.router.predict.metrics import PredictMetrics
from services.router.predict.types import Prediction, calibrated
from shared.clock import Clock
from shared.features import FloatMatrix
from shared.prediction import plausible
from shared.prior import PriorModel
from shared.samples import Rung

First = Literal["predictor", "in_process"]
_ORDERS: Final[dict[str, tuple[Rung, Rung]]] = {
    "predictor": (Rung.PREDICTOR, Rung.IN_PROCESS),
    "in_process": (Rung.IN_PROCESS, Rung.PREDICTOR),
}
_LOG_AGAIN_MS: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """`first`: the step that is tried first."""

    first: First = "predictor"
    remote_ms: float = 40.0
    """Deadline of the remote step; what is left of the decision's budget is the next step's."""
    reserve_ms: float = 5.0
    """What the remote step leaves of the deadline for the own bundle: 100 rows take 0.6 ms of CPU."""
    inline_max_rows: int = 512
    """More rows leave the event loop for a thread: they would hold up every other decision."""


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: FailureReason
    detail: str
    at_unix_ms: float


class Ladder:
    """Predictions for the director."""

    def __init__(
        self,
        client: PredictorClient | None,
        bundles: BundleWatcher | None,
        metrics: PredictMetrics,
        clock: Clock,
        *,
        prior: PriorModel | None = None,
        config: LadderConfig | None = None,
    ) -> None:
        """Every step may be absent."""
        self._client = client
        self._bundles = bundles
        self._metrics = metrics
        self._clock = clock
        self._config = config or LadderConfig()
        self._prior = prior
        self._order = _ORDERS[self._config.first]
        self._log = structlog.get_logger()
        self.by_rung: dict[Rung, int] = dict.fromkeys((*self._order, Rung.PRIOR, Rung.HEURISTIC), 0)
        self._last: dict[Rung, _Failure] = {}
        self._reported: dict[tuple[Rung, type[Exception]], float] = {}

    async def predict(
        self,
        rows: FloatMatrix,
        addresses: Sequence[str],
        backlog_tokens: npt.NDArray[Any],
        deadline_ms: float,
    ) -> Prediction | None:
        """Predict all candidates within `deadline_ms` from now.

        `rows` float32 (n, F) of the schema; `addresses` (n,) `ip:port`; `backlog_tokens` (n,): own + pending uncached
        tokens of each candidate. None when no step could: the heuristic scorers decide.
        """
        end_ms = self._clock.monotonic_ms() + deadline_ms
        for rung in (*self._order, Rung.PRIOR) if len(rows) else ():
            started_ms = self._clock.monotonic_ms()
            try:
                answer = await self._step(rung, rows, end_ms - started_ms)
                if answer is None:
                    continue
                prediction = self._prediction(rung, answer, addresses, backlog_tokens)
            except PredictError as error:
                self._failed(rung, error.reason, error.detail)
            except Exception as error:  # nothing that happens here may cost a request its decision
                self._report(rung, error)
                self._failed(rung, FailureReason.FAULT, type(error).__name__)
            else:
                self.by_rung[rung] += 1
                self._metrics.predicted(rung, self._clock.monotonic_ms() - started_ms)
                return prediction
        self.by_rung[Rung.HEURISTIC] += 1
        return None

    def describe(self) -> dict[str, Any]:
        """State of every step, for people."""
        now_ms = self._clock.unix_ms()
        return {
            "order": [rung.value for rung in self._order],
            "by_rung": {rung.value: count for rung, count in self.by_rung.items()},
            "last_failures": {
                rung.value: {
                    "reason": failure.reason.value,
                    "detail": failure.detail,
                    "age_s": round((now_ms - failure.at_unix_ms) / 1e3, 3),
                }
                for rung, failure in self._last.items()
            },
            "predictors": self._client.describe() if self._client else [],
            "own": self._bundles.describe() if self._bundles else None,
        }

    async def _step(self, rung: Rung, rows: FloatMatrix, left_ms: float) -> RawAnswer | None:
        """None where the step isn't configured; raises PredictError."""
        if rung is Rung.PREDICTOR:
            return await self._remote(rows, left_ms) if self._client else None
        if rung is Rung.PRIOR:
            return self._unlearned(rows)
        return await self._in_process(rows, left_ms) if self._bundles else None

    async def _remote(self, rows: FloatMatrix, left_ms: float) -> RawAnswer | None:
        if self._client is None:
            return None
        left_ms = min(left_ms, self._config.remote_ms)
        if self._order[-1] is Rung.IN_PROCESS and self._bundles is not None and self._bundles.model is not None:
            left_ms -= min(self._config.reserve_ms, left_ms / 2)
        if left_ms <= 0:
            raise PredictError(FailureReason.TIMEOUT, "the deadline was over before the call")
        return await self._client.predict(rows, left_ms)

    async def _in_process(self, rows: FloatMatrix, left_ms: float) -> RawAnswer | None:
        model = self._bundles.model if self._bundles else None
        if model is None:
            raise PredictError(FailureReason.NO_BUNDLE, "no verified bundle in this process yet")
        if left_ms <= 0:
            raise PredictError(FailureReason.TIMEOUT, "the deadline was over before the run")
        if len(rows) <= self._config.inline_max_rows:
            values = model.predict(rows)
        else:
            try:
                async with asyncio.timeout(left_ms / 1e3):
                    values = await asyncio.to_thread(model.predict, rows)
            except TimeoutError:
                raise PredictError(FailureReason.TIMEOUT, f"no answer within {left_ms:g} ms") from None
        if not plausible(values):
            raise PredictError(FailureReason.BAD_ANSWER, "a value that no latency can have")
        return RawAnswer(values, model.outputs, model.bundle_version)

    def _unlearned(self, rows: FloatMatrix) -> RawAnswer | None:
        if self._prior is None or (self._bundles is not None and self._bundles.model is not None):
            return None
        return RawAnswer(self._prior.predict(rows), self._prior.outputs, self._prior.bundle_version)

    def _prediction(
        self, rung: Rung, answer: RawAnswer, addresses: Sequence[str], backlog_tokens: npt.NDArray[Any]
    ) -> Prediction:
        bundles, version = self._bundles, answer.bundle_version
        compiled = bundles.calibration_for(version, answer.outputs) if bundles else None
        if compiled is None:
            self._metrics.uncalibrated()
        of_prior = bundles.prior_targets(version) if bundles else frozenset()
        return calibrated(answer.values, answer.outputs, version, rung, compiled, backlog_tokens, addresses, of_prior)

    def _report(self, rung: Rung, error: Exception) -> None:
        """Log a fault of ours once in a while, after this decision: a traceback takes milliseconds to write."""
        now_ms = self._clock.monotonic_ms()
        last = self._reported.get((rung, type(error)))
        if last is None or now_ms - last > _LOG_AGAIN_MS:
            self._reported[rung, type(error)] = now_ms
            log = partial(self._log.error, "prediction failed", rung=rung.value, exc_info=error)
            asyncio.get_running_loop().call_soon(log)

    def _failed(self, rung: Rung, reason: FailureReason, detail: str) -> None:
        self._metrics.step_failed(rung, reason)
        self._last[rung] = _Failure(reason, detail, self._clock.unix_ms())
