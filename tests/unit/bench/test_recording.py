"""A recording holds what happened on simulated pods, once, in order, and the same for the same seed."""

from collections import Counter

import numpy as np
import pytest

from bench.recording import SCENARIOS, Kind, Shift, record

MULTI_TURN = SCENARIOS["multi-turn-2048"]
POISSON = SCENARIOS["poisson-2048"]


@pytest.fixture(scope="module")
def recording():
    return record(MULTI_TURN, 400, 3)


def test_every_request_is_dispatched_once_and_ends_once(recording):
    kinds = Counter(event.kind for event in recording.events)
    assert kinds[Kind.DISPATCH] == kinds[Kind.END] + kinds[Kind.ABORT] == len(recording) == 400
    assert kinds[Kind.FIRST] == np.isfinite(recording.first_ms).sum()
    assert recording.aborted.sum() == kinds[Kind.ABORT]


def test_events_are_in_order_of_time(recording):
    times = [event.at_ms for event in recording.events]
    assert times == sorted(times)
    dispatched = [event.what for event in recording.events if event.kind is Kind.DISPATCH]
    assert dispatched == list(range(400))


def test_an_answered_request_has_its_first_token_before_its_end(recording):
    answered = ~recording.aborted
    assert (recording.ttft_ms[answered] > 0).all()
    assert (recording.first_ms[answered] <= recording.end_ms[answered]).all()


def test_later_turns_find_earlier_ones_in_the_cache(recording):
    hits = 1 - recording.uncached_tokens / recording.input_tokens
    assert (recording.uncached_tokens >= 1).all()
    assert 0.05 < np.mean(hits > 0.5) < 0.6
    single = record(POISSON, 200, 3)
    assert (single.uncached_tokens == single.input_tokens).all()


def test_the_same_seed_records_the_same_and_another_doesnt(recording):
    again = record(MULTI_TURN, 400, 3)
    np.testing.assert_array_equal(again.end_ms, recording.end_ms)
    assert not np.array_equal(record(MULTI_TURN, 400, 4).end_ms, recording.end_ms)


def test_a_shift_that_dilates_makes_latencies_longer_by_its_factor():
    quiet = record(POISSON, 1_500, 5)
    slowed = record(POISSON, 1_500, 5, Shift(0.0, 1.5, dilates=True))
    assert np.nanmedian(slowed.ttft_ms) / np.nanmedian(quiet.ttft_ms) == pytest.approx(1.5, rel=0.1)


def test_a_shift_of_one_pod_leaves_the_others():
    quiet = record(POISSON, 800, 5)
    slowed = record(POISSON, 800, 5, Shift(0.0, 3.0, pods=(1,)))
    ratio = [
        np.nanmedian(slowed.tpot_ms[slowed.pod == p]) / np.nanmedian(quiet.tpot_ms[quiet.pod == p]) for p in (0, 1)
    ]
    assert ratio[0] < 1.5
    assert ratio[1] > 2.0


@pytest.mark.parametrize(("now_ms", "factor"), [(0.0, 1.0), (99.0, 1.0), (100.0, 1.0), (150.0, 1.5), (900.0, 2.0)])
def test_a_ramp_rises_evenly(now_ms, factor):
    assert Shift(100.0, 2.0, ramp_ms=100.0).at(now_ms) == pytest.approx(factor)
