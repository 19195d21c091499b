"""The collector's settings are checked at the start, and its README names each of them."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.collector.metrics import CollectorMetrics
from services.collector.outbox import Fate
from services.collector.settings import CollectorSettings
from shared.errors import ConfigurationError
from shared.settings import load
from shared.verdicts import Note, Reason

README = Path(__file__).parents[3] / "services" / "collector" / "README.md"


def test_beyond_loopback_access_logs_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADTIME_COLLECTOR_ALS_HOST", "0.0.0.0")
    with pytest.raises(ConfigurationError, match="als_token"):
        load(CollectorSettings)
    monkeypatch.setenv("LEADTIME_COLLECTOR_ALS_TOKEN", "secret")
    assert load(CollectorSettings).als_host == "0.0.0.0"


def test_a_port_that_others_guard_needs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADTIME_COLLECTOR_ALS_HOST", "0.0.0.0")
    monkeypatch.setenv("LEADTIME_COLLECTOR_ALS_OPEN", "true")
    assert load(CollectorSettings).als_token is None


def test_a_typo_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADTIME_COLLECTOR_ALS_PROT", "9000")
    with pytest.raises(ConfigurationError, match="LEADTIME_COLLECTOR_ALS_PROT"):
        load(CollectorSettings)


def test_the_readme_names_every_setting_reason_note_fate_and_metric() -> None:
    text = README.read_text()
    settings = [f"`{name.upper()}`" for name in CollectorSettings.model_fields if name not in {"nats", "telemetry"}]
    registry = CollectorRegistry()
    CollectorMetrics(registry, "default")
    metrics = [metric.name for metric in registry.collect()]
    words = [*settings, *metrics, *(f"`{word.value}`" for kind in (Reason, Note, Fate) for word in kind)]
    assert [word for word in words if word not in text] == []
