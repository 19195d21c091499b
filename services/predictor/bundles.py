"""The bundle watch: Redis' pointers → verified, warmed models in their slots. Edge: Redis.

A notice on the channel, or the poll where notices are lost, makes it read each pool's pointer. A bundle is verified and
started in a thread, off the event loop, and taken into use in one assignment. Whatever goes wrong, the bundle in use
stays: Redis may be away, restarted or emptied. Bundles are keyed by pool and schema, so a rolling change of the schema
leaves this process with its own.
"""

import asyncio
from collections.abc import Sequence

import structlog
from redis.asyncio import Redis

from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import Device, DevicePolicy
from services.predictor.slot import Refused, Served, Slot, load_on_device
from shared.bundle import BundleGate, BundleRefusedError, Refusal
from shared.clock import Clock
from shared.features import SCHEMA_HASH
from shared.lifecycle import Readiness
from shared.names import BUNDLE_CONDITION_PREFIX, BUNDLES_CHANNEL, bundle_key, bundle_pointer_key
from shared.store_watch import StoreWatch


def condition(pool: str) -> str:
    """Name of the readiness condition of a pool."""
    return BUNDLE_CONDITION_PREFIX + pool


class BundleWatch:
    """Keeps the slots on the published bundles."""

    def __init__(
        self,
        redis: Redis,
        slots: Sequence[Slot],
        key: bytes | None,
        *,
        device: Device,
        policy: DevicePolicy,
        threads: int,
        poll_ms: float,
        metrics: PredictorMetrics,
        readiness: Readiness,
        clock: Clock,
    ) -> None:
        """`key` verifies signatures where it is set. `readiness` has one condition per slot, see `condition`."""
        self._store = StoreWatch(
            redis, (BUNDLES_CHANNEL,), [slot.pool for slot in slots], metrics.store, clock, poll_ms=poll_ms
        )
        self._watched = [(slot, BundleGate(slot.pool, key)) for slot in slots]
        self._device = device
        self._policy = policy
        self._threads = threads
        self._metrics = metrics
        self._readiness = readiness
        self._clock = clock
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._store.run(self.check, self._lost)

    async def check(self) -> None:
        """Read each pool's pointer once and follow it; raises what Redis raises."""
        for slot, gate in self._watched:
            await self._follow(slot, gate)

    async def _follow(self, slot: Slot, gate: BundleGate) -> None:
        version: str | None = None
        try:
            pointer = await self._store.get(bundle_pointer_key(slot.pool, SCHEMA_HASH))
            version = gate.wanted(pointer, self._clock.monotonic_ms())
            if version is None:
                if slot.current is None and pointer is None:
                    self._readiness.unmet(condition(slot.pool), "none published yet")
                return
            blob = await self._store.get(bundle_key(slot.pool, SCHEMA_HASH, version))
            started_ms = self._clock.monotonic_ms()
            served = await asyncio.to_thread(self._load, gate, version, blob)
        except BundleRefusedError as refusal:
            self._refuse(slot, gate, version, refusal)
            return
        before = slot.current
        slot.current = served
        gate.served(version)
        self._readiness.met(condition(slot.pool))
        load_ms = self._clock.monotonic_ms() - started_ms
        self._metrics.swapped(slot.pool, served, load_ms)
        self._log.info(
            "bundle in use",
            pool=slot.pool,
            version=version,
            before=before.manifest.version if before else None,
            providers={model.rendering: model.provider for model in served.models},
            crossover_rows=served.crossover_rows,
            device_fallback=served.fallback,
            load_ms=round(load_ms, 1),
        )

    def _load(self, gate: BundleGate, version: str, blob: bytes | None) -> Served:
        bundle = gate.open(version, blob)
        return load_on_device(bundle, self._device, self._policy, self._threads, self._clock.unix_ms())

    def _refuse(self, slot: Slot, gate: BundleGate, version: str | None, refusal: BundleRefusedError) -> None:
        if version is not None:
            gate.refused(version, refusal.reason, self._clock.monotonic_ms())
        last = slot.last_refused
        slot.last_refused = Refused(version, refusal.reason, refusal.detail, self._clock.unix_ms())
        self._metrics.refused(slot.pool, refusal.reason)
        if slot.current is None:
            self._readiness.unmet(condition(slot.pool), str(refusal))
        if last is None or (last.version, last.reason) != (version, refusal.reason):
            self._log.warning(
                "bundle refused",
                pool=slot.pool,
                version=version,
                reason=refusal.reason.value,
                detail=refusal.detail,
                serving=slot.current.manifest.version if slot.current else None,
                device_required=refusal.reason is Refusal.DEVICE,
            )

    def _lost(self, error: Exception) -> None:
        for slot, _ in self._watched:
            if slot.current is None:
                self._readiness.unmet(condition(slot.pool), f"redis: {type(error).__name__}")
