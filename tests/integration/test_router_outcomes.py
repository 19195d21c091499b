"""Outcomes come back over a real NATS, through its restarts."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import structlog
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from services.router.nats_link import NatsLink
from services.router.outcomes import OutcomeSubscriber
from shared.names import samples_subject, unsampled_subject
from shared.samples import LatencySample, encode_sample
from shared.settings import NatsSettings
from shared.verdicts import Reason, Unsampled, encode_unsampled
from tests.samples import make_sample
from tests.servers import NatsServer, nats_server, until


def to(server: NatsServer) -> dict[str, Any]:
    return NatsSettings(servers=server.url).connect_options()


@contextlib.asynccontextmanager
async def subscribed(options: dict[str, Any]) -> AsyncIterator[tuple[list[LatencySample], CollectorRegistry]]:
    seen: list[LatencySample] = []
    registry = CollectorRegistry()
    link = NatsLink(options, registry)
    OutcomeSubscriber("default", link, seen.append, registry)
    task = asyncio.create_task(link.run())
    try:
        yield seen, registry
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def publish_until_seen(url: str, seen: list[LatencySample], name: str) -> None:
    """Plain NATS keeps nothing: publish until the subscriber is there."""
    client = await nats.connect(url)

    async def seen_after_publishing() -> bool:
        await client.publish(samples_subject("default"), encode_sample(make_sample(name)))
        await client.flush()
        return any(s.decision_id == name for s in seen)

    try:
        await until(seen_after_publishing, f"sample {name} is seen")
    finally:
        await client.close()


async def test_samples_reach_the_router_and_damage_is_counted(nats: NatsServer) -> None:
    async with subscribed(to(nats)) as (seen, registry):
        await publish_until_seen(nats.url, seen, "first")
        await _raw(nats, b"{not a sample")
        await until(
            lambda: registry.get_sample_value("leadtime_router_outcomes_total", {"result": "invalid"}) == 1,
            "damage is counted",
        )


async def test_the_end_of_a_request_without_a_sample_reaches_the_router(nats: NatsServer) -> None:
    seen: list[Unsampled] = []
    registry = CollectorRegistry()
    link = NatsLink(to(nats), registry)
    OutcomeSubscriber("default", link, lambda _: None, registry, seen.append)
    task = asyncio.create_task(link.run())
    end = Unsampled(decision_id="a", reason=Reason.NOT_SUCCESS, status=500, endpoint="127.0.0.1:1")
    try:

        async def told() -> bool:
            await _raw(nats, encode_unsampled(end), unsampled_subject("default"))
            return bool(seen)

        await until(told, "the router is told")
        await _raw(nats, b"{damage", unsampled_subject("default"))
        await until(
            lambda: registry.get_sample_value("leadtime_router_outcomes_total", {"result": "invalid"}) == 1,
            "damage is counted",
        )
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert seen[0] == end
    assert registry.get_sample_value("leadtime_router_outcomes_total", {"result": "no_sample"}) == len(seen)


async def test_they_come_again_after_a_restart(nats: NatsServer) -> None:
    async with subscribed(to(nats)) as (seen, registry):
        await publish_until_seen(nats.url, seen, "before")
        await nats.kill()
        await until(lambda: registry.get_sample_value("leadtime_router_nats_connected") == 0, "the loss is seen")
        await nats.start()
        await publish_until_seen(nats.url, seen, "after")


async def test_a_connection_that_the_client_gave_up_is_made_anew(tmp_path: Path) -> None:
    """nats-py closes for good when a server that reloads its passwords throws it out."""
    config = tmp_path / "nats.conf"

    def allow(password: str) -> None:
        config.write_text(f'authorization {{ user: leadtime, password: "{password}" }}\n')

    allow("right")
    async with nats_server(tmp_path, extra=["-c", str(config)]) as server:
        options = NatsSettings(servers=server.url, user="leadtime", password=SecretStr("right")).connect_options()
        url = server.url.replace("nats://", "nats://leadtime:right@")
        async with subscribed(options) as (seen, registry):
            await publish_until_seen(url, seen, "before")
            allow("another")
            server.send(signal.SIGHUP)
            await until(lambda: registry.get_sample_value("leadtime_router_nats_connected") == 0, "the router is out")
            allow("right")
            server.send(signal.SIGHUP)
            await until(lambda: registry.get_sample_value("leadtime_router_nats_connected") == 1, "it is in again")
            await publish_until_seen(url, seen, "after")


async def test_the_router_waits_for_a_nats_that_is_not_there_yet(nats: NatsServer) -> None:
    await nats.stop()
    async with subscribed(to(nats)) as (seen, _):
        await nats.start()
        await publish_until_seen(nats.url, seen, "later")


async def _raw(server: NatsServer, data: bytes, subject: str = samples_subject("default")) -> None:
    client = await nats.connect(server.url)
    await client.publish(subject, data)
    await client.flush()
    await client.close()


async def test_an_outage_is_logged_once_however_often_the_client_tries() -> None:
    link = NatsLink({}, CollectorRegistry())
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            await link._on_error(ConnectionRefusedError())
        await link._on_reconnect()
        await link._on_error(ConnectionRefusedError())
    assert [entry["event"] for entry in logs] == ["nats error", "nats answers again", "nats error"]


async def test_a_message_whose_handling_fails_is_counted_and_the_next_is_read(nats: NatsServer) -> None:
    seen: list[bytes] = []
    registry = CollectorRegistry()
    link = NatsLink(to(nats), registry)

    def handle(payload: bytes) -> None:
        if payload == b"bad":
            raise ValueError(payload)
        seen.append(payload)

    link.subscribe("test.subject", handle)
    task = asyncio.create_task(link.run())

    async def read() -> bool:
        await _raw(nats, b"bad", "test.subject")
        await _raw(nats, b"good", "test.subject")
        failed = registry.get_sample_value("leadtime_router_nats_unhandled_total")
        return bool(failed and seen)

    try:
        await until(read, "a failure is counted and what comes after it is read")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert set(seen) == {b"good"}
