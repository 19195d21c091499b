"""The collector's metrics: what was seen, what became of it, and how good the predictions were.

Predicted and actual latency come from the same sample, so a dashboard compares like with like. Labels
are closed sets but for the model, of which the first 64 names are kept apart and the rest is `other`: a client chooses
the name.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.samples import LatencySample, Outcome
from shared.telemetry import ANSWER_BUCKETS_S, seconds
from shared.verdicts import Note, Reason

MAX_MODELS: Final = 64
RECENT: Final = 1_000
TPOT_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
ERROR_BUCKETS: Final = (-0.75, -0.5, -0.3, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
LATE_TTFT_RATIO: Final = 0.95
LATE_TTFT_TOKENS: Final = 10

_TARGETS: Final = ("ttft", "tpot", "e2e")


class Recent:
    """Mean over the last values, kept as a running sum."""

    __slots__ = ("_sum", "_values")

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._sum = 0.0

    def add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            self._sum -= self._values[0]
        self._values.append(value)
        self._sum += value

    def mean(self) -> float:
        """0 before the first value."""
        return self._sum / len(self._values) if self._values else 0.0


@dataclass(frozen=True, slots=True)
class _ModelMetrics:
    """Histograms of one model, by target."""

    name: str
    actual: dict[str, Histogram]
    predicted: dict[str, Histogram]
    error: dict[str, Histogram]


class CollectorMetrics:
    """Every metric of the service, on one registry of its own."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self._pool = pool
        self._models: dict[str, _ModelMetrics] = {}
        self.entries = Counter(
            "leadtime_collector_entries",
            "Access-log entries and posted samples by what became of them",
            ("source", "reason"),
            registry=registry,
        )
        # Every reason is exported from the start, as 0.
        self._by_reason = {reason: self.entries.labels("access_log", reason.value) for reason in Reason}
        self._notes = Counter(
            "leadtime_collector_sample_notes", "Accepted samples that lack something", ("note",), registry=registry
        )
        self._note = {note: self._notes.labels(note.value) for note in Note}
        self.outcomes = Counter(
            "leadtime_collector_samples", "Accepted samples by outcome", ("pool", "outcome"), registry=registry
        )
        self._outcome = {outcome: self.outcomes.labels(pool, outcome.value) for outcome in Outcome}
        self.als_streams = Gauge("leadtime_collector_als_streams", "Open access-log streams", registry=registry)
        self.als_messages = Counter("leadtime_collector_als_messages", "Access-log messages", registry=registry)
        self.als_refused = Counter(
            "leadtime_collector_als_refused", "Access-log streams refused", ("reason",), registry=registry
        )
        self.published = Counter(
            "leadtime_collector_published", "Samples that left the outbox, by fate", ("fate",), registry=registry
        )
        self.publish_retries = Counter(
            "leadtime_collector_publish_retries", "Samples to be sent again", ("reason",), registry=registry
        )
        self.spool_samples = Counter(
            "leadtime_collector_spool_samples",
            "Samples by their way through the spool: written to disk, read back, settled",
            ("event",),
            registry=registry,
        )
        self.spool_failures = Counter(
            "leadtime_collector_spool_failures", "Failed uses of the spool", ("reason",), registry=registry
        )
        for event in ("written", "read", "settled"):
            self.spool_samples.labels(event)
        for reason in ("full", "no_space", "io"):
            self.spool_failures.labels(reason)
        self.spool_damaged = Counter(
            "leadtime_collector_spool_damaged_bytes", "Bytes of the spool that were no whole record", registry=registry
        )
        self._spooled = Gauge("leadtime_collector_spooled_samples", "Samples on the disk", registry=registry)
        self._spool_bytes = Gauge("leadtime_collector_spool_bytes", "Size of the spool", registry=registry)
        self.untold = Counter(
            "leadtime_collector_untold",
            "Requests without a sample that routers weren't told of: more than are kept while NATS is away",
            registry=registry,
        )
        self.nats_errors = Counter("leadtime_collector_nats_errors", "Errors of the NATS client", registry=registry)
        self.stream_differs = Gauge(
            "leadtime_collector_stream_differs", "1 if the stream is configured otherwise", registry=registry
        )
        self._waiting = Gauge("leadtime_collector_queue_samples", "Samples waiting to be sent", registry=registry)
        self._outstanding = Gauge(
            "leadtime_collector_outstanding_samples", "Samples sent and not yet acknowledged", registry=registry
        )
        labels = ("pool", "model")
        buckets = {"ttft": ANSWER_BUCKETS_S, "tpot": TPOT_BUCKETS_S, "e2e": ANSWER_BUCKETS_S}
        self._actual = {
            target: Histogram(
                f"leadtime_collector_actual_{target}_seconds",
                f"Observed {target}, from the dispatch to the endpoint",
                labels,
                buckets=buckets[target],
                registry=registry,
            )
            for target in _TARGETS
        }
        self._predicted = {
            target: Histogram(
                f"leadtime_collector_predicted_{target}_seconds",
                f"Median {target} predicted for the endpoint that served",
                labels,
                buckets=buckets[target],
                registry=registry,
            )
            for target in _TARGETS
        }
        self._error = {
            target: Histogram(
                f"leadtime_collector_{target}_error_ratio",
                f"(predicted - actual) / actual of {target}",
                labels,
                buckets=ERROR_BUCKETS,
                registry=registry,
            )
            for target in _TARGETS
        }
        self._mape = {target: Recent(RECENT) for target in _TARGETS}
        self._bias = {target: Recent(RECENT) for target in _TARGETS}
        mape = Gauge(
            "leadtime_collector_prediction_mape_ratio",
            "Mean absolute error of the last 1000 predictions, relative to the actual latency",
            ("target",),
            registry=registry,
        )
        bias = Gauge(
            "leadtime_collector_prediction_bias_ratio",
            "Mean signed error of the last 1000 predictions, relative to the actual latency",
            ("target",),
            registry=registry,
        )
        for target in _TARGETS:
            mape.labels(target).set_function(self._mape[target].mean)
            bias.labels(target).set_function(self._bias[target].mean)
        self._slo = Counter(
            "leadtime_collector_slo", "Requests with an objective, by whether it was met", (*labels, "target", "met"),
            registry=registry,
        )  # fmt: skip
        self._without_content = Recent(RECENT)
        Gauge(
            "leadtime_collector_first_content_missing_ratio",
            "Share of the last 1000 complete streamed answers without a first-content instant",
            registry=registry,
        ).set_function(self._without_content.mean)
        self._late_ttft = Recent(RECENT)
        Gauge(
            "leadtime_collector_late_ttft_ratio",
            "Share of the last 1000 streamed answers of 10 or more tokens that began in the last 5 % of their time",
            registry=registry,
        ).set_function(self._late_ttft.mean)

    def watch_outbox(self, waiting: Callable[[], float], outstanding: Callable[[], float]) -> None:
        """Read the outbox's depth when the metrics are scraped."""
        self._waiting.set_function(waiting)
        self._outstanding.set_function(outstanding)

    def watch_spool(self, samples: Callable[[], float], size_bytes: Callable[[], float]) -> None:
        """Read the spool's size when the metrics are scraped."""
        self._spooled.set_function(samples)
        self._spool_bytes.set_function(size_bytes)

    def count_entry(self, reason: Reason) -> None:
        """One access-log entry."""
        self._by_reason[reason].inc()

    def count_posted(self, reason: str, count: int = 1) -> None:
        """Posted samples; `reason` is of the closed set that the room's README lists."""
        self.entries.labels("post", reason).inc(count)

    def observe(self, sample: LatencySample, notes: tuple[Note, ...] = ()) -> None:
        """Everything that one accepted sample tells."""
        for note in notes:
            self._note[note].inc()
        self._outcome[sample.outcome].inc()
        model = self._of_model(sample.model)
        if sample.outcome is Outcome.OK:
            for target in _TARGETS:
                self._compare(target, sample, model)
            if sample.streamed:
                self._without_content.add(sample.ttft_ms is None)
                if sample.ttft_ms is not None and sample.e2e_ms and (sample.output_tokens or 0) >= LATE_TTFT_TOKENS:
                    self._late_ttft.add(sample.ttft_ms >= LATE_TTFT_RATIO * sample.e2e_ms)
        for target, met in objectives(sample):
            self._slo.labels(self._pool, model.name, target, "true" if met else "false").inc()

    def _compare(self, target: str, sample: LatencySample, model: "_ModelMetrics") -> None:
        actual_ms: float | None = getattr(sample, f"{target}_ms")
        if actual_ms is None:
            return
        model.actual[target].observe(seconds(actual_ms))
        predicted_ms = (sample.prediction or {}).get(f"{target}_p50")
        if predicted_ms is None:
            return
        model.predicted[target].observe(seconds(predicted_ms))
        error = (predicted_ms - actual_ms) / actual_ms
        model.error[target].observe(error)
        self._mape[target].add(abs(error))
        self._bias[target].add(error)

    def _of_model(self, name: str) -> "_ModelMetrics":
        """The model's own histograms, or those of `other`; looked up by label once, which costs more than observing."""
        if (known := self._models.get(name)) is not None:
            return known
        if len(self._models) > MAX_MODELS:
            return self._models["other"]
        label = name if len(self._models) < MAX_MODELS else "other"
        made = _ModelMetrics(
            label,
            *(
                {target: of[target].labels(self._pool, label) for target in _TARGETS}
                for of in (self._actual, self._predicted, self._error)
            ),
        )
        self._models[label] = made
        return made


def objectives(sample: LatencySample) -> list[tuple[str, bool]]:
    """Each objective that the request stated, and whether it was met; an unknown outcome is left out.

    A client's clock starts at receipt, so the time before the dispatch counts. A request that broke off has missed a
    TTFT objective if it had waited longer than that without a token, and says nothing otherwise.
    """
    judged = []
    before_ms = sample.queue_ms + sample.decision_ms
    if sample.ttft_slo_ms is not None:
        if sample.ttft_ms is not None:
            judged.append(("ttft", before_ms + sample.ttft_ms <= sample.ttft_slo_ms))
        elif sample.outcome is not Outcome.OK and before_ms + (sample.e2e_ms or 0.0) > sample.ttft_slo_ms:
            judged.append(("ttft", False))
    if sample.tpot_slo_ms is not None and sample.tpot_ms is not None:
        judged.append(("tpot", sample.tpot_ms <= sample.tpot_slo_ms))
    return judged
