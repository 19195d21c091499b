"""Which bundle may follow which: the last good one, the guard over the live error, the pin, the hold after a rollback.
Pure.

A version is *good* once it has answered live samples and was no worse than the good one before it on the same samples.
The last good one is kept beside the champion and answers for every sample in its shadow, calibration included. The
champion is dropped for it when its live error has doubled against the error that the good one had when it was kept
*and* the good one is better on the same samples: where both are wrong the world has changed, and an old model is no
remedy; the next fit is.

After a rollback nothing replaces the good version until enough new samples came, twice as many after each further
rollback, so that a stream of bad challengers can't make the pool swing. An operator's pin stands above all of it.

The live error is mean |log(actual / predicted median)| of raw model output: calibration would hide a bad model until it
can't any more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from services.trainer.calibrate import Calibrator
from services.trainer.champion import Champion
from shared.errors import FieldError
from shared.prediction import TARGETS
from shared.prior import is_prior

# One mad label moves a mean of 100 by no more than this / 100.
ERROR_CAP: Final = 3.0


@dataclass(frozen=True, slots=True)
class SuccessionOptions:
    """Thresholds are ratios of live errors; counts are samples."""

    doubled: float = 2.0
    better: float = 0.8
    no_worse: float = 1.1
    min_samples: int = 50
    """Before an alarm. A line of champions that are each replaced sooner is judged as one"""
    proof_samples: int = 20
    """Before a version counts as good"""
    moving_samples: int = 100
    hold_samples: int = 200
    max_hold_samples: int = 6400


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def step(self, towards: float, over: int) -> None:
        self.count += 1
        self.value += (towards - self.value) / min(self.count, over)


class LiveErrors:
    """Moving mean |log error| of one model's medians, per target."""

    __slots__ = ("_means", "_over")

    def __init__(self, over: int) -> None:
        self._over = over
        self._means: dict[str, _Mean] = {}

    def observe(self, predicted: Mapping[str, float], actual_ms: Mapping[str, float]) -> None:
        """One sample: outputs by name, known targets in ms."""
        for target, actual in actual_ms.items():
            median = predicted.get(f"{target}_p50")
            if median is None or actual <= 0:
                continue
            error = abs(math.log(actual / max(median, 1e-6)))
            self._means.setdefault(target, _Mean()).step(min(error, ERROR_CAP), self._over)

    def failed(self, actual_ms: Mapping[str, float]) -> None:
        """One sample for which the model had no answer that could be true."""
        for target in actual_ms:
            self._means.setdefault(target, _Mean()).step(ERROR_CAP, self._over)

    def of(self, target: str, min_samples: int = 1) -> float | None:
        """The mean; None before so many samples."""
        mean = self._means.get(target)
        return mean.value if mean is not None and mean.count >= min_samples else None

    def count(self, target: str) -> int:
        mean = self._means.get(target)
        return mean.count if mean is not None else 0

    def view(self) -> dict[str, dict[str, float]]:
        return {target: {"samples": mean.count, "log_error": mean.value} for target, mean in self._means.items()}


@dataclass(slots=True)
class Good:
    """The last good version, in the champion's shadow."""

    champion: Champion
    calibrator: Calibrator
    reference: dict[str, float]
    """Its live error when it was kept, by target"""
    errors: LiveErrors
    """On the samples that the champion has answered"""


@dataclass(frozen=True, slots=True)
class Memory:
    """What outlives a process: in Redis beside the bundles."""

    pinned: str | None = None
    good: str | None = None
    reference: Mapping[str, float] = field(default_factory=dict)
    rollbacks_in_a_row: int = 0

    def encode(self) -> bytes:
        return orjson.dumps(
            {
                "pinned": self.pinned,
                "good": self.good,
                "reference": dict(self.reference),
                "rollbacks_in_a_row": self.rollbacks_in_a_row,
            }
        )

    @classmethod
    def decode(cls, payload: bytes) -> "Memory":
        """Raises FieldError."""
        try:
            found = orjson.loads(payload)
            texts = [found["pinned"], found["good"]]
            if any(text is not None and not isinstance(text, str) for text in texts):
                raise TypeError("a version is no text")
            reference = {
                target: float(found["reference"][target]) for target in TARGETS if target in found["reference"]
            }
            return cls(texts[0], texts[1], reference, int(found["rollbacks_in_a_row"]))
        except (ValueError, TypeError, KeyError) as error:
            raise FieldError(
                "succession", type(error).__name__, "pinned, good, reference, rollbacks_in_a_row"
            ) from None


class Succession:
    """State of one pool's line of bundles; see the module."""

    def __init__(self, options: SuccessionOptions) -> None:
        self.options = options
        self.errors = LiveErrors(options.moving_samples)
        """Of the champion"""
        self.good: Good | None = None
        self.pinned: str | None = None
        self.rollbacks_in_a_row = 0
        self._carried: dict[str, int] = {}
        """Samples in `errors` that an earlier champion answered"""
        self._trusted = False
        self._reference: dict[str, float] = {}
        self._held_until_total = 0
        self._held_since: str | None = None

    def memory(self) -> Memory:
        good = self.good
        return Memory(
            self.pinned,
            good.champion.version if good else None,
            dict(good.reference) if good else {},
            self.rollbacks_in_a_row,
        )

    def refusal(self, total: int) -> tuple[str, str] | None:
        """(reason, detail) for which no challenger may follow now; `total`: samples ever taken."""
        if self.pinned is not None:
            return "pinned", f"version {self.pinned} is pinned"
        if total < self._held_until_total:
            left = self._held_until_total - total
            return "held", f"after the rollback from {self._held_since} {left} more samples are waited for"
        return None

    def followed(self, outgoing: Champion | None, calibrator: Calibrator | None) -> None:
        """Another bundle takes the champion's place: keep the outgoing one if it is good."""
        good = self.good
        if outgoing is not None and calibrator is not None and self._is_good(outgoing):
            own = {target: self.errors.of(target, self.options.proof_samples) for target in TARGETS}
            reference = self._reference | {target: error for target, error in own.items() if error is not None}
            self.good = good = Good(outgoing, calibrator, reference, self._fresh())
            if not self._trusted:
                self.rollbacks_in_a_row = 0
        if good is not None and good.champion is not outgoing and not self._judged(self.options.min_samples):
            # Too few samples to judge it: the next one goes on with its account, or a fast line of bad fits escapes.
            self._carried = {target: self.errors.count(target) for target in TARGETS}
        else:
            self._reset()
            if good is not None:
                good.errors = self._fresh()
        self._trusted = False
        self._reference = {}

    def _is_good(self, outgoing: Champion) -> bool:
        if is_prior(outgoing.version):
            return False
        if self._trusted:
            return True
        for target in TARGETS:
            error, shadow = self.errors.of(target), self.good.errors.of(target) if self.good else None
            if error is not None and shadow is not None and error > self.options.no_worse * shadow:
                return False
        return self._judged(self.options.proof_samples)

    def _judged(self, samples: int) -> bool:
        """Whether the champion itself has answered so many samples."""
        return any(self.errors.count(target) - self._carried.get(target, 0) >= samples for target in TARGETS)

    def alarm(self) -> str | None:
        """Why the champion should be dropped for the last good version; None while it shouldn't."""
        good, options = self.good, self.options
        if good is None:
            return None
        for target in TARGETS:
            error = self.errors.of(target, options.min_samples)
            shadow = good.errors.of(target, options.min_samples)
            if error is None or shadow is None:
                continue
            reference = good.reference.get(target, shadow)
            if error >= options.doubled * reference and shadow <= options.better * error:
                return (
                    f"{target}: live mean |log error| {error:.3f}, {reference:.3f} when {good.champion.version} was "
                    f"kept; that one has {shadow:.3f} on the same samples"
                )
        return None

    def rolled_back(self, away_from: str, total: int) -> Good | None:
        """The champion gives way to the last good version, which is returned; what comes after it is held."""
        good, self.good = self.good, None
        if good is not None:
            self.hold(away_from, total)
            self.trust()
            self._reference = dict(good.reference)
        return good

    def hold(self, away_from: str, total: int) -> None:
        """Let nothing follow until enough new samples came."""
        options = self.options
        samples = min(options.max_hold_samples, options.hold_samples << min(self.rollbacks_in_a_row, 16))
        self.rollbacks_in_a_row += 1
        self._held_since = away_from
        self._held_until_total = total + samples

    def trust(self) -> None:
        """The champion was chosen by a person or by a rollback: it is good without proof."""
        self._trusted = True
        self._reset()

    def _reset(self) -> None:
        self.errors = self._fresh()
        self._carried = {}

    def _fresh(self) -> LiveErrors:
        return LiveErrors(self.options.moving_samples)

    def view(self, total: int) -> dict[str, Any]:
        """For people."""
        good, refusal = self.good, self.refusal(total)
        return {
            "pinned": self.pinned,
            "refuses_challengers": {"reason": refusal[0], "detail": refusal[1]} if refusal else None,
            "champion_live": self.errors.view(),
            "last_good": {
                "version": good.champion.version,
                "log_error_when_kept": good.reference,
                "on_the_same_samples": good.errors.view(),
            }
            if good
            else None,
            "alarm": self.alarm(),
            "rollbacks_in_a_row": self.rollbacks_in_a_row,
        }
