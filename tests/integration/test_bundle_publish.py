"""A bundle is published whole: whoever reads in the middle of it finds the old one or the new one."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from services.trainer.lease import Lease
from services.trainer.publish import BundleStore
from shared.bundle import Bundle, BundleGate
from shared.features import SCHEMA
from shared.names import bundle_key, bundle_pointer_key, trainer_lease_key
from tests.bundles import make_bundle
from tests.servers import RedisServer

POINTER = bundle_pointer_key("default", SCHEMA.hash)


class Interrupted(redis.asyncio.Redis):
    """A client after each of whose commands somebody else reads."""

    between: Callable[[str], Awaitable[None]] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        result = await super().execute_command(*args, **options)
        if self.between is not None:
            await self.between(str(args[0]))
        return result


@pytest.mark.parametrize("key", [None, b"a key of a fair length"])
async def test_between_any_two_commands_the_pointer_names_a_whole_bundle(redis: RedisServer, key: bytes | None) -> None:
    writer, reader = Interrupted.from_url(redis.url), Interrupted.from_url(redis.url)
    try:
        lease = Lease(writer, trainer_lease_key("default"), "token", 60_000)
        assert await lease.claim()
        store = BundleStore(writer, "default", key, lease)
        bundles = [make_bundle(created_unix_ms=1_800_000_000_000.0 + at, offset=at) for at in range(8)]
        await store.publish(bundles[0])
        for old, new in itertools.pairwise(bundles):
            seen = await _seen_while(writer, reader, key, lambda new=new: store.publish(new))
            versions = [version for _, version in seen]
            switch = versions.index(new.manifest.version)
            assert set(versions[:switch]) == {old.manifest.version}
            assert set(versions[switch:]) == {new.manifest.version}
            assert [command for command, _ in seen[:switch]] == ["SET"], "the blob comes before the pointer, alone"
        kept = await store.kept()
        lasting = [name for name in kept if await reader.ttl(bundle_key("default", SCHEMA.hash, name)) == -1]
        assert lasting == [bundle.manifest.version for bundle in bundles[-5:]]
    finally:
        await writer.aclose()
        await reader.aclose()


async def _seen_while(
    writer: Interrupted, reader: Interrupted, key: bytes | None, publish: Callable[[], Awaitable[None]]
) -> list[tuple[str, str]]:
    """(command, version) after each command of the writer's: what a router or predictor would then serve, verified."""
    seen = []

    async def read(command: str) -> None:
        gate = BundleGate("default", key)
        version = gate.wanted(await reader.get(POINTER), 0.0)
        assert version is not None
        found: Bundle = gate.open(version, await reader.get(bundle_key("default", SCHEMA.hash, version)))
        assert found.manifest.version == version
        seen.append((command, version))

    writer.between = read
    try:
        await publish()
    finally:
        writer.between = None
    return seen
