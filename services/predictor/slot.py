"""What a pool serves: the bundle in use, and how a bundle becomes a running model on the device that was asked for.

`Slot.current` is replaced in one assignment on the event loop; a batch takes it once and keeps it, so every answer
comes from one bundle, named in it.
"""

from dataclasses import dataclass
from typing import Final

from services.predictor.settings import Device, DevicePolicy
from shared.bundle import Bundle, BundleManifest, BundleRefusedError, Refusal
from shared.errors import IntegrityError
from shared.inference import CPU_PROVIDER, BundleModel

CUDA_PROVIDER: Final = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class Served:
    """A verified, warmed bundle. `fallback` says why it isn't on the preferred device; None when it is."""

    model: BundleModel
    manifest: BundleManifest
    since_unix_ms: float
    fallback: str | None = None


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


def load_on_device(bundle: Bundle, device: Device, policy: DevicePolicy, threads: int, unix_ms: float) -> Served:
    """Start and warm the rendering for the device; raises BundleRefusedError. Blocks for some 10 ms.

    CUDA takes the tensor rendering: ONNX Runtime has no CUDA kernel for tree ensembles. ONNX Runtime falls back to the
    CPU in silence, so the provider in use is read back from the session.
    """
    fallback: str | None = None
    if device is Device.CUDA:
        fallback = "the bundle has no tensor rendering"
        if "tensor" in bundle.graphs:
            try:
                model = BundleModel(
                    bundle, rendering="tensor", providers=(CUDA_PROVIDER, CPU_PROVIDER), threads=threads
                )
            except IntegrityError as error:
                fallback = str(error)
            else:
                if model.provider == CUDA_PROVIDER:
                    return Served(model, bundle.manifest, unix_ms)
                fallback = f"{CUDA_PROVIDER} isn't in use: ONNX Runtime chose {model.provider}"
        if policy is DevicePolicy.REQUIRE:
            raise BundleRefusedError(Refusal.DEVICE, f"cuda is required, but {fallback}")
    try:
        model = BundleModel(bundle, threads=threads)
    except IntegrityError as error:
        raise BundleRefusedError(Refusal.LOAD, str(error)) from None
    return Served(model, bundle.manifest, unix_ms, fallback)
