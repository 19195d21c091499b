"""What is slow or gone beside the request path costs it nothing, and a flood finds every queue bounded."""

import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from bench.queueing import as_samples, observe
from shared.samples import encode_decision
from sim.extproc_client import ExtProcClient
from sim.model_server import ModelServer
from sim.spec import ServerSpec
from tests.bundles import make_bundle
from tests.fakes.decisions import make_decision
from tests.fakes.entries import SERVED, make_entry, make_message
from tests.fakes.fake_predictor import fake_predictor
from tests.fakes.slow_proxy import slow_proxy
from tests.integration.collector.running import stored_count
from tests.integration.test_life_of_services import PATH, Service
from tests.integration.trainer_service import publish, stream
from tests.predictors import publish as publish_bundle
from tests.servers import NatsServer, RedisServer, ServerProcess, fetch, free_port, until

PUSHED_OUT = 'leadtime_collector_published_total{fate="pushed_out"}'
# The model server runs in the tests' own loop, which sends the flood as well.
PATIENT_MS = "10000"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 100}]}).encode()


async def metric(url: str, line: str) -> float:
    _, body = await fetch(f"{url}/metrics")
    found = (float(text.rpartition(" ")[2]) for text in body.decode().splitlines() if text.startswith(line + " "))
    return next(found, 0.0)


def logged(number: int) -> Any:
    decision = make_decision(SERVED, decision_id=f"id-{number}")
    return make_message(make_entry(decision=encode_decision(decision)))


async def picks(address: str, count: int) -> list[float]:
    """Milliseconds of each of so many decisions, one after the other; every one names an endpoint."""
    loop = asyncio.get_running_loop()
    spent = []
    async with ExtProcClient(address) as client:
        for _ in range(count):
            began_s = loop.time()
            assert (await client.pick(PATH, BODY)).destinations
            spent.append((loop.time() - began_s) * 1e3)
    return spent


@pytest.mark.parametrize("bytes_per_s", [0, 2_000])
async def test_slow_nats_redis_and_predictor_do_not_slow_a_decision(
    nats: NatsServer, redis: RedisServer, tmp_path: Path, bytes_per_s: int
) -> None:
    """Each behind a proxy that lets nothing through any more, or hardly anything. The predictor is left out after its
    first time-outs; a decision never takes longer than its budget.
    """
    server = ModelServer(ServerSpec(name="s", models=("m",)), asyncio.get_running_loop())
    await server.start()
    nats_port = int(nats.url.rpartition(":")[2])
    async with (
        fake_predictor() as predictor,
        slow_proxy(nats_port) as slow_nats,
        slow_proxy(redis.port) as slow_redis,
        slow_proxy(predictor.port) as slow_predictor,
    ):
        await publish_bundle(redis.url, make_bundle())
        router = Service(
            "router",
            tmp_path,
            LEADTIME_NATS_SERVERS=f"nats://127.0.0.1:{slow_nats.port}",
            LEADTIME_REDIS_URL=f"redis://127.0.0.1:{slow_redis.port}/0",
            LEADTIME_ROUTER_ENDPOINTS=f"127.0.0.1:{server.port}",
            LEADTIME_ROUTER_PREDICTORS=f"http://127.0.0.1:{slow_predictor.port}",
        )
        try:
            await router.start()
            await until(router.is_ready, "the router is ready")
            address, url = f"127.0.0.1:{router.extproc}", f"http://127.0.0.1:{router.port}"

            async def own_copy() -> bool:
                _, body = await fetch(f"{url}/v1/stats")
                return bool(json.loads(body)["ladder"]["own"]["bundle"])

            await until(own_copy, "the router has its own copy of the bundle")
            usual = await picks(address, 40)
            for proxy in (slow_nats, slow_redis, slow_predictor):
                proxy.bytes_per_s = bytes_per_s
            slowed = await picks(address, 80)
            # One predictor call's deadline is 40 ms; the rest is a machine that does other things too.
            assert max(slowed) < 100.0 + 10 * max(usual)
            settled = slowed[40:]
            assert statistics.median(settled) < 5.0 + 3 * statistics.median(usual)
            assert await router.is_ready()
        finally:
            await router.kill()
            server.close()


async def test_a_flood_of_requests_while_nats_is_frozen_leaves_the_router_as_large_as_it_was(
    nats: NatsServer, tmp_path: Path
) -> None:
    """It has a peer to tell of each of them, and can't. Bodies of 16 KB that were kept would be seen."""
    server = ModelServer(ServerSpec(name="s", models=("m",)), asyncio.get_running_loop())
    await server.start()
    environment = {
        "LEADTIME_NATS_SERVERS": nats.url,
        "LEADTIME_ROUTER_ENDPOINTS": f"127.0.0.1:{server.port}",
        "LEADTIME_ROUTER_PREDICTORS": "",
        "LEADTIME_ROUTER_PREFIX_SALT": "of the test",
        "LEADTIME_ROUTER_SCRAPE_TIMEOUT_MS": PATIENT_MS,
    }
    router, peer = (
        Service("router", tmp_path / "one", **environment),
        Service("router", tmp_path / "two", **environment),
    )
    prompts = ["".join(random.Random(number).choices("abcdefgh ", k=16_384)) for number in range(64)]
    numbers = itertools.count()

    async def send(client: ExtProcClient, count: int) -> None:
        for _ in range(count):
            message = {"role": "user", "content": prompts[next(numbers) % len(prompts)]}
            body = json.dumps({"model": "m", "messages": [message]}).encode()
            assert (await client.pick(PATH, body)).destinations

    async def idle(url: str) -> bool:
        return await metric(url, "leadtime_router_own_requests") == 0

    try:
        for service in (router, peer):
            service.log_file.parent.mkdir()
            await service.start()
        for service in (router, peer):
            await until(service.is_ready, "the router is ready")
        url = f"http://127.0.0.1:{router.port}"

        async def hears_the_other() -> bool:
            return await metric(url, "leadtime_router_peers") == 1

        await until(hears_the_other, "the router has a peer")
        async with ExtProcClient(f"127.0.0.1:{router.extproc}") as client:
            await asyncio.gather(*(send(client, 30) for _ in range(16)))
            nats.send(signal.SIGSTOP)
            await asyncio.gather(*(send(client, 10) for _ in range(16)))
            process = psutil.Process(router.pid)
            before = process.memory_info().rss
            await asyncio.gather(*(send(client, 80) for _ in range(16)))
            grown = process.memory_info().rss - before
        assert grown < 12 * 1024 * 1024
        await until(lambda: idle(url), "nothing is under way any more")
        nats.send(signal.SIGCONT)
        await until(hears_the_other, "the router has found its peer again")
        theirs = f"http://127.0.0.1:{peer.port}"

        async def agrees() -> bool:
            _, body = await fetch(f"{theirs}/v1/stats")
            return bool(json.loads(body)["inflight_requests"] == 0)

        await until(agrees, "the peer counts nothing under way either")
    finally:
        nats.send(signal.SIGCONT)
        await router.kill()
        await peer.kill()
        server.close()


async def test_a_thousand_requests_under_way_keep_no_liveness_probe_waiting(tmp_path: Path) -> None:
    server = ModelServer(ServerSpec(name="s", models=("m",)), asyncio.get_running_loop())
    await server.start()
    router = Service(
        "router",
        tmp_path,
        LEADTIME_ROUTER_ENDPOINTS=f"127.0.0.1:{server.port}",
        LEADTIME_ROUTER_PREDICTORS="",
        LEADTIME_ROUTER_SCRAPE_TIMEOUT_MS=PATIENT_MS,
    )
    url = f"http://127.0.0.1:{router.port}"

    async def under_way(count: int) -> bool:
        _, body = await fetch(f"{url}/v1/stats")
        return bool(json.loads(body)["inflight_requests"] == count)

    async def probe() -> None:
        while True:
            # Without an answer in time the status is 0.
            assert (await fetch(f"{url}/healthz", timeout_s=20.0))[0] == 200
            await asyncio.sleep(0.05)

    try:
        await router.start()
        await until(router.is_ready, "the router is ready")
        probing = asyncio.create_task(probe())
        async with ExtProcClient(f"127.0.0.1:{router.extproc}") as client:
            streams = [client.stream() for _ in range(1_000)]
            for start in range(0, len(streams), 50):
                answers = await asyncio.gather(*(one.request(PATH, BODY) for one in streams[start : start + 50]))
                assert all(answer.destinations for answer in answers)
            assert await under_way(1_000)
            assert (await client.pick(PATH, BODY)).destinations
            await asyncio.gather(*(one.end() for one in streams))
        await until(lambda: under_way(0), "all have ended")
        assert router.running
        assert not probing.done(), probing
        probing.cancel()
    finally:
        await router.kill()
        server.close()


async def test_a_flood_of_access_logs_while_nats_is_frozen_leaves_the_collector_as_large_as_it_was(
    nats: NatsServer, tmp_path: Path
) -> None:
    """Of 20,000 samples that can't be delivered, those that find room in memory or on disk arrive later, once each."""
    als = free_port()
    collector = Service(
        "collector",
        tmp_path,
        LEADTIME_NATS_SERVERS=nats.url,
        LEADTIME_COLLECTOR_QUEUE_SAMPLES="1000",
        LEADTIME_COLLECTOR_ACK_TIMEOUT_MS="500",
        LEADTIME_COLLECTOR_SPOOL_DIR=str(tmp_path / "spool"),
        LEADTIME_COLLECTOR_SPOOL_MAX_BYTES=str(2 * 1024 * 1024),
    )
    collector._env["LEADTIME_COLLECTOR_ALS_PORT"] = str(als)  # type: ignore[index]
    url = f"http://127.0.0.1:{collector.port}"

    async def send(begin: int, count: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{als}") as channel:
            stub = als_pb2_grpc.AccessLogServiceStub(channel)
            for start in range(begin, begin + count, 500):
                message = als_pb2.StreamAccessLogsMessage()
                message.http_logs.log_entry.extend(logged(number) for number in range(start, start + 500))
                await stub.StreamAccessLogs(iter([message]))

    try:
        await collector.start()
        await until(collector.is_ready, "the collector is ready")
        nats.send(signal.SIGSTOP)
        await send(0, 6_000)
        process = psutil.Process(collector.pid)
        before = process.memory_info().rss
        await send(6_000, 14_000)
        grown = process.memory_info().rss - before
        assert grown < 20 * 1024 * 1024

        async def full() -> bool:  # memory and disk
            return await metric(url, PUSHED_OUT) > 0

        await until(full, "more came than there is room for")
        assert await collector.alive()
        assert await metric(url, "leadtime_collector_spooled_samples") > 0
        assert sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.spool")) <= 2 * 1024 * 1024

        nats.send(signal.SIGCONT)

        async def delivered() -> bool:  # one that was sent, came back and was pushed out may have arrived after all
            lost = await metric(url, PUSHED_OUT)
            return await stored_count(nats.url) >= 20_000 - lost

        await until(delivered, "everything that wasn't counted as lost is delivered", timeout_s=60.0, poll_s=0.1)
        assert await stored_count(nats.url) <= 20_000
    finally:
        nats.send(signal.SIGCONT)
        await collector.kill()


async def test_a_flood_of_samples_leaves_the_trainer_as_large_as_its_window(
    nats: NatsServer, redis: RedisServer, tmp_path: Path
) -> None:
    samples = as_samples(observe(9_000, seed=8))
    port = free_port()
    trainer = ServerProcess(
        "trainer",
        tmp_path / "trainer.log",
        {
            "LEADTIME_NATS_SERVERS": nats.url,
            "LEADTIME_REDIS_URL": redis.url,
            "LEADTIME_TRAINER_HTTP_PORT": str(port),
            "LEADTIME_TRAINER_RETRAIN_INTERVAL_MS": "3600000",
        },
    )
    url = f"http://127.0.0.1:{port}"

    async def taken(count: int) -> bool:
        return await metric(url, "leadtime_trainer_samples_total") == count

    try:
        async with stream(nats.url) as context:
            trainer.spawn([sys.executable, "-m", "services.trainer"])
            await publish(context, samples[:3_000])
            await trainer.ready(lambda: taken(3_000))
            before = psutil.Process(trainer.pid).memory_info().rss
            await publish(context, samples[3_000:])
            await until(lambda: taken(9_000), "all are taken", timeout_s=60.0)
            grown = psutil.Process(trainer.pid).memory_info().rss - before
            assert grown < 64 * 1024 * 1024
            assert await metric(url, "leadtime_trainer_redeliveries_total") == 0
    finally:
        await trainer.kill()
