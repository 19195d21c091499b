"""The trainer's HTTP edge: probes, metrics, and the state of the model for people and dashboards."""

import math
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.trainer.settings import TrainerSettings
from shared.lifecycle import Readiness, probe_app, require_token


def build_app(
    settings: TrainerSettings, readiness: Readiness, registry: CollectorRegistry, status: Callable[[], dict[str, Any]]
) -> FastAPI:
    """The app; `status` gives what `/v1/model` shows."""
    app = probe_app("trainer", readiness, registry)

    @app.get("/v1/model", dependencies=[require_token(settings)])
    @app.get("/v1/status", dependencies=[require_token(settings)])
    async def model() -> dict[str, Any]:
        """Versions, errors, gate decisions with reasons, feature gains, window composition."""
        return {name: _finite(value) for name, value in status().items()}

    return app


def _finite(value: Any) -> Any:
    """JSON has no infinity: what isn't finite is absent."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
