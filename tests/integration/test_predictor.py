"""A real predictor process on a real Redis-protocol server: ready, hot swap under load, faults outlived."""

import asyncio
import json
import time

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from bench.queueing import observe
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.train import FitOptions, fit
from shared.features import SCHEMA_HASH
from shared.prediction import OUTPUTS
from shared.prior import PriorModel
from tests.bundles import expected, make_bundle, rows_of, sealed
from tests.predictors import predictor, publish
from tests.servers import fetch, until
from tests.unit.trainer.snapshots import snapshot_of

RAW = {"content-type": "application/octet-stream", "leadtime-pool": "default", "leadtime-schema": SCHEMA_HASH}
KEY = "a signing key for tests"


def bundle(number: int, **changes):
    """Bundle of this number: its offset and its version tell it."""
    return make_bundle(created_unix_ms=1_700_000_000_000.0 + number, offset=float(number), **changes)


async def ask(client: httpx.AsyncClient, rows) -> tuple[str, np.ndarray]:
    response = await client.post("/v1/predict", content=rows.tobytes(), headers=RAW)
    assert response.status_code == 200, response.text
    return response.headers["leadtime-bundle"], np.frombuffer(response.content, "<f4").reshape(len(rows), -1)


async def test_it_is_not_ready_before_the_first_bundle_and_ready_after_it(redis, tmp_path):
    async with predictor(tmp_path, redis.url) as process, httpx.AsyncClient(base_url=process.url) as client:
        status, body = await fetch(f"{process.url}/readyz")
        assert status == 503
        assert json.loads(body)["waiting_for"]["bundle:default"] in {"not yet", "none published yet"}
        response = await client.post("/v1/predict", content=rows_of(1).tobytes(), headers=RAW)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        version = await publish(redis.url, bundle(1))
        await until(process.is_ready, "ready")
        answered, values = await ask(client, rows_of(1, 2))
        assert answered == version
        assert np.array_equal(values, expected(rows_of(1, 2), offset=1.0))


async def test_bundles_are_swapped_under_load_without_a_failed_or_mixed_answer(redis, tmp_path):
    async with predictor(tmp_path, redis.url) as process:
        versions = {await publish(redis.url, bundle(1)): 1.0}
        await until(process.is_ready, "ready")
        seen: set[str] = set()
        answered = 0
        stop = asyncio.Event()

        async def load(seed: int) -> None:
            nonlocal answered
            rng = np.random.default_rng(seed)
            async with httpx.AsyncClient(base_url=process.url) as client:
                while not stop.is_set():
                    rows = rows_of(*rng.integers(0, 10_000, rng.integers(1, 40)))
                    version, values = await ask(client, rows)
                    assert np.array_equal(values, expected(rows, offset=versions[version]))
                    seen.add(version)
                    answered += 1

        loaders = [asyncio.create_task(load(seed)) for seed in range(4)]
        for number in range(2, 7):
            new = bundle(number)
            versions[new.manifest.version] = float(number)
            version = await publish(redis.url, new)
            await until(lambda version=version: version in seen or any(task.done() for task in loaders), "swapped")
        stop.set()
        await asyncio.gather(*loaders)
        assert seen == set(versions)
        assert answered > 20


async def test_a_bad_blob_is_refused_by_reason_and_the_bundle_before_stays(redis, tmp_path):
    async with predictor(tmp_path, redis.url) as process, httpx.AsyncClient(base_url=process.url) as client:
        good = await publish(redis.url, bundle(1))
        await until(process.is_ready, "ready")
        damaged = bytearray(sealed(bundle(2)))
        damaged[-1] ^= 1
        for number, blob, reason in (
            (2, bytes(damaged), "integrity"),
            (3, b"no blob", "integrity"),
            (4, sealed(bundle(9)), "manifest"),
            (5, sealed(bundle(5, graph=b"no graph")), "load"),
        ):
            refused = bundle(number, graph=b"no graph") if reason == "load" else bundle(number)
            version = await publish(redis.url, refused, blob=blob)

            async def told(version=version, reason=reason) -> bool:
                last = (await process.status())["pools"]["default"]["last_refused"]
                return bool(last) and (last["version"], last["reason"]) == (version, reason)

            await until(told, f"{version} refused as {reason}")
            assert (await ask(client, rows_of(3)))[0] == good
        assert await process.is_ready()
        metrics = (await fetch(f"{process.url}/metrics"))[1].decode()
        assert 'leadtime_predictor_bundle_refusals_total{pool="default",reason="integrity"} 2.0' in metrics
        version = await publish(redis.url, bundle(6))
        await until(lambda: process.serves(version), "a good bundle after bad ones")


async def test_unsigned_bundles_are_refused_where_a_key_is_set(redis, tmp_path, monkeypatch):
    monkeypatch.setenv("LEADTIME_REDIS_SIGNING_KEY", KEY)
    async with predictor(tmp_path, redis.url) as process:
        await publish(redis.url, bundle(1))
        await until(lambda: process.events("bundle refused"), "refused")
        assert not await process.is_ready()
        await publish(redis.url, bundle(2), key=KEY.encode())
        await until(process.is_ready, "ready with a signed bundle")


async def test_redis_may_be_killed_come_back_empty_and_publish_anew(redis, tmp_path):
    async with predictor(tmp_path, redis.url) as process, httpx.AsyncClient(base_url=process.url) as client:
        first = await publish(redis.url, bundle(1))
        await until(process.is_ready, "ready")
        await redis.kill()
        await until(lambda: process.events("redis is away; what is in use stays"), "noticed")
        assert (await ask(client, rows_of(3)))[0] == first
        assert await process.is_ready()
        await redis.start()
        await until(lambda: process.events("redis answers again"), "connected again")
        assert (await ask(client, rows_of(3)))[0] == first
        second = await publish(redis.url, bundle(2))
        await until(lambda: process.serves(second), "new bundle")


async def test_it_starts_before_redis_and_before_the_bundle(redis, tmp_path):
    await redis.stop()
    async with predictor(tmp_path, redis.url) as process:
        await until(lambda: process.events("redis is away; what is in use stays"), "noticed")
        assert (await fetch(f"{process.url}/healthz"))[0] == 200
        await redis.start()
        await publish(redis.url, bundle(1))
        await until(process.is_ready, "ready")


async def test_a_pointer_ahead_of_its_blob_is_followed_once_the_blob_is_there(redis, tmp_path):
    async with predictor(tmp_path, redis.url) as process:
        late = bundle(1)
        client = Redis.from_url(redis.url)
        await client.set(f"leadtime:bundle:{{default}}:{SCHEMA_HASH}:current", late.manifest.version)
        await until(lambda: process.events("bundle refused"), "missed")
        await client.aclose()
        await publish(redis.url, late)
        await until(process.is_ready, "ready")


async def test_a_bundle_that_has_targets_from_the_prior_is_served_whole(redis, tmp_path):
    """What the trainer makes of sixty whole answers: all outputs, where nothing was measured the prior's."""
    observed = observe(60, seed=3)
    options = CycleOptions("default", fit=FitOptions(prior="8b"))
    snapshot = snapshot_of(observed.rows, e2e=observed.e2e_ms)
    learned = run_cycle(snapshot, None, options, time.time() * 1e3).champion
    assert learned.bundle.manifest.prior_targets == ["ttft", "tpot"]
    async with predictor(tmp_path, redis.url) as process, httpx.AsyncClient(base_url=process.url) as client:
        version = await publish(redis.url, learned.bundle)
        await until(process.is_ready, "ready")
        status = (await process.status())["pools"]["default"]["bundle"]
        assert (status["version"], status["outputs"]) == (version, list(OUTPUTS))
        answered, values = await ask(client, observed.rows)
        assert answered == version
        assert values == pytest.approx(fit(snapshot, options.fit).predict(observed.rows), rel=1e-4)
        prior = PriorModel("8b").predict(observed.rows)
        for name in ("ttft_p50", "tpot_p50"):
            column = OUTPUTS.index(name)
            assert values[:, column] == pytest.approx(prior[:, column], rel=1e-4)
        column = OUTPUTS.index("e2e_p50")
        assert values[:, column] != pytest.approx(prior[:, column], rel=0.01)


async def test_where_cuda_is_required_it_is_not_ready_and_says_why(redis, tmp_path):
    await publish(redis.url, bundle(1))
    async with predictor(tmp_path, redis.url, device="cuda", device_policy="require") as process:
        await until(lambda: process.events("bundle refused"), "refused")
        status, body = await fetch(f"{process.url}/readyz")
        assert status == 503
        assert "cuda is required" in json.loads(body)["waiting_for"]["bundle:default"]


async def test_where_cuda_is_preferred_the_cpu_serves_and_says_so(redis, tmp_path):
    version = await publish(redis.url, bundle(1))
    async with predictor(tmp_path, redis.url, device="cuda") as process:
        await until(lambda: process.serves(version), "served")
        told = (await process.status())["pools"]["default"]["bundle"]
        assert (told["renderings"], told["device_fallback"]) == (
            {"tree_ensemble": "CPUExecutionProvider"},
            "the bundle has no tensor rendering",
        )
        metrics = (await fetch(f"{process.url}/metrics"))[1].decode()
        assert 'leadtime_predictor_device_fallback{pool="default"} 1.0' in metrics
        assert process.events("bundle in use")[0]["device_fallback"]


async def test_on_sigterm_it_answers_what_it_began_and_ends_with_success(redis, tmp_path):
    await publish(redis.url, bundle(1))
    async with predictor(tmp_path, redis.url) as process:
        await until(process.is_ready, "ready")
        body = rows_of(*range(100)).tobytes()
        head = "".join(f"{name}: {value}\r\n" for name, value in RAW.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        writer.write(
            f"POST /v1/predict HTTP/1.1\r\nhost: p\r\nexpect: 100-continue\r\n"
            f"content-length: {len(body)}\r\n{head}\r\n".encode()
        )
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        stopped = asyncio.create_task(process.stop())

        async def listens_no_more() -> bool:
            return (await fetch(f"{process.url}/healthz"))[0] == 0

        await until(listens_no_more, "stopping")
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert await stopped == 0
        assert process.events("service stopped")


@pytest.mark.parametrize("name", ["THREADS", "THREAD"])
async def test_a_bad_setting_stops_the_start_with_the_configuration_status(redis, tmp_path, name, monkeypatch):
    monkeypatch.setenv(f"LEADTIME_PREDICTOR_{name}", "none")
    with pytest.raises(AssertionError, match=f"LEADTIME_PREDICTOR_{name}"):
        async with predictor(tmp_path, redis.url):
            pass
