"""The edge to Redis: blob, then pointer, then notice. A reader in the middle sees the old bundle or the new one.

A bundle is an immutable sealed blob under its version. The pointer is switched by a script that first looks whether
this process still holds the lease, so a trainer that was replaced can't overwrite its successor's bundle. Blobs older
than the newest five expire after a grace in which a slow reader may still fetch them.
"""

from typing import Final

import orjson
from redis.asyncio import Redis

from services.trainer.champion import Champion
from services.trainer.lease import Lease, LeaseLostError
from shared.bundle import Bundle, BundleGate, Calibration, pack, seal, unseal
from shared.errors import ContractError
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.names import (
    BUNDLES_CHANNEL,
    CALIBRATIONS_CHANNEL,
    bundle_key,
    bundle_pointer_key,
    calibration_key,
)

KEEP_BUNDLES: Final = 5
EXPIRY_GRACE_S: Final = 120
_SWITCH: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
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
        self._versions: list[str] | None = None

    async def load(self) -> Champion | None:
        """The bundle that the pointer names, or None; raises ContractError if it can't be used."""
        gate = BundleGate(self._pool, self._key)
        version = gate.wanted(await self._get(bundle_pointer_key(self._pool, SCHEMA.hash)), 0.0)
        if version is None:
            return None
        bundle = gate.open(version, await self._get(bundle_key(self._pool, SCHEMA.hash, version)))
        return Champion(bundle, BundleModel(bundle), saved=True)

    async def holds(self, version: str) -> bool:
        """Whether blob and pointer of a version are there."""
        pointer = await self._get(bundle_pointer_key(self._pool, SCHEMA.hash))
        blobs = await self._redis.exists(bundle_key(self._pool, SCHEMA.hash, version))
        return pointer == version.encode() and bool(blobs)

    async def publish(self, bundle: Bundle) -> None:
        """Blob, pointer, notice; raises LeaseLostError before the pointer if another trainer is active."""
        version = bundle.manifest.version
        key = bundle_key(self._pool, SCHEMA.hash, version)
        await self._redis.set(key, seal(pack(bundle), self._key))
        notice = orjson.dumps({"pool": self._pool, "schema": SCHEMA.hash, "version": version})
        pointer = bundle_pointer_key(self._pool, SCHEMA.hash)
        await self._switch(pointer, version.encode(), BUNDLES_CHANNEL, notice)
        # A blob of this name may carry the expiry of an earlier retirement.
        await self._redis.persist(key)
        await self._retire(version)

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

    async def _retire(self, newest: str) -> None:
        """Let all but the newest bundles expire."""
        prefix = bundle_key(self._pool, SCHEMA.hash, "")
        if self._versions is None:
            found = [key async for key in self._redis.scan_iter(match=f"{prefix}*", count=1000)]
            names = {bytes(key).decode().removeprefix(prefix) for key in found}
            self._versions = sorted(names - {"current", newest})
        self._versions = [version for version in self._versions if version != newest] + [newest]
        while len(self._versions) > KEEP_BUNDLES:
            await self._redis.expire(f"{prefix}{self._versions.pop(0)}", EXPIRY_GRACE_S)

    async def _get(self, key: str) -> bytes | None:
        value = await self._redis.get(key)
        return value.encode() if isinstance(value, str) else value
