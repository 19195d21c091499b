"""The trainer's own learning in virtual time: intake, window, cadence, cycle, champion gate and calibration.

A fit's result is taken a set time after it began, as if it had run beside the rest; calibrations go out every second.
Routers get both at once. Nothing here is a copy: `services.trainer.learner` and `run_cycle` do the work.

Limits: the transport's loss and doubles aren't played; Redis, NATS and the predictor add no time of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.router.core import Prepared
from services.router.predict.types import Prediction, calibrated
from services.trainer.champion import Champion
from services.trainer.cycle import CycleReport, run_cycle
from services.trainer.intake import Intake, Taken
from services.trainer.learner import Learner
from services.trainer.settings import TrainerSettings
from services.trainer.window import Snapshot
from shared.inference import CompiledCalibration
from shared.samples import LatencySample, Rung, encode_sample

POOL: Final = "default"
EPOCH_UNIX_MS: Final = 1_800_000_000_000.0
# Of the other size than most replayed pools: of their own it would be the simulator's very coefficients.
PRIOR: Final = "70b"


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """`tick_ms`: how often the trainer looks whether a fit is due; `fit_ms`: how long a fit takes, on the replay's
    clock; `calibration_ms`: between two published calibrations. `retrain_ms` None is the trainer's own interval.
    """

    tick_ms: float = 500.0
    fit_ms: float = 1_000.0
    calibration_ms: float = 1_000.0
    retrain_ms: float | None = None


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit under way."""

    snapshot: Snapshot
    champion: Champion | None
    created_unix_ms: float
    ready_ms: float


class Learning:
    """One pool's trainer, and what routers hold of its work: the served bundle and its calibration."""

    def __init__(self, options: LearningOptions | None = None) -> None:
        self.options = options or LearningOptions()
        settings = TrainerSettings(pool=POOL, prior=PRIOR)
        if self.options.retrain_ms is not None:
            settings = settings.model_copy(update={"retrain_interval_ms": self.options.retrain_ms})
        self._intake = Intake(POOL, remembered=settings.remembered_ids)
        self._learner = Learner(
            settings.cycle_options(),
            settings.cadence(),
            window_recent_rows=settings.window_recent_rows,
            window_bin_rows=settings.window_bin_rows,
        )
        self._fit: _Fit | None = None
        self._served: Champion | None = None
        self._compiled: CompiledCalibration | None = None
        self._sequence = 0
        self._calibrated_samples = -1
        self._calibration_due_ms = 0.0
        self.expected_output_tokens: dict[str, float] = {}
        self.fits = 0
        self.refused = 0
        self.rollbacks = 0
        self.first_bundle_ms: float | None = None
        self.fit_cpu_ms = 0.0

    def take(self, samples: Sequence[LatencySample], now_ms: float) -> None:
        """Completed requests as the stream would deliver them at `now_ms`."""
        taken = [self._intake.examine(encode_sample(sample), sample.completed_unix_ms) for sample in samples]
        self._learner.take([item for item in taken if isinstance(item, Taken)], now_ms)

    def tick(self, now_ms: float) -> None:
        """Take a fit that is done, begin one that is due, publish what has changed."""
        fit = self._fit
        if fit is not None and now_ms >= fit.ready_ms:
            self._fit = None
            self._take(run_cycle(fit.snapshot, fit.champion, self._learner.options, fit.created_unix_ms), fit, now_ms)
        if self._learner.guard() is not None:
            self.rollbacks += 1
            self._serve(now_ms)
        if self._fit is None and self._learner.due(now_ms):
            snapshot, created_unix_ms = self._learner.begin(now_ms, EPOCH_UNIX_MS + now_ms)
            self._fit = _Fit(snapshot, self._learner.champion, created_unix_ms, now_ms + self.options.fit_ms)
        if now_ms >= self._calibration_due_ms:
            self._publish_calibration(now_ms)

    def _take(self, report: CycleReport, fit: _Fit, now_ms: float) -> None:
        self.fits += 1
        self.fit_cpu_ms += report.cpu_ms
        if not self._learner.adopt(self._learner.permitted(report), fit.snapshot):
            self.refused += 1
            return
        if self.first_bundle_ms is None:
            self.first_bundle_ms = now_ms
        self._serve(now_ms)

    def _serve(self, now_ms: float) -> None:
        """The champion and its calibration reach the routers."""
        self._served = self._learner.champion
        self._calibrated_samples = -1
        self._publish_calibration(now_ms)

    def _publish_calibration(self, now_ms: float) -> None:
        self._calibration_due_ms = now_ms + self.options.calibration_ms
        calibrator = self._learner.calibrator
        if calibrator is None or not calibrator.samples or calibrator.samples == self._calibrated_samples:
            return
        self._sequence += 1
        calibration = self._learner.calibration(POOL, self._sequence, EPOCH_UNIX_MS + now_ms)
        if calibration is not None:
            self._calibrated_samples = calibrator.samples
            served, prior = self._learner.champion, self._learner.prior
            model = served.model if served is not None else prior
            self._compiled = CompiledCalibration(calibration, model.outputs) if model is not None else None
            self.expected_output_tokens = dict(calibration.expected_output_tokens)

    def predict(self, prepared: Prepared) -> Prediction | None:
        """What the router's own steps answer: the bundle, the physics prior while there is none, None without both."""
        served, prior = self._served, self._learner.prior
        model = served.model if served is not None else prior
        if model is None:
            return None
        compiled = self._compiled
        return calibrated(
            model.predict(prepared.rows),
            model.outputs,
            model.bundle_version,
            Rung.IN_PROCESS if served is not None else Rung.PRIOR,
            compiled if compiled is not None and compiled.calibration.bundle_version == model.bundle_version else None,
            prepared.backlog_tokens,
            prepared.candidates.addresses,
            frozenset(served.bundle.manifest.prior_targets) if served is not None else frozenset(),
        )
