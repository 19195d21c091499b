"""Predicted and actual latency, error and objectives come from one sample; labels stay bounded."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.collector.metrics import MAX_MODELS, CollectorMetrics, Recent, objectives
from services.collector.validate import Probes, judge
from shared.samples import LatencySample, Outcome, encode_decision
from shared.verdicts import Note, Reason
from tests.fakes.decisions import make_decision
from tests.fakes.entries import SERVED, make_entry


def sample(**changes: Any) -> LatencySample:
    found = judge(make_entry(decision=encode_decision(make_decision(SERVED))), "default", Probes()).sample
    assert found is not None
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    return LatencySample(**{**values, **changes})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> CollectorMetrics:
    return CollectorMetrics(registry, "default")


def test_predicted_and_actual_and_their_error_are_seen_together(
    metrics: CollectorMetrics, registry: CollectorRegistry
) -> None:
    metrics.observe(sample())
    labels = {"pool": "default", "model": "m"}
    assert registry.get_sample_value("leadtime_collector_actual_ttft_seconds_sum", labels) == pytest.approx(0.4)
    assert registry.get_sample_value("leadtime_collector_predicted_ttft_seconds_sum", labels) == pytest.approx(0.1)
    lowest = {**labels, "le": "-0.75"}
    assert registry.get_sample_value("leadtime_collector_ttft_error_ratio_bucket", lowest) == 1.0
    bias = registry.get_sample_value("leadtime_collector_prediction_bias_ratio", {"target": "ttft"})
    assert bias == pytest.approx(-0.75)


def test_a_request_that_broke_off_says_nothing_of_latency(
    metrics: CollectorMetrics, registry: CollectorRegistry
) -> None:
    metrics.observe(sample(outcome=Outcome.CLIENT_ABORT))
    labels = {"pool": "default", "model": "m"}
    assert registry.get_sample_value("leadtime_collector_actual_ttft_seconds_count", labels) == 0.0
    counted = {"pool": "default", "outcome": "client_abort"}
    assert registry.get_sample_value("leadtime_collector_samples_total", counted) == 1.0


def test_models_beyond_the_bound_share_one_label(metrics: CollectorMetrics, registry: CollectorRegistry) -> None:
    for number in range(MAX_MODELS + 10):
        metrics.observe(sample(model=f"m{number}"))
    other = {"pool": "default", "model": "other"}
    assert registry.get_sample_value("leadtime_collector_actual_ttft_seconds_count", other) == 10.0


def test_every_reason_and_note_is_exported_before_it_happens(
    metrics: CollectorMetrics, registry: CollectorRegistry
) -> None:
    for reason in Reason:
        labels = {"source": "access_log", "reason": reason.value}
        assert registry.get_sample_value("leadtime_collector_entries_total", labels) == 0.0
    for note in Note:
        assert registry.get_sample_value("leadtime_collector_sample_notes_total", {"note": note.value}) == 0.0


def test_the_share_without_first_content_and_of_late_ones_is_visible(
    metrics: CollectorMetrics, registry: CollectorRegistry
) -> None:
    metrics.observe(sample(ttft_ms=None), (Note.NO_FIRST_CONTENT,))
    metrics.observe(sample())
    metrics.observe(sample(ttft_ms=595.0))
    assert registry.get_sample_value("leadtime_collector_first_content_missing_ratio") == pytest.approx(1 / 3)
    assert registry.get_sample_value("leadtime_collector_late_ttft_ratio") == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("changes", "judged"),
    [
        ({}, []),
        ({"ttft_slo_ms": 403.0}, [("ttft", True)]),
        ({"ttft_slo_ms": 402.9}, [("ttft", False)]),
        ({"tpot_slo_ms": 10.0}, [("tpot", True)]),
        ({"tpot_slo_ms": 9.0}, [("tpot", False)]),
        ({"ttft_slo_ms": 1.0, "ttft_ms": None}, []),
        ({"ttft_slo_ms": 1.0, "ttft_ms": None, "outcome": Outcome.CLIENT_ABORT}, [("ttft", False)]),
        ({"ttft_slo_ms": 900.0, "ttft_ms": None, "outcome": Outcome.CLIENT_ABORT}, []),
    ],
)
def test_an_objective_is_judged_from_receipt_and_only_where_the_outcome_is_known(
    changes: dict[str, Any], judged: list[tuple[str, bool]]
) -> None:
    assert objectives(sample(**changes)) == judged


def test_a_recent_mean_forgets() -> None:
    recent = Recent(2)
    assert recent.mean() == 0.0
    for value in (10.0, 1.0, 3.0):
        recent.add(value)
    assert recent.mean() == 2.0
