"""The router's own metrics: decisions, rungs, added latency. Label sets are closed or bounded.

A model's name is a label only up to `_MAX_MODELS` names; the rest are "other", so a scan of names can't grow the page.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.router.predict.types import Prediction
from services.router.request.errors import RejectReason
from shared.samples import Rung
from shared.telemetry import STEP_BUCKETS_S, seconds
from shared.verdicts import Note, Reason

_MAX_MODELS: Final = 64
WAIT_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RouterMetrics:
    """Counters and histograms of decisions, with the totals that `/v1/stats` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "leadtime_router_decisions_total", "Requests given an endpoint.", ["model", "rung"], registry=registry
        )
        self._rejections = Counter(
            "leadtime_router_rejections_total", "Requests answered by the router itself.", ["reason"], registry=registry
        )
        self._passed = Counter(
            "leadtime_router_passed_through_total",
            "Requests routed by load alone: they name no model.",
            registry=registry,
        )
        self._passed_over = Counter(
            "leadtime_router_picks_passed_over_total",
            "Requests that another endpoint served than the one listed first.",
            registry=registry,
        )
        self._failures = Counter(
            "leadtime_router_scheduling_failures_total",
            "Decisions that fell to the least loaded endpoint because a plugin, or a part of ours, failed.",
            registry=registry,
        )
        self._decision = Histogram(
            "leadtime_router_decision_seconds", "Receipt to answer.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._waited = Histogram(
            "leadtime_router_waiting_seconds",
            "Time that requests were held on purpose before they went.",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        stages = Histogram(
            "leadtime_router_stage_seconds",
            "Parts of a decision.",
            ["stage"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._stages = {name: stages.labels(name) for name in ("parse", "features", "predict", "policy")}
        self._completions = Counter(
            "leadtime_router_completions_total",
            "Responses seen on their way through, by what became of them.",
            ["reason"],
            registry=registry,
        )
        notes = Counter(
            "leadtime_router_completion_notes_total", "Completions that lack something.", ["note"], registry=registry
        )
        self._notes = {note: notes.labels(note.value) for note in Note}
        for reason in RejectReason:
            self._rejections.labels(reason.value)
        self._models: set[str] = set()
        self._rung_children: dict[tuple[str, Rung], Counter] = {}
        self.by_rung: dict[Rung, int] = dict.fromkeys(Rung, 0)
        self.by_reason: dict[RejectReason, int] = dict.fromkeys(RejectReason, 0)
        self.bundle_versions: dict[str, int] = {}

    def stage(self, name: str, duration_ms: float) -> None:
        self._stages[name].observe(seconds(duration_ms))

    def decided(self, model: str, prediction: Prediction | None, duration_ms: float) -> None:
        rung = prediction.rung if prediction else Rung.HEURISTIC
        self.by_rung[rung] += 1
        if prediction is not None:
            self._count_bundle(prediction.bundle_version)
        self._child(model, rung).inc()
        self._decision.observe(seconds(duration_ms))

    def waited(self, queue_ms: float) -> None:
        self._waited.observe(seconds(queue_ms))

    def rejected(self, reason: RejectReason) -> None:
        self.by_reason[reason] += 1
        self._rejections.labels(reason.value).inc()

    def completed(self, reason: Reason, notes: tuple[Note, ...] = ()) -> None:
        self._completions.labels(reason.value).inc()
        for note in notes:
            self._notes[note].inc()

    def passed_through(self) -> None:
        self._passed.inc()

    def passed_over(self) -> None:
        self._passed_over.inc()

    def scheduling_failed(self) -> None:
        self._failures.inc()

    def reset(self) -> None:
        """Forget the totals of `/v1/stats`; the Prometheus counters go on."""
        self.by_rung = dict.fromkeys(Rung, 0)
        self.by_reason = dict.fromkeys(RejectReason, 0)
        self.bundle_versions = {}

    def _count_bundle(self, version: str) -> None:
        if version not in self.bundle_versions and len(self.bundle_versions) >= 256:
            del self.bundle_versions[next(iter(self.bundle_versions))]
        self.bundle_versions[version] = self.bundle_versions.get(version, 0) + 1

    def _child(self, model: str, rung: Rung) -> Counter:
        if model not in self._models:
            if len(self._models) >= _MAX_MODELS:
                model = "other"
            self._models.add(model)
        child = self._rung_children.get((model, rung))
        if child is None:
            child = self._rung_children[model, rung] = self._decisions.labels(model, rung.value)
        return child
