"""The gate refuses what is clearly worse, not what is unlucky; empty sets have no metrics."""

import numpy as np
import pytest

from services.trainer.evaluate import HeldOut, breakdown, censored_beyond_p90, judge, metrics
from tests.unit.trainer.snapshots import prompts, rows_of

OUTPUTS = ("ttft_p50", "ttft_p90", "ttft_p99", "in_range")


def predictions(p50, spread=1.5):
    p50 = np.asarray(p50, np.float32)
    return np.stack([p50, p50 * spread, p50 * spread**2, np.ones_like(p50)], axis=1)


def held_out(actual):
    actual = np.asarray(actual, np.float32)
    return HeldOut(prompts(np.full(len(actual), 100)), actual)


def noisy(bias, noise, count=500, seed=1):
    rng = np.random.default_rng(seed)
    actual = np.exp(rng.normal(4, 1, count))
    return actual, predictions(actual * np.exp(bias + rng.normal(0, noise, count)))


def test_metrics_are_ratios():
    found = metrics(predictions([110, 90, 100, 400]), OUTPUTS, "ttft", held_out([100, 100, 100, 200]))
    assert found.samples == 4
    assert found.mape == pytest.approx((0.1 + 0.1 + 0 + 1) / 4)
    assert found.bias == pytest.approx(0.05)
    assert found.p90_coverage == 1.0


def test_an_empty_set_has_absent_metrics():
    found = metrics(predictions([]), OUTPUTS, "ttft", held_out([]))
    assert (found.samples, found.mape, found.bias, found.p90_coverage) == (0, None, None, None)
    assert metrics(predictions([1]), OUTPUTS, "e2e", held_out([1])).mape is None


def test_the_breakdown_splits_by_backlog_and_by_range():
    rows = rows_of(3, uncached_tokens=[10, 500, 500], pending_uncached_tokens=[0, 0, 5000])
    found = predictions([10, 20, 30])
    found[2, 3] = 0.0
    groups = breakdown(found, OUTPUTS, "ttft", HeldOut(rows, np.float32([10, 20, 60])), (256.0, 4096.0))
    assert {name: group.samples for name, group in groups.items()} == {
        "in_range": 2,
        "out_of_range": 1,
        "backlog 0-256 tokens": 1,
        "backlog 256-4096 tokens": 1,
        "backlog 4096-∞ tokens": 1,
    }
    assert groups["out_of_range"].bias == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("ours", "theirs", "accepted"),
    [
        ((0.0, 0.1), (0.0, 0.2), True),
        ((0.0, 0.2), (0.0, 0.2), True),
        ((0.0, 0.2), (0.0, 0.1), False),
        ((0.5, 0.1), (0.0, 0.1), False),
        ((-0.5, 0.1), (0.0, 0.1), False),
    ],
)
def test_a_challenger_that_is_clearly_worse_is_refused(ours, theirs, accepted):
    actual, challenger = noisy(*ours, seed=1)
    _, champion = noisy(*theirs, seed=1)
    verdict = judge({"ttft": held_out(actual)}, {"ttft": challenger}, OUTPUTS, {"ttft": champion}, OUTPUTS)
    assert verdict.accepted is accepted
    assert verdict.reason == ("accepted" if accepted else "worse_ttft")
    assert set(verdict.log_error) == {"ttft"}


def test_two_equal_models_are_told_apart_by_luck_only_so_the_challenger_passes():
    refused = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        actual = np.exp(rng.normal(4, 1, 60))
        ours, theirs = (predictions(actual * np.exp(rng.normal(0, 0.2, 60))) for _ in range(2))
        refused += not judge({"ttft": held_out(actual)}, {"ttft": ours}, OUTPUTS, {"ttft": theirs}, OUTPUTS).accepted
    assert refused <= 6


def test_one_mad_label_does_not_decide():
    actual, challenger = noisy(0.0, 0.1)
    _, champion = noisy(0.0, 0.3)
    actual[7] *= 1000
    assert judge({"ttft": held_out(actual)}, {"ttft": challenger}, OUTPUTS, {"ttft": champion}, OUTPUTS).accepted


def test_predictions_that_are_not_finite_are_refused():
    actual, challenger = noisy(0.0, 0.1)
    challenger[3, 1] = np.nan
    verdict = judge({"ttft": held_out(actual)}, {"ttft": challenger}, OUTPUTS, None, ())
    assert (verdict.accepted, verdict.reason) == (False, "not_finite")


def test_a_first_model_is_accepted_unless_it_is_hopeless():
    actual, good = noisy(0.0, 0.5)
    assert judge({"ttft": held_out(actual)}, {"ttft": good}, OUTPUTS, None, ()).accepted
    verdict = judge({"ttft": held_out(actual)}, {"ttft": predictions(actual * 50)}, OUTPUTS, None, ())
    assert (verdict.accepted, verdict.reason) == (False, "hopeless")


def test_a_target_that_only_the_challenger_has_is_no_reason_against_it():
    actual, challenger = noisy(0.0, 0.1)
    verdict = judge(
        {"ttft": held_out(actual)}, {"ttft": challenger}, OUTPUTS, {"ttft": np.ones((500, 1))}, ("in_range",)
    )
    assert verdict.accepted
    assert verdict.log_error["ttft"][1] is None


def test_cut_off_requests_show_a_model_that_is_too_low():
    outputs = ("e2e_p50", "e2e_p90", "e2e_p99", "in_range")
    assert censored_beyond_p90(predictions([100, 100]), outputs, np.float32([149, 151])) == 0.5
    assert censored_beyond_p90(predictions([]), outputs, np.float32([])) is None
    assert censored_beyond_p90(predictions([100]), OUTPUTS, np.float32([1])) is None
