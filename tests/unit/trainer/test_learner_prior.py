"""Before there is a champion the learner measures the prior, so that routers can bend it; the first fit ends that."""

import numpy as np

from bench.queueing import as_samples, observe
from services.trainer.cadence import Cadence
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.intake import Intake, Taken
from services.trainer.learner import Learner
from services.trainer.train import FitOptions
from shared.bundle import Calibration
from shared.inference import calibrate
from shared.prior import PriorModel, is_prior
from shared.samples import encode_sample

CADENCE = Cadence(10_000.0, 10, 100)


def taken_of(count: int) -> list[Taken]:
    intake = Intake("default", remembered=count)
    samples = as_samples(observe(count, seed=7))
    found = [intake.examine(encode_sample(sample), sample.completed_unix_ms) for sample in samples]
    return [outcome for outcome in found if isinstance(outcome, Taken)]


def learner_with(prior):
    return Learner(CycleOptions("default", fit=FitOptions(prior=prior)), CADENCE)


def test_the_priors_error_is_measured_from_the_first_sample_and_halves():
    """A 70B model behind a prior for 8B: three times too fast, until the calibration is applied."""
    learner, taken = learner_with("8b"), taken_of(60)
    prior = PriorModel("8b")
    assert learner.state == "cold"
    learner.take(taken[:40], 0.0)
    calibration = learner.calibration("default", 1, 0.0)
    assert isinstance(calibration, Calibration)
    assert calibration.bundle_version == prior.bundle_version
    assert calibration.log_bias["ttft"] > 0.5
    later = taken[40:]
    rows = np.stack([one.row for one in later])
    actual = np.array([one.targets["ttft"] for one in later])
    raw = prior.predict(rows)
    backlog = rows[:, 1] + rows[:, 2]
    addresses = [one.sample.endpoint for one in later]
    bent = calibrate(raw, prior.outputs, prior.bundle_version, calibration, backlog, addresses)

    def error(values):
        return np.abs(np.log(values[:, 0] / actual)).mean()

    assert error(bent) < 0.5 * error(raw)


def test_the_first_bundle_takes_the_priors_place():
    learner = learner_with("8b")
    learner.take(taken_of(60), 0.0)
    snapshot, created = learner.begin(0.0, 1.8e12)
    assert learner.adopt(run_cycle(snapshot, learner.champion, learner.options, created), snapshot)
    assert not is_prior(learner.calibrator.bundle_version)
    assert learner.state == "warming"


def test_without_a_prior_nothing_is_calibrated_before_the_first_bundle():
    learner = learner_with(None)
    learner.take(taken_of(20), 0.0)
    assert learner.calibration("default", 1, 0.0) is None
