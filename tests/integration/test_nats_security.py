"""NATS with TLS, NKeys and credentials: a real server that refuses strangers, the services' own clients."""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nkeys
from prometheus_client import CollectorRegistry

from services.router.nats_link import NatsLink
from shared.names import samples_subject
from shared.settings import NatsSettings, StreamSettings
from tests.certificates import Authority, write
from tests.integration.collector.running import running_collector
from tests.integration.collector.test_publish import sample
from tests.integration.trainer_service import running_trainer
from tests.servers import NatsServer, RedisServer, fetch, free_port, nats_server, until


def keys(prefix: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def signed(issuer: Any, subject: Any, name: str, claims: dict[str, Any]) -> str:
    """A token as `nsc` makes them."""

    def part(document: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()

    body: dict[str, Any] = {
        "iat": 1_700_000_000,
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": name,
        "nats": {"version": 2, **claims},
    }
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).rstrip(b"=").decode()
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{text}.{base64.urlsafe_b64encode(issuer.sign(text.encode())).rstrip(b'=').decode()}"


def account(operator: Any, who: Any, name: str, *, jetstream: bool) -> str:
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1) if jetstream else {}
    return signed(operator, who, name, {"type": "account", "limits": {**unlimited, "wildcards": True, **storage}})


@contextlib.asynccontextmanager
async def listening(settings: NatsSettings, heard: list[bytes]) -> AsyncIterator[NatsLink]:
    """A router's connection, which hears of each sample."""
    link = NatsLink(settings.connect_options(), CollectorRegistry())
    link.subscribe(samples_subject("default"), heard.append)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def delivers(settings: NatsSettings, redis: RedisServer) -> None:
    """What the collector stores comes to a router and to the trainer, each with its own connection."""
    heard: list[bytes] = []
    async with (
        listening(settings, heard) as link,
        running_collector(settings.servers, nats=settings) as collector,
        running_trainer(settings, redis.url) as trainer,
    ):
        await until(lambda: link.connected, "the router is connected")
        assert (await collector.post(json.dumps(sample()))).status_code == 200
        await until(lambda: heard, "the router has heard of the sample")

        async def judged() -> bool:  # of another schema than its own
            _, page = await fetch(f"{trainer.url}/metrics")
            return b'leadtime_trainer_samples_rejected_total{reason="schema"} 1.0' in page

        await until(judged, "the trainer has the sample")


async def is_refused(settings: NatsSettings) -> None:
    async with running_collector(settings.servers, ready=False, nats=settings) as collector:

        async def failing() -> bool:
            return await collector.metric("leadtime_collector_nats_errors_total") > 0

        await until(failing, "the server refused it")
        assert not await collector.ready()


async def test_tls_with_certificates_of_both_sides(redis: RedisServer, tmp_path: Path) -> None:
    authority = Authority.make()
    theirs, ours = write(tmp_path, authority, "server"), write(tmp_path, authority, "client")
    config = tmp_path / "nats.conf"
    pair = f'cert_file: "{theirs.certificate}", key_file: "{theirs.key}", ca_file: "{theirs.authority}"'
    config.write_text(f"tls {{ {pair}, verify: true }}")
    async with nats_server(tmp_path / "store", extra=["-c", str(config)]) as server:
        url = server.url.replace("nats://127.0.0.1", "tls://localhost")
        own = {"tls_cert_file": ours.certificate, "tls_key_file": ours.key}
        await delivers(NatsSettings(servers=url, tls_ca_file=ours.authority, **own), redis)
        await is_refused(NatsSettings(servers=url, tls_ca_file=ours.authority))


async def test_an_nkey_opens_what_it_is_allowed_to(redis: RedisServer, tmp_path: Path) -> None:
    user, stranger = keys(nkeys.PREFIX_BYTE_USER), keys(nkeys.PREFIX_BYTE_USER)
    config, seed, wrong = tmp_path / "nats.conf", tmp_path / "seed", tmp_path / "wrong"
    config.write_text(f"authorization {{ users: [ {{ nkey: {user.public_key.decode()} }} ] }}")
    seed.write_bytes(user.seed)
    wrong.write_bytes(stranger.seed)
    async with nats_server(tmp_path / "store", extra=["-c", str(config)]) as server:
        await delivers(NatsSettings(servers=server.url, nkey_seed_file=seed), redis)
        await is_refused(NatsSettings(servers=server.url, nkey_seed_file=wrong))


async def test_credentials_of_an_operators_user_are_taken(redis: RedisServer, tmp_path: Path) -> None:
    operator, system = keys(nkeys.PREFIX_BYTE_OPERATOR), keys(nkeys.PREFIX_BYTE_ACCOUNT)
    ours, user = keys(nkeys.PREFIX_BYTE_ACCOUNT), keys(nkeys.PREFIX_BYTE_USER)
    config, credentials = tmp_path / "nats.conf", tmp_path / "user.creds"
    config.write_text(
        f"operator: {signed(operator, operator, 'operator', {'type': 'operator'})}\n"
        f"system_account: {system.public_key.decode()}\n"
        "resolver: MEMORY\n"
        f"resolver_preload: {{\n"
        f"  {system.public_key.decode()}: {account(operator, system, 'system', jetstream=False)}\n"
        f"  {ours.public_key.decode()}: {account(operator, ours, 'leadtime', jetstream=True)}\n}}\n"
    )
    token = signed(
        ours, user, "collector", {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
    )
    credentials.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    async with nats_server(tmp_path / "store", extra=["-c", str(config)]) as server:
        await delivers(NatsSettings(servers=server.url, credentials_file=credentials), redis)
        await is_refused(NatsSettings(servers=server.url))


async def test_of_several_servers_those_that_live_are_used(tmp_path: Path) -> None:
    """Three servers of one cluster and three replicas; the one that a client is connected to goes away."""
    routes = [free_port() for _ in range(3)]
    peers = ",".join(f"nats://127.0.0.1:{port}" for port in routes)

    def member(number: int) -> list[str]:
        return [
            "--cluster", f"nats://127.0.0.1:{routes[number]}", "--cluster_name", "test", "--routes", peers,
            "--server_name", f"n{number}",
        ]  # fmt: skip

    servers = [NatsServer(tmp_path / f"n{number}", member(number)) for number in range(3)]
    for each in servers:
        each.launch()  # each waits for the others before it is healthy
    async with contextlib.AsyncExitStack() as stopping:
        for each in servers:
            stopping.push_async_callback(each.stop)
        for each in servers:
            await each.ready(each.healthy)
        urls = ",".join(each.url for each in servers)
        stream = StreamSettings(replicas=3)
        spool = tmp_path / "spool"
        async with running_collector(urls, stream=stream, spool_dir=spool, ack_timeout_ms=3_000) as collector:
            assert (await collector.post(json.dumps(sample(1)))).status_code == 200
            await servers[0].kill()
            for number in range(2, 12):
                assert (await collector.post(json.dumps(sample(number)))).status_code == 200

            async def empty() -> bool:
                return await collector.metric("leadtime_collector_spooled_samples") == 0.0

            await until(empty, "everything is in the stream")
            done = await collector.metric('leadtime_collector_published_total{fate="acknowledged"}')
            doubled = await collector.metric('leadtime_collector_published_total{fate="duplicate"}')
            assert done + doubled >= 11
