"""The router's own copy of the last good bundle, and the pool's calibration. Edge: Redis.

The in-process rung runs the bundle; calibration bends the answers of both rungs, where its bundle is theirs. Both are
verified (seal, signature where a key is set); a bundle is started and warmed in a thread, and taken into use in one
assignment. Whatever goes wrong, what is in use stays: Redis may be away, restarted or emptied.

A notice on a channel, or the poll where notices are lost, makes it read the keys. The calibration before is kept too:
while a swap goes through the pool, predictors still answer from the bundle before.
"""

import asyncio
import hashlib
from typing import Any, Final

import structlog
from redis.asyncio import Redis

from services.router.predict.metrics import PredictMetrics
from shared.bundle import BundleGate, BundleManifest, BundleRefusedError, Calibration, Refusal, unseal
from shared.clock import Clock
from shared.errors import ContractError, IntegrityError
from shared.features import SCHEMA_HASH
from shared.inference import BundleModel, CompiledCalibration
from shared.names import (
    BUNDLES_CHANNEL,
    CALIBRATIONS_CHANNEL,
    bundle_key,
    bundle_pointer_key,
    calibration_key,
)
from shared.store_watch import StoreWatch

_MAX_CALIBRATION_BYTES: Final = 16 * 1024 * 1024
# Of the bundle and of the one before it.
_KEPT: Final = 2


class BundleWatcher:
    """Holds the bundle's model and the calibration; `run` keeps them on what is published."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        key: bytes | None,
        metrics: PredictMetrics,
        clock: Clock,
        *,
        poll_ms: float = 2_000.0,
    ) -> None:
        """`key` verifies signatures where it is set. `redis` stays the caller's to close."""
        self.model: BundleModel | None = None
        """The own copy, ready to run; None before the first verified bundle."""
        self.manifest: BundleManifest | None = None
        self.calibration: Calibration | None = None
        """The newest."""
        self._calibrations: dict[str, Calibration] = {}
        self._compiled: dict[str, tuple[Calibration, tuple[str, ...], CompiledCalibration]] = {}
        self._calibration_digest = b""
        self._prior_targets: dict[str, frozenset[str]] = {}
        self._store = StoreWatch(
            redis, (BUNDLES_CHANNEL, CALIBRATIONS_CHANNEL), (pool,), metrics.store, clock, poll_ms=poll_ms
        )
        self._pool = pool
        self._key = key
        self._gate = BundleGate(pool, key)
        self._metrics = metrics
        self._clock = clock
        self._log = structlog.get_logger()
        self._last_refusal: dict[str, Any] | None = None

    @property
    def connected(self) -> bool:
        """Whether Redis answered when it was last asked."""
        return self._store.connected

    def calibration_for(self, bundle_version: str, outputs: tuple[str, ...]) -> CompiledCalibration | None:
        """The calibration of this bundle, laid out for its outputs; None where none is here."""
        calibration = self._calibrations.get(bundle_version)
        if calibration is None:
            return None
        compiled = self._compiled.get(bundle_version)
        if compiled is None or compiled[0] is not calibration or compiled[1] != outputs:
            compiled = calibration, outputs, CompiledCalibration(calibration, outputs)
            self._compiled[bundle_version] = compiled
        return compiled[2]

    def prior_targets(self, bundle_version: str) -> frozenset[str]:
        """What of this bundle rests on the physics prior; nothing where the bundle isn't known here."""
        return self._prior_targets.get(bundle_version, frozenset())

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._store.run(self.check)

    async def check(self) -> None:
        """Read pointer and calibration once and follow them; raises what Redis raises."""
        await self._follow_bundle()
        await self._follow_calibration()

    def describe(self) -> dict[str, Any]:
        """State of the own copy, for people."""
        now_ms = self._clock.unix_ms()
        bundle = calibration = None
        if self.manifest is not None:
            bundle = {
                "version": self.manifest.version,
                "outputs": self.manifest.outputs,
                "prior_targets": self.manifest.prior_targets,
                "window_samples": self.manifest.window_samples,
                "trained_age_s": round((now_ms - self.manifest.created_unix_ms) / 1e3, 3),
            }
        if self.calibration is not None:
            calibration = {
                "bundle": self.calibration.bundle_version,
                "sequence": self.calibration.sequence,
                "age_s": round((now_ms - self.calibration.updated_unix_ms) / 1e3, 3),
            }
        return {
            "redis_connected": self._store.connected,
            "store_errors": self._store.metrics.errors,
            "bundle": bundle,
            "calibration": calibration,
            "last_refused": self._last_refusal,
        }

    async def _follow_bundle(self) -> None:
        version: str | None = None
        try:
            pointer = await self._store.get(bundle_pointer_key(self._pool, SCHEMA_HASH))
            version = self._gate.wanted(pointer, self._clock.monotonic_ms())
            if version is None:
                return
            blob = await self._store.get(bundle_key(self._pool, SCHEMA_HASH, version))
            model, manifest = await asyncio.to_thread(self._load, version, blob)
        except BundleRefusedError as refusal:
            self._refuse(version, refusal)
            return
        self.model, self.manifest = model, manifest
        self._prior_targets[version] = frozenset(manifest.prior_targets)
        while len(self._prior_targets) > _KEPT:
            del self._prior_targets[next(iter(self._prior_targets))]
        self._gate.served(version)
        self._metrics.swapped(version, manifest.created_unix_ms)
        self._log.info("own bundle in use", version=version)

    def _load(self, version: str, blob: bytes | None) -> tuple[BundleModel, BundleManifest]:
        bundle = self._gate.open(version, blob)
        try:
            return BundleModel(bundle), bundle.manifest
        except IntegrityError as error:
            raise BundleRefusedError(Refusal.LOAD, str(error)) from None

    def _refuse(self, version: str | None, refusal: BundleRefusedError) -> None:
        if version is not None:
            self._gate.refused(version, refusal.reason, self._clock.monotonic_ms())
        self._metrics.refused(refusal.reason)
        told = {"version": version, "reason": refusal.reason.value, "detail": refusal.detail}
        if told != self._last_refusal:
            self._last_refusal = told
            self._log.warning("bundle refused", **told, serving=self._gate.version)

    async def _follow_calibration(self) -> None:
        sealed = await self._store.get(calibration_key(self._pool))
        if sealed is None:
            return
        digest = hashlib.blake2b(sealed, digest_size=16).digest()
        if digest == self._calibration_digest:
            return
        self._calibration_digest = digest
        try:
            payload = unseal(sealed, self._key, max_bytes=_MAX_CALIBRATION_BYTES)
            calibration = Calibration.decode(payload, pool=self._pool)
        except ContractError as error:
            self._metrics.calibration_refused()
            self._log.warning("calibration refused", detail=str(error))
            return
        self.calibration = calibration
        self._calibrations[calibration.bundle_version] = calibration
        while len(self._calibrations) > _KEPT:
            oldest = next(iter(self._calibrations))
            del self._calibrations[oldest]
            self._compiled.pop(oldest, None)
        self._metrics.calibrated(calibration.updated_unix_ms)
