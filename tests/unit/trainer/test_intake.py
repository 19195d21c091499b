"""A message becomes a row of the window, or is rejected with one reason."""

import msgspec
import numpy as np
import pytest

from bench.queueing import EPOCH_UNIX_MS, as_samples, observe
from services.trainer.intake import FUTURE_MS, POISON, Intake, LabelHealth, Reject, Taken
from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, encode_sample

NOW = EPOCH_UNIX_MS + 60_000.0


@pytest.fixture(scope="module")
def sample() -> LatencySample:
    return as_samples(observe(3, seed=1))[0]


def changed(sample: LatencySample, **fields) -> LatencySample:
    return msgspec.structs.replace(sample, **fields)


def examine(sample: LatencySample):
    return Intake("default", remembered=10).examine(encode_sample(sample), NOW)


def test_an_answered_request_teaches_its_known_latencies(sample):
    taken = examine(sample)
    assert isinstance(taken, Taken)
    assert taken.targets == {"ttft": sample.ttft_ms, "tpot": sample.tpot_ms, "e2e": sample.e2e_ms}
    assert taken.row.dtype == np.float32
    assert taken.row.shape == (len(SCHEMA),)
    assert taken.censored_ms is None


def test_a_plain_answer_teaches_e2e_only(sample):
    assert set(examine(changed(sample, streamed=False)).targets) == {"e2e"}


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ABORT, Outcome.TIMEOUT, Outcome.UPSTREAM_RESET])
def test_a_cut_off_request_is_kept_for_the_evaluation_only(sample, outcome):
    taken = examine(changed(sample, outcome=outcome, ttft_ms=None, tpot_ms=None, e2e_ms=750.0))
    assert (taken.targets, taken.censored_ms) == ({}, 750.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pool": "other"}, Reject.POOL),
        ({"schema_hash": "0" * 16}, Reject.SCHEMA),
        ({"outcome": Outcome.UPSTREAM_ERROR}, Reject.OUTCOME),
        ({"outcome": Outcome.SHED}, Reject.OUTCOME),
        ({"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}, Reject.NO_LABEL),
        ({"outcome": Outcome.TIMEOUT, "e2e_ms": None}, Reject.NO_LABEL),
        ({"completed_unix_ms": NOW + FUTURE_MS + 1}, Reject.CLOCK),
        ({"received_unix_ms": 4e12}, Reject.CLOCK),
        ({"ttft_ms": 2_000.0, "e2e_ms": 1_900.0}, Reject.INCONSISTENT),
        ({"ttft_ms": 100.0, "tpot_ms": 50.0, "output_tokens": 101, "e2e_ms": 1_000.0}, Reject.INCONSISTENT),
        ({"ttft_ms": -5.0}, Reject.MALFORMED),
        ({"e2e_ms": 1e12}, Reject.MALFORMED),
        ({"features": [1.0]}, Reject.MALFORMED),
        ({"features": [-1.0] * len(SCHEMA)}, Reject.MALFORMED),
    ],
)
def test_what_teaches_nothing_has_its_own_reason(sample, fields, reason):
    assert examine(changed(sample, **fields)) is reason
    assert (reason in POISON) == (reason in {Reject.MALFORMED, Reject.POOL})


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"decision_id": 1}', b"[" * 5000])
def test_bytes_that_are_no_sample_are_malformed(data):
    assert Intake("default", remembered=10).examine(data, NOW) is Reject.MALFORMED


def test_a_decision_counts_once_and_memory_of_it_is_bounded(sample):
    intake = Intake("default", remembered=2)
    first, second, third = (encode_sample(changed(sample, decision_id=name)) for name in "abc")
    assert isinstance(intake.examine(first, NOW), Taken)
    assert intake.examine(first, NOW) is Reject.DUPLICATE
    assert isinstance(intake.examine(second, NOW), Taken)
    assert isinstance(intake.examine(third, NOW), Taken)
    assert isinstance(intake.examine(first, NOW), Taken)


def test_a_rejected_message_does_not_shadow_a_good_one_of_the_same_decision(sample):
    intake = Intake("default", remembered=10)
    assert intake.examine(encode_sample(changed(sample, outcome=Outcome.UPSTREAM_ERROR)), NOW) is Reject.OUTCOME
    assert isinstance(intake.examine(encode_sample(sample), NOW), Taken)


def test_an_added_field_is_tolerated(sample):
    data = encode_sample(sample)[:-1] + b',"added_later":{"x":1}}'
    assert isinstance(Intake("default", remembered=10).examine(data, NOW), Taken)


def test_labels_whose_ttft_is_really_e2e_are_noticed(sample):
    health = LabelHealth()
    for _ in range(100):
        health.observe(changed(sample, ttft_ms=100.0, e2e_ms=1000.0, output_tokens=50))
    assert health.healthy
    for _ in range(60):
        health.observe(changed(sample, ttft_ms=999.0, e2e_ms=1000.0, output_tokens=50))
    assert not health.healthy
    assert health.degenerate_share > 0.2


def test_short_answers_say_nothing_about_label_health(sample):
    health = LabelHealth()
    for _ in range(500):
        health.observe(changed(sample, ttft_ms=999.0, e2e_ms=1000.0, output_tokens=5))
    assert health.degenerate_share == 0.0
    assert health.healthy


def test_rounding_and_estimated_counts_are_no_contradiction(sample):
    """Labels are rounded, and an estimated count says nothing of the time per token."""
    close = changed(sample, ttft_ms=100.0, tpot_ms=10.0, output_tokens=11, e2e_ms=199.5)
    assert isinstance(examine(close), Taken)
    estimated = changed(close, output_tokens=1_000, output_tokens_estimated=True)
    assert isinstance(examine(estimated), Taken)
