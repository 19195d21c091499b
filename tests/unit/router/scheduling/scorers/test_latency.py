"""latency-scorer: lowest prediction without an SLO, headroom with one, and every half-stated case between."""

import numpy as np
import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.scorers.latency import LatencyConfig, LatencyScorer
from tests.unit.router.scheduling.builders import candidates, context, everyone, only, prediction


def score(predicted, slo=None, alive=None, elapsed_ms=0.0, **config):
    count = len(next(iter(predicted.columns.values())))
    scorer = LatencyScorer(LatencyConfig(**config))
    ctx = context(candidates(count), predicted, slo=slo, elapsed_ms=elapsed_ms)
    return scorer.score(ctx, everyone(count) if alive is None else alive)


def test_no_prediction_is_no_opinion():
    assert LatencyScorer(LatencyConfig()).score(context(candidates(2)), everyone(2)) is None


def test_a_bundle_without_any_latency_is_no_opinion():
    assert score(prediction(in_range=[1, 1])) is None


def test_a_dimension_without_spread_leaves_the_other_its_full_range():
    scores = score(prediction(ttft_p50=[200, 200, 200], tpot_p50=[20, 30, 40]))
    assert scores.tolist() == [1.0, 0.5, 0.0]


def test_without_any_spread_all_are_equal_and_finite():
    assert score(prediction(ttft_p50=[200, 200], tpot_p50=[20, 20])).tolist() == [1.0, 1.0]


def test_a_single_endpoint_scores_a_finite_number():
    assert score(prediction(ttft_p50=[200], tpot_p50=[20])).tolist() == [1.0]


def test_weights_blend_the_two_dimensions():
    scores = score(prediction(ttft_p50=[100, 200], tpot_p50=[40, 20]))
    assert scores == pytest.approx([0.8, 0.2])


def test_raw_ttft_ranks_whatever_the_answer_lengths_were():
    """B05: 3000 ms loses to 1000 ms."""
    scores = score(prediction(ttft_p50=[3000, 1000]))
    assert scores.tolist() == [0.0, 1.0]


def test_end_to_end_latency_stands_in_where_ttft_is_not_trained():
    assert score(prediction(e2e_p50=[900, 300])).tolist() == [0.0, 1.0]


def test_only_alive_candidates_make_the_range():
    scores = score(prediction(ttft_p50=[100, 200, 10_000]), alive=only(3, 0, 1))
    assert scores[:2].tolist() == [1.0, 0.0]


def test_least_prefers_the_smallest_headroom_that_still_meets_the_slo():
    scores = score(prediction(ttft_p50=[990, 500, 1200]), slo=Slo(ttft_ms=1000))
    assert scores.argmax() == 0
    assert scores[2] == 0.0
    assert scores[1] > 0.0


def test_most_prefers_the_largest_headroom():
    scores = score(prediction(ttft_p50=[990, 500, 1200]), slo=Slo(ttft_ms=1000), strategy="most")
    assert scores.tolist() == pytest.approx([0.01, 1.0, 0.0])


def test_headrooms_of_both_dimensions_are_blended_under_least():
    scores = score(prediction(ttft_p50=[990, 950], tpot_p50=[48, 40]), slo=Slo(1000, 50))
    assert scores.tolist() == pytest.approx([1.0, 0.01])


def test_a_prediction_equal_to_the_slo_meets_it():
    assert score(prediction(ttft_p50=[1000, 1001]), slo=Slo(ttft_ms=1000)).tolist() == [1.0, 0.0]


def test_where_none_meets_the_slo_the_one_that_misses_by_least_is_best():
    scores = score(prediction(ttft_p50=[1010, 1100], tpot_p50=[55, 80]), slo=Slo(1000, 50))
    assert scores.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("slo", [Slo(ttft_ms=1000), Slo(tpot_ms=50)])
def test_one_stated_objective_is_enough_and_the_other_is_not_asked_for(slo):
    """A missing half isn't an objective of 0 that nobody meets."""
    predicted = prediction(ttft_p50=[500, 1500], tpot_p50=[40, 60])
    assert score(predicted, slo=slo).tolist() == [1.0, 0.0]


def test_an_objective_without_a_prediction_is_left_out():
    scores = score(prediction(ttft_p50=[300, 100]), slo=Slo(tpot_ms=50))
    assert scores.tolist() == [0.0, 1.0]


def test_time_already_spent_counts_against_the_ttft_objective():
    predicted = prediction(ttft_p50=[800, 400])
    assert score(predicted, slo=Slo(ttft_ms=1000)).tolist() == pytest.approx([1.0, 0.01])
    assert score(predicted, slo=Slo(ttft_ms=1000), elapsed_ms=300).tolist() == [0.0, 1.0]


def test_weights_of_zero_leave_everyone_equal():
    scores = score(prediction(ttft_p50=[1, 2], tpot_p50=[2, 1]), ttft_weight=0.0, tpot_weight=0.0)
    assert scores.tolist() == [1.0, 1.0]
    assert scores.dtype == np.float32
