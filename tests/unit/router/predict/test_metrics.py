"""Every metric and every reason of the predictions is in the room's README."""

from pathlib import Path

from prometheus_client import CollectorRegistry

import services.router.predict
from services.router.predict.errors import FailureReason
from services.router.predict.metrics import PredictMetrics
from shared.clock import SystemClock

README = (Path(services.router.predict.__file__).parent / "README.md").read_text()


def test_every_metric_is_described():
    registry = CollectorRegistry()
    PredictMetrics(registry, SystemClock())
    names = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    assert [name for name in sorted(names) if f"`{name}`" not in README] == []


def test_every_reason_is_described():
    assert [reason.value for reason in FailureReason if f"`{reason.value}`" not in README] == []
