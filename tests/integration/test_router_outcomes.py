"""Outcomes come back over a real NATS, through its restarts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import nats
from prometheus_client import CollectorRegistry

from services.router.outcomes import OutcomeSubscriber
from shared.names import samples_subject
from shared.samples import LatencySample, encode_sample
from shared.settings import NatsSettings
from tests.servers import NatsServer, until
from tests.unit.router.test_decisions import sample


@contextlib.asynccontextmanager
async def subscribed(server: NatsServer) -> AsyncIterator[tuple[list[LatencySample], CollectorRegistry]]:
    seen: list[LatencySample] = []
    registry = CollectorRegistry()
    options = NatsSettings(servers=server.url).connect_options()
    task = asyncio.create_task(OutcomeSubscriber("default", options, seen.append, registry).run())
    try:
        yield seen, registry
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def publish_until_seen(server: NatsServer, seen: list[LatencySample], name: str) -> None:
    """Plain NATS keeps nothing: publish until the subscriber is there."""
    client = await nats.connect(server.url)

    async def seen_after_publishing() -> bool:
        await client.publish(samples_subject("default"), encode_sample(sample(name)))
        await client.flush()
        return any(s.decision_id == name for s in seen)

    try:
        await until(seen_after_publishing, f"sample {name} is seen")
    finally:
        await client.close()


async def test_samples_reach_the_router_and_damage_is_counted(nats: NatsServer) -> None:
    async with subscribed(nats) as (seen, registry):
        await publish_until_seen(nats, seen, "first")
        await _raw(nats, b"{not a sample")
        await until(
            lambda: registry.get_sample_value("leadtime_router_outcomes_total", {"result": "invalid"}) == 1,
            "damage is counted",
        )


async def test_they_come_again_after_a_restart(nats: NatsServer) -> None:
    async with subscribed(nats) as (seen, registry):
        await publish_until_seen(nats, seen, "before")
        await nats.kill()
        await until(lambda: registry.get_sample_value("leadtime_router_nats_connected") == 0, "the loss is seen")
        await nats.start()
        await publish_until_seen(nats, seen, "after")


async def test_the_router_waits_for_a_nats_that_is_not_there_yet(nats: NatsServer) -> None:
    await nats.stop()
    async with subscribed(nats) as (seen, _):
        await nats.start()
        await publish_until_seen(nats, seen, "later")


async def _raw(server: NatsServer, data: bytes) -> None:
    client = await nats.connect(server.url)
    await client.publish(samples_subject("default"), data)
    await client.flush()
    await client.close()
