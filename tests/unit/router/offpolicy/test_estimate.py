"""Off-policy estimates on made-up logs whose truth is known: near it, and intervals as often right as they say."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from services.router.offpolicy.estimate import evaluate, student_quantile

ACTIONS = 4


class World:
    """Requests with a context, four actions with a latency each, a logging policy and another one."""

    def __init__(self, seed: int, n: int, *, model_bias: float = 1.0, correlated: bool = False) -> None:
        rng = np.random.default_rng(seed)
        difficulty = rng.gamma(2.0, 50.0, n)
        if correlated:  # a queue that comes and goes: neighbours share it
            steps = rng.normal(0, 25, n)
            wave = np.convolve(steps, 0.95 ** np.arange(100))[:n]
            difficulty = np.maximum(difficulty + wave, 1.0)
        self.mean = difficulty[:, None] * np.array([1.0, 1.2, 1.5, 2.0])
        self.logging = _soft(-self.mean / 60.0, 0.1)
        self.target = _soft(-self.mean / 20.0, 0.0)
        self.truth = float((self.target * self.mean).sum(axis=1).mean())
        lots = rng.random((n, 1))
        self.done = np.minimum((self.logging.cumsum(axis=1) < lots).sum(axis=1), ACTIONS - 1)
        at = np.arange(n)
        self.rewards = self.mean[at, self.done] * np.exp(rng.normal(0, 0.3, n) - 0.045)
        guess = self.mean * model_bias * np.exp(rng.normal(0, 0.15, self.mean.shape))
        self.verdict = evaluate(
            self.rewards,
            self.logging[at, self.done],
            self.target[at, self.done],
            guess[at, self.done],
            (self.target * guess).sum(axis=1),
        )


def _soft(logits, floor):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return (1 - floor) * p + floor / ACTIONS


POPULATION = World(999, 200_000).truth
"""Of many more contexts than one log has."""


@pytest.mark.parametrize("estimator", ["ips", "snips", "dr"])
def test_intervals_hold_the_truth_about_as_often_as_they_say(estimator):
    hits = 0
    for seed in range(200):
        estimate = getattr(World(seed, 1_500).verdict, estimator)
        hits += estimate.low <= POPULATION <= estimate.high
    assert 0.90 <= hits / 200 <= 0.995


def test_they_hold_it_too_where_neighbours_share_a_queue():
    population = World(998, 200_000, correlated=True).truth
    hits = sum(
        (verdict := World(seed, 2_000, correlated=True).verdict).dr.low <= population <= verdict.dr.high
        for seed in range(120)
    )
    assert hits / 120 >= 0.85


def test_a_model_that_is_wrong_by_a_factor_does_not_bias_the_doubly_robust_estimate():
    errors = [World(seed, 2_000, model_bias=3.0).verdict.dr.value / POPULATION - 1 for seed in range(40)]
    assert abs(float(np.mean(errors))) < 0.02


def test_the_doubly_robust_estimate_is_the_surest():
    width = {
        name: np.mean([getattr(w.verdict, name).high - getattr(w.verdict, name).low for w in map(_world, range(20))])
        for name in ("ips", "snips", "dr")
    }
    assert width["dr"] < width["snips"]
    assert width["dr"] < width["ips"]


def _world(seed):
    return World(seed, 1_500)


def test_the_difference_is_told_more_surely_than_the_two_means():
    verdict = World(1, 3_000).verdict
    assert verdict.difference.value == pytest.approx(verdict.dr.value - verdict.logged.value)
    assert verdict.difference.high < 0, "the other policy is quicker, and that is sure"
    assert verdict.difference.high - verdict.difference.low < verdict.dr.high - verdict.dr.low


def test_the_same_policy_earns_what_was_logged():
    world = World(3, 1_000)
    at = np.arange(1_000)
    p = world.logging[at, world.done]
    verdict = evaluate(world.rewards, p, p, world.rewards * 0, world.rewards * 0)
    assert verdict.snips.value == verdict.ips.value == pytest.approx(world.rewards.mean())
    assert verdict.difference.value == pytest.approx(0.0)
    assert verdict.effective_rows == pytest.approx(1_000)
    assert verdict.warnings == ()


def test_a_thin_overlap_is_warned_of():
    n = 1_000
    expected = np.full(n, 0.001)
    expected[:20] = 1.0
    verdict = evaluate(np.ones(n), np.full(n, 0.02), expected, np.zeros(n), np.zeros(n))
    assert verdict.effective_rows < 25
    assert "too thin" in verdict.warnings[0]


def test_what_was_never_tried_is_warned_of():
    """A policy that draws no lots: where the other would do something else, its weight is 0."""
    n = 1_000
    expected = np.zeros(n)
    expected[::2] = 1.0
    verdict = evaluate(np.ones(n), np.ones(n), expected, np.ones(n), np.ones(n))
    assert verdict.covered == pytest.approx(0.5)
    assert any("50% of what the profile would do was never tried" in warning for warning in verdict.warnings)


def test_no_overlap_at_all_is_no_estimate():
    verdict = evaluate(np.ones(50), np.ones(50), np.zeros(50), np.ones(50), np.ones(50))
    assert math.isnan(verdict.dr.value)
    assert verdict.effective_rows == 0.0
    assert len(verdict.warnings) == 2


def test_one_row_has_no_interval():
    verdict = evaluate([2.0], [0.5], [1.0], [1.0], [1.0])
    assert verdict.snips.value == 2.0
    assert math.isinf(verdict.snips.high)


@pytest.mark.parametrize("propensity", [0.0, 1.5, math.nan])
def test_a_propensity_that_is_none_is_refused(propensity):
    with pytest.raises(ValueError, match="propensity"):
        evaluate([1.0], [propensity], [1.0], [1.0], [1.0])
    with pytest.raises(ValueError, match="no rows"):
        evaluate([], [], [], [], [])


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.5706), (10, 2.2281), (31, 2.0395), (1_000, 1.9623)])
def test_student_s_quantile(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=0.005)
    assert student_quantile(0.5, freedom) == pytest.approx(NormalDist().inv_cdf(0.5), abs=1e-9)
