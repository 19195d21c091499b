"""The outlook of holding a request: how busy the endpoints are in ms, and whether any can serve it in time."""

import numpy as np
import pytest

from services.router.admission.outlook import outlook
from services.router.admission.waiting_room import WaitingRoomConfig
from services.router.request.inference_request import Slo
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from tests.unit.router.scheduling.builders import candidates, context, prediction

PROFILES = Profiles(load_presets(Registry()))
BUSY = {"pending_uncached_tokens": [3000, 1000], "uncached_tokens": [1000, 1000]}


def look(predicted, *, slo=None, elapsed_ms=0.0, room=None, **columns):
    endpoints = candidates(2, **{**BUSY, **columns})
    ctx = context(endpoints, predicted, slo=slo, elapsed_ms=elapsed_ms, expected_output_tokens=100.0)
    return outlook(ctx, PROFILES.pipeline("leadtime").run(ctx), WaitingRoomConfig(**(room or {})))


def test_the_backlog_s_share_of_the_predicted_ttft_is_the_time_until_it_begins():
    seen = look(prediction(ttft_p50=[400, 500], ttft_p90=[800, 900]))
    assert seen.start_ms == pytest.approx(250.0), "the least busy"
    assert seen.service_ms == pytest.approx(100.0), "own prefill at the chosen one"
    assert seen.ttft_ms == pytest.approx(800.0), "the careful quantile there"
    assert seen.candidates == 2


def test_the_chosen_one_s_backlog_may_count_instead():
    assert look(prediction(ttft_p50=[400, 500]), room={"hungry": "chosen"}).start_ms == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("slo", "in_time"), [(Slo(), True), (Slo(400), True), (Slo(399), False), (Slo(9000, 1), False)]
)
def test_in_time_means_that_some_candidate_meets_every_objective(slo, in_time):
    assert look(prediction(ttft_p50=[400, 500], tpot_p50=[9, 9]), slo=slo).in_time is in_time


def test_time_already_spent_counts():
    assert not look(prediction(ttft_p50=[400, 500]), slo=Slo(450), elapsed_ms=60.0).in_time


def test_a_batch_too_full_for_the_tpot_objective_is_work_enough():
    full = {"decoding_requests": [300, 300], "decode_context_tokens": [90_000, 90_000]}
    predicted = prediction(ttft_p50=[10, 10], tpot_p50=[25, 30])
    seen = look(predicted, slo=Slo(tpot_ms=20), pending_uncached_tokens=[0, 0], **full)
    assert seen.start_ms == pytest.approx(300.0), "3 ms over a tenth more, for 100 tokens"
    assert not seen.in_time


def test_a_tpot_a_tenth_over_its_objective_is_taken_to_be_met():
    full = {
        "decoding_requests": [300, 300],
        "decode_context_tokens": [90_000, 90_000],
        "pending_uncached_tokens": [0, 0],
    }
    seen = look(prediction(ttft_p50=[10, 10], tpot_p50=[21.9, 30]), slo=Slo(tpot_ms=20), **full)
    assert (seen.start_ms, seen.in_time) == (0.0, True)
    assert not look(prediction(ttft_p50=[10, 10], tpot_p50=[22.1, 30]), slo=Slo(tpot_ms=20), **full).in_time
    strict = {"tpot_tolerance": 0.0}
    assert not look(
        prediction(ttft_p50=[10, 10], tpot_p50=[20.1, 30]), slo=Slo(tpot_ms=20), room=strict, **full
    ).in_time


def test_a_tpot_that_not_even_an_empty_endpoint_meets_is_not_waited_for():
    predicted = prediction(ttft_p50=[10, 10], tpot_p50=[25, 30])
    assert look(predicted, slo=Slo(tpot_ms=20), pending_uncached_tokens=[0, 0]).start_ms == 0.0


@pytest.mark.parametrize(
    "predicted", [None, prediction(tpot_p50=[1, 1]), prediction(ttft_p50=[np.nan, np.nan])], ids=["none", "tpot", "nan"]
)
def test_without_a_prediction_there_is_nothing_to_hold_for(predicted):
    assert look(predicted) is None
