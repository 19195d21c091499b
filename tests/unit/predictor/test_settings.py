"""Settings: what is served by default, and what is refused at start; every setting and metric is in the README."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import services.predictor
from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import PredictorSettings
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.settings import ServiceSettings, load

README = Path(services.predictor.__file__).parent / "README.md"


def test_by_default_the_one_pool_is_served_on_the_cpu_with_one_thread():
    settings = load(PredictorSettings)
    assert settings.served_pools == ("default",)
    assert (settings.device, settings.threads) == ("cpu", 1)


def test_pools_are_a_comma_separated_list(monkeypatch):
    monkeypatch.setenv("LEADTIME_PREDICTOR_POOLS", "chat, code")
    assert load(PredictorSettings).served_pools == ("chat", "code")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POOLS", "chat,Chat"),
        ("POOLS", "chat,chat"),
        ("COALESCE_WINDOW_MS", "1.5"),
        ("BATCH_MAX_ROWS", "0"),
        ("DEVICE", "tpu"),
        ("DEVICE_POLICY", "hope"),
        ("THREADS", "0"),
        ("THREAD", "1"),
    ],
)
def test_a_bad_value_stops_the_start_and_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"LEADTIME_PREDICTOR_{name}", value)
    with pytest.raises(ConfigurationError, match=f"LEADTIME_PREDICTOR_{name}"):
        load(PredictorSettings)


def test_every_setting_of_the_predictor_is_in_its_readme():
    text = README.read_text()
    own = set(PredictorSettings.model_fields) - set(ServiceSettings.model_fields)
    assert [name for name in own if f"`{name.upper()}`" not in text and name != "redis"] == []


def test_every_metric_of_the_predictor_is_in_its_readme():
    registry = CollectorRegistry()
    PredictorMetrics(registry, SystemClock())
    text = README.read_text()
    names = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
