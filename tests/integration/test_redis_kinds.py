"""Bundles and leases through sentinels, a cluster, an ACL user and TLS: real servers, the services' own clients."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from bench.queueing import as_samples, observe
from services.router.predict.bundles import BundleWatcher
from services.router.predict.metrics import PredictMetrics
from shared.clock import SystemClock
from shared.redis_connection import connect
from shared.settings import RedisSettings
from tests.certificates import Authority, write
from tests.integration.trainer_service import publish, running_trainer, stream
from tests.servers import NatsServer, RedisSentinel, RedisServer, free_port, redis_server, until

SAMPLES = as_samples(observe(300, seed=5))
ACL = "on >secret resetchannels ~leadtime:* &leadtime:* -@all +@read +@write +@pubsub +@scripting +@connection"


async def command(server: RedisServer, *words: str, **options: str) -> object:
    client = Redis.from_url(server.url, protocol=2, **options)
    try:
        return await client.execute_command(*words)
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def watching(settings: RedisSettings) -> AsyncIterator[BundleWatcher]:
    """What a router sees of the bundles."""
    clock = SystemClock()
    client = connect(settings, retries=0)
    watcher = BundleWatcher(client, "default", None, PredictMetrics(CollectorRegistry(), clock), clock)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


async def a_bundle_goes_from_trainer_to_router(nats: NatsServer, settings: RedisSettings) -> None:
    async with (
        stream(nats.url) as context,
        watching(settings) as router,
        running_trainer(nats.url, settings) as trainer,
    ):
        await publish(context, SAMPLES[:60])
        version = await trainer.published()
        await until(lambda: router.manifest and router.manifest.version >= version, "the router has the bundle")
        await publish(context, SAMPLES[60:])
        await trainer.taken(len(SAMPLES))
        await until(lambda: router.calibration is not None, "the router has a calibration")


async def test_a_cluster_serves_bundles_and_leases(nats: NatsServer, tmp_path: Path) -> None:
    extra = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf")]
    async with redis_server(tmp_path, extra=extra) as server:
        await command(server, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")

        async def whole() -> bool:
            return b"cluster_state:ok" in bytes(await command(server, "CLUSTER", "INFO"))  # type: ignore[arg-type]

        await until(whole, "the cluster serves")
        url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{server.port}"
        await a_bundle_goes_from_trainer_to_router(nats, RedisSettings(url=url))


async def test_a_cluster_may_come_later_and_go_for_a_while(nats: NatsServer, tmp_path: Path) -> None:
    extra = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf")]
    async with redis_server(tmp_path, extra=extra) as server:
        await command(server, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        await server.stop()
        settings = RedisSettings(url=f"redis+cluster://127.0.0.1:{server.port}")
        async with (
            stream(nats.url) as context,
            watching(settings) as router,
            running_trainer(nats.url, settings, lease_ttl_ms=1_000) as trainer,
        ):
            await publish(context, SAMPLES[:60])
            await server.start()
            first = await trainer.published()
            await server.restart()
            await publish(context, SAMPLES[60:])
            second = await trainer.published(after=first)
            await until(lambda: router.manifest and router.manifest.version >= second, "the router has the new bundle")


async def test_sentinels_name_the_master_and_a_failover_is_followed(nats: NatsServer, tmp_path: Path) -> None:
    for name in ("one", "two", "sentinel"):
        (tmp_path / name).mkdir()
    async with redis_server(tmp_path / "one") as one:
        follow = ["--replicaof", f"127.0.0.1 {one.port}", "--repl-diskless-sync-delay", "0"]
        async with redis_server(tmp_path / "two", extra=follow) as two:
            sentinel = RedisSentinel(tmp_path / "sentinel", one)
            await sentinel.start()
            try:
                await until(lambda: "+slave" in sentinel.log(), "the sentinel knows the replica")
                url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/leadtime/0"
                settings = RedisSettings(url=url)
                async with (
                    stream(nats.url) as context,
                    watching(settings) as router,
                    running_trainer(nats.url, settings, lease_ttl_ms=1_000) as trainer,
                ):
                    await publish(context, SAMPLES[:60])
                    first = await trainer.published()
                    await one.kill()
                    await until(lambda: "+switch-master" in sentinel.log(), "the replica has taken over")
                    await publish(context, SAMPLES[60:])
                    second = await trainer.published(after=first)
                    await until(
                        lambda: router.manifest and router.manifest.version >= second, "the router has the new bundle"
                    )
                    assert await command(two, "EXISTS", "leadtime:lease:trainer:{default}") == 1
            finally:
                await sentinel.stop()


async def test_an_acl_user_with_the_rights_that_are_documented_is_enough(nats: NatsServer, tmp_path: Path) -> None:
    async with redis_server(tmp_path, extra=["--user", "leadtime", *ACL.split(), "--user", "default", "off"]) as server:
        settings = RedisSettings(url=server.url, username="leadtime", password="secret")
        await a_bundle_goes_from_trainer_to_router(nats, settings)
        client = connect(settings, retries=0)
        with pytest.raises(NoPermissionError):
            await client.set("other", "1")
        await client.aclose()


@contextlib.asynccontextmanager
async def tls_in_front(server: RedisServer, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The Redis-protocol server of the wheel has no TLS of its own: this ends TLS before it. Yields the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, back), pump(to, writer))

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def test_tls_with_certificates_of_both_sides(nats: NatsServer, redis: RedisServer, tmp_path: Path) -> None:
    authority = Authority.make()
    ours, theirs = write(tmp_path, authority, "client"), write(tmp_path, authority, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(theirs.authority))
    context.load_cert_chain(theirs.certificate, theirs.key)
    context.verify_mode = ssl.CERT_REQUIRED
    async with tls_in_front(redis, context) as port:
        settings = RedisSettings(
            url=f"rediss://localhost:{port}/0",
            tls_ca_file=ours.authority,
            tls_cert_file=ours.certificate,
            tls_key_file=ours.key,
        )
        await a_bundle_goes_from_trainer_to_router(nats, settings)
        stranger = RedisSettings(url=f"rediss://localhost:{port}/0", tls_ca_file=ours.authority)
        client = connect(stranger, retries=0)
        with pytest.raises(Exception, match=r"(?i)ssl|tls|certificate|connection"):
            await client.ping()
        await client.aclose()


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_call(
    redis: RedisServer, retries: int
) -> None:
    client = connect(RedisSettings(url=redis.url), retries=retries)
    try:
        assert await client.set("key", "value")
        for _ in range(5):
            assert await command(redis, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

            async def gone() -> bool:
                listed = bytes(await command(redis, "CLIENT", "LIST", "TYPE", "normal"))  # type: ignore[arg-type]
                return listed.count(b" addr=") <= 1

            await until(gone, "only the asking connection is left")
            assert await client.get("key") == b"value"
    finally:
        await client.aclose()
