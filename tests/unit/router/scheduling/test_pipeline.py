"""The pipeline's own rules, with plugins small enough to see through, and its propensity over all lots."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.interfaces import Branch
from services.router.scheduling.pickers.max_score import MaxScoreConfig, MaxScorePicker
from services.router.scheduling.pipeline import NamedFilter, Pipeline, WeightedScorer
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from tests.unit.router.scheduling.builders import candidates, column, context, only, prediction

MAX = MaxScorePicker(MaxScoreConfig())


@dataclass
class Keeps:
    indexes: tuple[int, ...]

    def keep(self, context, alive):
        return alive & only(len(alive), *self.indexes) if self.indexes else np.zeros(len(alive), np.bool_)


@dataclass
class Tosses:
    """Keeps `heads` with the probability, else `tails`."""

    probability: float
    heads: tuple[int, ...]
    tails: tuple[int, ...]

    def branches(self, context, alive):
        count = len(alive)
        return (
            Branch(self.probability, alive & only(count, *self.heads)),
            Branch(1 - self.probability, alive & only(count, *self.tails)),
        )


@dataclass
class Gives:
    values: list[float] | None

    def score(self, context, alive):
        return None if self.values is None else column(self.values)


def pipeline(*, filters=(), scorers=(), picker=MAX, fallback=None, name="test"):
    return Pipeline(
        name,
        tuple(NamedFilter(f"filter-{i}", plugin) for i, plugin in enumerate(filters)),
        tuple(WeightedScorer(f"scorer-{i}", weight, plugin) for i, (weight, plugin) in enumerate(scorers)),
        picker,
        fallback,
    )


def run(built, count=3, endpoints=3, seed=0):
    return built.run(context(candidates(endpoints), seed=seed), count)


def test_scores_are_a_weighted_mean():
    decision = run(pipeline(scorers=[(3, Gives([1, 0, 0])), (1, Gives([0, 1, 0]))]))
    assert decision.total.tolist() == [0.75, 0.25, 0.0]
    assert decision.order == (0, 1, 2)
    assert decision.scores_of(1) == {"scorer-0": 0.0, "scorer-1": 1.0, "total": 0.25}


def test_a_scorer_without_an_opinion_is_left_out_of_the_weights():
    decision = run(pipeline(scorers=[(3, Gives(None)), (1, Gives([0, 0.5, 1]))]))
    assert decision.total.tolist() == [0, 0.5, 1]
    assert decision.scores_of(0)["scorer-0"] is None
    assert not decision.used_fallback


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_no_opinion(bad):
    decision = run(pipeline(scorers=[(3, Gives([bad, 0, 0])), (1, Gives([0, 0.5, 1]))]))
    assert decision.order == (2, 1, 0)
    assert decision.opinions[0].scores is None


def test_where_no_scorer_has_an_opinion_the_fallback_decides_and_says_so():
    last = pipeline(name="last", scorers=[(1, Gives([0, 1, 0.5]))])
    decision = run(pipeline(scorers=[(1, Gives(None))], filters=[Keeps((0,))], fallback=last))
    assert decision.used_fallback
    assert decision.profile == "last"
    assert decision.order == (1, 2, 0)
    assert [opinion.scores is None for opinion in decision.opinions] == [True, False]


def test_without_a_fallback_nobody_s_opinion_makes_everyone_equal():
    decisions = [run(pipeline(scorers=[(1, Gives(None))]), seed=seed) for seed in range(60)]
    assert {decision.order[0] for decision in decisions} == {0, 1, 2}
    assert {decision.propensity for decision in decisions} == {1 / 3}


def test_a_profile_without_scorers_needs_no_fallback():
    last = pipeline(name="last", scorers=[(1, Gives([0, 1, 0]))])
    assert run(pipeline(fallback=last)).profile == "test"


def test_filters_narrow_one_after_the_other():
    decision = run(pipeline(filters=[Keeps((0, 1)), Keeps((1, 2))], scorers=[(1, Gives([1, 0.1, 1]))]), count=1)
    assert decision.order == (1,)
    assert decision.alive.tolist() == [False, True, False]
    assert [narrowing.kept.tolist() for narrowing in decision.narrowings] == [[True, True, False], [False, True, False]]


def test_a_filter_that_leaves_nobody_is_ignored_and_the_decision_says_so():
    decision = run(pipeline(filters=[Keeps(()), Keeps((2,))], scorers=[(1, Gives([1, 0.5, 0]))]))
    assert [narrowing.ignored for narrowing in decision.narrowings] == [True, False]
    assert decision.order[0] == 2


def test_a_list_cut_short_by_filters_is_filled_with_the_best_of_the_others():
    decision = run(pipeline(filters=[Keeps((2,))], scorers=[(1, Gives([0.3, 0.6, 0.1]))]))
    assert decision.order == (2, 1, 0)
    assert decision.propensity == 1.0


def test_the_list_is_no_longer_than_asked_for_or_than_the_pool():
    built = pipeline(scorers=[(1, Gives([0.3, 0.6, 0.1]))])
    assert run(built, count=2).order == (1, 0)
    assert len(run(built, count=9).order) == 3


@pytest.mark.parametrize(("endpoints", "count"), [(0, 3), (3, 0)])
def test_an_empty_question_is_a_value_error(endpoints, count):
    with pytest.raises(ValueError, match="at least 1"):
        run(pipeline(), count=count, endpoints=endpoints)


def test_the_propensity_covers_the_lots_of_all_filters_and_of_the_picker():
    """By hand: heads (0.75) leaves 0 and 1, then 0 wins; tails leaves 1 and 2, of which the second toss takes one."""
    built = pipeline(
        filters=[Tosses(0.75, (0, 1), (1, 2)), Tosses(0.4, (0, 1), (0, 2))], scorers=[(1, Gives([1, 0.5, 0.2]))]
    )
    decisions = [run(built, count=1, seed=seed) for seed in range(3000)]
    assert {(d.order[0], round(d.propensity, 9)) for d in decisions} == {(0, 0.75), (1, 0.1), (2, 0.15)}
    firsts = Counter(decision.order[0] for decision in decisions)
    assert [firsts[i] / 3000 for i in range(3)] == pytest.approx([0.75, 0.1, 0.15], abs=0.03)


def test_an_empty_branch_counts_as_everyone():
    built = pipeline(filters=[Tosses(0.5, (0,), ())], scorers=[(1, Gives([0.1, 1, 0.2]))])
    decisions = [run(built, count=1, seed=seed) for seed in range(60)]
    assert {(d.order[0], d.propensity) for d in decisions} == {(0, 0.5), (1, 0.5)}


def test_the_propensity_of_the_slo_preset_is_what_really_happens():
    """Two affinity filters, a tier filter and a weighted lot, each with its own chance."""
    endpoints = candidates(4, uncached_tokens=[0, 150, 1000, 1000])
    predicted = prediction(ttft_p50=[400, 300, 200, 1500], tpot_p50=[30, 25, 20, 45])
    built = Profiles(load_presets(Registry())).pipeline("predicted-latency-slo")
    runs = 6000
    chances, firsts = {}, Counter()
    for seed in range(runs):
        decision = built.run(context(endpoints, predicted, slo=Slo(1000, 40), seed=seed), 1)
        firsts[decision.order[0]] += 1
        chances.setdefault(decision.order[0], decision.propensity)
        assert decision.propensity == pytest.approx(chances[decision.order[0]])
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-3)
    for candidate, chance in chances.items():
        assert firsts[candidate] / runs == pytest.approx(chance, abs=4 * (chance / runs) ** 0.5)
