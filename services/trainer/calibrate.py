"""Online calibration: what must move faster than a refit. Pure state, fed sample by sample, no I/O.

From each arriving sample and the champion's raw prediction of its row: a bias per target (moving location of the log
residual, 0.03 a sample), log offsets per backlog bin (of all quantiles by what is left of the residual, of P90 and P99
by pinball steps of 0.05, so that each bin covers its level), a bias per endpoint as far as it isn't chance, and the
median output length per model and route. The published `Calibration` is applied by `shared.inference.calibrate` and
nowhere else.

A change (`shifts.py`), of the pool or of one endpoint, is not crept up on: the bias jumps to where errors lie since,
what they had pushed quantiles and endpoints by is taken back, and labels of requests that were sent before teach no
more. A level's rate begins anew then.

A step's residual is cut at the running mean of |residual|: latency errors are skewed, and a plain mean sits above the
median that P50 promises (TTFT error 18.2 % uncorrected, 20.0 % with the mean, 18.5 % with the cut; after the drift
35 → 19 %). It also means that one label ×100 can't throw the bias. Quantiles see signs, not sizes, and a tenth of lies
would make P90 cover 98 %: a sample off by more than `LOG_LIMIT` is passed over while fewer than a third are.

Limits: 4096 endpoints and 1024 output lengths, the least recently seen leave. Rates start at 1/n, so that the first
samples of a bundle count in full.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from services.trainer.outliers import CHANGED_SHARE, LOG_LIMIT
from services.trainer.shifts import ShiftWatch
from shared.bundle import Calibration
from shared.inference import MAX_LOG_CORRECTION
from shared.names import length_key
from shared.prediction import TARGETS

SCALE_CAP: Final = 1.0
SCALE_RATE: Final = 0.02
FAR_RATE: Final = 0.02
# How a level hurries: a moving mean of signs over ~10 samples; beyond a half, which chance makes of one sample in 40,
# up to 10 times the rate.
_PERSISTENCE_RATE: Final = 0.1
_PERSISTENT: Final = 0.5
_HURRY: Final = 9.0
# Labels of a bin that came while a request was under way halve its step on the bin's offsets when there are so many.
TOGETHER: Final = 40
REMEMBERED: Final = 256
_LEAST_MS: Final = 1e-6
# A change is one against where the bias was some 300 samples ago; before it has settled there is none.
SLOW_RATE: Final = 0.003
CHANGE_MIN_SAMPLES: Final = 200
POOL_SPAN: Final = 64
POOL_LEAST: Final = 8
# An endpoint's own errors are fewer, and 4096 of them are remembered.
ENDPOINT_SPAN: Final = 16
ENDPOINT_LEAST: Final = 6
ENDPOINT_MIN_SAMPLES: Final = 20
ENDPOINT_SLOW_RATE: Final = 0.02
GAP_RATE: Final = 0.03
LEVELS: Final[Mapping[str, float]] = {"p90": 0.9, "p99": 0.99}
MEDIAN: Final = "p50"
MAX_ENDPOINTS: Final = 4096
MAX_LENGTHS: Final = 1024
ANY_MODEL: Final = "*"
# A rolling mean over about this many samples is the live error.
LIVE_SAMPLES: Final = 200


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Rates per sample, shrinkage in samples, inner edges of the backlog bins in tokens."""

    bias_rate: float = 0.03
    pinball_rate: float = 0.05
    median_rate: float = 0.03
    """Of a backlog bin's own median"""
    endpoint_rate: float = 0.03
    endpoint_doubt: float = 4.0
    """An endpoint's bias is halved where its square is so many times what chance makes of as many samples"""
    change_log: float = 0.2
    """A level that has moved by so much (a factor of 1.22) is a change: rows of before teach little"""
    output_rate: float = 0.05
    backlog_edges_tokens: tuple[float, ...] = (256.0, 1024.0, 4096.0, 16384.0)


@dataclass(slots=True)
class _Mean:
    """A mean whose rate falls as 1/n down to the given one; kept in bounds."""

    value: float = 0.0
    count: int = 0

    def step(self, towards: float, rate: float) -> None:
        self.count += 1
        self.value += max(rate, 1.0 / (self.count + 1)) * (towards - self.value)


@dataclass(slots=True)
class _Level(_Mean):
    """A mean that hurries while its errors keep one sign, as they do after a change and by chance they don't.

    `persistence` is a moving mean of the errors' signs; a step's rate is up to `1 + _HURRY` times the given one.
    """

    persistence: float = 0.0

    def follow(self, error: float, rate: float) -> None:
        """Step by a cut error; one mad label is one sign, whatever its size."""
        self.persistence += _PERSISTENCE_RATE * (math.copysign(1.0, error) - self.persistence)
        hurry = max(0.0, abs(self.persistence) - _PERSISTENT) / (1.0 - _PERSISTENT)
        self.step(self.value + error, rate * (1.0 + _HURRY * hurry))


@dataclass(frozen=True, slots=True)
class LiveError:
    """Errors of the last ~200 calibrated predictions, as ratios: mean |relative|, mean signed relative."""

    samples: int
    mape: float
    bias: float


class _Note(NamedTuple):
    """What one sample moved, so that it can be taken back."""

    backlog_bin: int
    steps: tuple[float, ...]
    """Of the offsets, in the order of the levels"""
    endpoint: str
    endpoint_step: float


@dataclass(slots=True)
class _Endpoint(_Level):
    """An endpoint's own level beside the pool's bias."""

    slow: float = 0.0
    """Where it was some dozens of its samples ago"""
    onset: int = 0
    """Its samples that were sent before this one tell of what was before a change"""
    jumped_at: int = 0
    """Number of the sample by which that change was seen"""
    last: int = 0
    """Number of its newest sample"""
    gap: _Mean = field(default_factory=_Mean)
    """Samples of all from one of its own to the next"""
    together: _Mean = field(default_factory=_Mean)
    """Its labels that came while a request of its was under way, where they tell of the same batches"""
    watch: ShiftWatch[_Note] = field(
        default_factory=lambda: ShiftWatch[_Note](span=ENDPOINT_SPAN, least=ENDPOINT_LEAST)
    )


@dataclass(slots=True)
class _Target:
    offsets: dict[str, list[float]]
    """By level, one log offset per backlog bin"""
    bias: _Level = field(default_factory=_Level)
    slow_bias: float = 0.0
    """Where the bias was some hundred samples ago; far from it is a change"""
    medians: list[float] = field(default_factory=list)
    """Per bin, the log offset of all quantiles: long backlogs come in few bursts, and are predicted too low"""
    came: list[list[int]] = field(default_factory=list)
    """Per bin, the numbers of its last samples"""
    onset: int = 0
    jumped_at: int = 0
    watch: ShiftWatch[_Note] = field(default_factory=lambda: ShiftWatch[_Note](span=POOL_SPAN, least=POOL_LEAST))
    endpoints: OrderedDict[str, _Endpoint] = field(default_factory=OrderedDict)
    scale: float = 0.25
    """Running mean of |log residual|, which cuts the steps"""
    live_error: _Mean = field(default_factory=_Mean)
    live_bias: _Mean = field(default_factory=_Mean)
    far: _Mean = field(default_factory=_Mean)
    """Share of samples that are off by more than any honest one"""

    def take_back(self, notes: Sequence[_Note]) -> None:
        """Undo what these samples moved the offsets by."""
        for note in notes:
            for offsets, step in zip(self.offsets.values(), note.steps, strict=True):
                offsets[note.backlog_bin] = _bounded(offsets[note.backlog_bin] - step)


class OutputLengths:
    """The median output length per model, per model and route of the gateway, and of all under `*`: tokens, learned
    from every answer, bundle or not.
    """

    __slots__ = ("_lengths", "_rate")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lengths: OrderedDict[str, _Mean] = OrderedDict()

    def observe(self, model: str, output_tokens: int, route: str = "") -> None:
        """Learn from one answer; a route begins where its model is."""
        length = math.log(max(1, output_tokens))
        for name in dict.fromkeys((ANY_MODEL, model, length_key(model, route))):
            mean = self._lengths.get(name)
            if mean is None:
                known = self._lengths.get(model)
                mean = self._lengths[name] = _Mean(length if known is None else known.value)
            # A median in log space: each answer moves it by the same step, however long it is.
            mean.step(mean.value + math.copysign(1.0, length - mean.value), self._rate)
            self._lengths.move_to_end(name)
        while len(self._lengths) > MAX_LENGTHS:
            self._lengths.popitem(last=False)

    def tokens(self) -> dict[str, float]:
        return {model: math.exp(mean.value) for model, mean in self._lengths.items()}


class Calibrator:
    """The calibration of one bundle, learned sample by sample. Another bundle takes another calibrator."""

    __slots__ = (
        "_edges", "_live", "_options", "_targets", "bundle_version", "changed_at", "endpoints_changed_at", "samples",
    )  # fmt: skip

    def __init__(self, options: CalibrationOptions, bundle_version: str, outputs: Sequence[str]) -> None:
        """No bias and no offsets for the bundle's `outputs` yet."""
        self._options = options
        self._edges = options.backlog_edges_tokens
        self._live = False
        self.bundle_version = bundle_version
        self.samples = 0
        self.changed_at: int | None = None
        """Number of the sample with which latencies became others, as far as this calibrator has seen"""
        self.endpoints_changed_at: dict[str, int] = {}
        """The same of single endpoints"""
        bins = len(self._edges) + 1
        self._targets = {
            target: _Target(
                {level: [0.0] * bins for level in LEVELS if f"{target}_{level}" in outputs},
                medians=[0.0] * bins,
                came=[[] for _ in range(bins)],
            )
            for target in TARGETS
            if f"{target}_p50" in outputs
        }

    def observe(
        self,
        predicted: Mapping[str, float],
        actual_ms: Mapping[str, float],
        backlog_tokens: float,
        endpoint: str,
        served: Mapping[str, float] | None = None,
        lag: int = 0,
        *,
        seen: bool = False,
    ) -> None:
        """Learn from one sample: the bundle's raw outputs by name, the known targets in ms.

        `served`: what the router predicted at decision time with this bundle, where it did. Quantiles are judged by it:
        labels come late, and a bound that the newest bias has moved covers better than the one that was served.
        `lag`: how many samples came while this one was under way. `seen`: the model was fitted on this row, which says
        nothing of how far its quantiles reach.
        """
        backlog_bin = bisect_right(self._edges, backlog_tokens)
        self.samples += 1
        for target, state in self._targets.items():
            actual = actual_ms.get(target)
            if actual is None:
                continue
            # Who was sent first ends first where a target is the whole of a request: sorted by sending the newest
            # would always be the quick ones.
            sent = self.samples - (0 if target == "e2e" else lag)
            own = state.endpoints.get(endpoint)
            if sent < max(state.onset, own.onset if own else 0):
                continue  # it tells of what was before a change
            residual = math.log(actual / max(predicted[f"{target}_p50"], 1e-6))
            median = state.medians[backlog_bin]
            share = (self._shrunk(own, state.scale) if own else 0.0) + median
            error = residual - _bounded(state.bias.value + share)
            far = abs(error) > LOG_LIMIT
            state.far.step(float(far), FAR_RATE)
            if far and state.far.value < CHANGED_SHARE:
                continue  # a label that can't be true; where many are so far off, the pool has changed
            # predicted/actual − 1 of the calibrated prediction.
            relative = math.expm1(max(-5.0, min(5.0, -error)))
            state.live_error.step(abs(relative), 1.0 / LIVE_SAMPLES)
            state.live_bias.step(relative, 1.0 / LIVE_SAMPLES)
            if sent < max(state.jumped_at, own.jumped_at if own else 0):
                served = None  # by a bound that knew nothing of the change
            steps = (0.0,) * len(state.offsets)
            if not seen:
                steps = self._step_offsets(
                    target,
                    state,
                    backlog_bin,
                    actual,
                    predicted,
                    share,
                    served,
                    sent,
                    residual - state.bias.value - share,
                )
            before = state.bias.value
            state.bias.follow(_cut(error, state.scale), self._options.bias_rate)
            state.bias.value = _bounded(state.bias.value)
            own = self._endpoint(state, endpoint)
            own.gap.step(self.samples - own.last, GAP_RATE)
            own.last = self.samples
            if target != "ttft":
                own.together.step(lag / max(1.0, own.gap.value), GAP_RATE)
            moved = own.value
            own.follow(_cut(residual - median - before - own.value, state.scale), self._options.endpoint_rate)
            note = _Note(backlog_bin, steps, endpoint, own.value - moved)
            if not self._pool_changed(state, sent, residual - share, note):
                self._endpoint_changed(state, own, sent, residual - median - before, note)
            state.scale += SCALE_RATE * (min(abs(error), SCALE_CAP) - state.scale)

    def _step_offsets(
        self,
        target: str,
        state: _Target,
        backlog_bin: int,
        actual: float,
        predicted: Mapping[str, float],
        share: float,
        served: Mapping[str, float] | None,
        sent: int,
        error: float,
    ) -> tuple[float, ...]:
        """Move the offsets of a bin by one step: its median by the cut error, each level by a pinball step; those.

        The more labels of its bin came while a request was under way, the less is its step: a burst is mispredicted as
        a whole, and all of its steps together would move a bound far beyond what any of them asks for.

        A bound that has been moved well past the label meanwhile isn't moved for it again: answers of 25 s at 45 a
        second were judged by a bound that the first dozens of them had mended, and P90 of TPOT ended at 4.5 times P50.
        Not so TTFT's, which is missed in bursts: the next one comes when the bias has forgotten this one.
        """
        came = state.came[backlog_bin]
        alone = 1.0 / (1.0 + (len(came) - bisect_right(came, sent)) / TOGETHER)
        rate = self._options.pinball_rate * alone
        step = self._options.median_rate * alone * _cut(error, state.scale)
        state.medians[backlog_bin] = _bounded(state.medians[backlog_bin] + step)
        came.append(self.samples)
        if len(came) > 2 * REMEMBERED:
            del came[:REMEMBERED]
        steps = []
        for level, offsets in state.offsets.items():
            shift = _bounded(state.bias.value + share + offsets[backlog_bin])
            today = predicted[f"{target}_{level}"] * math.exp(shift)
            upper = (served or {}).get(f"{target}_{level}", today)
            step = rate * (float(actual > upper) - (1.0 - LEVELS[level]))
            if target != "ttft" and (actual > upper) != (actual > today):
                moved = math.log(max(today, _LEAST_MS) / max(upper, _LEAST_MS))
                if abs(moved) > self._options.change_log:
                    step = 0.0
            offsets[backlog_bin] = _bounded(offsets[backlog_bin] + step)
            steps.append(step)
        return tuple(steps)

    def mark(self) -> None:
        """From here on offsets are learned of live requests, and the next bundle's calibrator goes on with them."""
        self._live = True

    def learned(self) -> dict[str, list[float]]:
        """The offsets per backlog bin by output, medians' too; nothing where none are of live requests."""
        if not self._live:
            return {}
        return {
            f"{target}_{level}": list(offsets)
            for target, state in self._targets.items()
            for level, offsets in ((MEDIAN, state.medians), *state.offsets.items())
        }

    def onsets(self) -> dict[str, dict[str | None, tuple[int, int]]]:
        """Per target, of the pool (None) and each endpoint: how many samples ago a change began, and was seen."""
        now = self.samples
        return {
            target: {
                None: (now - state.onset, now - state.jumped_at),
                **{name: (now - own.onset, now - own.jumped_at) for name, own in state.endpoints.items()},
            }
            for target, state in self._targets.items()
        }

    def inherit(self, before: "Calibrator", unseen: int = 0) -> None:
        """Take what is no bundle's own from another one's calibrator, which has seen `unseen` samples more.

        Offsets of live requests (how far a bundle of this pool is off where it hasn't been fitted), and since when
        labels tell of how it is.
        """
        learned, onsets, now = before.learned(), before.onsets(), self.samples + unseen
        for target, state in self._targets.items():
            for level, offsets in ((MEDIAN, state.medians), *state.offsets.items()):
                offsets[:] = learned.get(f"{target}_{level}", offsets)
            for name, (began, seen) in onsets.get(target, {}).items():
                changed = state if name is None else state.endpoints.get(name)
                if changed is not None:
                    changed.onset, changed.jumped_at = now - began, now - seen

    def calibration(
        self, pool: str, sequence: int, now_unix_ms: float, expected_output_tokens: Mapping[str, float]
    ) -> Calibration:
        """The state as it is published."""
        return Calibration(
            pool=pool,
            bundle_version=self.bundle_version,
            sequence=sequence,
            updated_unix_ms=now_unix_ms,
            log_bias={target: state.bias.value for target, state in self._targets.items()},
            backlog_edges_tokens=list(self._edges),
            quantile_log_offset={
                name: [_bounded(offset + median) for offset, median in zip(offsets, state.medians, strict=True)]
                for target, state in self._targets.items()
                for name, offsets in (
                    (f"{target}_{MEDIAN}", [0.0] * len(state.medians)),
                    *((f"{target}_{level}", offsets) for level, offsets in state.offsets.items()),
                )
            },
            endpoint_log_bias={target: self._endpoint_biases(state) for target, state in self._targets.items()},
            expected_output_tokens=dict(expected_output_tokens),
        )

    def _endpoint_biases(self, state: _Target) -> dict[str, float]:
        """An endpoint's bias; of a target that nobody has measured it is that of whole answers: who is slow is slow."""
        known = state if state.bias.count else self._targets.get("e2e", state)
        return {endpoint: self._shrunk(own, known.scale) for endpoint, own in known.endpoints.items()}

    def live(self) -> dict[str, LiveError]:
        """Rolling error of the calibrated predictions, per target that had samples."""
        return {
            target: LiveError(state.live_error.count, state.live_error.value, state.live_bias.value)
            for target, state in self._targets.items()
            if state.live_error.count
        }

    def _pool_changed(self, state: _Target, sent: int, error: float, note: _Note) -> bool:
        """Whether latencies of the whole pool are seen to be others; then the bias is where they lie since."""
        if state.bias.count <= CHANGE_MIN_SAMPLES:
            state.slow_bias = state.bias.value
            return False
        # Where single errors are large (e2e) a level wanders further by chance.
        least_log = max(self._options.change_log, state.scale)
        shift = state.watch.observe(
            sent, error, note, reference=state.slow_bias, scale=state.scale, least_log=least_log
        )
        if shift is None:
            state.slow_bias += SLOW_RATE * (state.bias.value - state.slow_bias)
            return False
        state.take_back(shift.notes)
        for told in shift.notes:
            if (own := state.endpoints.get(told.endpoint)) is not None:
                own.value -= told.endpoint_step
        for own in state.endpoints.values():
            own.watch.clear()
        state.bias = _Level(_bounded(shift.level), len(shift.notes))
        state.slow_bias = state.bias.value
        state.onset, state.jumped_at = shift.onset, self.samples
        self.changed_at = max(0, shift.onset)
        return True

    def _endpoint_changed(self, state: _Target, own: _Endpoint, sent: int, error: float, note: _Note) -> None:
        """The same of one endpoint: its share is where its errors lie since."""
        if own.count <= ENDPOINT_MIN_SAMPLES:
            own.slow = own.value
            return
        least_log = max(self._options.change_log, state.scale)
        shift = own.watch.observe(sent, error, note, reference=own.slow, scale=state.scale, least_log=least_log)
        if shift is None:
            own.slow += ENDPOINT_SLOW_RATE * (own.value - own.slow)
            return
        state.take_back(shift.notes)
        own.value, own.count, own.persistence = _bounded(shift.level), len(shift.notes), 0.0
        own.slow = own.value
        own.onset, own.jumped_at = shift.onset, self.samples
        self.endpoints_changed_at[note.endpoint] = max(0, shift.onset)

    def _endpoint(self, state: _Target, endpoint: str) -> _Endpoint:
        own = state.endpoints.get(endpoint)
        if own is None:
            own = state.endpoints[endpoint] = _Endpoint()
        state.endpoints.move_to_end(endpoint)
        while len(state.endpoints) > MAX_ENDPOINTS:
            gone, _ = state.endpoints.popitem(last=False)
            self.endpoints_changed_at.pop(gone, None)
        return own

    def _shrunk(self, own: _Endpoint, scale: float) -> float:
        """An endpoint's share, as far as it isn't chance.

        Answers that were decoded side by side err together, and are one witness between them: of eight equal pods the
        one whose batch had just shrunk was taken for a fifth faster, and filled until labels came 25 s later.
        """
        square = own.value * own.value
        if not square:
            return 0.0
        counted = min(own.count, 2.0 / self._options.endpoint_rate) / (1.0 + own.together.value)
        chance = self._options.endpoint_doubt * scale * scale / max(1.0, counted)
        return _bounded(own.value * square / (square + chance))


def _cut(value: float, at: float) -> float:
    return min(at, max(-at, value))


def _bounded(value: float) -> float:
    return min(MAX_LOG_CORRECTION, max(-MAX_LOG_CORRECTION, value))
