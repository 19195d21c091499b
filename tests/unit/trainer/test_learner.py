"""The learner carries out what the succession says: a champion, one in its shadow, a word above the gate's."""

import dataclasses
import math

import pytest

from bench.queueing import as_samples, observe
from services.trainer.cadence import Cadence
from services.trainer.champion import Champion
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.intake import Intake, Taken
from services.trainer.learner import Learner
from services.trainer.succession import Memory
from services.trainer.train import FitOptions
from shared.inference import BundleModel
from shared.samples import encode_sample
from tests.bundles import make_bundle

NOW = 1_800_000_000_000.0
OPTIONS = CycleOptions("default", fit=FitOptions(rounds=5))


@pytest.fixture(scope="module")
def taken():
    intake = Intake("default", remembered=10_000)
    samples = as_samples(observe(900, seed=31))
    found = [intake.examine(encode_sample(sample), math.inf) for sample in samples]
    return [one for one in found if isinstance(one, Taken)]


def fitted(learner: Learner, at_ms: float) -> bool:
    snapshot, created = learner.begin(at_ms, NOW + at_ms)
    report = run_cycle(snapshot, learner.champion, learner.options, created)
    assert report.verdict.accepted, report.verdict
    return learner.adopt(report, snapshot)


def wrong(at_ms: float) -> Champion:
    """A whole bundle whose every answer is over a minute."""
    bundle = make_bundle(created_unix_ms=NOW + at_ms, offset=80_000.0)
    return Champion(bundle, BundleModel(bundle), saved=False)


@pytest.fixture
def learner(taken):
    """A first version that has proven itself, and a second that follows it."""
    learner = Learner(OPTIONS, Cadence())
    learner.take(taken[:200], 0.0)
    assert fitted(learner, 1)
    learner.take(taken[200:300], 0.0)
    assert fitted(learner, 2)
    return learner


def test_the_last_good_version_learns_on_in_the_shadow(learner, taken):
    good = learner.succession.good
    assert good.champion.version < learner.champion.version
    before = good.calibrator.samples
    learner.take(taken[300:320], 0.0)
    assert good.calibrator.samples == before + 20
    assert good.errors.count("e2e") == learner.succession.errors.count("e2e") == 20


def test_a_bad_version_is_left_for_the_good_one_with_its_calibration(learner, taken):
    good = learner.champion
    learner.take(taken[300:350], 0.0)
    learner.choose(wrong(3))
    kept = learner.succession.good
    assert kept.champion is good
    learner.take(taken[350:450], 0.0)
    alarm = learner.guard()
    assert alarm is not None
    assert good.version in alarm
    assert learner.champion is good
    assert learner.calibrator is kept.calibrator
    assert learner.calibration("default", 1, NOW).bundle_version == good.version
    assert learner.guard() is None


def test_what_is_fitted_after_a_rollback_waits(learner, taken):
    learner.take(taken[300:350], 0.0)
    learner.choose(wrong(3))
    learner.take(taken[350:450], 0.0)
    learner.guard()
    assert not fitted(learner, 4)
    learner.take(taken[450:700], 0.0)
    assert fitted(learner, 5)


def test_a_pinned_version_stays_whatever_happens(learner, taken):
    learner.take(taken[300:350], 0.0)
    learner.choose(bad := wrong(3))
    learner.succession.pinned = bad.version
    learner.take(taken[350:450], 0.0)
    assert learner.succession.alarm() is not None
    assert learner.guard() is None
    assert not fitted(learner, 4)
    assert learner.champion is bad


def test_a_refused_report_says_why_and_has_no_bundle(learner):
    snapshot, created = learner.begin(9, NOW + 9)
    report = run_cycle(snapshot, learner.champion, learner.options, created)
    assert learner.permitted(report) is report
    learner.succession.pinned = learner.champion.version
    refused = learner.permitted(report)
    assert (refused.verdict.accepted, refused.verdict.reason, refused.champion) == (False, "pinned", None)
    assert refused.metrics == report.metrics


def test_a_new_process_goes_on_with_pin_and_good_version(learner, taken):
    memory = dataclasses.replace(learner.succession.memory(), pinned=learner.champion.version)
    good = learner.succession.good.champion
    after = Learner(OPTIONS, Cadence())
    after.restore(learner.champion)
    after.remember(Memory.decode(memory.encode()), good)
    after.take(taken[:300], 0.0, replayed=True)
    after.rebuilt()
    assert after.succession.pinned == learner.champion.version
    assert after.succession.good.champion is good
    assert after.succession.good.reference == pytest.approx(learner.succession.good.reference)
    assert after.succession.good.calibrator.samples > 0
    assert after.calibrator.bundle_version == learner.champion.version
