"""The fitted model: exact on a line, honest outside, sane from few rows, never negative, never NaN."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.queueing import observe
from services.trainer.basis import tree_matrix
from services.trainer.train import LOG_LATENCY_HIGH, FitOptions, conformal, edge_of, fit, split, weighted_quantile
from shared.features import SCHEMA, hardware_code
from tests.unit.trainer.snapshots import line_snapshot, prompts, rows_of, snapshot_of, window_of

OPTIONS = FitOptions()


def column(model, rows, name):
    return model.predict(rows)[:, model.outputs.index(name)]


@pytest.mark.parametrize("count", [30, 100, 300, 2000])
def test_a_line_is_recovered_and_carried_on_where_trees_would_be_flat(count):
    """Trained on TTFT = 20 + 0.1 × tokens up to 1024 tokens; trees alone say 122 ms at 8192."""
    model = fit(line_snapshot(count), OPTIONS)
    inside = column(model, prompts([100, 500, 1000]), "ttft_p50")
    assert inside == pytest.approx([30.0, 70.0, 120.0], rel=0.1)
    outside = column(model, prompts([2048, 8192]), "ttft_p50")
    assert outside == pytest.approx([224.8, 839.2], rel=0.25)
    swept = column(model, prompts(np.arange(1024, 16_384, 64)), "ttft_p50")
    assert (np.diff(swept) >= 0).all()


def test_noise_does_not_bend_the_line():
    rng = np.random.default_rng(3)
    snapshot = line_snapshot(2000, formula=lambda tokens: (20 + 0.1 * tokens) * np.exp(rng.normal(0, 0.1, tokens.size)))
    model = fit(snapshot, OPTIONS)
    assert column(model, prompts([2048, 8192]), "ttft_p50") == pytest.approx([224.8, 839.2], rel=0.25)


def test_more_work_ahead_of_the_same_count_of_requests_takes_longer():
    """Two requests in flight with 8,192 tokens, or with 64."""
    rng = np.random.default_rng(5)
    count = 2000
    tokens = rng.integers(16, 2000, count)
    pending = rng.integers(0, 4, count)
    ahead = pending * rng.integers(16, 6000, count)
    ttft_ms = (15 + 0.05 * (tokens + ahead)) * np.exp(rng.normal(0, 0.05, count))
    rows = rows_of(
        count, input_tokens=tokens, uncached_tokens=tokens, pending_requests=pending, pending_uncached_tokens=ahead
    )
    model = fit(snapshot_of(rows, ttft=ttft_ms), OPTIONS)
    asked = rows_of(2, input_tokens=500, uncached_tokens=500, pending_requests=2, pending_uncached_tokens=[64, 8192])
    short, long = column(model, asked, "ttft_p50")
    assert short == pytest.approx(15 + 0.05 * 564, rel=0.2)
    assert long == pytest.approx(15 + 0.05 * 8692, rel=0.2)


def test_no_samples_make_no_model():
    assert fit(snapshot_of(prompts([])), OPTIONS) is None
    assert fit(snapshot_of(prompts([1, 2, 3]), ttft=[1, 2, 3]), OPTIONS) is None


def test_a_target_without_rows_is_absent_from_the_outputs():
    model = fit(snapshot_of(prompts(range(1, 41)), e2e=np.arange(1, 41)), OPTIONS)
    assert model.outputs == ("e2e_p50", "e2e_p90", "e2e_p99", "in_range")


def test_ten_rows_make_a_model_that_is_better_than_nothing():
    snapshot = line_snapshot(10)
    model = fit(snapshot, OPTIONS)
    predicted = column(model, prompts([64, 512, 1024]), "ttft_p50")
    assert predicted == pytest.approx([26.4, 71.2, 122.4], rel=0.3)


def test_the_newest_rows_are_held_out():
    snapshot = line_snapshot(1000)
    used, held = split(snapshot, "ttft", 0.1)
    assert len(held) == 100
    assert used.max() < held.min()


def test_each_hardware_class_has_its_own_speed_and_an_unknown_one_the_pools():
    rng = np.random.default_rng(2)
    tokens = rng.integers(16, 2000, 1200)
    code = rng.choice([hardware_code("h100"), hardware_code("l4")], 1200)
    slow = np.where(code == hardware_code("l4"), 5.0, 1.0)
    rows = rows_of(1200, input_tokens=tokens, uncached_tokens=tokens, hardware_class=code)
    model = fit(snapshot_of(rows, ttft=(10 + 0.05 * tokens) * slow), OPTIONS)
    asked = rows_of(
        3,
        input_tokens=1000,
        uncached_tokens=1000,
        hardware_class=[hardware_code("h100"), hardware_code("l4"), hardware_code("b200")],
    )
    fast, slow_ms, unknown = column(model, asked, "ttft_p50")
    assert fast == pytest.approx(60, rel=0.05)
    assert slow_ms == pytest.approx(300, rel=0.05)
    assert fast < unknown < slow_ms
    assert model.in_range(asked).tolist() == [True, True, False]


def test_a_rare_class_is_believed_only_as_far_as_its_rows_go():
    rng = np.random.default_rng(2)
    tokens = rng.integers(16, 2000, 1000)
    code = np.where(np.arange(1000) % 33 == 0, hardware_code("l4"), hardware_code("h100"))
    rows = rows_of(1000, input_tokens=tokens, uncached_tokens=tokens, hardware_class=code)
    ttft_ms = (10 + 0.05 * tokens) * np.where(code == hardware_code("l4"), 4.0, 1.0)
    model = fit(snapshot_of(rows, ttft=ttft_ms), FitOptions(tree_min_rows=10_000))
    asked = rows_of(1, input_tokens=1000, uncached_tokens=1000, hardware_class=hardware_code("l4"))
    assert 90 < column(model, asked, "ttft_p50")[0] < 240


def test_rows_beyond_the_trained_range_are_flagged_and_their_tail_is_wider():
    rng = np.random.default_rng(4)
    snapshot = line_snapshot(2000, formula=lambda tokens: (20 + 0.1 * tokens) * np.exp(rng.normal(0, 0.1, tokens.size)))
    model = fit(snapshot, OPTIONS)
    predicted = model.predict(prompts([1000, 1100]))
    assert predicted[:, -1].tolist() == [1.0, 0.0]
    ratio = np.log(predicted[:, 1] / predicted[:, 0])
    assert ratio[1] == pytest.approx(1.5 * ratio[0], rel=0.35)


def test_what_one_burst_at_the_edge_was_off_by_is_not_carried_on():
    """The longest prompts, a thirtieth of all, took 0.6 of what the line says; one of four times that doesn't."""
    snapshot = line_snapshot(3000, formula=lambda tokens: (20 + 0.1 * tokens) * np.where(tokens > 990, 0.6, 1.0))
    model = fit(snapshot, OPTIONS)
    target, longer = model.targets["ttft"], prompts([4096])
    assert model.targets["ttft"].residual.inplace_predict(tree_matrix(longer))[0] < -0.15
    assert target.log_p50(longer, tree_matrix(longer)) - np.log(target.base.predict(longer)) == pytest.approx(
        0, abs=0.1
    )


def test_the_edge_is_the_ratio_of_what_came_in_all_to_what_the_base_says_in_all():
    base = np.arange(1.0, 1001.0, dtype=np.float32)
    came = np.where(np.arange(1000) % 2, 3 * base, base)
    edge = edge_of(base, came.astype(np.float32), np.ones(1000, np.float32))
    assert np.exp(edge.log_reach) == pytest.approx(800.0)
    assert np.exp(edge.log_factor) == pytest.approx(2.0, rel=0.01)


def test_from_few_rows_there_is_no_edge_within_reach():
    few = np.ones(80, np.float32)
    assert edge_of(few, 2 * few, few).log_reach == LOG_LATENCY_HIGH


def test_quantiles_cover_what_they_promise_on_rows_nobody_saw():
    observed = observe(9000, seed=11)
    seen = np.random.default_rng(1).random(len(observed)) < 0.7
    rows, ttft_ms, e2e_ms = observed.rows, observed.ttft_ms, observed.e2e_ms
    model = fit(snapshot_of(rows[seen], ttft=ttft_ms[seen], e2e=e2e_ms[seen]), FitOptions(half_life_samples=1e6))
    predicted = model.predict(rows[~seen])
    for target, actual in (("ttft", ttft_ms[~seen]), ("e2e", e2e_ms[~seen])):
        p50, p90, p99 = (predicted[:, model.outputs.index(f"{target}_{q}")] for q in ("p50", "p90", "p99"))
        assert 0.45 < (actual <= p50).mean() < 0.55
        assert 0.87 < (actual <= p90).mean() < 0.93
        assert (actual <= p99).mean() > 0.97


def test_the_same_rows_and_seed_make_the_same_model():
    snapshot = window_of(observe(600, seed=3)).snapshot()
    first, second = fit(snapshot, OPTIONS), fit(snapshot, OPTIONS)
    assert np.array_equal(first.predict(snapshot.rows), second.predict(snapshot.rows))


def test_gains_name_features_and_sum_to_one():
    model = fit(window_of(observe(1500, seed=3)).snapshot(), OPTIONS)
    gains = model.gains()
    assert set(gains) == {"ttft", "tpot", "e2e"}
    for shares in gains.values():
        assert sum(shares.values()) == pytest.approx(1.0)
        assert set(shares) <= {*SCHEMA.names, "backlog_tokens", "batch_requests"}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_the_rows_predictions_are_positive_finite_and_ordered(data):
    count = data.draw(st.integers(11, 80))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    high = np.array([min(feature.high, 10.0 ** data.draw(st.integers(0, 7))) for feature in SCHEMA.features])
    rows = (rng.random((count, len(SCHEMA))) * high).astype(np.float32)
    rows[:, SCHEMA.index["hardware_class"]] = np.round(rows[:, SCHEMA.index["hardware_class"]])
    labels = np.exp(rng.normal(3, data.draw(st.sampled_from([0.0, 1.0, 4.0])), count)).clip(1e-3, 8.6e7)
    model = fit(snapshot_of(rows, ttft=labels, tpot=labels[::-1], e2e=labels), FitOptions(tree_min_rows=20))
    wild = (rng.random((50, len(SCHEMA))) * np.array([feature.high for feature in SCHEMA.features])).astype(np.float32)
    predicted = model.predict(np.concatenate([rows, wild]))
    assert np.isfinite(predicted).all()
    assert (predicted[:, :-1] > 0).all()
    for target in range(3):
        p50, p90, p99 = predicted[:, 3 * target : 3 * target + 3].T
        assert (p50 <= p90).all()
        assert (p90 <= p99).all()


@pytest.mark.parametrize(("level", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.9, 9.0), (1.0, 9.0)])
def test_a_weighted_quantile_is_the_least_value_with_enough_weight(level, expected):
    assert weighted_quantile(np.array([9.0, 1.0, 2.0]), np.array([1.0, 2.0, 2.0]), level) == expected


def test_conformal_factors_are_wide_when_almost_nothing_is_known():
    assert conformal(np.zeros(1, np.float32), np.ones(1, np.float32), np.ones(1, np.float32)) == (0.0, 0.5, 1.0)


def test_conformal_factors_put_the_levels_where_they_belong():
    errors = np.random.default_rng(1).normal(0.2, 1.0, 20_000).astype(np.float32)
    scale = np.full(20_000, 2.0, np.float32)
    shift, q90, q99 = conformal(errors, scale, np.ones(20_000, np.float32))
    assert shift == pytest.approx(0.2, abs=0.03)
    assert 2 * q90 == pytest.approx(1.28, abs=0.04)
    assert 2 * q99 == pytest.approx(2.33, abs=0.1)
