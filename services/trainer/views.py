"""Bundles and cycles as plain data, for `/v1/model`. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.trainer.champion import Champion
from services.trainer.cycle import CycleReport
from services.trainer.succession import Memory
from shared.bundle import TargetMetrics


def bundle_view(champion: Champion, age_ms: float | None, published: str | None) -> dict[str, Any]:
    """The bundle that serves; `published` is the version that Redis has."""
    manifest = champion.bundle.manifest
    return {
        "version": manifest.version,
        "published": published == manifest.version,
        "saved": champion.saved,
        "age_ms": age_ms,
        "window_samples": manifest.window_samples,
        "outputs": manifest.outputs,
        "prior_targets": manifest.prior_targets,
        "metrics": {target: metrics.model_dump() for target, metrics in manifest.metrics.items()},
        "renderings": [rendering.model_dump() for rendering in manifest.renderings],
        "libraries": manifest.libraries,
    }


def version_view(
    version: str, champion: Champion | None, memory: Memory, held_out: Mapping[str, TargetMetrics] | None
) -> dict[str, Any]:
    """A version that is kept, what it is now, and its held-out errors; None where its bundle couldn't be read."""
    roles = {
        "serving": champion is not None and champion.version == version,
        "pinned": memory.pinned == version,
        "last_good": memory.good == version,
    }
    return {
        "version": version,
        "unix_ms": int(version.partition("-")[0]),
        "is": [role for role, held in roles.items() if held],
        "metrics": None if held_out is None else {name: metrics.model_dump() for name, metrics in held_out.items()},
    }


def report_view(report: CycleReport) -> dict[str, Any]:
    """A cycle's report as plain data."""
    return {
        "unix_ms": report.created_unix_ms,
        "verdict": report.verdict.reason,
        "detail": report.verdict.detail,
        "window_samples": report.window_samples,
        "wall_ms": report.wall_ms,
        "cpu_ms": report.cpu_ms,
        "metrics": {target: metrics.model_dump() for target, metrics in report.metrics.items()},
        "champion_metrics": {target: metrics.model_dump() for target, metrics in report.champion_metrics.items()},
        "groups": {
            target: {name: metrics.model_dump() for name, metrics in groups.items()}
            for target, groups in report.groups.items()
        },
        "censored_beyond_p90": report.censored_beyond_p90,
        "gains": report.gains,
        "disbelieved_rows": dict(report.disbelieved),
        "converter": report.converter,
        "parity": asdict(report.parity) if report.parity else None,
        "tensor": asdict(report.tensor) if report.tensor else None,
    }
