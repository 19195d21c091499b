"""The predictor's metrics: requests, batches, model time, bundle. Label sets are closed or bounded.

Children of the hot path are bound once: a `labels()` call costs more than the increment.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.predictor.slot import Served
from shared.bundle import Refusal, RenderingName
from shared.clock import Clock
from shared.names import REASON_NO_BUNDLE
from shared.store_watch import StoreMetrics
from shared.telemetry import STEP_BUCKETS_S, seconds

_ROW_BUCKETS: Final = (1, 4, 16, 64, 128, 256, 512, 1_024, 4_096, 16_384)


class Reason(StrEnum):
    """How a call of `/v1/predict` ended: the label of its counter, and `error.reason` in an error's body."""

    OK = "ok"
    MALFORMED = "malformed"
    SHAPE = "shape"
    VALUE = "value"
    SCHEMA = "schema"
    POOL = "pool"
    CONTENT_TYPE = "content_type"
    TOO_LARGE = "too_large"
    BODY_TIMEOUT = "body_timeout"
    UNAUTHORIZED = "unauthorized"
    DISCONNECTED = "disconnected"
    NO_BUNDLE = REASON_NO_BUNDLE
    OVERLOADED = "overloaded"
    MODEL_FAULT = "model_fault"


class PredictorMetrics:
    """Everything `/metrics` shows of this service."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        requests = Counter(
            "leadtime_predictor_requests_total",
            "Calls of /v1/predict by how they ended.",
            ["status", "reason"],
            registry=registry,
        )
        self._requests_by_status = requests
        self._ok = requests.labels("200", Reason.OK.value)
        self._rows = Counter("leadtime_predictor_rows_total", "Rows answered.", registry=registry)
        self._batch_rows = Histogram(
            "leadtime_predictor_batch_rows", "Rows of one model run.", buckets=_ROW_BUCKETS, registry=registry
        )
        self._model = Histogram(
            "leadtime_predictor_model_seconds", "One model run.", buckets=STEP_BUCKETS_S, registry=registry
        )
        runs = Counter(
            "leadtime_predictor_runs_total", "Model runs by the rendering that answered.", ["rendering"],
            registry=registry,
        )  # fmt: skip
        self._runs: dict[RenderingName, Counter] = {name: runs.labels(name) for name in get_args(RenderingName)}
        self._queue = Histogram(
            "leadtime_predictor_queue_seconds",
            "A request's wait for its model run.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._waiting_rows = Gauge(
            "leadtime_predictor_waiting_rows", "Rows that wait for the model.", ["pool"], registry=registry
        )
        self._bundle_info = Gauge(
            "leadtime_predictor_bundle_info",
            "1 for each rendering in use, with the ONNX Runtime provider that really runs it.",
            ["pool", "version", "rendering", "provider"],
            registry=registry,
        )
        self._bundle_age = Gauge(
            "leadtime_predictor_bundle_age_seconds",
            "Time since the bundle in use was trained.",
            ["pool"],
            registry=registry,
        )
        self._crossover = Gauge(
            "leadtime_predictor_crossover_rows",
            "Batch size from which on the accelerator answers; -1 where the CPU takes all.",
            ["pool"],
            registry=registry,
        )
        self._swaps = Counter(
            "leadtime_predictor_bundle_swaps_total", "Bundles taken into use.", ["pool"], registry=registry
        )
        self._load = Histogram(
            "leadtime_predictor_bundle_load_seconds",
            "Fetched to in use: verify, start, warm.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._refusals = Counter(
            "leadtime_predictor_bundle_refusals_total",
            "Published bundles that were not taken; the one before stays.",
            ["pool", "reason"],
            registry=registry,
        )
        self._fallback = Gauge(
            "leadtime_predictor_device_fallback",
            "1 when the CPU serves although another device is preferred.",
            ["pool"],
            registry=registry,
        )
        self.store = StoreMetrics("leadtime_predictor", registry, clock)
        self.swaps = 0
        self.refusals = 0

    def watch_pool(self, pool: str, waiting_rows: Callable[[], int]) -> None:
        """Show the pool's series before anything happens to it."""
        self._swaps.labels(pool)
        self._waiting_rows.labels(pool).set_function(waiting_rows)
        for reason in Refusal:
            self._refusals.labels(pool, reason.value)

    def answered(self, rows: int, queue_ms: float) -> None:
        self._ok.inc()
        self._rows.inc(rows)
        self._queue.observe(seconds(queue_ms))

    def failed(self, status: int, reason: Reason) -> None:
        self._requests_by_status.labels(str(status), reason.value).inc()

    def ran(self, rendering: RenderingName, rows: int, model_ms: float) -> None:
        self._runs[rendering].inc()
        self._batch_rows.observe(rows)
        self._model.observe(seconds(model_ms))

    def swapped(self, pool: str, served: Served, load_ms: float) -> None:
        self.swaps += 1
        self._swaps.labels(pool).inc()
        self._load.observe(seconds(load_ms))
        self._bundle_info.remove_by_labels({"pool": pool})
        for model in served.models:
            self._bundle_info.labels(pool, served.manifest.version, model.rendering, model.provider).set(1)
        self._crossover.labels(pool).set(-1 if served.crossover_rows is None else served.crossover_rows)
        created_unix_ms = served.manifest.created_unix_ms
        self._bundle_age.labels(pool).set_function(lambda: seconds(self._clock.unix_ms() - created_unix_ms))
        self._fallback.labels(pool).set(1 if served.fallback else 0)

    def refused(self, pool: str, reason: Refusal) -> None:
        self.refusals += 1
        self._refusals.labels(pool, reason.value).inc()
