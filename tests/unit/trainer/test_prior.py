"""Few rows lean on the physics prior: the same prior as the router's, as far as it is right, and never a constant."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.queueing import H100_70B, Scenario, observe
from services.trainer.prior import prior_base
from services.trainer.train import FitOptions, fit
from shared.features import SCHEMA, hardware_code
from shared.prediction import TARGETS
from shared.prior import PriorModel
from tests.unit.trainer.snapshots import prompts, rows_of, snapshot_of, window_of

WITH = FitOptions(prior="8b")
WITHOUT = FitOptions()


@pytest.mark.parametrize("size", ["8b", "70b"])
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_it_is_the_prior_that_the_router_answers_with(target, size, seed):
    rng = np.random.default_rng(seed)
    highs = np.array([min(feature.high, 10.0 ** rng.integers(0, 6)) for feature in SCHEMA.features])
    rows = np.round(rng.random((20, len(SCHEMA))) * highs).astype(np.float32)
    rows[:, SCHEMA.index["uncached_tokens"]] = np.minimum(
        rows[:, SCHEMA.index["uncached_tokens"]], rows[:, SCHEMA.index["input_tokens"]]
    )
    unknown = rows[:, SCHEMA.index["expected_output_tokens_known"]] == 0
    rows[unknown, SCHEMA.index["expected_output_tokens"]] = 0.0
    model = PriorModel(size)
    shown = model.predict(rows)[:, model.outputs.index(f"{target}_p50")]
    ours = prior_base(target, size).predict(rows)
    assert np.minimum(ours, 86_400_000.0) == pytest.approx(shown, rel=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_ten_requests_that_are_all_alike_make_no_constant(target):
    """One prompt length, an idle pool: the own fit can't know what a longer prompt or a backlog costs."""
    alike = snapshot_of(prompts([500.0] * 10), **{target: np.full(10, 60.0)})
    asked = rows_of(
        3,
        input_tokens=[500, 8000, 500],
        uncached_tokens=[500, 8000, 500],
        pending_uncached_tokens=[0, 0, 40_000],
        pending_requests=[0, 0, 10],
    )

    def predicted(options):
        model = fit(alike, options)
        return model.predict(asked)[:, model.outputs.index(f"{target}_p50")]

    here, longer, behind = predicted(WITH)
    assert here == pytest.approx(60.0, rel=0.05)
    assert longer > 1.1 * here
    assert behind > 1.03 * here
    assert np.ptp(predicted(WITHOUT)) < 1e-3


@pytest.mark.parametrize("count", [10, 20, 40, 100])
def test_the_first_models_are_better_for_it_on_a_pool_that_the_prior_does_not_know(count):
    """Four machines of a 70B model, told that it is an 8B: TTFT of later requests, mean of ten seeds."""
    errors = {"with": [], "without": []}
    for seed in range(10):
        observed = observe(count + 400, seed=seed)
        rows, actual = observed.rows, observed.ttft_ms
        snapshot = snapshot_of(rows[:count], ttft=actual[:count])
        for name, options in (("with", WITH), ("without", WITHOUT)):
            predicted = fit(snapshot, options).predict(rows[count:])[:, 0]
            errors[name].append(np.abs(np.log(predicted / actual[count:])).mean())
    assert np.mean(errors["with"]) < 1.03 * np.mean(errors["without"])
    assert np.mean(errors["with"]) < 0.55


def test_a_class_never_seen_is_as_much_slower_as_the_prior_says():
    """Thirty answers of H100s, then a request for an A100: three times as slow per token."""
    observed = observe(30, seed=3, scenario=Scenario(pods=(H100_70B,)))
    model = fit(window_of(observed).snapshot(), FitOptions(prior="70b"))
    asked = rows_of(
        2, input_tokens=4000, uncached_tokens=4000, hardware_class=[hardware_code("h100"), hardware_code("a100")]
    )
    fast, slow = model.predict(asked)[:, 0]
    if fast != slow:
        assert 1.5 < slow / fast < 4.5


def test_the_scale_is_a_median_that_a_mad_label_does_not_move():
    prior, rows = prior_base("ttft", "8b"), prompts([100.0, 200.0, 300.0, 400.0, 500.0])
    labels = prior.predict(rows) * np.array([2.0, 2.1, 1.9, 2.0, 9e4])
    assert prior.scale(rows, labels) == pytest.approx(2.0)
