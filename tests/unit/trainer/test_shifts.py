"""A change of level is seen soon, with where it began, also where labels of before and after come mixed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.shifts import Arrivals, ShiftWatch


def watch() -> ShiftWatch[int]:
    return ShiftWatch(span=64, least=8)


def seen(state, errors, *, sent=None, scale=0.1, reference=0.0):
    """(place of the error by which a change was seen, the change); None without one."""
    for place, error in enumerate(errors):
        number = place if sent is None else sent[place]
        shift = state.observe(number, float(error), place, reference=reference, scale=scale, least_log=0.2)
        if shift is not None:
            return place, shift
    return None


@pytest.mark.parametrize("factor", [1.5, 2.0, 1 / 1.5])
def test_a_change_is_seen_within_a_dozen_errors_with_its_onset_and_level(factor):
    rng = np.random.default_rng(1)
    errors = rng.normal(0, 0.12, 300)
    errors[200:] += np.log(factor)
    place, shift = seen(watch(), errors)
    assert 207 <= place < 216
    assert shift.onset == pytest.approx(200, abs=2)
    assert shift.level == pytest.approx(np.log(factor), abs=0.1)
    assert shift.notes == tuple(range(shift.onset, place + 1))


def test_steady_errors_have_no_change():
    for seed in range(20):
        assert seen(watch(), np.random.default_rng(seed).normal(0, 0.12, 2_000)) is None


def test_labels_of_before_and_after_that_come_mixed_fall_apart_by_when_they_were_sent():
    """After the change every other label is still one of before, as slow requests end late."""
    rng = np.random.default_rng(3)
    early, late = iter(range(100, 200)), iter(range(200, 300))
    sent = [*range(100), *(number for pair in zip(early, late, strict=True) for number in pair)]
    errors = rng.normal(0, 0.1, len(sent)) + np.where(np.array(sent) >= 200, np.log(1.5), 0.0)
    place, shift = seen(watch(), errors, sent=sent)
    assert place < 124
    assert shift.onset == 200


def test_a_change_too_small_to_matter_or_a_few_wild_errors_are_none():
    rng = np.random.default_rng(4)
    small = rng.normal(0, 0.05, 400) + np.where(np.arange(400) >= 200, 0.12, 0.0)
    assert seen(watch(), small, scale=0.05) is None
    wild = rng.normal(0, 0.1, 400)
    wild[200:206] = 5.0
    assert seen(watch(), wild) is None


def test_after_a_change_the_watch_begins_anew():
    state = watch()
    assert seen(state, [0.0] * 50 + [0.5] * 20) is not None
    assert seen(state, [0.5] * 100, reference=0.5) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.floats(-20, 20)), max_size=120),
    st.floats(0, 2),
    st.floats(0.05, 1),
)
def test_what_is_seen_is_a_run_of_the_newest_sent_and_large_enough(samples, scale, least_log):
    state = watch()
    for place, (sent, error) in enumerate(samples):
        shift = state.observe(sent, error, place, reference=0.0, scale=scale, least_log=least_log)
        if shift is None:
            continue
        assert len(shift.notes) >= 8
        assert abs(shift.level) >= least_log
        assert all(samples[note][0] >= shift.onset for note in shift.notes)
        assert shift.level == pytest.approx(np.median([samples[note][1] for note in shift.notes]))


def test_a_label_lags_by_what_came_while_its_request_was_under_way():
    arrivals = Arrivals()
    for second in range(1, 11):
        arrivals.lags(second * 1_000.0, [100.0] * 20)
    assert arrivals.lags(11_000.0, [0.0, 5_000.0, float("nan"), 1e9]) == [0, 92, 0, 204]


def test_labels_of_the_first_batch_were_sent_before_any_had_come():
    assert Arrivals().lags(5.0, [10_000.0, 3.0]) == [1, 2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e5), st.lists(st.floats(0, 1e8), max_size=20)), max_size=40))
def test_no_label_lags_by_more_than_came_before_it(batches):
    arrivals, now_ms, total = Arrivals(kept=16), 0.0, 0
    for gap_ms, durations in batches:
        now_ms += gap_ms
        lags = arrivals.lags(now_ms, durations)
        assert all(0 <= lag <= total + place for place, lag in enumerate(lags, start=1))
        total += len(durations)
