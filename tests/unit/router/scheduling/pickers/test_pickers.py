"""Pickers: order, ties, lots and the propensity that is logged, against what really happens."""

from collections import Counter

import numpy as np
import pytest

from services.router.scheduling.pickers.max_score import MaxScoreConfig, MaxScorePicker
from services.router.scheduling.pickers.random import RandomConfig, RandomPicker
from services.router.scheduling.pickers.round_robin import RoundRobinConfig, RoundRobinPicker
from services.router.scheduling.pickers.weighted_random import WeightedRandomConfig, WeightedRandomPicker
from tests.unit.router.scheduling.builders import column, everyone, only

MAX = MaxScorePicker(MaxScoreConfig())


def rng(seed=0):
    return np.random.default_rng(seed)


def test_max_score_lists_by_score():
    pick = MAX.pick(column([0.2, 0.9, 0.5, 0.7]), everyone(4), 3, rng())
    assert pick.order == (1, 3, 2)
    assert pick.propensity == 1.0


def test_max_score_takes_only_alive_candidates():
    assert MAX.pick(column([0.2, 0.9, 0.5]), only(3, 0, 2), 3, rng()).order == (2, 0)


def test_max_score_draws_among_equals_uniformly():
    scores, source = column([0.5, 1.0, 1.0, 1.0]), rng()
    picks = [MAX.pick(scores, everyone(4), 3, source) for _ in range(3000)]
    firsts = Counter(pick.order[0] for pick in picks)
    assert set(firsts) == {1, 2, 3}
    assert all(900 < count < 1100 for count in firsts.values())
    assert {pick.propensity for pick in picks} == {1 / 3}
    assert all(sorted(pick.order) == [1, 2, 3] for pick in picks)


def test_max_score_ties_reach_as_far_as_their_tolerance():
    picker = MaxScorePicker(MaxScoreConfig(tie_tolerance=0.1))
    assert picker.probabilities(column([1.0, 0.95, 0.85]), everyone(3)).tolist() == [0.5, 0.5, 0.0]


def test_max_score_explores_with_its_stated_propensity():
    picker, source = MaxScorePicker(MaxScoreConfig(exploration_probability=0.2)), rng()
    scores = column([0.1, 1.0, 0.3, 0.2])
    assert picker.probabilities(scores, everyone(4)).tolist() == pytest.approx([0.05, 0.85, 0.05, 0.05])
    picks = [picker.pick(scores, everyone(4), 2, source) for _ in range(4000)]
    for pick in picks:
        assert pick.propensity == pytest.approx(0.85 if pick.order[0] == 1 else 0.05)
        assert len(set(pick.order)) == 2
    assert Counter(pick.order[0] for pick in picks)[1] / 4000 == pytest.approx(0.85, abs=0.02)


def test_weighted_random_draws_in_proportion_to_score():
    picker, source = WeightedRandomPicker(WeightedRandomConfig()), rng()
    scores = column([0.5, 0.25, 0.25, 0.0])
    picks = [picker.pick(scores, everyone(4), 4, source) for _ in range(4000)]
    firsts = Counter(pick.order[0] for pick in picks)
    assert firsts[0] / 4000 == pytest.approx(0.5, abs=0.03)
    assert firsts[1] / 4000 == pytest.approx(0.25, abs=0.03)
    assert all(pick.order[-1] == 3 for pick in picks)
    assert {(pick.order[0], pick.propensity) for pick in picks} == {(0, 0.5), (1, 0.25), (2, 0.25)}


def test_weighted_random_is_uniform_where_all_score_nothing():
    picker, source = WeightedRandomPicker(WeightedRandomConfig()), rng()
    picks = [picker.pick(column([0, 0, 0]), only(3, 0, 2), 3, source) for _ in range(1000)]
    assert {pick.propensity for pick in picks} == {0.5}
    assert {pick.order for pick in picks} == {(0, 2), (2, 0)}
    assert Counter(pick.order[0] for pick in picks)[0] == pytest.approx(500, abs=60)


def test_weighted_random_finds_the_best_of_ten_evenly_spread_only_once_in_five():
    picker = WeightedRandomPicker(WeightedRandomConfig())
    chances = picker.probabilities(column(np.linspace(0.01, 1.0, 10)), everyone(10))
    assert chances[-1] == pytest.approx(0.2, abs=0.01)


def test_random_ignores_scores():
    picker, source = RandomPicker(RandomConfig()), rng()
    picks = [picker.pick(column([1, 0, 0]), everyone(3), 2, source) for _ in range(3000)]
    assert all(900 < count < 1100 for count in Counter(pick.order[0] for pick in picks).values())
    assert {pick.propensity for pick in picks} == {1 / 3}
    assert all(len(set(pick.order)) == 2 for pick in picks)


def test_round_robin_takes_turns_from_a_random_start():
    picker = RoundRobinPicker(RoundRobinConfig())
    firsts = [picker.pick(column([0, 0, 0]), everyone(3), 2, rng()).order[0] for _ in range(6)]
    assert [(first - firsts[0]) % 3 for first in firsts] == [0, 1, 2, 0, 1, 2]
    starts = {
        RoundRobinPicker(RoundRobinConfig()).pick(column([0] * 4), everyone(4), 1, rng(s)).order for s in range(60)
    }
    assert starts == {(0,), (1,), (2,), (3,)}


def test_round_robin_lists_the_following_turns_for_retries():
    picker = RoundRobinPicker(RoundRobinConfig())
    first, second, third = picker.pick(column([0, 0, 0]), everyone(3), 3, rng()).order
    assert (second, third) == ((first + 1) % 3, (first + 2) % 3)
    assert picker.pick(column([0, 0, 0]), only(3, first), 3, rng()).order == (first,)
