"""What a pool serves: the bundle in use, and how a bundle becomes a running model on the device that was asked for.

`Slot.current` is replaced in one assignment on the event loop; a batch takes it once and keeps it, so every answer
comes from one bundle, named in it.

With an accelerator both renderings run: the tree ensemble on the CPU, which starts in microseconds, and the tensor
rendering on the device, which pays a launch for each of some hundred operators whatever the batch. Which is faster from
which batch size on is measured at each load, and kept with the bundle.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.predictor.settings import Device, DevicePolicy
from shared.bundle import Bundle, BundleManifest, BundleRefusedError, Refusal
from shared.errors import IntegrityError
from shared.features import SCHEMA, FloatMatrix
from shared.inference import CUDA, Accelerator, BundleModel

# Batch sizes that are timed. Larger batches follow the largest one.
TIMED_ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)
_TIMED_RUNS: Final = 3
# Each rendering may stray by 1e-4 from the native model.
MAX_DISAGREEMENT: Final = 2e-4

Measure = Callable[[BundleModel, FloatMatrix], float]


@dataclass(frozen=True, slots=True)
class Served:
    """A verified, warmed bundle."""

    model: BundleModel
    """The tree ensemble on the CPU"""
    manifest: BundleManifest
    since_unix_ms: float
    fallback: str | None = None
    """Why no accelerator serves although one is preferred"""
    accelerated: BundleModel | None = None
    """The tensor rendering on the accelerator, where it is the faster one from some batch size on"""
    crossover_rows: int | None = None
    """That batch size"""
    timings_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By batch size: CPU, accelerator"""

    def model_for(self, rows: int) -> BundleModel:
        """The faster rendering for a batch of so many rows."""
        if self.accelerated is None or self.crossover_rows is None or rows < self.crossover_rows:
            return self.model
        return self.accelerated

    @property
    def models(self) -> tuple[BundleModel, ...]:
        """Those in use."""
        return (self.model,) if self.accelerated is None else (self.model, self.accelerated)


@dataclass(frozen=True, slots=True)
class Refused:
    """The newest bundle that wasn't taken."""

    version: str | None
    reason: Refusal
    detail: str
    at_unix_ms: float


class Slot:
    """One pool's place for a bundle."""

    __slots__ = ("current", "last_refused", "pool")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.current: Served | None = None
        self.last_refused: Refused | None = None


def measure_ms(model: BundleModel, rows: FloatMatrix) -> float:
    """Least wall time of a few runs: what disturbs a run only ever makes it longer."""
    model.predict(rows)
    taken_s = []
    for _ in range(_TIMED_RUNS):
        began_s = time.perf_counter()
        model.predict(rows)
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s) * 1e3


def crossover(sizes: Sequence[int], cpu_ms: Sequence[float], device_ms: Sequence[float]) -> int | None:
    """The least size from which on the device is faster at every larger one, too; None where it is at none."""
    found = None
    for size, cpu, device in zip(reversed(sizes), reversed(cpu_ms), reversed(device_ms), strict=True):
        if device >= cpu:
            break
        found = size
    return found


def load_on_device(
    bundle: Bundle,
    device: Device,
    policy: DevicePolicy,
    threads: int,
    unix_ms: float,
    *,
    accelerator: Accelerator = CUDA,
    measure: Measure = measure_ms,
) -> Served:
    """Start, warm and time what the device takes; raises BundleRefusedError. Blocks: 10 ms, with a device some 100.

    The CPU's rendering is always started. One that can't be had on the device, or says something else there, is
    refused with `require`, and left out and told with `prefer`.
    """
    try:
        model = BundleModel(bundle, threads=threads)
    except IntegrityError as error:
        raise BundleRefusedError(Refusal.LOAD, str(error)) from None
    if device is Device.CPU:
        return Served(model, bundle.manifest, unix_ms)
    try:
        accelerated = _accelerated(bundle, model, threads, accelerator)
    except IntegrityError as error:
        if policy is DevicePolicy.REQUIRE:
            raise BundleRefusedError(Refusal.DEVICE, f"{device.value} is required, but {error}") from None
        return Served(model, bundle.manifest, unix_ms, str(error))
    rows = _timing_rows(bundle.manifest, max(TIMED_ROWS))
    cpu_ms = [measure(model, rows[:count]) for count in TIMED_ROWS]
    device_ms = [measure(accelerated, rows[:count]) for count in TIMED_ROWS]
    timings = dict(zip(TIMED_ROWS, zip(cpu_ms, device_ms, strict=True), strict=True))
    at = crossover(TIMED_ROWS, cpu_ms, device_ms)
    if at is None:
        slower = f"{accelerator.provider} is slower than the CPU at {max(TIMED_ROWS)} rows"
        return Served(model, bundle.manifest, unix_ms, slower, timings_ms=timings)
    return Served(model, bundle.manifest, unix_ms, None, accelerated, at, timings)


def _accelerated(bundle: Bundle, model: BundleModel, threads: int, accelerator: Accelerator) -> BundleModel:
    """The tensor rendering on the accelerator, which says there what the tree ensemble says; raises IntegrityError."""
    if "tensor" not in bundle.graphs:
        raise IntegrityError("the bundle has no tensor rendering")
    accelerated = BundleModel(bundle, rendering="tensor", accelerator=accelerator, threads=threads)
    rows = _timing_rows(bundle.manifest, 256)
    trees, tensors = model.predict(rows).astype(np.float64), accelerated.predict(rows)
    difference = float((np.abs(tensors - trees) / np.maximum(np.abs(trees), 1e-3)).max())
    if not difference <= MAX_DISAGREEMENT:
        raise IntegrityError(f"on {accelerator.provider} the tensor rendering strays by {difference:.1e}")
    return accelerated


def _timing_rows(manifest: BundleManifest, count: int) -> FloatMatrix:
    """Rows all over the trained range, float32 (count, F): equal ones would flatter the trees."""
    low, high = np.array(manifest.feature_low, np.float32), np.array(manifest.feature_high, np.float32)
    drawn = np.random.default_rng(0).uniform(size=(count, len(SCHEMA))).astype(np.float32)
    # Squared: most requests are small.
    return low + (high - low) * drawn * drawn
