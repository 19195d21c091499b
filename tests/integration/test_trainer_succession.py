"""Pin and rollback, end to end: a real trainer, a real store, a predictor process and the router's own watcher."""

import asyncio
import contextlib
import dataclasses
import hashlib

import httpx
import numpy as np
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from bench.queueing import as_samples, observe
from services.router.predict.bundles import BundleWatcher
from services.router.predict.metrics import PredictMetrics
from services.trainer import trainer as conductor
from services.trainer.calibrate import CalibrationOptions, Calibrator
from services.trainer.champion import Champion
from shared.bundle import Bundle, bundle_version
from shared.clock import SystemClock
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.names import bundle_key, bundle_pointer_key, calibration_key, succession_key
from tests.bundles import linear_graph
from tests.integration.trainer_service import publish, running_trainer, stream
from tests.predictors import predictor
from tests.servers import until

POINTER = bundle_pointer_key("default", SCHEMA.hash)
SAMPLES = as_samples(observe(2000, seed=23))


async def ask(method: str, url: str, body=None, **headers):
    async with httpx.AsyncClient() as client:
        answer = await client.request(method, url, json=body, headers=headers)
    return answer.status_code, answer.json()


@contextlib.asynccontextmanager
async def watcher(redis_url: str):
    """The router's own copy, kept on what is published."""
    client = Redis.from_url(redis_url)
    clock = SystemClock()
    watching = BundleWatcher(client, "default", None, PredictMetrics(CollectorRegistry(), clock), clock, poll_ms=200)
    task = asyncio.create_task(watching.run())
    try:
        yield watching
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


async def everywhere(version: str, process, watching) -> None:
    """Await that predictor and router serve a version, and that the router has its calibration."""
    await until(lambda: process.serves(version), f"the predictor serves {version}")

    def router() -> bool:
        manifest, calibration = watching.manifest, watching.calibration
        return bool(manifest and manifest.version == version and calibration and calibration.bundle_version == version)

    await until(router, f"the router serves {version}, calibrated")


async def fitted_on(trainer, samples: int) -> None:
    """Await that the newest fit has seen so many samples, so that none is due."""

    async def done():
        model = await trainer.model()
        return model["last_cycle"] and model["last_cycle"]["window_samples"] == samples and model["bundle"]["published"]

    await until(done, f"a fit of {samples} samples")


async def two_versions(context, trainer) -> tuple[str, str]:
    """A version that answered live samples, and the one that followed it."""
    await publish(context, SAMPLES[:100])
    await trainer.taken(100)
    first = await trainer.published()
    await publish(context, SAMPLES[100:200])
    await fitted_on(trainer, 200)
    return first, (await trainer.model())["bundle"]["version"]


async def test_predictors_and_routers_follow_a_rollback_and_a_pin_that_outlives_the_trainer(nats, redis, tmp_path):
    async with (
        stream(nats.url) as context,
        predictor(tmp_path, redis.url) as process,
        watcher(redis.url) as watching,
    ):
        async with running_trainer(nats.url, redis.url) as trainer:
            first, second = await two_versions(context, trainer)
            await everywhere((await trainer.model())["bundle"]["version"], process, watching)
            status, model = await ask("POST", f"{trainer.url}/v1/model/rollback", {"version": first})
            assert status == 200, model
            assert model["bundle"]["version"] == first < second
            assert model["decisions"][0]["reason"] == "rolled_back_by_operator"
            await everywhere(first, process, watching)
            # What is fitted meanwhile waits for new samples.
            await publish(context, SAMPLES[200:260])

            async def held():
                return (await trainer.model())["decisions"][0]["reason"] == "held"

            await until(held, "a challenger is held")
            assert await trainer.metric('leadtime_trainer_rollbacks_total{cause="operator"}') == 1

            model = await trainer.model()
            kept = {one["version"]: one["is"] for one in model["versions"]}
            assert {first, second} <= set(kept)
            assert kept[first] == ["serving"]
            status, model = await ask("POST", f"{trainer.url}/v1/model/pin", {"version": second})
            assert (status, model["succession"]["pinned"]) == (200, second)
            await everywhere(second, process, watching)
        async with running_trainer(nats.url, redis.url) as trainer:
            await publish(context, SAMPLES[260:900])
            await trainer.taken(900)

            async def refused():
                return any(decision["reason"] == "pinned" for decision in (await trainer.model())["decisions"])

            await until(refused, "a challenger is refused because of the pin")
            model = await trainer.model()
            assert (model["bundle"]["version"], model["succession"]["pinned"]) == (second, second)
            change = model["succession"]["last_change"]
            assert (change["reason"], change["version"]) == ("pinned_by_operator", second), "told by the next process"
            assert [one["reason"] for one in model["decisions"]].count("pinned_by_operator") == 1
            errors = {one["version"]: one["metrics"] for one in model["versions"]}
            assert errors[first]["ttft"]["mape"] > 0, "of a version that another process fitted"
            assert await trainer.metric("leadtime_trainer_pinned") == 1
            before = watching.calibration.sequence
            await publish(context, SAMPLES[900:950])
            await until(lambda: watching.calibration.sequence > before, "the calibration of a pinned version goes on")
            assert watching.calibration.bundle_version == second

            status, model = await ask("DELETE", f"{trainer.url}/v1/model/pin")
            assert (status, model["succession"]["pinned"]) == (200, None)
            await publish(context, SAMPLES[950:1000])

            async def judged():
                reasons = [decision["reason"] for decision in (await trainer.model())["decisions"]]
                return reasons.index("unpinned_by_operator") > 0

            await until(judged, "challengers are judged again")
            served = (await trainer.model())["bundle"]["version"]
            assert served >= second
            await until(lambda: process.serves(served), "the predictor serves what the trainer says")


def astray(real, made):
    """A cycle whose bundle is whole, passed every check, and is far off."""

    def run(snapshot, champion, options, created_unix_ms):
        report = real(snapshot, None, options, created_unix_ms)
        bundle = report.champion.bundle
        graph = linear_graph(np.zeros((len(SCHEMA), len(bundle.manifest.outputs)), np.float32), 80_000.0)
        version = bundle_version(created_unix_ms, graph)
        rendering = bundle.manifest.renderings[0].model_copy(
            update={"sha256": hashlib.sha256(graph).hexdigest(), "size_bytes": len(graph)}
        )
        manifest = bundle.manifest.model_copy(update={"version": version, "renderings": [rendering]})
        wrong = Bundle(manifest, {"tree_ensemble": graph})
        calibrator = Calibrator(CalibrationOptions(), version, manifest.outputs)
        made.append(version)
        return dataclasses.replace(
            report, champion=Champion(wrong, BundleModel(wrong), saved=False), calibrator=calibrator
        )

    return run


async def test_a_version_whose_live_error_doubles_is_left_for_the_last_good_one(nats, redis, tmp_path, monkeypatch):
    async with (
        stream(nats.url) as context,
        predictor(tmp_path, redis.url) as process,
        watcher(redis.url) as watching,
        running_trainer(nats.url, redis.url) as trainer,
    ):
        await publish(context, SAMPLES[:100])
        await trainer.taken(100)
        await trainer.published()
        await publish(context, SAMPLES[100:200])
        await trainer.taken(200)

        await fitted_on(trainer, 200)
        made: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(conductor, "run_cycle", astray(conductor.run_cycle, made))
            # The one that serves proves itself on these, and the bad one follows it.
            await publish(context, SAMPLES[200:260])

            async def followed():
                version = (await trainer.model())["bundle"]["version"]
                return version in made and version

            bad = await until(followed, "the bad one follows")
            good = (await trainer.model())["succession"]["last_good"]["version"]
            await until(lambda: process.serves(bad), "the pool took it")
            await publish(context, SAMPLES[260:340])

            async def back():
                return (await trainer.model())["bundle"]["version"] == good

            await until(back, "the trainer went back")
        model = await trainer.model()
        said = next(decision for decision in model["decisions"] if decision["reason"] == "rolled_back")
        assert said["detail"].startswith(f"from {bad}: ")
        assert said["version"] == good
        assert await trainer.metric('leadtime_trainer_rollbacks_total{cause="live_error"}') == 1
        await everywhere(good, process, watching)
        # It doesn't swing back: the next version comes after the wait, by the gate.
        await publish(context, SAMPLES[340:420])

        async def held():
            return (await trainer.model())["decisions"][0]["reason"] == "held"

        await until(held, "challengers wait")
        await publish(context, SAMPLES[420:700])
        assert await trainer.published(after=good) not in made
        assert await trainer.metric('leadtime_trainer_rollbacks_total{cause="live_error"}') == 1


async def test_what_cannot_be_done_is_said(nats, redis):
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url, http_token="secret") as trainer:
        key = {"authorization": "Bearer secret"}
        for method, path, body in (
            ("POST", "/v1/model/pin", {"version": "x"}),
            ("DELETE", "/v1/model/pin", None),
            ("POST", "/v1/model/rollback", {}),
        ):
            assert (await ask(method, trainer.url + path, body))[0] == 401
        assert (await ask("POST", f"{trainer.url}/v1/model/rollback", {}, **key))[0] == 409
        assert (await ask("DELETE", f"{trainer.url}/v1/model/pin", **key)) == (409, {"detail": "no version is pinned"})
        await publish(context, SAMPLES[:50])

        async def published():
            async with httpx.AsyncClient(headers=key) as client:
                bundle = (await client.get(f"{trainer.url}/v1/model")).json()["bundle"]
            return bundle and bundle["published"] and bundle["version"]

        version = await until(published, "a bundle")
        status, answer = await ask("POST", f"{trainer.url}/v1/model/pin", {"version": "1800000000000-00000000"}, **key)
        assert (status, version in answer["detail"]) == (404, True)
        assert (await ask("POST", f"{trainer.url}/v1/model/pin", {}, **key))[0] == 422
        assert (await ask("POST", f"{trainer.url}/v1/model/pin", {"version": version}, **key))[0] == 200
        assert (await ask("POST", f"{trainer.url}/v1/model/rollback", {}, **key))[0] == 409
        await redis.stop()
        status, answer = await ask("DELETE", f"{trainer.url}/v1/model/pin", **key)
        assert (status, answer["detail"].startswith("Redis is away, nothing was changed")) == (503, True)
        await redis.start()


async def test_pin_and_last_good_version_come_back_with_an_emptied_store(nats, redis):
    """Blobs are kept while they may serve again, and written again when the store lost them."""
    client = Redis.from_url(redis.url)
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url, lease_ttl_ms=1_000) as trainer:
        first, _ = await two_versions(context, trainer)
        await ask("POST", f"{trainer.url}/v1/model/pin", {"version": first})
        await redis.stop()
        await redis.start()

        async def whole():
            return (
                await client.exists(
                    bundle_key("default", SCHEMA.hash, first),
                    succession_key("default", SCHEMA.hash),
                    calibration_key("default"),
                )
                == 3
                and await client.get(POINTER) == first.encode()
            )

        await until(whole, "pin, bundle and calibration are back")
        assert await client.ttl(bundle_key("default", SCHEMA.hash, first)) == -1
        for start in range(200, 1600, 200):
            await publish(context, SAMPLES[start : start + 200])
        assert (await trainer.model())["bundle"]["version"] == first
    await client.aclose()
