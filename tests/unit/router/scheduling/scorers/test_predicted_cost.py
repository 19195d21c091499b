"""predicted-cost-scorer: each term by hand, what happens without its inputs, and the risk that fades in overload."""

import math

import numpy as np
import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.scorers.predicted_cost import PredictedCostConfig, PredictedCostScorer, _normal_cdf
from tests.unit.router.scheduling.builders import candidates, column, context, everyone, only, prediction


def cost(ctx, **config):
    values = PredictedCostScorer(PredictedCostConfig(**config)).cost_ms(ctx, everyone(len(ctx.candidates)))
    return None if values is None else values.tolist()


def score(ctx, alive=None, **config):
    count = len(ctx.candidates)
    return PredictedCostScorer(PredictedCostConfig(**config)).score(ctx, everyone(count) if alive is None else alive)


FREE = dict.fromkeys(
    ("waiting_weight", "stall_weight", "future_weight", "decode_weight", "kv_pressure_ms", "slo_risk_ms"), 0.0
)


def test_no_prediction_is_no_opinion():
    assert score(context(candidates(2))) is None


def test_a_bundle_without_ttft_and_end_to_end_latency_is_no_opinion():
    assert score(context(candidates(2), prediction(tpot_p50=[1, 2]))) is None


def test_without_prices_the_cost_is_the_predicted_ttft():
    ctx = context(candidates(2, decoding_requests=[5, 9]), prediction(ttft_p50=[100, 300], tpot_p50=[10, 20]))
    assert cost(ctx, **FREE) == [100.0, 300.0]


def test_waiting_costs_more_the_more_of_the_objective_it_takes_up_to_twice():
    ctx = context(candidates(3), prediction(ttft_p50=[100, 500, 3000]), slo=Slo(ttft_ms=1000))
    values = cost(ctx, **(FREE | {"waiting_weight": 8.0}))
    assert values == pytest.approx([100 * 1.8, 500 * 5, 3000 * 17])


@pytest.mark.parametrize("slo", [Slo(), Slo(tpot_ms=40)], ids=["no objective", "none for TTFT"])
def test_without_a_ttft_objective_waiting_costs_its_time(slo):
    ctx = context(candidates(2), prediction(ttft_p50=[100, 500]), slo=slo)
    assert cost(ctx, **(FREE | {"waiting_weight": 8.0})) == [100.0, 500.0]


def test_on_unlike_hardware_waiting_costs_its_time():
    ctx = context(candidates(2, hardware_class=[1, 2]), prediction(ttft_p50=[100, 500]), slo=Slo(ttft_ms=1000))
    assert cost(ctx, **(FREE | {"waiting_weight": 8.0})) == [100.0, 500.0]


def test_beyond_the_server_s_limit_of_sequences_answers_must_end_first():
    """Nine too many where 256 answers of 512 tokens at 20 ms end in 10.24 s, 40 ms each. Unknown limits keep nobody."""
    endpoints = candidates(
        4, pending_requests=[4, 0, 4, 4], decoding_requests=[260, 255, 260, 260], sequence_limit=[256, 256, 0, 1024]
    )
    ctx = context(endpoints, prediction(ttft_p50=[50] * 4, tpot_p50=[20] * 4), expected_output_tokens=512)
    assert cost(ctx, **FREE) == pytest.approx([50 + 9 * 40, 50, 50, 50])


def test_a_wait_for_a_place_is_part_of_the_risk():
    predicted = prediction(ttft_p50=[50] * 2, ttft_p90=[60] * 2, tpot_p50=[20] * 2)
    endpoints = candidates(2, decoding_requests=[300, 300], sequence_limit=[256, 0])
    [full, free] = cost(context(endpoints, predicted, slo=Slo(ttft_ms=1000), expected_output_tokens=512), **RISK)
    assert full == pytest.approx(50 + 45 * 40 + 300, rel=1e-3)
    assert free == pytest.approx(50)


def test_end_to_end_latency_stands_in_for_ttft():
    assert cost(context(candidates(2), prediction(e2e_p50=[900, 700])), **FREE) == [900.0, 700.0]


def test_the_stall_price_is_our_share_of_the_prefill_for_each_request_there():
    endpoints = candidates(
        2,
        uncached_tokens=[1000, 1000],
        pending_uncached_tokens=[3000, 0],
        pending_requests=[2, 0],
        decoding_requests=[8, 4],
    )
    values = cost(context(endpoints, prediction(ttft_p50=[400, 100])), **(FREE | {"stall_weight": 0.1}))
    assert values == pytest.approx([400 + 0.1 * (400 * 1000 / 4000) * 10, 100 + 0.1 * 100 * 4])


def test_a_fully_cached_prompt_stalls_nobody():
    endpoints = candidates(1, decoding_requests=[8])
    assert cost(context(endpoints, prediction(ttft_p50=[20])), **(FREE | {"stall_weight": 1.0})) == [20.0]


def test_a_measured_pace_prices_the_prefill_of_an_endpoint_whatever_its_hardware_is_called():
    endpoints = candidates(
        2,
        uncached_tokens=[1000, 1000],
        pending_uncached_tokens=[3000, 3000],
        decoding_requests=[10, 10],
        prefill_ms_per_token=[0.02, 0.06],
    )
    values = cost(context(endpoints, prediction(ttft_p50=[400, 400])), **(FREE | {"stall_weight": 0.1}))
    assert values == pytest.approx([400 + 0.1 * 20 * 10, 400 + 0.1 * 60 * 10])


def test_an_endpoint_without_a_measured_pace_has_its_hardware_class_s():
    endpoints = candidates(
        2,
        uncached_tokens=[1000, 1000],
        pending_uncached_tokens=[3000, 0],
        decoding_requests=[10, 10],
        prefill_ms_per_token=[0.02, 0.0],
    )
    values = cost(context(endpoints, prediction(ttft_p50=[400, 100])), **(FREE | {"stall_weight": 0.1}))
    assert values == pytest.approx([400 + 0.1 * 20 * 10, 100 + 0.1 * (1000 * 500 / 5000) * 10])


def test_the_future_price_is_our_prefill_for_each_request_that_arrives_while_we_wait():
    endpoints = candidates(
        2, uncached_tokens=[1000, 1000], prefill_ms_per_token=[0.1, 0.1], arrivals_per_ms=[0.001, 0.003]
    )
    values = cost(context(endpoints, prediction(ttft_p50=[400, 100])), **(FREE | {"future_weight": 1.0}))
    assert values == pytest.approx([400 + 100 * 0.001 * 400, 100 + 100 * 0.003 * 100])


def test_kv_pressure_counts_what_is_queued_and_grows_with_the_square():
    endpoints = candidates(
        4,
        uncached_tokens=[500, 500, 500, 500],
        pending_uncached_tokens=[0, 0, 500, 1_000_000],
        kv_cache_utilization=[0.80, 0.90, 0.90, 0.90],
        kv_capacity_tokens=[10_000, 10_000, 10_000, 10_000],
    )
    values = cost(context(endpoints, prediction(ttft_p50=[100] * 4)), **(FREE | {"kv_pressure_ms": 400.0}))
    assert values == pytest.approx([100, 200, 500, 100 + 4 * 400], rel=1e-4)


def test_an_endpoint_that_tells_no_kv_capacity_is_judged_by_its_utilization_and_an_unscraped_one_not_at_all():
    endpoints = candidates(
        2, uncached_tokens=[500, 500], kv_cache_utilization=[0.95, 0.0], scrape_known=[1, 0], kv_capacity_tokens=[0, 1]
    )
    values = cost(context(endpoints, prediction(ttft_p50=[100, 100])), **(FREE | {"kv_pressure_ms": 400.0}))
    assert values == pytest.approx([200, 100], rel=1e-4)


def test_the_decode_price_is_the_step_time_we_add_for_each_request_there():
    endpoints = candidates(1, decoding_requests=[10], decode_context_tokens=[20_000])
    ctx = context(endpoints, prediction(ttft_p50=[50], tpot_p50=[12]), input_tokens=1000, expected_output_tokens=200)
    empty_step = 12 / (1 + 0.0015 * 10 + 7e-6 * 20_000)
    added = empty_step * (0.0015 + 7e-6 * (1000 + 100))
    values = cost(ctx, **(FREE | {"decode_weight": 0.02}))
    assert values == pytest.approx([50 + 0.02 * added * 10 * 200], rel=1e-5)


@pytest.mark.parametrize(
    ("decode_base", "per_request", "per_context_token"),
    [(6.31, 0.0093, 4.30e-5), (4.85, 0.0085, 3.18e-5), (11.49, 0.0152, 9.68e-5), (22.23, 0.0228, 2.05e-4)],
)
def test_the_step_shares_fit_measured_accelerators_within_a_third(decode_base, per_request, per_context_token):
    """8B on H100, H200, A100 and L40S: marginal step time of one more request of 1000 tokens in a batch of 32."""
    tpot = decode_base + 33 * per_request + per_context_token * 33_000
    truth = per_request + per_context_token * 1000
    endpoints = candidates(1, decoding_requests=[32], decode_context_tokens=[32_000])
    ctx = context(endpoints, prediction(ttft_p50=[0], tpot_p50=[tpot]), input_tokens=900, expected_output_tokens=200)
    [value] = cost(ctx, **(FREE | {"decode_weight": 1.0}))
    assert value / (32 * 200) == pytest.approx(truth, rel=0.33)


@pytest.mark.parametrize(
    ("expected", "max_tokens", "used"), [(None, None, 256), (None, 100, 100), (None, 8000, 1024), (400.0, 100, 400)]
)
def test_the_answer_length_is_learned_else_asked_for_else_the_default_and_capped(expected, max_tokens, used):
    ctx = context(candidates(1), None, expected_output_tokens=expected, max_tokens=max_tokens)
    assert PredictedCostScorer(PredictedCostConfig())._output_tokens(ctx) == used


def test_the_normal_distribution_function_is_close_to_the_true_one():
    z = np.linspace(-8, 8, 321, dtype=np.float32)
    truth = [0.5 * (1 + math.erf(float(v) / math.sqrt(2))) for v in z]
    assert _normal_cdf(z).tolist() == pytest.approx(truth, abs=3e-4)


RISK = FREE | {"slo_risk_ms": 300.0}


def test_the_risk_of_missing_the_ttft_objective_is_read_from_the_quantiles():
    """The objective lies at the second endpoint's p90, far above the first's: its risk is 10 %, hardly faded."""
    predicted = prediction(ttft_p50=[10, 500], ttft_p90=[11, 1000])
    values = cost(context(candidates(2), predicted, slo=Slo(ttft_ms=1000)), **RISK)
    assert values == pytest.approx([10, 500 + 300 * 0.1], rel=1e-3)


def test_the_time_already_spent_shortens_the_objective():
    predicted = prediction(ttft_p50=[10, 500], ttft_p90=[11, 1000])
    values = cost(context(candidates(2), predicted, slo=Slo(ttft_ms=1200), elapsed_ms=200), **RISK)
    assert values == pytest.approx([10, 530], rel=1e-3)


def test_an_objective_that_is_lost_already_ranks_nobody():
    predicted = prediction(ttft_p50=[10, 500], ttft_p90=[11, 1000])
    assert cost(context(candidates(2), predicted, slo=Slo(ttft_ms=100), elapsed_ms=200), **RISK) == [10, 500]


def test_risk_fades_where_even_the_best_endpoint_is_sure_to_miss():
    predicted = prediction(ttft_p50=[5000, 9000], ttft_p90=[6000, 11_000])
    assert cost(context(candidates(2), predicted, slo=Slo(ttft_ms=500)), **RISK) == pytest.approx([5000, 9000])


def test_either_objective_alone_counts_and_both_add_up():
    predicted = prediction(ttft_p50=[500, 10], ttft_p90=[1000, 11], tpot_p50=[20, 1], tpot_p90=[40, 2])
    ctx = {slo: context(candidates(2), predicted, slo=slo) for slo in (Slo(1000), Slo(None, 40), Slo(1000, 40))}
    risks = [(cost(c, **RISK)[0] - 500) / 300 for c in ctx.values()]
    assert risks == pytest.approx([0.1, 0.1, 0.2], abs=2e-3)


def test_a_bound_of_tpot_that_one_candidate_alone_has_wider_makes_it_no_riskier():
    """The spread is learned by backlog bin from late labels; of candidates with one median none is set apart by it."""
    predicted = prediction(ttft_p50=[50, 50, 50], tpot_p50=[30, 30, 30], tpot_p90=[33, 60, 33])
    values = cost(context(candidates(3), predicted, slo=Slo(None, 40)), **RISK)
    assert values[0] == values[1] == values[2]


def test_candidates_without_a_bound_of_tpot_leave_the_spread_to_those_with_one():
    nan = float("nan")
    predicted = prediction(ttft_p50=[50, 50, nan], tpot_p50=[1, 20, nan], tpot_p90=[2, 40, nan])
    values = cost(context(candidates(3), predicted, slo=Slo(None, 40)), **RISK)
    assert values[:2] == pytest.approx([50, 50 + 300 * 0.1], rel=1e-2)


@pytest.mark.parametrize(("limit_ms", "shares"), [(40.0, [1 / 64, 1 / 16]), (20.0, [1 / 4, 1.0]), (10.0, [1.0, 1.0])])
def test_prices_for_others_count_by_how_near_tpot_is_to_the_objective_there_and_at_the_slowest(limit_ms, shares):
    endpoints = candidates(2, uncached_tokens=[1000] * 2, decoding_requests=[10] * 2, prefill_ms_per_token=[0.02, 0.02])
    predicted = prediction(ttft_p50=[100] * 2, tpot_p50=[10, 20])
    priced = FREE | {"stall_weight": 0.5}
    stall = 0.5 * 20 * 10
    stated = context(endpoints, predicted, slo=Slo(tpot_ms=limit_ms))
    assert cost(stated, **priced) == pytest.approx([100 + share * stall for share in shares], rel=1e-4)
    assert cost(stated, **priced, urgency_power=0) == pytest.approx([100 + stall] * 2)


@pytest.mark.parametrize(
    "unlike",
    [{"hardware_class": [1, 2]}, {"prefill_ms_per_token": [0.02, 0.05]}],
    ids=["by class", "by measured pace, unlabelled"],
)
def test_prices_for_others_are_whole_on_unlike_hardware(unlike):
    columns = {"uncached_tokens": [1000] * 2, "decoding_requests": [10] * 2, "prefill_ms_per_token": [0.02, 0.02]}
    endpoints = candidates(2, **(columns | unlike))
    predicted = prediction(ttft_p50=[100] * 2, tpot_p50=[10, 20])
    values = cost(context(endpoints, predicted, slo=Slo(tpot_ms=40)), **(FREE | {"stall_weight": 0.5}))
    assert values[0] == pytest.approx(200)


def test_an_endpoint_whose_tpot_is_unpredicted_leaves_the_others_their_price():
    endpoints = candidates(2, uncached_tokens=[1000] * 2, decoding_requests=[10] * 2, prefill_ms_per_token=[0.02, 0.02])
    predicted = prediction(ttft_p50=[100] * 2, tpot_p50=[20, math.nan])
    values = cost(context(endpoints, predicted, slo=Slo(tpot_ms=40)), **(FREE | {"stall_weight": 0.5}))
    assert values[0] == pytest.approx(100 + 100 / 16, rel=1e-4)
    assert math.isnan(values[1])


def test_without_a_tpot_objective_prices_for_others_are_whole():
    endpoints = candidates(1, uncached_tokens=[1000], decoding_requests=[10], prefill_ms_per_token=[0.02])
    predicted = prediction(ttft_p50=[100], tpot_p50=[10])
    values = cost(context(endpoints, predicted, slo=Slo(ttft_ms=1000)), **(FREE | {"stall_weight": 0.5}))
    assert values == pytest.approx([200])


def test_the_decode_price_counts_by_the_same_nearness():
    endpoints = candidates(2, decoding_requests=[10, 10])
    predicted = prediction(ttft_p50=[50, 50], tpot_p50=[20, 20])
    priced = FREE | {"decode_weight": 0.02}
    [near, _], [free, _] = (
        cost(context(endpoints, predicted, slo=Slo(tpot_ms=limit), expected_output_tokens=200), **priced)
        for limit in (20, 40)
    )
    assert free - 50 == pytest.approx((near - 50) / 16, rel=1e-3)


def test_a_full_batch_far_from_its_objective_is_at_no_risk():
    """150 answers of a thousand tokens at 27 of 40 ms: a wide spread made our step look like a miss of theirs."""
    endpoints = candidates(1, decoding_requests=[150], decode_context_tokens=[225_000])
    predicted = prediction(ttft_p50=[100], tpot_p50=[27], tpot_p90=[28])
    [value] = cost(
        context(endpoints, predicted, slo=Slo(tpot_ms=40), input_tokens=1000, expected_output_tokens=1000), **RISK
    )
    assert value == pytest.approx(100, abs=5.0)


def test_neighbours_near_their_objective_make_an_endpoint_dearer():
    endpoints = candidates(2, decoding_requests=[0, 40])
    predicted = prediction(ttft_p50=[100, 100], tpot_p50=[40, 40], tpot_p90=[44, 44])
    lonely, crowded = cost(context(endpoints, predicted, slo=Slo(tpot_ms=40)), **RISK)
    assert crowded > lonely


UNLIKE = {"hardware_class": [1, 2]}


def test_on_unlike_hardware_risk_counts_even_where_the_best_endpoint_is_sure_to_miss():
    predicted = prediction(ttft_p50=[5000, 9000], ttft_p90=[5500, 9900])
    values = cost(context(candidates(2, **UNLIKE), predicted, slo=Slo(ttft_ms=500)), **RISK)
    assert values == pytest.approx([5300, 9300], rel=1e-3)


def test_what_unlike_endpoints_can_not_keep_goes_to_where_the_objective_is_lost_already():
    """The fast one would meet it once more, at its batch's peril; the slow one's batch has nothing left to lose."""
    endpoints = candidates(2, decoding_requests=[150, 150], **UNLIKE)
    predicted = prediction(ttft_p50=[100, 100], tpot_p50=[39, 80], tpot_p90=[42, 86])
    asked = context(endpoints, predicted, slo=Slo(tpot_ms=40), expected_output_tokens=500)
    fast, slow = cost(asked, **RISK)
    assert slow < fast


def test_one_lost_objective_leaves_the_other_s_risk():
    """TPOT is lost everywhere, so it no longer ranks; a prompt that would wait too long still avoids that."""
    predicted = prediction(ttft_p50=[100, 900], ttft_p90=[110, 1300], tpot_p50=[100, 100], tpot_p90=[110, 110])
    near, far = cost(context(candidates(2), predicted, slo=Slo(ttft_ms=1000, tpot_ms=40)), **RISK)
    assert near == pytest.approx(100, abs=1)
    assert far > 900 + 0.3 * 300


def test_objectives_without_quantiles_use_a_wide_spread():
    values = cost(context(candidates(2), prediction(ttft_p50=[10, 1000]), slo=Slo(ttft_ms=1000)), **RISK)
    assert values == pytest.approx([10, 1150], rel=1e-3)


def test_ratios_of_cost_are_kept_and_the_cheapest_scores_one():
    scores = score(context(candidates(3), prediction(ttft_p50=[200, 100, 400])), **FREE)
    assert scores.tolist() == pytest.approx([0.5, 1.0, 0.25])


def test_a_cheaper_candidate_that_is_not_alive_does_not_push_scores_beyond_one():
    scores = score(context(candidates(3), prediction(ttft_p50=[200, 100, 400])), alive=only(3, 0, 2), **FREE)
    assert scores.tolist() == pytest.approx([1.0, 1.0, 0.5])


def test_costs_of_zero_are_finite():
    scores = score(context(candidates(2), prediction(ttft_p50=[0, 100])))
    assert scores[0] == 1.0
    assert 0 < scores[1] < 1e-4


def test_a_single_candidate_scores_one():
    assert score(context(candidates(1), prediction(ttft_p50=[77]))).tolist() == [1.0]


def test_arithmetic_stays_in_float32():
    predicted = prediction(ttft_p50=[10, 20], ttft_p90=[12, 30], tpot_p50=[5, 6], tpot_p90=[7, 8])
    ctx = context(candidates(2, decoding_requests=[1, 2]), predicted, slo=Slo(100, 10))
    assert score(ctx).dtype == column([]).dtype
