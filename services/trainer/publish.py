"""The edge to Redis: blob, then pointer, then notice. A reader in the middle sees the old bundle or the new one.

A bundle is an immutable sealed blob under its version, so a rollback is the pointer naming an older version again. The
pointer is switched by a script that first looks whether this process still holds the lease, so a trainer that was
replaced can't overwrite its successor's bundle. Blobs older than the newest five expire after a grace in which a slow
reader may still fetch them; the last good one and a pinned one stay.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Final

import orjson
import structlog
from redis.asyncio import Redis

from services.trainer import last_change
from services.trainer.champion import Champion
from services.trainer.last_change import Change
from services.trainer.lease import Lease, LeaseLostError
from services.trainer.succession import Memory
from shared.bundle import Bundle, BundleGate, Calibration, TargetMetrics, pack, seal, unseal
from shared.errors import ContractError
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.names import (
    BUNDLES_CHANNEL,
    CALIBRATIONS_CHANNEL,
    bundle_key,
    bundle_pointer_key,
    calibration_key,
    succession_key,
)

KEEP_BUNDLES: Final = 5
EXPIRY_GRACE_S: Final = 120
_SWITCH: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return 1
"""


class BundleStore:
    """What one pool's trainer writes to Redis and reads back at a start. Every method raises RedisError."""

    def __init__(self, redis: Redis, pool: str, key: bytes | None, lease: Lease) -> None:
        """`key` signs what is written and verifies what is read, where it is set."""
        self._redis = redis
        self._pool = pool
        self._key = key
        self._lease = lease
        self.versions: list[str] = []
        """Those that are kept, the newest last, as this process last knew"""
        self.held_out: dict[str, Mapping[str, TargetMetrics]] = {}
        """Held-out errors, as the manifests have them, of the versions that this process has written or read"""

    async def load(self) -> Champion | None:
        """The bundle that the pointer names, or None; raises ContractError if it can't be used."""
        version = BundleGate(self._pool, self._key).wanted(await self._get(self._pointer), 0.0)
        return None if version is None else await self.load_version(version)

    async def load_version(self, version: str) -> Champion:
        """A bundle that is kept; raises ContractError if it isn't there or can't be used."""
        bundle = await self._read(version)
        return Champion(bundle, BundleModel(bundle), saved=True)

    async def kept(self) -> list[str]:
        """Versions whose blobs are there, oldest first; of those that are new here `held_out` is read."""
        prefix = bundle_key(self._pool, SCHEMA.hash, "")
        found = [key async for key in self._redis.scan_iter(match=f"{prefix}*", count=1000)]
        self.versions = sorted({bytes(key).decode().removeprefix(prefix) for key in found} - {"current"})
        for version in self.versions:
            if version not in self.held_out:
                with contextlib.suppress(ContractError):  # whoever asks for this version is told
                    await self._read(version)
        return self.versions

    async def load_memory(self) -> tuple[Memory, Change | None]:
        """What an earlier trainer left, and its last change; empty where there is none, or none that can be read."""
        blob = await self._get(succession_key(self._pool, SCHEMA.hash))
        if blob is None:
            return Memory(), None
        try:
            return last_change.decode(unseal(blob, self._key))
        except ContractError as error:
            structlog.get_logger().warning("memory of pin and last good version refused", reason=str(error))
            return Memory(), None

    async def save_memory(self, memory: Memory, change: Change | None) -> None:
        """Raises LeaseLostError if another trainer is active."""
        blob = seal(last_change.encode(memory, change), self._key)
        await self._switch(succession_key(self._pool, SCHEMA.hash), blob, "", b"")

    async def put(self, bundle: Bundle) -> None:
        """A blob without the pointer."""
        self.held_out[bundle.manifest.version] = bundle.manifest.metrics
        await self._redis.set(
            bundle_key(self._pool, SCHEMA.hash, bundle.manifest.version), seal(pack(bundle), self._key)
        )

    async def holds(self, version: str) -> bool:
        """Whether blob and pointer of a version are there."""
        pointer = await self._get(self._pointer)
        return pointer == version.encode() and await self.keeps(version)

    async def keeps(self, version: str) -> bool:
        """Whether the blob of a version is there."""
        return bool(await self._redis.exists(bundle_key(self._pool, SCHEMA.hash, version)))

    async def publish(self, bundle: Bundle, keep: Collection[str] = ()) -> None:
        """Blob, pointer, notice; raises LeaseLostError before the pointer if another trainer is active.

        `keep`: versions that stay although newer ones came.
        """
        version = bundle.manifest.version
        await self.put(bundle)
        notice = orjson.dumps({"pool": self._pool, "schema": SCHEMA.hash, "version": version})
        await self._switch(self._pointer, version.encode(), BUNDLES_CHANNEL, notice)
        # A blob of this name may carry the expiry of an earlier retirement.
        await self._redis.persist(bundle_key(self._pool, SCHEMA.hash, version))
        await self._retire(version, keep)

    async def publish_calibration(self, calibration: Calibration) -> None:
        """The calibration, then its notice; raises LeaseLostError if another trainer is active."""
        notice = {
            "pool": self._pool,
            "bundle_version": calibration.bundle_version,
            "sequence": calibration.sequence,
        }
        blob = seal(calibration.encode(), self._key)
        await self._switch(calibration_key(self._pool), blob, CALIBRATIONS_CHANNEL, orjson.dumps(notice))

    async def calibration_sequence(self) -> int:
        """Sequence number of the calibration that is there; 0 without a readable one."""
        blob = await self._get(calibration_key(self._pool))
        if blob is None:
            return 0
        try:
            return Calibration.decode(unseal(blob, self._key), pool=self._pool).sequence
        except ContractError:  # damaged, or signed by another key: the next one replaces it
            return 0

    async def _switch(self, key: str, value: bytes, channel: str, notice: bytes) -> None:
        lease = self._lease
        while not await self._redis.eval(_SWITCH, 2, lease.key, key, lease.token, value, channel, notice):
            # A store that was emptied has no lease either: take it again before giving up.
            if not await lease.claim():
                raise LeaseLostError(lease.key)

    async def _retire(self, newest: str, keep: Collection[str]) -> None:
        """Let all but the newest bundles and those to keep expire."""
        prefix = bundle_key(self._pool, SCHEMA.hash, "")
        if not self.versions:
            self.versions = await self.kept()
        self.versions = [version for version in self.versions if version != newest] + [newest]
        for version in self.versions[:-KEEP_BUNDLES]:
            if version in keep:
                await self._redis.persist(f"{prefix}{version}")
            else:
                self.versions.remove(version)
                self.held_out.pop(version, None)
                await self._redis.expire(f"{prefix}{version}", EXPIRY_GRACE_S)

    async def _read(self, version: str) -> Bundle:
        blob = await self._get(bundle_key(self._pool, SCHEMA.hash, version))
        bundle = BundleGate(self._pool, self._key).open(version, blob)
        self.held_out[version] = bundle.manifest.metrics
        return bundle

    @property
    def _pointer(self) -> str:
        return bundle_pointer_key(self._pool, SCHEMA.hash)

    async def _get(self, key: str) -> bytes | None:
        value = await self._redis.get(key)
        return value.encode() if isinstance(value, str) else value
