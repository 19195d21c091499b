"""Metrics of the router's predictions: ladder steps, calls, replicas, own bundle, calibration. Closed label sets."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.router.predict.errors import FailureReason
from shared.bundle import Refusal
from shared.clock import Clock
from shared.samples import Rung
from shared.store_watch import StoreMetrics
from shared.telemetry import STEP_BUCKETS_S, seconds

_ROW_BUCKETS: Final = (1, 4, 16, 64, 128, 256, 512, 1_024, 4_096)
_STEPS: Final = (Rung.PREDICTOR, Rung.IN_PROCESS, Rung.PRIOR)


class PredictMetrics:
    """Everything `/metrics` shows of `services.router.predict`; one per process."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        failures = Counter(
            "leadtime_router_predict_failures_total",
            "Steps of the ladder that gave no prediction.",
            ["rung", "reason"],
            registry=registry,
        )
        self._failures = {
            (rung, reason): failures.labels(rung.value, reason.value) for rung in _STEPS for reason in FailureReason
        }
        step = Histogram(
            "leadtime_router_predict_seconds",
            "One step of the ladder that gave a prediction.",
            ["rung"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._step = {rung: step.labels(rung.value) for rung in _STEPS}
        self._uncalibrated = Counter(
            "leadtime_router_predict_uncalibrated_total",
            "Predictions passed on raw: no calibration of their bundle is here.",
            registry=registry,
        )
        calls = Counter(
            "leadtime_router_predict_calls_total",
            "Calls of a predictor by result; a prediction may take several.",
            ["result"],
            registry=registry,
        )
        self._calls = {name: calls.labels(name) for name in ("ok", *(reason.value for reason in FailureReason))}
        self._call_rows = Histogram(
            "leadtime_router_predict_call_rows",
            "Rows of one call, several requests' together.",
            buckets=_ROW_BUCKETS,
            registry=registry,
        )
        self._call = Histogram(
            "leadtime_router_predict_call_seconds",
            "One call of a predictor that was answered.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._replicas = Gauge(
            "leadtime_router_predict_replicas", "Predictors known, by state.", ["state"], registry=registry
        )
        self._ejections = Counter(
            "leadtime_router_predict_ejections_total", "Predictors taken out until a probe succeeds.", registry=registry
        )
        self._resolve_failures = Counter(
            "leadtime_router_predict_resolve_failures_total", "Names of predictors not resolved.", registry=registry
        )
        self._bundle_info = Gauge(
            "leadtime_router_predict_bundle_info", "1 for this process's own bundle.", ["version"], registry=registry
        )
        self._bundle_age = Gauge(
            "leadtime_router_predict_bundle_age_seconds", "Time since the own bundle was trained.", registry=registry
        )
        self._swaps = Counter(
            "leadtime_router_predict_bundle_swaps_total", "Bundles taken into use.", registry=registry
        )
        refusals = Counter(
            "leadtime_router_predict_bundle_refusals_total",
            "Published bundles that were not taken; the one before stays.",
            ["reason"],
            registry=registry,
        )
        self._refusals = {reason: refusals.labels(reason.value) for reason in Refusal}
        self._calibration_age = Gauge(
            "leadtime_router_predict_calibration_age_seconds", "Age of the calibration in use.", registry=registry
        )
        self._calibration_refusals = Counter(
            "leadtime_router_predict_calibration_refusals_total",
            "Published calibrations that were not taken.",
            registry=registry,
        )
        self.store = StoreMetrics("leadtime_router_predict", registry, clock)

    def predicted(self, rung: Rung, duration_ms: float) -> None:
        self._step[rung].observe(seconds(duration_ms))

    def step_failed(self, rung: Rung, reason: FailureReason) -> None:
        self._failures[rung, reason].inc()

    def uncalibrated(self) -> None:
        self._uncalibrated.inc()

    def called(self, rows: int, duration_ms: float) -> None:
        self._calls["ok"].inc()
        self._call_rows.observe(rows)
        self._call.observe(seconds(duration_ms))

    def call_failed(self, reason: FailureReason) -> None:
        self._calls[reason.value].inc()

    def watch_replicas(
        self, live: Callable[[], int], without_model: Callable[[], int], ejected: Callable[[], int]
    ) -> None:
        self._replicas.labels("live").set_function(live)
        self._replicas.labels("without_model").set_function(without_model)
        self._replicas.labels("ejected").set_function(ejected)

    def ejected(self) -> None:
        self._ejections.inc()

    def resolve_failed(self) -> None:
        self._resolve_failures.inc()

    def swapped(self, version: str, created_unix_ms: float) -> None:
        self._swaps.inc()
        self._bundle_info.clear()
        self._bundle_info.labels(version).set(1)
        self._bundle_age.set_function(self._age_of(created_unix_ms))

    def refused(self, reason: Refusal) -> None:
        self._refusals[reason].inc()

    def calibrated(self, updated_unix_ms: float) -> None:
        self._calibration_age.set_function(self._age_of(updated_unix_ms))

    def calibration_refused(self) -> None:
        self._calibration_refusals.inc()

    def _age_of(self, unix_ms: float) -> Callable[[], float]:
        return lambda: seconds(self._clock.unix_ms() - unix_ms)
