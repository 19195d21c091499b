"""What the trainer knows and how it changes: window, answer lengths, champion and calibrator. Pure state, no I/O.

The trainer's conductor feeds it from JetStream and runs the fits in a thread; a replay feeds it in virtual time and
fits in line. Both go through here, so that what a replay learns is what the trainer would have learned.

A fit is three steps: `begin` copies the window, `run_cycle` works on the copy wherever that suits, and `adopt` takes
the report: a new champion comes with a calibrator that has seen the newest rows, those of the fit's own time included.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.trainer.basis import backlog_tokens
from services.trainer.cadence import Cadence
from services.trainer.calibrate import Calibrator, OutputLengths
from services.trainer.champion import Champion
from services.trainer.cycle import CycleOptions, CycleReport, observe_rows, warmed
from services.trainer.intake import LabelHealth, Taken
from services.trainer.window import SampleWindow, Snapshot
from shared.bundle import Calibration
from shared.features import FloatMatrix
from shared.prediction import plausible

# A model from fewer rows serves, but is still called warming.
READY_SAMPLES: Final = 100


class Learner:
    """One pool's learning. Belongs to one task."""

    def __init__(self, options: CycleOptions, cadence: Cadence, *, window_bin_rows: int = 500) -> None:
        self.options = options
        self.cadence = cadence
        self.window = SampleWindow(bin_rows=window_bin_rows)
        self.lengths = OutputLengths(options.calibration.output_rate)
        self.health = LabelHealth()
        self.champion: Champion | None = None
        self.calibrator: Calibrator | None = None
        self._fitted_total = 0
        self._last_fit_ms: float | None = None
        self._last_created_ms = 0.0

    def take(self, batch: Sequence[Taken], *, replayed: bool = False) -> None:
        """Put a batch into the window and let the calibration see it; `replayed` ones are seen by `rebuilt`."""
        for taken in batch:
            if taken.censored_ms is not None:
                self.window.add_censored(taken.row, taken.censored_ms)
                continue
            self.window.add(taken.row, taken.targets, taken.sample.endpoint)
            self.health.observe(taken.sample)
            if taken.sample.output_tokens:
                self.lengths.observe(taken.sample.model, taken.sample.output_tokens)
        if not replayed:
            self._calibrate([taken for taken in batch if taken.censored_ms is None])

    def _calibrate(self, batch: Sequence[Taken]) -> None:
        if self.champion is None or self.calibrator is None or not batch:
            return
        rows: FloatMatrix = np.stack([taken.row for taken in batch])
        answers = self.champion.model.predict(rows)
        if not plausible(answers):
            return  # a saved bundle that answers nonsense: nothing to learn of it, and the next fit replaces it
        predictions, outputs = answers.tolist(), self.champion.model.outputs
        for taken, predicted, backlog in zip(batch, predictions, backlog_tokens(rows).tolist(), strict=True):
            named = dict(zip(outputs, predicted, strict=True))
            self.calibrator.observe(named, taken.targets, backlog, taken.sample.endpoint)

    def restore(self, saved: Champion) -> bool:
        """Go on from a bundle that was published before; False where it is the champion already."""
        if self.champion is not None and saved.version == self.champion.version:
            return False
        self.champion = saved
        self._last_created_ms = max(self._last_created_ms, saved.bundle.manifest.created_unix_ms)
        self.calibrator = Calibrator(self.options.calibration, saved.version, saved.model.outputs)
        return True

    def rebuilt(self) -> None:
        """The window is whole again: the champion's calibration sees its newest rows."""
        if self.champion is not None:
            self.calibrator = warmed(self.window.snapshot(), self.champion, self.options.calibration)

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

    def adopt(self, report: CycleReport, snapshot: Snapshot) -> bool:
        """Take a fit's champion, where it has one."""
        if report.champion is None or report.calibrator is None:
            return False
        since = self.window.snapshot(newer_than=snapshot.total)
        observe_rows(report.calibrator, report.champion, since, 0)
        self.champion, self.calibrator = report.champion, report.calibrator
        return True

    def calibration(self, pool: str, sequence: int, now_unix_ms: float) -> Calibration | None:
        """The champion's calibration as it is published; None while there is none."""
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
