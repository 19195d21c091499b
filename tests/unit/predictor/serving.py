"""A predictor without sockets or Redis: slots filled by hand, the app called in process."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from services.predictor.app import Edge, build_app
from services.predictor.batcher import Batcher, BatchLimits
from services.predictor.bundles import condition
from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import Device, DevicePolicy, PredictorSettings
from services.predictor.slot import Served, Slot, load_on_device
from shared.clock import SystemClock
from shared.lifecycle import Readiness
from tests.bundles import make_bundle


def served(**bundle: Any) -> Served:
    """A real model of a small bundle."""
    return load_on_device(make_bundle(**bundle), Device.CPU, DevicePolicy.PREFER, 1, 0.0)


def served_by(predict: Any, *, provider: str = "CPUExecutionProvider") -> Served:
    """A model whose answers are `predict(rows)`."""
    real = served()
    model = SimpleNamespace(
        predict=predict,
        provider=provider,
        outputs=real.model.outputs,
        bundle_version=real.model.bundle_version,
        rendering="tree_ensemble",
    )
    return Served(model, real.manifest, 0.0)  # type: ignore[arg-type]


@dataclass
class Serving:
    app: Edge
    client: httpx.AsyncClient
    batchers: dict[str, Batcher]
    slots: dict[str, Slot]
    metrics: PredictorMetrics
    readiness: Readiness
    registry: CollectorRegistry

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def make_batcher(
    slot: Slot, worker: ThreadPoolExecutor, registry: CollectorRegistry | None = None, **limits: Any
) -> Batcher:
    given = {"window_ms": 1.0, "max_rows": 256, "inline_max_rows": 256, "max_waiting_rows": 1_000, **limits}
    metrics = PredictorMetrics(registry or CollectorRegistry(), SystemClock())
    return Batcher(slot, BatchLimits(**given), worker, metrics, SystemClock())


def make_serving(worker: ThreadPoolExecutor, *, pools: tuple[str, ...] = ("default",), **settings: Any) -> Serving:
    configured = PredictorSettings(pools=",".join(pools), **settings)
    registry, clock = CollectorRegistry(), SystemClock()
    metrics = PredictorMetrics(registry, clock)
    readiness = Readiness(*(condition(pool) for pool in pools))
    slots = {pool: Slot(pool) for pool in pools}
    limits = BatchLimits(
        configured.coalesce_window_ms,
        configured.batch_max_rows,
        configured.inline_max_rows,
        configured.max_waiting_rows,
    )
    batchers = {pool: Batcher(slot, limits, worker, metrics, clock) for pool, slot in slots.items()}
    app = build_app(configured, batchers, metrics, readiness, registry, clock)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://predictor")
    return Serving(app, client, batchers, slots, metrics, readiness, registry)
