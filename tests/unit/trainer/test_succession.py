"""Which bundle may follow which: the guard, the hold and the memory, on plain numbers."""

from types import SimpleNamespace

import pytest

from services.trainer.calibrate import CalibrationOptions, Calibrator
from services.trainer.succession import Memory, Succession, SuccessionOptions
from shared.errors import FieldError
from shared.prior import PRIOR_PREFIX

OPTIONS = SuccessionOptions()


def version(name: str):
    return SimpleNamespace(version=name)


def calibrator(name: str) -> Calibrator:
    return Calibrator(CalibrationOptions(), name, ("ttft_p50",))


def feed(succession: Succession, samples: int, champion: float, good: float | None = None, actual: float = 100.0):
    """So many samples of 100 ms; the medians that the champion and the last good version give."""
    for _ in range(samples):
        succession.errors.observe({"ttft_p50": champion}, {"ttft": actual})
        if succession.good is not None and good is not None:
            succession.good.errors.observe({"ttft_p50": good}, {"ttft": actual})


def after_a_good_one(samples: int = 100) -> Succession:
    """`a` was 20 % off for some samples; `b` has just followed it."""
    succession = Succession(OPTIONS)
    feed(succession, samples, 120.0)
    succession.followed(version("a"), calibrator("a"))
    return succession


def test_a_version_that_answered_is_kept_as_good_with_its_error():
    succession = after_a_good_one()
    assert succession.good.champion.version == "a"
    assert succession.good.reference["ttft"] == pytest.approx(0.182, abs=1e-3)


def test_a_version_that_hardly_answered_isnt_good():
    assert after_a_good_one(samples=OPTIONS.proof_samples - 1).good is None


def test_a_prior_is_never_gone_back_to():
    succession = Succession(OPTIONS)
    feed(succession, 100, 120.0)
    succession.followed(version(PRIOR_PREFIX + "01234567"), calibrator("p"))
    assert succession.good is None


def test_a_doubled_live_error_raises_the_alarm_where_the_good_one_is_better_on_the_same_samples():
    succession = after_a_good_one()
    feed(succession, OPTIONS.min_samples - 1, 200.0, good=120.0)
    assert succession.alarm() is None
    feed(succession, 1, 200.0, good=120.0)
    assert succession.alarm() == (
        "ttft: live mean |log error| 0.693, 0.182 when a was kept; that one has 0.182 on the same samples"
    )


@pytest.mark.parametrize(
    ("champion", "good"),
    [
        (200.0, 190.0),  # the world changed: both are wrong
        (140.0, 101.0),  # worse, but not twice as wrong
        (101.0, 200.0),
    ],
)
def test_no_alarm_otherwise(champion, good):
    succession = after_a_good_one()
    feed(succession, 200, champion, good=good)
    assert succession.alarm() is None


def test_one_mad_label_is_no_alarm():
    succession = after_a_good_one()
    feed(succession, 100, 115.0, good=115.0)
    succession.errors.observe({"ttft_p50": 115.0}, {"ttft": 1e7})
    assert succession.alarm() is None


def test_answers_that_cannot_be_true_count_as_wrong():
    succession = after_a_good_one()
    for _ in range(OPTIONS.min_samples):
        succession.errors.failed({"ttft": 100.0})
        succession.good.errors.observe({"ttft_p50": 120.0}, {"ttft": 100.0})
    assert succession.alarm() is not None


def test_a_fast_line_of_bad_fits_is_judged_as_one():
    """Each is replaced before it has answered samples enough for a judgement of its own."""
    succession = after_a_good_one()
    for name in "bcdef":
        feed(succession, 10, 200.0, good=120.0)
        if succession.alarm() is None:
            succession.followed(version(name), calibrator(name))
    assert succession.alarm() is not None
    assert succession.good.champion.version == "a"


def test_a_worse_version_doesnt_become_the_good_one():
    succession = after_a_good_one()
    feed(succession, 100, 150.0, good=120.0)
    succession.followed(version("b"), calibrator("b"))
    assert succession.good.champion.version == "a"
    feed(succession, 100, 110.0, good=120.0)
    succession.followed(version("c"), calibrator("c"))
    assert succession.good.champion.version == "c"


def test_after_a_rollback_challengers_wait_longer_each_time_until_a_version_proves_itself():
    succession = after_a_good_one()
    waits = []
    for name in "bcd":
        good = succession.rolled_back(name, total=1000)
        assert good.champion.version == "a"
        waits.append(next(n for n in range(10_000) if succession.refusal(1000 + n) is None))
        # The good one serves again, the next challenger comes and is bad as well.
        succession.followed(good.champion, good.calibrator)
        assert succession.good.champion.version == "a"
        assert succession.good.reference["ttft"] == pytest.approx(0.182, abs=1e-3)
    assert waits == [200, 400, 800]
    feed(succession, 100, 118.0, good=120.0)
    succession.followed(version("e"), calibrator("e"))
    assert succession.rollbacks_in_a_row == 0


def test_the_hold_has_an_end():
    succession = Succession(OPTIONS)
    for _ in range(40):
        succession.hold("x", total=0)
    assert succession.refusal(OPTIONS.max_hold_samples) is None
    assert succession.refusal(0) == ("held", "after the rollback from x 6400 more samples are waited for")


def test_the_version_that_was_gone_back_to_cannot_be_gone_back_from():
    """Nothing is left to flap to."""
    succession = after_a_good_one()
    succession.rolled_back("b", total=0)
    feed(succession, 500, 500.0)
    assert succession.good is None
    assert succession.alarm() is None


def test_a_pin_refuses_everything():
    succession = after_a_good_one()
    succession.pinned = "a"
    assert succession.refusal(10**9) == ("pinned", "version a is pinned")
    assert succession.view(0)["refuses_challengers"]["reason"] == "pinned"


def test_memory_survives_its_encoding():
    memory = Memory("a", "b", {"ttft": 0.25}, 2)
    assert Memory.decode(memory.encode()) == memory
    assert Memory.decode(Memory().encode()) == Memory()


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]", b'{"pinned": 1, "good": null, "reference": {}, "rollbacks_in_a_row": 0}']
)
def test_a_memory_of_another_form_is_refused(payload):
    with pytest.raises(FieldError, match="succession"):
        Memory.decode(payload)
