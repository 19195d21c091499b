"""The trainer's metrics: window, fits, gate, bundles, calibration, stream. Label sets are closed."""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.trainer.intake import POISON, Reject
from shared.bundle import RenderingName
from shared.prediction import TARGETS
from shared.telemetry import seconds

_FIT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TrainerMetrics:
    """Everything `/metrics` shows of this service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.samples = Counter("leadtime_trainer_samples_total", "Samples taken into the window.", registry=registry)
        self.censored = Counter(
            "leadtime_trainer_censored_samples_total", "Cut-off requests kept for evaluation.", registry=registry
        )
        self._rejected = Counter(
            "leadtime_trainer_samples_rejected_total", "Messages that taught nothing.", ["reason"], registry=registry
        )
        for reason in Reject:
            self._rejected.labels(reason.value)
        self.redeliveries = Counter(
            "leadtime_trainer_redeliveries_total", "Messages that JetStream had to send again.", registry=registry
        )
        self.dead_letters = Counter(
            "leadtime_trainer_dead_letters_total", "Messages moved out of the way, or not.", ["reason"],
            registry=registry,
        )  # fmt: skip
        for letter in (*sorted(POISON), "max_deliver", "failed"):
            self.dead_letters.labels(letter)
        self._stream_errors = Counter(
            "leadtime_trainer_stream_errors_total", "Failed calls of NATS or JetStream.", registry=registry
        )
        self._store_errors = Counter("leadtime_trainer_store_errors_total", "Failed calls of Redis.", registry=registry)
        self.cycles = Counter(
            "leadtime_trainer_cycles_total", "Training cycles by how they ended.", ["verdict"], registry=registry
        )
        self.cycle_wall = Histogram(
            "leadtime_trainer_cycle_seconds", "One training cycle.", buckets=_FIT_BUCKETS_S, registry=registry
        )
        self.cycle_cpu = Counter(
            "leadtime_trainer_cycle_cpu_seconds_total", "CPU time of training cycles.", registry=registry
        )
        self.bundles = Counter("leadtime_trainer_bundles_published_total", "Bundles published.", registry=registry)
        self._rollbacks = Counter(
            "leadtime_trainer_rollbacks_total", "Returns to an earlier version, by whose word.", ["cause"],
            registry=registry,
        )  # fmt: skip
        for cause in ("live_error", "operator"):
            self._rollbacks.labels(cause)
        self.calibrations = Counter(
            "leadtime_trainer_calibrations_published_total", "Calibrations published.", registry=registry
        )
        self._parity = Gauge(
            "leadtime_trainer_parity_error_ratio", "Largest relative error of the last graph.", ["rendering"],
            registry=registry,
        )  # fmt: skip
        self._tensor = Counter(
            "leadtime_trainer_tensor_renderings_total", "Tensor renderings by what became of them.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        for outcome in ("listed", "refused"):
            self._tensor.labels(outcome)
        self._held_out_error = Gauge(
            "leadtime_trainer_held_out_error_ratio", "MAPE of the champion's held-out rows.", ["target"],
            registry=registry,
        )  # fmt: skip

        self._disbelieved = Gauge(
            "leadtime_trainer_disbelieved_rows", "Rows that the last fit left out: their labels can't be true.",
            ["target"], registry=registry,
        )  # fmt: skip

    def watch(
        self,
        *,
        window_rows: Callable[[str], int],
        calibration_sequence: Callable[[], int],
        active: Callable[[], bool],
        bundle_age_ms: Callable[[], float | None],
        degenerate_share: Callable[[], float],
        pinned: Callable[[], bool],
    ) -> None:
        """Gauges that read the trainer's state when they are scraped."""
        rows = Gauge(
            "leadtime_trainer_window_rows", "Rows in the window that have the target.", ["target"],
            registry=self._registry,
        )  # fmt: skip
        for target in TARGETS:
            rows.labels(target).set_function(lambda target=target: window_rows(target))  # type: ignore[misc]
        for name, text, read in (
            ("calibration_sequence", "Sequence number of the last calibration.", calibration_sequence),
            ("active", "1 while this process holds the pool's lease.", lambda: int(active())),
            ("pinned", "1 while an operator's pin holds a version.", lambda: int(pinned())),
            ("degenerate_ttft_ratio", "Share of TTFT labels that are nearly e2e.", degenerate_share),
            ("bundle_age_seconds", "Age of the champion; -1 without one.", lambda: _age_s(bundle_age_ms())),
        ):
            Gauge(f"leadtime_trainer_{name}", text, registry=self._registry).set_function(read)

    def rejected(self, reason: Reject, count: int = 1) -> None:
        self._rejected.labels(reason.value).inc(count)

    def disbelieved(self, target: str, rows: int) -> None:
        self._disbelieved.labels(target).set(rows)

    def stream_failed(self) -> None:
        self._stream_errors.inc()

    def store_failed(self) -> None:
        self._store_errors.inc()

    def cycle_ended(self, verdict: str, wall_ms: float, cpu_ms: float) -> None:
        self.cycles.labels(verdict).inc()
        self.cycle_wall.observe(seconds(wall_ms))
        self.cycle_cpu.inc(seconds(cpu_ms))

    def parity_checked(self, rendering: RenderingName, error: float) -> None:
        self._parity.labels(rendering).set(error)

    def tensor_rendering(self, *, listed: bool) -> None:
        self._tensor.labels("listed" if listed else "refused").inc()

    def rolled_back(self, cause: Literal["live_error", "operator"]) -> None:
        self._rollbacks.labels(cause).inc()

    def champion_error(self, target: str, mape: float | None) -> None:
        if mape is not None:
            self._held_out_error.labels(target).set(mape)


def _age_s(age_ms: float | None) -> float:
    return -1.0 if age_ms is None else seconds(age_ms)
