"""latency-slo-admitter: refuses only what may be refused and can't be served, and says when to come back."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.inference_request import Slo
from services.router.scheduling.admitters.drain import MAX_DRAIN_MS, drain_ms
from services.router.scheduling.admitters.latency_slo import LatencySloAdmitter, LatencySloConfig
from shared.prior import PriorModel
from tests.unit.router.scheduling.builders import candidates, context, prediction

BUSY = {"pending_requests": [3, 3], "pending_uncached_tokens": [9000, 9000], "uncached_tokens": [1000, 1000]}
LATE = prediction(ttft_p50=[1500, 2500], tpot_p50=[30, 30])


def refusal(predicted=LATE, *, priority=-1, slo=None, quantile="p50", elapsed_ms=0.0, **columns):
    admitter = LatencySloAdmitter(LatencySloConfig(quantile=quantile))
    endpoints = candidates(2, **{**BUSY, **columns})
    return admitter.admit(
        context(endpoints, predicted, priority=priority, slo=slo or Slo(ttft_ms=1000), elapsed_ms=elapsed_ms)
    )


def test_a_sheddable_request_that_nobody_can_serve_in_time_is_refused():
    found = refusal()
    assert found is not None
    assert (found.plugin, found.reason) == ("latency-slo-admitter", "slo_unreachable")
    assert found.retry_after_ms == pytest.approx(500.0)


def test_a_target_that_was_measured_refuses_whatever_else_is_the_priors():
    slo = Slo(ttft_ms=1000, tpot_ms=10)
    assert refusal(dataclasses.replace(LATE, prior_targets=frozenset({"tpot"})), slo=slo) is not None


@pytest.mark.parametrize("priority", [0, 1, 1_000_000])
def test_what_may_not_be_shed_is_let_in(priority):
    assert refusal(priority=priority) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"predicted": None},
        {"predicted": dataclasses.replace(LATE, bundle_version=PriorModel("8b").bundle_version)},
        {"predicted": dataclasses.replace(LATE, prior_targets=frozenset({"ttft"}))},
        {"slo": Slo()},
        {"predicted": prediction(tpot_p50=[30, 30])},
        {"slo": Slo(ttft_ms=1500)},
        {"slo": Slo(ttft_ms=2600, tpot_ms=30)},
        {"predicted": prediction(ttft_p50=[1500, np.nan])},
        {"pending_requests": [3, 0]},
    ],
    ids=[
        "no prediction",
        "the prior's only",
        "a bundle's that has it from the prior",
        "no objective",
        "none predicted",
        "one meets it",
        "both met",
        "one unpredicted",
        "one idle",
    ],
)
def test_doubt_lets_a_request_in(changes):
    assert refusal(**changes) is None


def test_an_endpoint_that_serves_others_is_not_idle():
    assert refusal(pending_requests=[3, 0], running_requests=[0, 2]) is not None


def test_a_ttft_objective_alone_is_judged_alone():
    """The incumbent takes a missing TPOT objective for one of 0 ms, and refuses."""
    assert refusal(prediction(ttft_p50=[900, 900], tpot_p50=[30, 30])) is None
    assert refusal(prediction(ttft_p50=[900, 900], tpot_p50=[30, 30]), slo=Slo(tpot_ms=20)) is not None


def test_the_deadline_is_reduced_by_the_time_already_spent():
    in_time = prediction(ttft_p50=[950, 980])
    assert refusal(in_time, elapsed_ms=40.0) is None
    assert refusal(in_time, elapsed_ms=60.0) is not None


def test_a_quantile_may_decide():
    unsure = prediction(ttft_p50=[900, 900], ttft_p90=[1200, 1300])
    assert refusal(unsure) is None
    assert refusal(unsure, quantile="p90") is not None
    assert refusal(prediction(ttft_p50=[900, 900]), quantile="p90") is None  # the median stands in


def test_retry_after_is_the_least_drain_of_all_endpoints():
    ctx = context(candidates(2, **BUSY), LATE, slo=Slo(ttft_ms=1000), elapsed_ms=100.0)
    assert drain_ms(ctx) == pytest.approx(600.0)


def test_a_prompt_too_long_for_its_objective_comes_back_to_an_empty_endpoint():
    alone = candidates(2, pending_requests=[3, 3], pending_uncached_tokens=[1000, 1000], uncached_tokens=[9000, 9000])
    assert drain_ms(context(alone, LATE, slo=Slo(ttft_ms=100))) == pytest.approx(150.0)


def test_tpot_drains_as_answers_end():
    ctx = context(candidates(2, **BUSY), LATE, slo=Slo(tpot_ms=20), expected_output_tokens=100.0)
    assert drain_ms(ctx) == pytest.approx(1000.0)


milliseconds = st.floats(0, 1e9, width=32)


@given(st.lists(milliseconds, min_size=2, max_size=2), st.floats(0.1, 1e8), st.floats(0, 1e8))
def test_a_drain_time_is_always_a_sane_number(ttft, slo_ms, elapsed_ms):
    ctx = context(candidates(2, **BUSY), prediction(ttft_p50=ttft), slo=Slo(ttft_ms=slo_ms), elapsed_ms=elapsed_ms)
    assert 1.0 <= drain_ms(ctx) <= MAX_DRAIN_MS
