"""Faults of the published strategies that are not copied: one test each, through whole presets or plugins.

The numbers are those of the list that was drawn up from the incumbent's sources; what concerns other rooms (labels,
training, transport, model format, metrics) is tested there.
"""

import numpy as np
import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from tests.unit.router.scheduling.builders import candidates, context, prediction

PROFILES = Profiles(load_presets(Registry()))
SLO = "predicted-latency-slo"


def run(profile, endpoints, predicted, **fields):
    return PROFILES.pipeline(profile).run(context(endpoints, predicted, **fields))


def chances(profile, endpoints, predicted, **fields):
    return PROFILES.pipeline(profile).first_probabilities(context(endpoints, predicted, **fields))


def test_2_more_than_a_hundred_candidates_are_scored_by_prediction_as_few_are():
    count = 300
    ttft = np.linspace(100, 1000, count)
    decision = run("leadtime", candidates(count), prediction(ttft_p50=ttft))
    assert not decision.used_fallback
    assert decision.order[0] == 0


def test_4_a_shed_request_carries_a_reason_and_a_time():
    busy = candidates(2, pending_requests=[5, 5], pending_uncached_tokens=[9000, 9000], uncached_tokens=[10, 10])
    decision = run(SLO, busy, prediction(ttft_p50=[900, 900]), priority=-1, slo=Slo(ttft_ms=100))
    assert decision.refusal is not None
    assert decision.refusal.reason == "slo_unreachable"
    assert decision.refusal.retry_after_ms == pytest.approx(800, rel=0.01)


def test_5_a_ttft_objective_alone_keeps_the_endpoints_that_meet_it():
    predicted = prediction(ttft_p50=[100, 900], tpot_p50=[90, 10])
    decision = run(SLO, candidates(2), predicted, slo=Slo(ttft_ms=500))
    assert [
        n.kept.tolist() for n in decision.narrowings if n.plugin == "slo-headroom-tier-filter" and n.chance > 0.5
    ] in (
        [[True, False]],
        [],
    )
    assert chances(SLO, candidates(2), predicted, slo=Slo(ttft_ms=500))[0] > 0.98


def test_6_a_neighbour_without_an_objective_does_not_change_what_is_asked_of_us():
    """What others asked for isn't read at all: our objective is held against our prediction."""
    predicted = prediction(ttft_p50=[100, 100], tpot_p50=[25, 25])
    decision = run(SLO, candidates(2, decoding_requests=[9, 9]), predicted, priority=-1, slo=Slo(tpot_ms=26))
    assert decision.refusal is None


def test_8_an_objective_may_be_held_against_a_quantile_instead_of_the_median():
    decision = run("leadtime", candidates(2), prediction(ttft_p50=[95, 99], ttft_p90=[300, 101]), slo=Slo(ttft_ms=102))
    assert decision.order[0] == 1, "the surer of two that meet the SLO at the median"


def test_12_time_spent_in_the_router_is_taken_off_the_objective():
    predicted = prediction(ttft_p50=[80, 95])
    early = chances(SLO, candidates(2), predicted, slo=Slo(ttft_ms=100))
    late = chances(SLO, candidates(2), predicted, slo=Slo(ttft_ms=100), elapsed_ms=10.0)
    assert early[1] > 0.5  # least headroom first: both are in time
    assert late[0] > 0.98  # only the quicker one still is


def test_13_a_difference_of_a_millisecond_is_not_blown_up_to_the_whole_scale():
    decision = run("leadtime", candidates(3), prediction(ttft_p50=[1000, 1001, 2000]))
    scores = [decision.scores_of(i)["total"] for i in range(3)]
    assert scores[0] - scores[1] < 0.002
    assert scores[0] - scores[2] > 0.4


def test_14_an_idle_endpoint_does_not_take_all_from_a_quicker_busy_one():
    endpoints = candidates(2, decoding_requests=[3, 0])
    predicted = prediction(ttft_p50=[50, 400])
    assert run("leadtime", endpoints, predicted).order[0] == 0
    assert chances("predicted-latency", endpoints, predicted)[0] > 0.9


def test_19_a_match_counts_only_as_far_as_it_is_without_a_gap():
    from services.router.state.prefix_index import BlockHasher, PrefixIndex

    index = PrefixIndex(BlockHasher(b"salt", block_bytes=16))
    names = index.hasher.names("m", bytes(range(64)))
    index.insert(names, 0)
    index.insert([names[0], names[2], names[3]], 1)
    assert index.lookup(names, 2).tolist() == [64, 16]


def test_22_one_endpoint_without_a_prediction_does_not_cost_the_others_theirs():
    predicted = prediction(ttft_p50=[300, np.nan, 100], tpot_p50=[10, np.nan, 10])
    for profile in ("leadtime", "predicted-latency", SLO):
        decision = run(profile, candidates(3), predicted, slo=Slo(ttft_ms=400))
        assert not decision.used_fallback
        assert np.isfinite(decision.total).all()
    assert run("leadtime", candidates(3), predicted).order[0] == 2


def test_32_every_lot_is_in_the_propensity():
    endpoints = candidates(3, uncached_tokens=[10, 1000, 1000])
    predicted = prediction(ttft_p50=[100, 150, 200], tpot_p50=[20, 10, 10])
    pipeline = PROFILES.pipeline(SLO)
    expected = pipeline.first_probabilities(context(endpoints, predicted, slo=Slo(ttft_ms=120)))
    assert expected.sum() == pytest.approx(1.0)
    for seed in range(200):
        decision = pipeline.run(context(endpoints, predicted, slo=Slo(ttft_ms=120), seed=seed))
        assert decision.propensity == pytest.approx(expected[decision.order[0]])
