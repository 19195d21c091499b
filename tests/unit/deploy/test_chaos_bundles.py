"""A prediction is held against the bundle that it names: made again, as it is or bent by that bundle's calibration."""

import msgspec
import numpy as np
import pytest

from deploy.local.chaos.bundles import Judge, Verdict
from shared.bundle import Calibration
from shared.inference import calibrate
from shared.prior import PRIOR_PREFIX
from tests.bundles import OUTPUTS, expected, make_bundle, rows_of
from tests.samples import make_sample

OLD = make_bundle(created_unix_ms=1.7e12, offset=100.0)
NEW = make_bundle(created_unix_ms=1.8e12, offset=150.0)
ROW = rows_of(40.0)


def calibration(bundle, log_bias: float, sequence: int = 1) -> Calibration:
    return Calibration(
        pool="default",
        bundle_version=bundle.manifest.version,
        sequence=sequence,
        updated_unix_ms=1.0,
        log_bias={"ttft": log_bias, "tpot": log_bias},
    )


OF_OLD, OF_NEW = calibration(OLD, 0.05, 2), calibration(NEW, 0.2, 1)


def judge() -> Judge:
    known = Judge()
    known.learn_calibration(OF_NEW)  # as it may come: before its bundle
    known.learn_bundle(OLD)
    known.learn_bundle(NEW)
    known.learn_calibration(OF_OLD)
    return known


def sample(named, answered, bent_by: Calibration | None):
    offset = {OLD: 100.0, NEW: 150.0}[answered]
    values = expected(ROW, offset=offset)
    if bent_by is not None:
        values = calibrate(values, OUTPUTS, bent_by.bundle_version, bent_by, np.zeros(1, np.float32), ("a:1",))
    return msgspec.structs.replace(
        make_sample("x"),
        features=ROW[0].tolist(),
        bundle_version=named.manifest.version,
        prediction=dict(zip(OUTPUTS, values[0].tolist(), strict=True)),
    )


@pytest.mark.parametrize(
    ("answered", "bent_by", "verdict"),
    [
        (NEW, None, Verdict.AGREES),
        (NEW, OF_NEW, Verdict.AGREES),
        (OLD, None, Verdict.MIXED),
        (OLD, OF_OLD, Verdict.MIXED),
        (NEW, OF_OLD, Verdict.MIXED),
        (NEW, calibration(NEW, -0.3), Verdict.UNEXPLAINED),
    ],
)
def test_what_a_prediction_that_names_the_new_bundle_was_made_of(answered, bent_by, verdict):
    assert judge().judge(sample(NEW, answered, bent_by)) is verdict


def test_what_was_not_learned_is_not_judged():
    assert judge().judge(msgspec.structs.replace(make_sample("x"), prediction=None)) is Verdict.NONE
    guessed = msgspec.structs.replace(sample(NEW, NEW, None), bundle_version=f"{PRIOR_PREFIX}h100-70b")
    assert judge().judge(guessed) is Verdict.NONE


def test_where_a_calibrations_number_is_missing_it_may_have_been_that():
    known = judge()
    told = sample(OLD, OLD, calibration(OLD, -0.3))
    assert known.judge(told) is Verdict.UNEXPLAINED
    known.learn_calibration(calibration(OLD, 0.1, 4))
    assert known.judge(told) is Verdict.UNSEEN
    assert known.judge(sample(NEW, NEW, calibration(NEW, -0.3))) is Verdict.UNEXPLAINED


def test_a_calibration_that_is_read_again_is_not_one_that_was_missed():
    known = judge()
    known.learn_calibration(OF_OLD)
    assert known.judge(sample(OLD, OLD, calibration(OLD, -0.3))) is Verdict.UNEXPLAINED


@pytest.mark.parametrize("sequence", [1, 2, 7])
def test_numbers_that_begin_anew_hide_how_many_were_missed(sequence):
    """Redis was emptied, or the run began later than the trainer."""
    known = judge()
    known.learn_calibration(calibration(NEW, 0.1, sequence))
    for bundle in (OLD, NEW):
        assert known.judge(sample(bundle, bundle, calibration(bundle, -0.3))) is Verdict.UNSEEN


def test_what_is_learned_later_explains_what_came_before():
    known = Judge()
    told = sample(NEW, NEW, OF_NEW)
    assert known.judge(told) is Verdict.UNEXPLAINED
    assert known.wanted == {NEW.manifest.version}
    known.learn_bundle(NEW)
    assert known.judge(told) is Verdict.UNEXPLAINED
    known.learn_calibration(OF_NEW)
    assert known.judge(told) is Verdict.AGREES
    assert not known.wanted
