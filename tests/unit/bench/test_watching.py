"""Who watches a recording predicts before it learns, with the services' own ledger and trainer."""

import numpy as np
import pytest

from bench.incumbent import SIX, THIRTEEN, features, predictions
from bench.model_queueing import by_bin, coverage, errors, judged_requests, summary
from bench.recording import SCENARIOS, Kind, record
from bench.watching import LEDGERS, VirtualTrainer, watch
from services.trainer.cadence import Cadence
from services.trainer.cycle import CycleOptions
from shared.features import SCHEMA

COLUMN = SCHEMA.index


@pytest.fixture(scope="module")
def recording():
    return record(SCENARIOS["mixed-2048"], 900, 3)


@pytest.fixture(scope="module")
def watched(recording):
    return {
        ledger: watch(recording, ledger, VirtualTrainer(CycleOptions("pool"), Cadence(20_000.0))) for ledger in LEDGERS
    }


@pytest.mark.parametrize("ledger", LEDGERS)
def test_rows_obey_the_schema_and_the_first_predictions_come_after_the_first_labels(recording, watched, ledger):
    seen = watched[ledger]
    SCHEMA.check(seen.rows)
    predicted = np.isfinite(seen.column("ttft_p50"))
    assert not predicted[0]
    assert predicted[-100:].all()
    assert seen.labels[np.flatnonzero(predicted)[0]] >= 10
    assert (np.diff(seen.labels) >= 0).all()
    p50, p90, p99 = (seen.column(f"ttft_{level}")[predicted] for level in ("p50", "p90", "p99"))
    assert (p50 <= p90).all()
    assert (p90 <= p99).all()


def test_the_exact_ledger_counts_what_is_pending(recording, watched):
    pending = np.zeros(len(SCENARIOS["mixed-2048"].pods))
    before: set[int] = set()
    for event in recording.events:
        if event.kind is Kind.SCRAPE:
            continue
        pod = recording.pod[event.what]
        if event.kind is Kind.DISPATCH:
            assert watched["exact"].rows[event.what, COLUMN["pending_requests"]] == pending[pod]
            pending[pod] += 1
            before.add(event.what)
        elif event.what in before:
            pending[pod] -= 1
            before.discard(event.what)


def test_a_seeing_ledger_is_nearer_to_the_truth_than_a_timer(watched):
    def distance(ledger):
        return np.abs(watched[ledger].rows - watched["exact"].rows)[:, COLUMN["pending_requests"]].mean()

    assert distance("exact") == 0 < distance("timer+scrape")
    assert distance("timer+scrape") < 0.5


def test_pods_that_the_router_believes_to_be_of_another_class_have_that_class_in_their_rows(recording):
    seen = watch(recording, "exact", VirtualTrainer(CycleOptions("pool"), Cadence(1e9)), hardware={0: "l40s"})
    assert len(set(seen.rows[recording.pod == 0, COLUMN["hardware_class"]])) == 1
    assert seen.rows[recording.pod == 0][0, COLUMN["hardware_class"]] != seen.rows[recording.pod == 1][0, -1]


def test_the_incumbents_columns_are_what_its_counters_hold(recording):
    six, thirteen = features(recording)
    assert six.shape == (900, len(SIX))
    assert thirteen.shape == (900, len(THIRTEEN))
    assert (six >= 0).all()
    assert (thirteen >= 0).all()
    # The first request meets an empty pool.
    assert six[0, SIX.index("running")] == 0 == thirteen[0, THIRTEEN.index("prefill_in_flight")]
    np.testing.assert_array_equal(thirteen[:, THIRTEEN.index("effective_input")], recording.uncached_tokens)


@pytest.mark.parametrize("method", ["incumbent-six", "incumbent-thirteen"])
def test_the_incumbent_predicts_from_its_first_fit_on(recording, method):
    begins_ms = float(recording.dispatched_ms[450])
    predicted = predictions(recording, method, 30_000.0, begins_ms)
    later = recording.dispatched_ms >= begins_ms
    assert np.isnan(predicted[~later]).all()
    assert (predicted[later] > 0).all()


def test_judged_are_the_answered_of_the_second_half_and_bins_part_them(recording, watched):
    judged = judged_requests(recording)
    assert not judged[:450].any()
    assert not (judged & recording.aborted).any()
    seen = watched["exact"]
    backlog = seen.rows[:, COLUMN["uncached_tokens"]] + seen.rows[:, COLUMN["pending_uncached_tokens"]]
    parts = [mask for _, mask in by_bin(backlog, judged)]
    assert sum(mask.sum() for mask in parts) == judged.sum()
    table = coverage(recording.ttft_ms, seen, backlog, judged)
    assert sum(found["rows"] for found in table["coverage_by_bin"].values()) == judged.sum()
    assert 0.7 < table["p90_coverage"] <= 1


def test_errors_of_a_perfect_prediction_are_none():
    actual = np.array([10.0, 20.0, 30.0])
    assert errors(actual, actual, np.ones(3, bool)) == {"rows": 3, "mape": 0.0, "p90_ape": 0.0, "bias": 0.0}


def test_a_summary_has_mean_and_spread_over_seeds():
    rows = [
        {"scenario": "a", "seed": seed, "method": "leadtime", "ledger": "timer", "mape": mape, "p90_coverage": None}
        for seed, mape in ((1, 0.1), (2, 0.3))
    ]
    assert summary(rows) == [
        {
            "scenario": "a", "method": "leadtime", "ledger": "timer", "seeds": 2,
            "mape": {"mean": pytest.approx(0.2), "spread": pytest.approx(0.1)},
        }
    ]  # fmt: skip
