"""Settings: what is refused at start; every setting, metric and reason is in the README."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import services.trainer
from services.trainer.intake import Reject
from services.trainer.metrics import TrainerMetrics
from services.trainer.settings import TrainerSettings
from shared.errors import ConfigurationError
from shared.settings import ServiceSettings, load

README = Path(services.trainer.__file__).parent / "README.md"


def test_the_defaults_are_those_of_use_in_production():
    settings = load(TrainerSettings)
    assert (settings.retrain_interval_ms, settings.min_samples, settings.min_samples_after_saved) == (10_000, 10, 100)
    assert settings.window_bin_rows == 500
    assert settings.parity_tolerance == 1e-4


def test_settings_reach_the_parts_they_name(monkeypatch):
    monkeypatch.setenv("LEADTIME_TRAINER_ROUNDS", "7")
    monkeypatch.setenv("LEADTIME_TRAINER_BIAS_RATE", "0.5")
    monkeypatch.setenv("LEADTIME_TRAINER_RETRAIN_INTERVAL_MS", "500")
    settings = load(TrainerSettings)
    assert settings.cycle_options().fit.rounds == 7
    assert settings.cycle_options().calibration.bias_rate == 0.5
    assert settings.cadence().interval_ms == 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEPTH", "9"),
        ("THREADS", "0"),
        ("RETRAIN_INTERVAL_MS", "1"),
        ("MIN_SAMPLES", "9"),
        ("PARITY_TOLERANCE", "0.5"),
        ("OBJECTIVE", "reg:gamma"),
        ("POOL", "Not a label"),
    ],
)
def test_a_bad_value_stops_the_start_and_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"LEADTIME_TRAINER_{name}", value)
    with pytest.raises(ConfigurationError, match=f"LEADTIME_TRAINER_{name}"):
        load(TrainerSettings)


def test_every_setting_is_in_the_readme():
    text = README.read_text()
    own = set(TrainerSettings.model_fields) - set(ServiceSettings.model_fields) - {"nats", "redis"}
    assert [name for name in sorted(own) if f"`{name.upper()}`" not in text] == []


def test_every_metric_and_reason_is_in_the_readme():
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    metrics.watch(
        window_rows=lambda _: 0,
        calibration_sequence=lambda: 0,
        active=lambda: False,
        bundle_age_ms=lambda: None,
        degenerate_share=lambda: 0.0,
        pinned=lambda: False,
    )
    text = README.read_text()
    names = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    assert [reason for reason in Reject if f"`{reason.value}`" not in text] == []


def test_the_age_of_no_bundle_is_minus_one_and_of_one_in_seconds():
    registry = CollectorRegistry()
    ages = [None, 2500.0]
    TrainerMetrics(registry).watch(
        window_rows=lambda _: 0,
        calibration_sequence=lambda: 0,
        active=lambda: True,
        bundle_age_ms=lambda: ages[0],
        degenerate_share=lambda: 0.0,
        pinned=lambda: False,
    )
    assert registry.get_sample_value("leadtime_trainer_bundle_age_seconds") == -1
    ages.pop(0)
    assert registry.get_sample_value("leadtime_trainer_bundle_age_seconds") == 2.5
