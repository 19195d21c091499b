"""Which replica is called: the least busy live one; ejected ones come back by a probe alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.predict.errors import FailureReason
from services.router.predict.replicas import Address, CircuitConfig, Probe, ReplicaSet

A, B, C = (Address(f"10.0.0.{i}", 8080, "http://predictor:8080") for i in (1, 2, 3))
DECISIVE = (FailureReason.REFUSED, FailureReason.UNAVAILABLE, FailureReason.STATUS)


def made(*addresses: Address, **circuit: float) -> ReplicaSet:
    replicas = ReplicaSet(CircuitConfig(**circuit))
    replicas.update(addresses)
    return replicas


def of(replicas: ReplicaSet, address: Address):
    return next(replica for replica in replicas if replica.address == address)


def test_the_replica_with_the_fewest_outstanding_calls_is_chosen():
    replicas = made(A, B, C)
    for address, outstanding in ((A, 2), (B, 1), (C, 3)):
        of(replicas, address).outstanding = outstanding
    assert {replicas.choose().address for _ in range(5)} == {B}


def test_equal_replicas_are_called_in_turn():
    replicas = made(A, B, C)
    assert sorted(str(replicas.choose().address) for _ in range(6)) == sorted(map(str, (A, B, C) * 2))


def test_a_replica_that_was_tried_is_not_chosen_again():
    replicas = made(A, B)
    assert replicas.choose({A}).address == B
    assert replicas.choose({A, B}) is None
    assert replicas.others({A}) == 1


def test_without_replicas_none_is_chosen():
    assert made().choose() is None


@pytest.mark.parametrize("reason", DECISIVE)
def test_a_decisive_failure_ejects_at_once(reason):
    replicas = made(A, B)
    assert replicas.failed(of(replicas, A), reason, 0.0)
    assert {replicas.choose().address for _ in range(4)} == {B}
    assert (replicas.live_count(), replicas.ejected_count()) == (1, 1)


@pytest.mark.parametrize(
    "reason", [reason for reason in FailureReason if reason not in {*DECISIVE, FailureReason.NO_BUNDLE}]
)
def test_other_failures_eject_after_three_in_a_row(reason):
    replicas = made(A, max_failures=3)
    replica = of(replicas, A)
    assert [replicas.failed(replica, reason, 0.0) for _ in range(3)] == [False, False, True]


def test_a_success_in_between_starts_the_count_anew():
    replicas = made(A, max_failures=2)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.TIMEOUT, 0.0)
    replicas.succeeded(replica)
    assert not replicas.failed(replica, FailureReason.TIMEOUT, 0.0)


def test_a_failure_of_an_ejected_replica_does_not_put_its_probe_off():
    replicas = made(A, probe_ms=500.0)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.REFUSED, 0.0)
    assert not replicas.failed(replica, FailureReason.REFUSED, 400.0)
    assert replicas.due_probes(500.0) == [replica]


def test_probes_come_at_doubling_intervals_up_to_the_longest():
    replicas = made(A, probe_ms=500.0, max_probe_ms=1_500.0)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.REFUSED, 0.0)
    assert replicas.due_probes(499.0) == []
    intervals = []
    for _ in range(3):
        intervals.append(replica.probe_at_ms)
        replicas.probed(replica, Probe.FAILED, 0.0)
    assert [*intervals, replica.probe_at_ms] == [500.0, 1_000.0, 1_500.0, 1_500.0]


def test_a_good_probe_brings_a_replica_back_on_probation():
    replicas = made(A, max_failures=3)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.REFUSED, 0.0)
    replicas.probed(replica, Probe.READY, 500.0)
    assert replicas.choose() is replica
    assert replicas.failed(replica, FailureReason.TIMEOUT, 600.0)


def test_new_addresses_keep_the_state_of_those_that_stay_and_name_those_that_left():
    replicas = made(A, B)
    replicas.failed(of(replicas, B), FailureReason.REFUSED, 0.0)
    gone = replicas.update([B, C])
    assert [replica.address for replica in gone] == [A]
    assert not of(replicas, B).live
    assert of(replicas, C).live


def test_a_replica_without_a_model_is_not_called_and_not_ejected():
    replicas = made(A, B)
    assert not replicas.failed(of(replicas, A), FailureReason.NO_BUNDLE, 0.0)
    assert {replicas.choose().address for _ in range(4)} == {B}
    assert (replicas.live_count(), replicas.without_model_count(), replicas.ejected_count()) == (1, 1, 0)


def test_a_replica_without_a_model_is_probed_as_often_however_long_that_takes():
    replicas = made(A, probe_ms=500.0)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.NO_BUNDLE, 0.0)
    for now_ms in range(500, 50_000, 500):
        assert replicas.due_probes(now_ms - 1.0) == []
        assert replicas.due_probes(now_ms) == [replica]
        assert not replicas.probed(replica, Probe.NO_MODEL, now_ms)


def test_a_replica_that_has_its_model_now_comes_back_as_one_that_never_failed():
    replicas = made(A, max_failures=3)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.NO_BUNDLE, 0.0)
    assert not replicas.probed(replica, Probe.READY, 500.0)
    assert replicas.choose() is replica
    assert [replicas.failed(replica, FailureReason.TIMEOUT, 600.0) for _ in range(3)] == [False, False, True]


def test_a_replica_without_a_model_that_no_longer_answers_is_ejected():
    replicas = made(A, probe_ms=500.0)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.NO_BUNDLE, 0.0)
    assert replicas.probed(replica, Probe.FAILED, 500.0)
    assert not replicas.probed(replica, Probe.FAILED, 1_000.0)
    assert (replicas.without_model_count(), replicas.ejected_count()) == (0, 1)
    assert replica.probe_at_ms == 2_000.0


def test_an_ejected_replica_that_answers_again_without_a_model_is_no_longer_probed_ever_more_seldom():
    replicas = made(A, probe_ms=500.0)
    replica = of(replicas, A)
    replicas.failed(replica, FailureReason.REFUSED, 0.0)
    for _ in range(4):
        replicas.probed(replica, Probe.FAILED, 0.0)
    replicas.probed(replica, Probe.NO_MODEL, 10_000.0)
    assert (replicas.without_model_count(), replicas.ejected_count()) == (1, 0)
    assert replica.probe_at_ms == 10_500.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["fail", "ok", "probe", "dead", "no model", "still none"]), st.integers(0, 2)),
        max_size=40,
    )
)
def test_whatever_happens_what_is_chosen_is_live_and_was_not_tried(events):
    replicas = made(A, B, C)
    for now_ms, (event, index) in enumerate(events):
        replica = list(replicas)[index]
        if event == "fail":
            replicas.failed(replica, FailureReason.TIMEOUT, now_ms)
        elif event == "dead":
            replicas.failed(replica, FailureReason.REFUSED, now_ms)
        elif event == "ok":
            replicas.succeeded(replica)
        elif event == "no model":
            replicas.failed(replica, FailureReason.NO_BUNDLE, now_ms)
        elif not replica.live:
            replicas.probed(replica, Probe.READY if event == "probe" else Probe.NO_MODEL, now_ms)
        chosen = replicas.choose({A})
        assert chosen is None or (chosen.live and chosen.address != A)
        assert (chosen is None) == (replicas.others({A}) == 0)
        assert replicas.live_count() + replicas.without_model_count() + replicas.ejected_count() == 3
        assert len(replicas.due_probes(now_ms + 1e9)) == 3 - replicas.live_count()


def test_an_address_is_written_as_people_write_it():
    assert str(A) == "10.0.0.1:8080"
    assert str(Address("::1", 80, "")) == "[::1]:80"
