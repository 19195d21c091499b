"""Laws that hold for every plugin in the table, whatever the endpoints look like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.inference_request import Slo
from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import PLUGINS, Kind, Registry
from tests.unit.router.scheduling.builders import candidates, column, context, prediction

PROFILES = Profiles(load_presets(Registry()))
SCORERS = [plugin for plugin in PLUGINS if plugin.kind is Kind.SCORER]
FILTERS = [plugin for plugin in PLUGINS if plugin.kind is Kind.FILTER]
PICKERS = [plugin for plugin in PLUGINS if plugin.kind is Kind.PICKER]

counts = st.integers(0, 60).map(float)
tokens = st.integers(0, 200_000).map(float)
milliseconds = st.floats(0, 600_000, width=32)
ratio = st.floats(0, 1, width=32)
flag = st.sampled_from([0.0, 1.0])

COLUMNS = {
    "uncached_tokens": tokens,
    "pending_uncached_tokens": tokens,
    "pending_requests": counts,
    "decoding_requests": counts,
    "decode_context_tokens": tokens,
    "waiting_requests": counts,
    "running_requests": counts,
    "kv_cache_utilization": ratio,
    "scrape_known": flag,
}
OUTPUTS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p50")


@st.composite
def situations(draw, least=1, most=6):
    """A context and a mask of the alive candidates, at least one."""
    count = draw(st.integers(least, most))

    def values(strategy):
        return draw(st.lists(strategy, min_size=count, max_size=count))

    endpoints = candidates(count, **{name: values(strategy) for name, strategy in COLUMNS.items()})
    outputs = draw(st.lists(st.sampled_from(OUTPUTS), unique=True))
    predicted = prediction(**{name: values(milliseconds) for name in outputs}) if outputs else None
    objective = st.none() | st.floats(1, 100_000)
    ctx = context(
        endpoints,
        predicted,
        input_tokens=draw(tokens),
        max_tokens=draw(st.none() | st.integers(1, 100_000)),
        slo=Slo(draw(objective), draw(objective)),
        elapsed_ms=draw(st.floats(0, 10_000)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    alive = np.array(values(st.booleans()), np.bool_)
    alive[draw(st.integers(0, count - 1))] = True
    return ctx, alive


def shuffled(ctx: Context, order: np.ndarray) -> Context:
    """The same situation with the endpoints in another order."""
    endpoints = candidates(len(order), **{name: values[order] for name, values in ctx.candidates.columns().items()})
    predicted = ctx.prediction
    if predicted is not None:
        predicted = prediction(**{name: values[order] for name, values in predicted.columns.items()})
    return Context(ctx.request, endpoints, predicted, ctx.rng, ctx.elapsed_ms, ctx.expected_output_tokens)


def by_name(plugins):
    return pytest.mark.parametrize("plugin", plugins, ids=[plugin.name for plugin in plugins])


@by_name(PLUGINS)
def test_every_config_has_defaults_and_a_description(plugin):
    config = plugin.config()
    assert isinstance(config, StrictConfig)
    assert plugin.config.__doc__
    plugin.build(config)


@by_name(SCORERS)
@settings(max_examples=40, deadline=None)
@given(situation=situations())
def test_scores_are_finite_and_lie_between_0_and_1(plugin, situation):
    ctx, alive = situation
    scores = plugin.build(plugin.config()).score(ctx, alive)
    if scores is not None:
        assert scores.dtype == np.float32
        assert scores.shape == (len(alive),)
        assert np.isfinite(scores).all()
        assert ((scores >= 0) & (scores <= 1 + 1e-6)).all()


@by_name(SCORERS)
@settings(max_examples=40, deadline=None)
@given(situation=situations(), data=st.data())
def test_scores_do_not_depend_on_the_order_of_the_endpoints(plugin, situation, data):
    ctx, alive = situation
    order = np.array(data.draw(st.permutations(range(len(alive)))))
    scorer = plugin.build(plugin.config())
    scores, other = scorer.score(ctx, alive), scorer.score(shuffled(ctx, order), alive[order])
    assert (scores is None) == (other is None)
    if scores is not None:
        assert other[alive[order]].tolist() == pytest.approx(scores[order][alive[order]].tolist(), abs=1e-5)


@by_name(FILTERS)
@settings(max_examples=40, deadline=None)
@given(situation=situations(), data=st.data())
def test_filters_return_subsets_whatever_the_order_with_chances_that_sum_to_1(plugin, situation, data):
    ctx, alive = situation
    built = plugin.build(plugin.config())
    branches = built.branches(ctx, alive)
    assert sum(branch.probability for branch in branches) == pytest.approx(1.0)
    for branch in branches:
        assert branch.keep.dtype == np.bool_
        assert not (branch.keep & ~alive).any()
        assert branch.keep.any()
    order = np.array(data.draw(st.permutations(range(len(alive)))))
    assert [branch.keep.tolist() for branch in built.branches(shuffled(ctx, order), alive[order])] == [
        branch.keep[order].tolist() for branch in branches
    ]


@st.composite
def scored(draw):
    count = draw(st.integers(1, 6))
    scores = column(draw(st.lists(ratio, min_size=count, max_size=count)))
    alive = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    alive[draw(st.integers(0, count - 1))] = True
    return scores, alive


def picker_of(plugin):
    explores = {"exploration_probability": 0.1} if "exploration_probability" in plugin.config.model_fields else {}
    return plugin.build(plugin.config(**explores))


@by_name(PICKERS)
@settings(max_examples=60, deadline=None)
@given(situation=scored(), count=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_picks_are_alive_without_repetition_and_state_their_propensity(plugin, situation, count, seed):
    scores, alive = situation
    picker = picker_of(plugin)
    pick = picker.pick(scores, alive, count, np.random.default_rng(seed))
    assert len(pick.order) == len(set(pick.order)) == min(count, np.count_nonzero(alive))
    assert all(alive[candidate] for candidate in pick.order)
    assert all(type(candidate) is int for candidate in pick.order)
    assert 0.0 < pick.propensity <= 1.0
    assert pick.propensity == pytest.approx(picker.probabilities(scores, alive)[pick.order[0]])


@by_name(PICKERS)
@settings(max_examples=60, deadline=None)
@given(situation=scored(), data=st.data())
def test_propensities_sum_to_1_over_the_alive_whatever_the_order(plugin, situation, data):
    scores, alive = situation
    picker = picker_of(plugin)
    chances = picker.probabilities(scores, alive)
    assert chances.sum() == pytest.approx(1.0)
    assert not chances[~alive].any()
    order = np.array(data.draw(st.permutations(range(len(alive)))))
    assert picker.probabilities(scores[order], alive[order]).tolist() == pytest.approx(chances[order].tolist())


@pytest.mark.parametrize("name", PROFILES.names)
@settings(max_examples=40, deadline=None)
@given(situation=situations(), count=st.integers(1, 4))
def test_every_preset_decides_every_situation(name, situation, count):
    ctx, _ = situation
    decision = PROFILES.pipeline(name).run(ctx, count)
    endpoints = len(ctx.candidates)
    assert len(decision.order) == len(set(decision.order)) == min(count, endpoints)
    assert all(0 <= candidate < endpoints for candidate in decision.order)
    assert 0.0 < decision.propensity <= 1.0
    assert decision.alive[decision.order[0]]
    assert np.isfinite(decision.total[decision.alive]).all()
