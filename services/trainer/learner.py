"""What the trainer knows and how it changes: window, answer lengths, champion and calibrator. Pure state, no I/O.

`succession.py` says which bundle may follow which; here it is carried out.

The trainer's conductor feeds it from JetStream and runs the fits in a thread; a replay feeds it in virtual time and
fits in line. Both go through here, so that what a replay learns is what the trainer would have learned.

A fit is three steps: `begin` copies the window, `run_cycle` works on the copy wherever that suits, and `adopt` takes
the report: a new champion comes with a calibrator that has seen the newest rows, those of the fit's own time included.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from services.trainer.basis import backlog_tokens
from services.trainer.cadence import Cadence
from services.trainer.calibrate import Calibrator, OutputLengths
from services.trainer.champion import Champion
from services.trainer.cycle import CycleOptions, CycleReport, observe_rows, warmed
from services.trainer.intake import LabelHealth, Taken
from services.trainer.shifts import Arrivals
from services.trainer.succession import Good, LiveErrors, Memory, Succession, SuccessionOptions
from services.trainer.window import SampleWindow, Snapshot
from shared.bundle import Calibration
from shared.features import FloatMatrix
from shared.inference import BundleModel
from shared.prediction import plausible
from shared.prior import PriorModel

# A model from fewer rows serves, but is still called warming.
READY_SAMPLES: Final = 100


class Learner:
    """One pool's learning. Belongs to one task."""

    def __init__(
        self,
        options: CycleOptions,
        cadence: Cadence,
        *,
        window_recent_rows: int = 8_000,
        window_bin_rows: int = 500,
        succession: SuccessionOptions | None = None,
    ) -> None:
        self.options = options
        self.cadence = cadence
        self.window = SampleWindow(recent_rows=window_recent_rows, bin_rows=window_bin_rows)
        self.lengths = OutputLengths(options.calibration.output_rate)
        self.health = LabelHealth()
        self.champion: Champion | None = None
        self.prior = PriorModel(options.fit.prior) if options.fit.prior is not None else None
        """What routers answer with while there is no champion; its error is measured until then"""
        self.calibrator: Calibrator | None = None
        """The champion's, or the prior's"""
        if self.prior is not None:
            self.calibrator = Calibrator(options.calibration, self.prior.bundle_version, self.prior.outputs)
        self.succession = Succession(succession or SuccessionOptions())
        self._arrivals = Arrivals()
        self._fitted_total = 0
        self._last_fit_ms: float | None = None
        self._last_created_ms = 0.0

    def take(self, batch: Sequence[Taken], now_ms: float, *, replayed: bool = False) -> None:
        """Put a batch that came at `now_ms` (monotonic) into the window and let the calibration see it; `replayed` ones
        are seen by `rebuilt`, and nobody knows when they came.
        """
        answered = [taken for taken in batch if taken.censored_ms is None]
        lags = [0] * len(answered)
        if not replayed:
            lags = self._arrivals.lags(now_ms, [_duration_ms(taken) for taken in answered])
        for taken in batch:
            if taken.censored_ms is not None:
                self.window.add_censored(taken.row, taken.censored_ms)
        for taken, lag in zip(answered, lags, strict=True):
            self.window.add(taken.row, taken.targets, taken.sample.endpoint, lag)
            self.health.observe(taken.sample)
            if taken.sample.output_tokens:
                self.lengths.observe(taken.sample.model, taken.sample.output_tokens, taken.sample.route)
        if not replayed:
            self._calibrate(answered, lags)

    def _calibrate(self, batch: Sequence[Taken], lags: Sequence[int]) -> None:
        if self.calibrator is None or not batch:
            return
        rows: FloatMatrix = np.stack([taken.row for taken in batch])
        if self.champion is not None:
            _observe(self.champion.model, self.calibrator, self.succession.errors, rows, batch, lags)
            self._heed_change(self.calibrator)
        elif self.prior is not None:
            _observe(self.prior, self.calibrator, None, rows, batch, lags)
        good = self.succession.good
        if good is not None:
            _observe(good.champion.model, good.calibrator, good.errors, rows, batch, lags)

    def _heed_change(self, calibrator: Calibrator) -> None:
        """Where the calibrator has seen latencies become others, rows of before count for little from here on."""
        if calibrator.changed_at is not None:
            since = calibrator.samples - calibrator.changed_at
            self.window.changed_at = max(self.window.changed_at, self.window.total - since)
        for endpoint, changed_at in calibrator.endpoints_changed_at.items():
            number = self.window.total - (calibrator.samples - changed_at)
            self.window.endpoints_changed_at[endpoint] = max(self.window.endpoints_changed_at.get(endpoint, 0), number)

    def restore(self, saved: Champion) -> bool:
        """Go on from a bundle that was published before; False where it is the champion already."""
        if self.champion is not None and saved.version == self.champion.version:
            return False
        self.succession.followed(self.champion, self.calibrator)
        self.champion = saved
        self._last_created_ms = max(self._last_created_ms, saved.bundle.manifest.created_unix_ms)
        self.calibrator = Calibrator(self.options.calibration, saved.version, saved.model.outputs)
        return True

    def remember(self, memory: Memory, good: Champion | None) -> None:
        """Go on with what an earlier process left; `good` is its last good version, where it could be loaded."""
        succession = self.succession
        succession.pinned = memory.pinned
        succession.rollbacks_in_a_row = memory.rollbacks_in_a_row
        if good is not None and (self.champion is None or good.version != self.champion.version):
            calibrator = Calibrator(self.options.calibration, good.version, good.model.outputs)
            errors = LiveErrors(succession.options.moving_samples)
            succession.good = Good(good, calibrator, dict(memory.reference), errors)

    def rebuilt(self) -> None:
        """The window is whole again: the calibrations see its newest rows."""
        snapshot, good = self.window.snapshot(), self.succession.good
        if self.champion is not None:
            self.calibrator = warmed(snapshot, self.champion, self.options.calibration)
            self._heed_change(self.calibrator)
        if good is not None:
            good.calibrator = warmed(snapshot, good.champion, self.options.calibration)

    def guard(self) -> str | None:
        """Go back to the last good version where the champion's live error calls for it; then why, else None."""
        alarm = self.succession.alarm()
        if alarm is None or self.champion is None or self.succession.pinned is not None:
            return None
        good = self.succession.rolled_back(self.champion.version, self.window.total)
        if good is None:
            return None
        self.champion, self.calibrator = good.champion, good.calibrator
        return alarm

    def choose(self, chosen: Champion) -> None:
        """Put a version that a person named in the champion's place."""
        if self.champion is None or chosen.version != self.champion.version:
            self.succession.followed(self.champion, self.calibrator)
            self.champion = chosen
            self.calibrator = warmed(self.window.snapshot(), chosen, self.options.calibration)
        good = self.succession.good
        if good is not None and good.champion.version == chosen.version:
            self.succession.good = None
        self.succession.trust()

    def due(self, now_ms: float) -> bool:
        """Whether to fit at `now_ms` (monotonic)."""
        due, _ = self.cadence.due(
            now_ms=now_ms,
            last_fit_ms=self._last_fit_ms,
            samples=len(self.window),
            new_samples=self.window.total - self._fitted_total,
            saved=self.champion is not None and self.champion.saved,
        )
        return due

    def begin(self, now_ms: float, now_unix_ms: float) -> tuple[Snapshot, float]:
        """The rows to fit on, and the bundle's creation time: versions sort by it, also where a clock steps back."""
        self._last_fit_ms = now_ms
        snapshot = self.window.snapshot()
        self._fitted_total = snapshot.total
        self._last_created_ms = max(now_unix_ms, self._last_created_ms + 1.0)
        return snapshot, self._last_created_ms

    def permitted(self, report: CycleReport) -> CycleReport:
        """The report, refused where a pin or a hold lets nothing follow."""
        refusal = self.succession.refusal(self.window.total)
        if refusal is None or report.champion is None:
            return report
        reason, detail = refusal
        return replace(
            report,
            champion=None,
            calibrator=None,
            verdict=replace(report.verdict, accepted=False, reason=reason, detail=detail),
        )

    def adopt(self, report: CycleReport, snapshot: Snapshot) -> bool:
        """Take a fit's champion, where it has one."""
        report = self.permitted(report)
        if report.champion is None or report.calibrator is None:
            return False
        self.succession.followed(self.champion, self.calibrator)
        since = self.window.snapshot(newer_than=snapshot.total)
        if self.calibrator is not None:
            report.calibrator.inherit(self.calibrator, len(since))
        # What they say of quantiles is inherited.
        observe_rows(report.calibrator, report.champion, since, 0, fitted=len(since))
        self._heed_change(report.calibrator)
        self.champion, self.calibrator = report.champion, report.calibrator
        return True

    def calibration(self, pool: str, sequence: int, now_unix_ms: float) -> Calibration | None:
        """The calibration of the champion, or of the prior before there is one, as it is published; None without."""
        if self.calibrator is None:
            return None
        return self.calibrator.calibration(pool, sequence, now_unix_ms, self.lengths.tokens())

    @property
    def state(self) -> str:
        """`cold` without a bundle, `warming` on a saved one or one from few rows, else `ready`."""
        if self.champion is None:
            return "cold"
        few = self.champion.bundle.manifest.window_samples < READY_SAMPLES
        return "warming" if self.champion.saved or few else "ready"


def _duration_ms(taken: Taken) -> float:
    """How long a request took; NaN where only parts of it are known."""
    return taken.targets.get("e2e", math.nan) if taken.sample.e2e_ms is None else taken.sample.e2e_ms


def _observe(
    model: BundleModel | PriorModel,
    calibrator: Calibrator,
    errors: LiveErrors | None,
    rows: FloatMatrix,
    batch: Sequence[Taken],
    lags: Sequence[int],
) -> None:
    """Let one version answer for a batch, and learn how it did."""
    answers = model.predict(rows)
    if not plausible(answers):
        if errors is not None:
            for taken in batch:  # nonsense: nothing to learn of it but that
                errors.failed(taken.targets)
        return
    predictions, outputs = answers.tolist(), model.outputs
    for taken, predicted, backlog, lag in zip(batch, predictions, backlog_tokens(rows).tolist(), lags, strict=True):
        named = dict(zip(outputs, predicted, strict=True))
        calibrator.observe(named, taken.targets, backlog, taken.sample.endpoint, taken.sample.prediction, lag)
        if errors is not None:
            errors.observe(named, taken.targets)
