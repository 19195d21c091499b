"""Online calibration follows a drift, keeps quantiles honest, and can't be thrown by one label."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.calibrate import MAX_ENDPOINTS, MAX_LENGTHS, CalibrationOptions, Calibrator, OutputLengths
from shared.bundle import Calibration
from shared.inference import MAX_LOG_CORRECTION
from shared.inference import calibrate as apply
from shared.names import length_key

OUTPUTS = ("ttft_p50", "ttft_p90", "ttft_p99", "in_range")
RAW = {"ttft_p50": 100.0, "ttft_p90": 150.0, "ttft_p99": 200.0, "in_range": 1.0}


def calibrator() -> Calibrator:
    return Calibrator(CalibrationOptions(), "v", OUTPUTS)


def published(state: Calibrator) -> Calibration:
    return state.calibration("default", 1, 0.0, {})


def test_a_new_bundle_starts_without_any_correction():
    found = published(calibrator())
    assert found.log_bias == {"ttft": 0.0}
    assert found.quantile_log_offset == {"ttft_p50": [0.0] * 5, "ttft_p90": [0.0] * 5, "ttft_p99": [0.0] * 5}
    assert found.endpoint_log_bias == {"ttft": {}}
    assert len(found.backlog_edges_tokens) == 4


def test_a_drift_of_a_half_is_followed_within_two_hundred_samples():
    state, rng = calibrator(), np.random.default_rng(1)
    for _ in range(1000):
        state.observe(RAW, {"ttft": 100 * np.exp(rng.normal(0, 0.15))}, 100.0, "a")
    for _ in range(200):
        state.observe(RAW, {"ttft": 150 * np.exp(rng.normal(0, 0.15))}, 100.0, "a")
    found = published(state)
    total = found.log_bias["ttft"] + found.endpoint_log_bias["ttft"]["a"]
    assert total == pytest.approx(np.log(1.5), abs=0.08)


@pytest.mark.parametrize("tokens", [10.0, 700.0, 50_000.0])
def test_each_backlog_bin_covers_its_level(tokens):
    """The bundle's own P90 fits no bin: here the truth is much wider than it says."""
    state, rng = calibrator(), np.random.default_rng(2)
    for _ in range(4000):
        state.observe(RAW, {"ttft": 100 * np.exp(rng.normal(0, 0.8))}, tokens, "a")
    fresh = 100 * np.exp(rng.normal(0, 0.8, 4000))
    raw = np.array([[100.0, 150.0, 200.0, 1.0]] * 4000, np.float32)
    calibrated = apply(raw, OUTPUTS, "v", published(state), np.full(4000, tokens, np.float32), ["a"] * 4000)
    assert (fresh <= calibrated[:, 1]).mean() == pytest.approx(0.9, abs=0.035)
    assert (fresh <= calibrated[:, 2]).mean() > 0.96


def test_one_mad_label_moves_the_bias_by_no_more_than_one_ordinary_miss():
    state = calibrator()
    for _ in range(300):
        state.observe(RAW, {"ttft": 105.0}, 100.0, "a")
    before = published(state).log_bias["ttft"]
    state.observe(RAW, {"ttft": 10_000.0}, 100.0, "a")
    assert abs(published(state).log_bias["ttft"] - before) < 0.02


def test_an_endpoint_is_believed_only_as_far_as_its_samples_go():
    state = calibrator()
    for _ in range(2000):
        state.observe(RAW, {"ttft": 100.0}, 100.0, "usual")
    for _ in range(3):
        state.observe(RAW, {"ttft": 130.0}, 100.0, "slow")
    little = published(state).endpoint_log_bias["ttft"]["slow"]
    for _ in range(200):
        state.observe(RAW, {"ttft": 100.0}, 100.0, "usual")
        state.observe(RAW, {"ttft": 130.0}, 100.0, "slow")
    much = published(state).endpoint_log_bias["ttft"]
    assert 0 < little < 0.5 * np.log(1.3)
    assert much["slow"] - much["usual"] == pytest.approx(np.log(1.3), rel=0.25)


@pytest.mark.parametrize(("lag", "least", "most"), [(0, 0.9, 1.1), (400, 0.0, 0.7)])
def test_answers_decoded_side_by_side_are_one_witness_of_how_fast_an_endpoint_is(lag, least, most):
    """A tenth less in 150 answers that overlapped is a few small batches; in 200 one after the other it is a trait."""
    raw = {"tpot_p50": 30.0, "tpot_p90": 33.0, "tpot_p99": 36.0, "in_range": 1.0}
    state, rng = Calibrator(CalibrationOptions(), "v", tuple(raw)), np.random.default_rng(3)
    for number in range(1_600):
        endpoint = "abcdefgh"[number % 8]
        factor = 0.9 if endpoint == "b" else 1.0
        state.observe(raw, {"tpot": 30.0 * factor * np.exp(rng.normal(0, 0.06))}, 500.0, endpoint, lag=lag)
    share = published(state).endpoint_log_bias["tpot"]["b"] / np.log(0.9)
    assert least <= share <= most


def test_a_target_that_the_bundle_lacks_or_the_sample_lacks_changes_nothing():
    state = calibrator()
    state.observe(RAW, {"e2e": 5000.0}, 100.0, "a")
    assert published(state).log_bias == {"ttft": 0.0}
    assert state.live() == {}


def test_the_live_error_is_that_of_the_calibrated_prediction():
    state = calibrator()
    for _ in range(2000):
        state.observe(RAW, {"ttft": 200.0}, 100.0, "a")
    live = state.live()["ttft"]
    assert live.samples == 2000
    assert live.mape < 0.02
    assert abs(live.bias) < 0.02


def test_endpoints_are_bounded_and_the_least_recent_leave():
    state = calibrator()
    for number in range(MAX_ENDPOINTS + 5):
        state.observe(RAW, {"ttft": 100.0}, 100.0, str(number))
    kept = published(state).endpoint_log_bias["ttft"]
    assert len(kept) == MAX_ENDPOINTS
    assert "0" not in kept
    assert str(MAX_ENDPOINTS + 4) in kept


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 8e7), st.floats(0, 1e7), st.sampled_from("ab")), max_size=60))
def test_whatever_comes_corrections_stay_in_bounds_and_the_message_survives_the_wire(samples):
    state = calibrator()
    for actual, backlog, endpoint in samples:
        state.observe(RAW, {"ttft": actual}, backlog, endpoint)
    found = Calibration.decode(published(state).encode(), pool="default")
    numbers = [
        *found.log_bias.values(),
        *found.endpoint_log_bias["ttft"].values(),
        *(offset for offsets in found.quantile_log_offset.values() for offset in offsets),
    ]
    assert all(abs(number) <= MAX_LOG_CORRECTION for number in numbers)


def test_the_output_length_is_the_median_per_model():
    lengths, rng = OutputLengths(0.05), np.random.default_rng(1)
    for _ in range(3000):
        lengths.observe("short", int(50 * np.exp(rng.normal(0, 0.5))))
        lengths.observe("long", int(800 * np.exp(rng.normal(0, 0.5))))
    found = lengths.tokens()
    assert found["short"] == pytest.approx(50, rel=0.3)
    assert found["long"] == pytest.approx(800, rel=0.3)
    assert 50 < found["*"] < 800


def test_a_route_has_its_own_output_length_and_begins_where_its_model_is():
    lengths, rng = OutputLengths(0.05), np.random.default_rng(1)
    for _ in range(2000):
        lengths.observe("m", int(50 * np.exp(rng.normal(0, 0.5))), "title")
        lengths.observe("m", int(800 * np.exp(rng.normal(0, 0.5))), "chat")
    found = lengths.tokens()
    assert found[length_key("m", "title")] == pytest.approx(50, rel=0.3)
    assert found[length_key("m", "chat")] == pytest.approx(800, rel=0.3)
    assert 50 < found["m"] < 800
    lengths.observe("m", 10_000, "new")
    assert lengths.tokens()[length_key("m", "new")] < 3 * found["m"]


def test_output_lengths_are_bounded():
    lengths = OutputLengths(0.05)
    for number in range(MAX_LENGTHS + 50):
        lengths.observe(f"model-{number}", 10)
    assert len(lengths.tokens()) == MAX_LENGTHS
    assert "*" in lengths.tokens()


def test_a_tenth_of_lies_moves_neither_bias_nor_quantiles():
    honest, lied_to, rng = calibrator(), calibrator(), np.random.default_rng(4)
    for number in range(3000):
        actual = 110 * np.exp(rng.normal(0, 0.3))
        honest.observe(RAW, {"ttft": actual}, 100.0, "a")
        lied_to.observe(RAW, {"ttft": actual * (100.0 if number % 10 == 3 else 1.0)}, 100.0, "a")
    clean, dirty = published(honest), published(lied_to)
    assert dirty.log_bias["ttft"] == pytest.approx(clean.log_bias["ttft"], abs=0.05)
    for level in ("ttft_p90", "ttft_p99"):
        assert dirty.quantile_log_offset[level][0] == pytest.approx(clean.quantile_log_offset[level][0], abs=0.15)
    assert lied_to.live()["ttft"].mape < 1.2 * honest.live()["ttft"].mape


def test_a_pool_that_became_twenty_times_slower_is_followed():
    """Each of its labels is as far off as a lie; a third of them are not lies."""
    state = calibrator()
    for _ in range(500):
        state.observe(RAW, {"ttft": 100.0}, 100.0, "a")
    for _ in range(300):
        state.observe(RAW, {"ttft": 2000.0}, 100.0, "a")
    found = published(state)
    assert found.log_bias["ttft"] + found.endpoint_log_bias["ttft"]["a"] > 1.0


def _drifting(calibrator, factors, *, endpoint="a", noise=0.1, seed=1):
    """Samples whose actual latency is `factor` × the prediction of 100 ms, with noise."""
    rng = np.random.default_rng(seed)
    for factor in factors:
        predicted = {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}
        actual = {"ttft": 100.0 * factor * float(np.exp(rng.normal(0, noise)))}
        calibrator.observe(predicted, actual, 500.0, endpoint)


def _bias(calibrator):
    return calibrator.calibration("p", 1, 0.0, {}).log_bias["ttft"]


def test_a_change_of_half_is_followed_within_forty_samples_and_noise_doesnt_hurry():
    calibrator = Calibrator(CalibrationOptions(endpoint_rate=1e-6), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    _drifting(calibrator, [1.0] * 500)
    assert abs(_bias(calibrator)) < 0.05
    _drifting(calibrator, [1.5] * 40, seed=2)
    assert _bias(calibrator) == pytest.approx(np.log(1.5), abs=0.1)


def test_a_change_is_seen_with_about_where_it_began_and_steady_latencies_have_none():
    calibrator = Calibrator(CalibrationOptions(), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    _drifting(calibrator, [1.0] * 3000, noise=0.15)
    assert calibrator.changed_at is None
    _drifting(calibrator, [1.5] * 100, noise=0.15, seed=2)
    assert calibrator.changed_at == pytest.approx(3000, abs=50)


def test_one_mad_label_is_no_change():
    calibrator = Calibrator(CalibrationOptions(), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    _drifting(calibrator, [1.0] * 400)
    before = _bias(calibrator)
    _drifting(calibrator, [100.0])
    assert _bias(calibrator) == pytest.approx(before, abs=0.01)
    assert calibrator.changed_at is None


def test_quantiles_are_judged_by_what_was_served_where_that_is_known():
    outputs = ("ttft_p50", "ttft_p90", "ttft_p99")
    plain, told = Calibrator(CalibrationOptions(), "v", outputs), Calibrator(CalibrationOptions(), "v", outputs)
    predicted = {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}
    for calibrator, served in ((plain, None), (told, {"ttft_p90": 90.0})):
        calibrator.observe(predicted, {"ttft": 100.0}, 500.0, "a", served)
    offset = [c.calibration("p", 1, 0.0, {}).quantile_log_offset["ttft_p90"][1] for c in (plain, told)]
    assert offset[0] < 0 < offset[1]


def test_a_bound_that_has_been_raised_past_a_label_isnt_raised_for_it_once_more():
    """Labels come late: hundreds of requests were sent under the bound that the first of them have mended."""
    calibrator = Calibrator(CalibrationOptions(), "v", ("tpot_p50", "tpot_p90", "tpot_p99"))
    served = {"tpot_p50": 20.0, "tpot_p90": 21.0, "tpot_p99": 22.0}
    for number in range(1_500):
        calibrator.observe(served, {"tpot": 30.0}, 100.0, f"e{number % 8}", served, lag=min(number, 1_000))
    found = calibrator.calibration("p", 1, 0.0, {})
    bias = found.log_bias["tpot"]
    assert bias == pytest.approx(np.log(1.5), abs=0.05)
    assert found.quantile_log_offset["tpot_p90"][0] < 0.3


def test_offsets_of_live_requests_are_handed_on_and_those_of_a_prior_arent():
    outputs = ("ttft_p50", "ttft_p90", "ttft_p99")
    predicted = {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}
    for live in (True, False):
        before, after = Calibrator(CalibrationOptions(), "v", outputs), Calibrator(CalibrationOptions(), "w", outputs)
        if live:
            before.mark()
        for _ in range(5):
            before.observe(predicted, {"ttft": 100.0}, 500.0, "a", {"ttft_p90": 90.0})
        after.inherit(before)
        offsets = after.calibration("p", 1, 0.0, {}).quantile_log_offset["ttft_p90"]
        assert offsets == (before.calibration("p", 1, 0.0, {}).quantile_log_offset["ttft_p90"] if live else [0.0] * 5)
        assert (offsets[1] > 0.1) is live


def test_rows_that_a_model_was_fitted_on_say_nothing_of_its_quantiles():
    calibrator = Calibrator(CalibrationOptions(), "v", OUTPUTS)
    for _ in range(200):
        calibrator.observe(RAW, {"ttft": 120.0}, 500.0, "a", seen=True)
    found = published(calibrator)
    assert found.quantile_log_offset["ttft_p90"] == [0.0] * 5
    assert found.log_bias["ttft"] + found.endpoint_log_bias["ttft"]["a"] == pytest.approx(np.log(1.2), abs=0.05)


def test_a_bin_that_is_predicted_too_low_is_raised_alone():
    calibrator, rng = Calibrator(CalibrationOptions(), "v", OUTPUTS), np.random.default_rng(6)
    for number in range(4_000):
        deep = number % 10 == 0
        actual = 100.0 * (1.2 if deep else 1.0) * np.exp(rng.normal(0, 0.1))
        calibrator.observe(RAW, {"ttft": actual}, 50_000.0 if deep else 500.0, "a")
    found = published(calibrator)
    medians = found.quantile_log_offset["ttft_p50"]
    shared = found.log_bias["ttft"] + found.endpoint_log_bias["ttft"]["a"]
    assert shared + medians[4] == pytest.approx(np.log(1.2), abs=0.05)
    assert shared + medians[1] == pytest.approx(0.0, abs=0.03)


def test_a_burst_that_nobody_could_know_of_moves_a_bound_less_than_as_many_single_requests():
    burst, single = calibrator(), calibrator()
    for number in range(25):
        burst.observe(RAW, {"ttft": 170.0}, 50_000.0, "a", {"ttft_p90": 150.0}, lag=number)
        single.observe(RAW, {"ttft": 170.0}, 50_000.0, "a", {"ttft_p90": 150.0})
    moved = [published(state).quantile_log_offset["ttft_p90"][4] for state in (burst, single)]
    assert 0.2 < moved[0] < moved[1]


def test_after_a_change_of_the_pool_the_bias_is_there_within_a_dozen_samples_and_quantiles_stay():
    calibrator = Calibrator(CalibrationOptions(), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    _drifting(calibrator, [1.0] * 1_000)
    before = calibrator.calibration("p", 1, 0.0, {})
    _drifting(calibrator, [1.5] * 12, seed=2)
    after = calibrator.calibration("p", 1, 0.0, {})
    assert after.log_bias["ttft"] + after.endpoint_log_bias["ttft"]["a"] == pytest.approx(np.log(1.5), abs=0.1)
    offsets = [c.quantile_log_offset["ttft_p90"][1] for c in (before, after)]
    assert offsets[1] == pytest.approx(offsets[0], abs=0.1)  # twelve misses alone are 0.54


def test_a_label_of_before_a_change_teaches_no_more():
    calibrator = Calibrator(CalibrationOptions(), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    _drifting(calibrator, [1.0] * 500)
    _drifting(calibrator, [1.5] * 40, seed=2)
    bias = _bias(calibrator)
    for _ in range(30):
        calibrator.observe(
            {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}, {"ttft": 100.0}, 500.0, "a", lag=200
        )
    assert _bias(calibrator) == bias


def test_an_endpoint_that_becomes_slow_has_its_share_after_a_dozen_of_its_samples_and_the_pool_stays():
    calibrator = Calibrator(CalibrationOptions(), "v", ("ttft_p50", "ttft_p90", "ttft_p99"))
    rng = np.random.default_rng(5)
    raw = {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}
    for number in range(2_000 + 40):
        endpoint = "abcd"[number % 4]
        factor = 2.0 if number >= 2_000 and endpoint == "b" else 1.0
        calibrator.observe(raw, {"ttft": 100.0 * factor * np.exp(rng.normal(0, 0.1))}, 500.0, endpoint)
    found = calibrator.calibration("p", 1, 0.0, {})
    assert found.endpoint_log_bias["ttft"]["b"] + found.log_bias["ttft"] == pytest.approx(np.log(2.0), abs=0.15)
    assert found.endpoint_log_bias["ttft"]["a"] + found.log_bias["ttft"] == pytest.approx(0.0, abs=0.1)
    assert calibrator.changed_at is None
    assert calibrator.endpoints_changed_at["b"] == pytest.approx(2_000, abs=25)


def test_another_bundles_calibrator_knows_since_when_labels_count():
    outputs = ("ttft_p50", "ttft_p90", "ttft_p99")
    before, after = Calibrator(CalibrationOptions(), "v", outputs), Calibrator(CalibrationOptions(), "w", outputs)
    _drifting(before, [1.0] * 500)
    _drifting(before, [1.5] * 40, seed=2)
    _drifting(after, [1.0] * 300, seed=3)
    after.inherit(before)
    bias = _bias(after)
    raw = {"ttft_p50": 100.0, "ttft_p90": 120.0, "ttft_p99": 150.0}
    after.observe(raw, {"ttft": 60.0}, 500.0, "a", lag=60)
    assert _bias(after) == bias
    after.observe(raw, {"ttft": 60.0}, 500.0, "a", lag=5)
    assert _bias(after) < bias


def test_a_target_that_nobody_measures_goes_by_how_slow_an_endpoints_whole_answers_are():
    """Answers that aren't streamed: TTFT is the prior's, and an endpoint half as fast is believed so there too."""
    raw = {f"{target}_{level}": 100.0 for target in ("ttft", "e2e") for level in ("p50", "p90", "p99")}
    state, rng = Calibrator(CalibrationOptions(), "v", tuple(raw)), np.random.default_rng(3)
    for _ in range(400):
        for endpoint, e2e_ms in (("a", 100.0), ("b", 100.0), ("slow", 200.0)):
            state.observe(raw, {"e2e": e2e_ms * np.exp(rng.normal(0, 0.1))}, 100.0, endpoint)
    found = published(state)
    assert found.endpoint_log_bias["ttft"] == found.endpoint_log_bias["e2e"]
    assert found.endpoint_log_bias["ttft"]["slow"] > 0.3
    assert found.log_bias["ttft"] == 0.0
    state.observe(raw, {"ttft": 100.0}, 100.0, "a")
    assert "slow" not in published(state).endpoint_log_bias["ttft"]
