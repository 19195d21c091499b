"""A server's limit of sequences, by what its scrapes show."""

import pytest

from services.router.state.sequence_limit import SequenceLimits


def scrape(limits, progress, running=256.0, waiting=3.0, kv=0.5, slot=0):
    return limits.seen(slot, running=running, waiting=waiting, kv_cache_utilization=kv, progress=progress)


def found(running=256.0, times=5):
    limits = SequenceLimits()
    for progress in range(times):
        scrape(limits, progress, running)
    return limits


def test_as_many_as_ever_again_and_again_while_others_wait_and_answers_begin_is_the_limit():
    limits = SequenceLimits()
    assert [scrape(limits, progress) for progress in range(6)] == [0, 0, 0, 0, 256, 256]


def test_a_limit_stays_while_fewer_run():
    assert scrape(found(), 9, running=120.0, waiting=0.0) == 256


def test_one_that_runs_more_has_another_limit_or_none():
    limits = found()
    assert scrape(limits, 9, running=257.0) == 0
    assert [scrape(limits, progress, running=257.0) for progress in range(10, 15)][-1] == 257


@pytest.mark.parametrize(
    "unlike",
    [{"waiting": 0.0}, {"kv": 0.95}, {"running": 12.0}],
    ids=["nobody waits", "the cache is full", "a small batch"],
)
def test_what_may_have_another_cause_is_no_limit(unlike):
    limits = SequenceLimits()
    assert {scrape(limits, progress, **unlike) for progress in range(50)} == {0}


def test_a_long_prefill_that_keeps_all_waiting_is_no_limit():
    limits = SequenceLimits()
    assert {scrape(limits, progress=7) for _ in range(50)} == {0}


def test_a_server_that_counts_no_progress_has_no_limit_that_could_be_found():
    limits = SequenceLimits()
    assert {scrape(limits, progress=None) for _ in range(50)} == {0}


def test_a_batch_that_is_never_twice_as_large_as_ever_has_no_limit():
    limits = SequenceLimits()
    assert {scrape(limits, progress, running=100.0 + progress) for progress in range(50)} == {0}


def test_another_process_has_a_limit_of_its_own():
    limits = found()
    limits.forget(0)
    assert scrape(limits, 9) == 0


def test_endpoints_are_told_apart():
    limits = found()
    assert scrape(limits, 9, slot=1) == 0
    assert scrape(limits, 9, slot=0) == 256
