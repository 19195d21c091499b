"""One training cycle: snapshot → fit → judge → export → parity → bundle. CPU work without I/O, run in a worker thread.

Reads top to bottom. What isn't better than the champion, or isn't the same in the graph as in the native model, ends
here with a verdict; nothing is raised for it.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version as installed
from typing import Any, Final

import numpy as np
import orjson

from services.trainer.basis import backlog_tokens
from services.trainer.calibrate import CalibrationOptions, Calibrator
from services.trainer.champion import Champion
from services.trainer.evaluate import HeldOut, Verdict, breakdown, censored_beyond_p90, judge, metrics
from services.trainer.export import BoosterToGraph, Parity, Rendered, parity, parity_rows, render, serialize
from services.trainer.levels import leveled, without_endpoints
from services.trainer.train import FitOptions, LatencyModel, fit, split
from services.trainer.window import Snapshot, held_out_rows
from shared.bundle import Bundle, BundleManifest, Rendering, RenderingName, TargetMetrics, bundle_version
from shared.errors import IntegrityError
from shared.features import SCHEMA, FloatMatrix
from shared.inference import BundleModel
from shared.prediction import TARGETS, plausible

LIBRARIES: Final = ("xgboost-cpu", "numpy", "scipy", "onnx", "onnxmltools", "onnxruntime")
# Newest rows by which a new bundle's calibration is warmed: a bias is settled after 200, a P99 offset never sooner.
WARM_UP_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class CycleOptions:
    """What a cycle needs to know beside the samples."""

    pool: str
    fit: FitOptions = field(default_factory=FitOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    parity_tolerance: float = 1e-4
    tensor: BoosterToGraph | None = None
    """Makes the tensor rendering, where there is a maker"""


@dataclass(frozen=True, slots=True)
class TensorOutcome:
    """Whether the bundle lists a tensor rendering, how far it strays, and why it isn't listed."""

    listed: bool
    parity: Parity | None
    detail: str
    cpu_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CycleReport:
    """What came out. `champion` and `calibrator` are there when the verdict is to accept."""

    verdict: Verdict
    window_samples: int
    created_unix_ms: float
    metrics: Mapping[str, TargetMetrics] = field(default_factory=dict)
    champion_metrics: Mapping[str, TargetMetrics] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, TargetMetrics]] = field(default_factory=dict)
    censored_beyond_p90: float | None = None
    gains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    disbelieved: Mapping[str, int] = field(default_factory=dict)
    """Per target, rows left out of the fit since their labels can't be true"""
    converter: str = ""
    parity: Parity | None = None
    tensor: TensorOutcome | None = None
    """None where no tensor rendering was tried"""
    champion: Champion | None = None
    calibrator: Calibrator | None = None
    wall_ms: float = 0.0
    cpu_ms: float = 0.0


def run_cycle(
    snapshot: Snapshot, champion: Champion | None, options: CycleOptions, created_unix_ms: float
) -> CycleReport:
    """Fit a challenger on a snapshot, judge it against the champion, and make a bundle of it if it may replace it."""
    wall, cpu = time.perf_counter(), time.thread_time()
    report = _fit_and_judge(snapshot, champion, options, created_unix_ms)
    return replace(report, wall_ms=(time.perf_counter() - wall) * 1e3, cpu_ms=(time.thread_time() - cpu) * 1e3)


def _fit_and_judge(
    snapshot: Snapshot, champion: Champion | None, options: CycleOptions, created_unix_ms: float
) -> CycleReport:
    snapshot = leveled(snapshot, champion)
    report = CycleReport(Verdict(False, "too_few_rows"), len(snapshot), created_unix_ms)
    # The model is of the pool; how much slower one endpoint is than the pool is its calibration's to say.
    alike = without_endpoints(snapshot, champion)
    model = fit(alike, options.fit)
    if model is None:
        return report
    lost = _lost(model, champion)
    if lost:
        detail = f"too few samples of {', '.join(lost)}, which {champion.version if champion else ''} has learned"
        return replace(report, verdict=Verdict(False, "fewer_targets", detail))
    # What is the prior's is judged by nobody: it stands in for what the pool hasn't shown yet.
    held_out = _held_out(alike, model.learned, options.fit.held_out_fraction)
    ours = {target: model.predict(held.rows) for target, held in held_out.items()}
    theirs = {target: champion.model.predict(held.rows) for target, held in held_out.items()} if champion else None
    if theirs is not None and not all(map(plausible, theirs.values())):
        theirs = None  # nonsense can't be compared with: the challenger is judged as the first would be
    their_outputs = champion.model.outputs if champion and theirs is not None else ()
    edges = options.calibration.backlog_edges_tokens
    outputs = model.outputs
    report = replace(
        report,
        verdict=judge(held_out, ours, outputs, theirs, their_outputs),
        metrics={target: metrics(ours[target], outputs, target, held) for target, held in held_out.items()},
        champion_metrics={
            target: metrics(theirs[target], their_outputs, target, held) for target, held in held_out.items()
        }
        if theirs
        else {},
        groups={target: breakdown(ours[target], outputs, target, held, edges) for target, held in held_out.items()},
        censored_beyond_p90=censored_beyond_p90(model.predict(snapshot.censored_rows), outputs, snapshot.censored_ms),
        gains=model.gains(),
        disbelieved=model.disbelieved,
    )
    if not report.verdict.accepted:
        return report
    return _export(snapshot, model, options, report)


def _lost(model: LatencyModel, champion: Champion | None) -> list[str]:
    """Targets that the champion has and the model hasn't, or that only the champion has learned."""
    if champion is None:
        return []
    manifest = champion.bundle.manifest
    theirs = [target for target in TARGETS if f"{target}_p50" in manifest.outputs]
    return [
        target
        for target in theirs
        if target not in (model.targets if target in manifest.prior_targets else model.learned)
    ]


def _held_out(snapshot: Snapshot, targets: Sequence[str], fraction: float) -> dict[str, HeldOut]:
    held_out = {}
    for target in targets:
        _, positions = split(snapshot, target, fraction)
        if len(positions):
            held_out[target] = HeldOut(snapshot.rows[positions], snapshot.targets[target][positions])
    return held_out


def _export(snapshot: Snapshot, model: LatencyModel, options: CycleOptions, report: CycleReport) -> CycleReport:
    """Render, prove and pack. No bundle without a proven tree-ensemble rendering; a tensor one may be absent."""
    rows = parity_rows(model, snapshot.rows, np.random.default_rng(options.fit.seed))
    expected = model.predict(rows)
    try:
        rendered = render(model)
        version = bundle_version(report.created_unix_ms, rendered.model.SerializeToString())
        metadata = _metadata(model, version, options.pool, report)
        bundle = _bundle(model, version, options.pool, report)
        bundle, session, checked = _with_rendering(bundle, "tree_ensemble", rendered, metadata, expected, rows)
    except (ValueError, IntegrityError) as error:
        return replace(report, verdict=replace(report.verdict, accepted=False, reason="export", detail=str(error)))
    report = replace(report, converter=rendered.converter, parity=checked)
    if not checked.max_relative_error <= options.parity_tolerance:
        return replace(report, verdict=replace(report.verdict, accepted=False, reason="parity", detail=_told(checked)))
    if options.tensor is not None:
        bundle, report = _with_tensor(bundle, model, options, metadata, expected, rows, report)
    champion = Champion(bundle, session, saved=False)
    return replace(
        report,
        champion=champion,
        calibrator=warmed(snapshot, champion, options.calibration, options.fit.held_out_fraction),
    )


def _with_tensor(
    bundle: Bundle,
    model: LatencyModel,
    options: CycleOptions,
    metadata: Mapping[str, str],
    expected: FloatMatrix,
    rows: FloatMatrix,
    report: CycleReport,
) -> tuple[Bundle, CycleReport]:
    """The bundle with its tensor rendering where that can be made and passes parity, else as it was."""
    began = time.thread_time()
    outcome: TensorOutcome
    try:
        rendered = render(model, options.tensor)
        both, _, checked = _with_rendering(bundle, "tensor", rendered, metadata, expected, rows)
        outcome = TensorOutcome(checked.max_relative_error <= options.parity_tolerance, checked, _told(checked))
    except (ValueError, IntegrityError) as error:
        outcome = TensorOutcome(False, None, str(error))
    outcome = replace(outcome, cpu_ms=(time.thread_time() - began) * 1e3)
    return (both if outcome.listed else bundle), replace(report, tensor=outcome)


def _with_rendering(
    bundle: Bundle,
    name: RenderingName,
    rendered: Rendered,
    metadata: Mapping[str, str],
    expected: FloatMatrix,
    rows: FloatMatrix,
) -> tuple[Bundle, BundleModel, Parity]:
    """The bundle with one rendering more, its session on the runtime that readers use, and its parity there."""
    graph = serialize(
        rendered.model, {**metadata, "leadtime.rendering": name, "leadtime.converter": rendered.converter}
    )
    sha256 = hashlib.sha256(graph).hexdigest()
    entry = Rendering(
        name=name, sha256=sha256, size_bytes=len(graph), parity_max_relative_error=float("inf"), parity_rows=0
    )
    manifest = bundle.manifest
    session = BundleModel(Bundle(manifest, {name: graph}), rendering=name)
    checked = parity(session.predict, expected, rows)
    entry = entry.model_copy(
        update={"parity_max_relative_error": checked.max_relative_error, "parity_rows": checked.rows}
    )
    libraries = manifest.libraries | {f"{name} converter": rendered.converter}
    manifest = manifest.model_copy(update={"renderings": [*manifest.renderings, entry], "libraries": libraries})
    return Bundle(manifest, {**bundle.graphs, name: graph}), session, checked


def _told(checked: Parity) -> str:
    return f"relative error {checked.max_relative_error:.2e} on {checked.rows} rows"


def _metadata(model: LatencyModel, version: str, pool: str, report: CycleReport) -> dict[str, str]:
    """What a graph says of itself where its bundle is lost."""
    features = [
        {"name": f.name, "unit": f.unit, "low": f.low, "high": f.high, "default": f.default} for f in SCHEMA.features
    ]
    values: dict[str, Any] = {
        "schema": features,
        "outputs": model.outputs,
        "prior_targets": model.prior_targets,
        "created_unix_ms": report.created_unix_ms,
        "window_samples": report.window_samples,
        "feature_low": model.feature_low.tolist(),
        "feature_high": model.feature_high.tolist(),
        "metrics": {target: found.model_dump() for target, found in report.metrics.items()},
    }
    texts = {"pool": pool, "version": version, "schema_hash": SCHEMA.hash}
    encoded = {name: orjson.dumps(value).decode() for name, value in values.items()}
    return {f"leadtime.{name}": text for name, text in (texts | encoded).items()}


def _bundle(model: LatencyModel, version: str, pool: str, report: CycleReport) -> Bundle:
    """A bundle without a rendering yet."""
    manifest = BundleManifest(
        pool=pool,
        version=version,
        schema_hash=SCHEMA.hash,
        features=list(SCHEMA.names),
        outputs=list(model.outputs),
        prior_targets=list(model.prior_targets),
        created_unix_ms=report.created_unix_ms,
        window_samples=report.window_samples,
        metrics=dict(report.metrics),
        feature_low=[float(value) for value in model.feature_low],
        feature_high=[float(value) for value in model.feature_high],
        libraries={name: installed(name) for name in LIBRARIES},
        renderings=[],
    )
    return Bundle(manifest, {})


def warmed(
    snapshot: Snapshot, champion: Champion, options: CalibrationOptions, held_out_fraction: float = 0.1
) -> Calibrator:
    """A calibrator that has seen the newest rows of a snapshot, in order of arrival. Quantiles are calibrated on the
    newest of all alone: the champion may have been fitted on the others.
    """
    calibrator = Calibrator(options, champion.version, champion.model.outputs)
    start = max(0, len(snapshot) - WARM_UP_ROWS)
    fitted = len(snapshot) - held_out_rows(len(snapshot), held_out_fraction)
    observe_rows(calibrator, champion, snapshot, start, fitted=fitted)
    calibrator.mark()
    return calibrator


def observe_rows(
    calibrator: Calibrator,
    champion: Champion,
    snapshot: Snapshot,
    start: int,
    end: int | None = None,
    *,
    fitted: int = 0,
) -> None:
    """Let a calibrator see the rows of a snapshot from position `start` up to `end`; those before `fitted` say nothing
    of quantiles.
    """
    rows: FloatMatrix = snapshot.rows[start:end]
    if not len(rows):
        return
    answers = champion.model.predict(rows)
    if not plausible(answers):
        return
    predictions = answers.tolist()
    backlog = backlog_tokens(rows).tolist()
    columns = [snapshot.targets[target][start:end].tolist() for target in TARGETS]
    lags = (snapshot.sequence - snapshot.sent)[start:end].tolist()
    for row, endpoint in enumerate(snapshot.endpoints[start:end]):
        actual = {
            target: column[row] for target, column in zip(TARGETS, columns, strict=True) if column[row] == column[row]
        }
        predicted = dict(zip(champion.model.outputs, predictions[row], strict=True))
        calibrator.observe(predicted, actual, backlog[row], endpoint, lag=lags[row], seen=start + row < fitted)
