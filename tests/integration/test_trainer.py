"""The trainer against a real NATS with JetStream and a real Redis-protocol server."""

import asyncio
import contextlib
import signal
import sys
import threading
from pathlib import Path

import msgspec
import orjson
import pytest
import redis.asyncio
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import NotFoundError

from bench.queueing import as_samples, observe
from services.trainer import consumer
from services.trainer import trainer as conductor
from services.trainer.dead_letters import DeadLetters
from shared.bundle import BundleGate, BundleRefusedError, Calibration, seal, unseal
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.names import (
    BUNDLES_CHANNEL,
    DEAD_REASON_HEADER,
    DEAD_SOURCE_HEADER,
    DEAD_STREAM,
    SAMPLES_STREAM,
    bundle_key,
    bundle_pointer_key,
    calibration_key,
    samples_subject,
    trainer_durable,
    trainer_lease_key,
)
from shared.samples import encode_sample
from shared.streams import dead_stream_config
from tests.integration.trainer_service import publish, running_trainer, stream
from tests.servers import NatsServer, RedisServer, ServerProcess, fetch, free_port, nats_server, until

POINTER = bundle_pointer_key("default", SCHEMA.hash)
KEY = b"a key of a fair length"
SAMPLES = as_samples(observe(1200, seed=21))


@contextlib.asynccontextmanager
async def store(server: RedisServer):
    client = redis.asyncio.Redis.from_url(server.url)
    try:
        yield client
    finally:
        await client.aclose()


async def consumer_state(context):
    return await context.consumer_info(SAMPLES_STREAM, trainer_durable("default"))


async def replayed(trainer):
    """Await that the replay at the start is over: what comes from here on goes through the durable consumer."""

    async def ready():
        return (await fetch(f"{trainer.url}/readyz"))[0] == 200

    await until(ready, "the replay is over")


async def test_samples_become_a_bundle_and_a_calibration(nats, redis):
    """The notice comes when blob and pointer are there, and both load as a reader loads them."""
    async with stream(nats.url) as context, store(redis) as client, client.pubsub() as notices:
        await notices.subscribe(BUNDLES_CHANNEL)
        async with running_trainer(nats.url, redis.url) as trainer:
            assert (await until(trainer.model, "an answer"))["state"] == "cold"
            await publish(context, SAMPLES[:150])

            async def next_notice():
                return await notices.get_message(ignore_subscribe_messages=True, timeout=0.1)

            notice = orjson.loads((await until(next_notice, "a notice"))["data"])
            assert notice == {"pool": "default", "schema": SCHEMA.hash, "version": notice["version"]}
            blob = await client.get(bundle_key("default", SCHEMA.hash, notice["version"]))
            assert await client.get(POINTER) is not None
            model = BundleModel(BundleGate("default", None).open(notice["version"], blob))
            assert {"ttft_p50", "tpot_p50", "e2e_p50", "in_range"} <= set(model.outputs)

            async def calibrated():
                sealed = await client.get(calibration_key("default"))
                found = Calibration.decode(unseal(sealed, None), pool="default") if sealed else None
                return found if found and found.bundle_version == await trainer.published() else None

            first = await until(calibrated, "a calibration of the published bundle")
            assert first.expected_output_tokens["sim-model"] > 1
            await publish(context, SAMPLES[150:200])

            async def newer():
                return (await calibrated() or first).sequence > first.sequence

            await until(newer, "a newer calibration")
            view = await trainer.model()
            assert view["state"] == "ready"
            assert view["decisions"][-1]["reason"] == "accepted"
            assert view["champion_fit"]["parity"]["max_relative_error"] <= 1e-4
            assert await trainer.metric("leadtime_trainer_redeliveries_total") == 0
        assert trainer.task.exception() is None


async def test_a_restart_rebuilds_the_window_by_replay_without_doubles(nats, redis):
    async with stream(nats.url) as context:
        async with running_trainer(nats.url, redis.url) as trainer:
            await publish(context, SAMPLES[:300])
            await trainer.taken(300)
            version = await trainer.published()
        await publish(context, SAMPLES[300:320])
        async with running_trainer(nats.url, redis.url, retrain_interval_ms=3_600_000) as trainer:
            await trainer.taken(320)
            view = await trainer.model()
            assert view["window"]["rows"] == 320
            await publish(context, SAMPLES[320:400])
            await trainer.taken(400)

            async def settled():
                state = await consumer_state(context)
                return state.num_pending == 0 and state.num_ack_pending == 0

            await until(settled, "everything is acknowledged")
            assert (await trainer.model())["window"]["taken"] == 400
            assert await trainer.metric("leadtime_trainer_redeliveries_total") == 0
        assert version


async def test_a_saved_bundle_is_served_until_a_hundred_samples_came(nats, redis):
    async with stream(nats.url) as context:
        async with running_trainer(nats.url, redis.url, retrain_interval_ms=3_600_000) as trainer:
            await publish(context, SAMPLES[:40])
            await trainer.taken(40)
            version = await trainer.published()
        async with running_trainer(nats.url, redis.url) as trainer:
            await trainer.taken(40)
            view = await trainer.model()
            assert (view["state"], view["bundle"]["version"], view["samples_needed"]) == ("warming", version, 100)
            await publish(context, SAMPLES[40:440])
            assert await trainer.published(after=version) > version


async def test_poison_blocks_nothing_and_is_not_sent_again(nats, redis):
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url, ack_wait_ms=1_000) as trainer:
        await replayed(trainer)
        subject = samples_subject("default")
        await context.publish(subject, b"not a sample")
        await context.publish(subject, encode_sample(msgspec.structs.replace(SAMPLES[0], pool="other")))
        await context.publish(subject, encode_sample(msgspec.structs.replace(SAMPLES[1], schema_hash="0" * 16)))
        await context.publish(subject, encode_sample(msgspec.structs.replace(SAMPLES[2], ttft_ms=-1.0)))
        await publish(context, SAMPLES[:50])
        await trainer.taken(50)

        async def settled():
            state = await consumer_state(context)
            return state.num_pending == 0 and state.num_ack_pending == 0

        await until(settled, "nothing is left in the consumer")
        for reason, count in (("malformed", 2), ("pool", 1), ("schema", 1), ("duplicate", 0)):
            line = f'leadtime_trainer_samples_rejected_total{{reason="{reason}"}}'
            assert await trainer.metric(line) == count
        assert (await consumer_state(context)).num_redelivered == 0


async def dead_letters(context):
    """(reason, data) of every dead letter, oldest first."""
    state = (await context.stream_info(DEAD_STREAM)).state
    found = [await context.get_msg(DEAD_STREAM, n) for n in range(1, state.messages + 1)]
    return [(message.headers[DEAD_REASON_HEADER], message.data) for message in found]


async def test_poison_becomes_a_dead_letter_with_its_reason(nats, redis):
    other = encode_sample(msgspec.structs.replace(SAMPLES[0], pool="other"))
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url) as trainer:
        await replayed(trainer)
        await context.publish(samples_subject("default"), b"not a sample")
        await context.publish(samples_subject("default"), other)
        await publish(context, SAMPLES[:20])
        await trainer.taken(20)

        async def both():
            return await trainer.metric('leadtime_trainer_dead_letters_total{reason="pool"}') == 1

        await until(both, "the second dead letter is stored")
        assert sorted(await dead_letters(context)) == [("malformed", b"not a sample"), ("pool", other)]
        assert (await context.get_msg(DEAD_STREAM, 1)).headers[DEAD_SOURCE_HEADER].startswith("LEADTIME_SAMPLES:")


async def test_poison_that_was_there_before_the_first_trainer_becomes_dead_letters_once(nats, redis):
    """What is too old to teach among it too. The durable consumer begins behind it and would never bring it."""
    async with stream(nats.url) as context:
        await context.publish(samples_subject("default"), b"too old")
        await publish(context, SAMPLES[:150])
        await context.publish(samples_subject("default"), b"not a sample")
        for _ in range(2):  # the first start, and one that finds the durable consumer
            async with running_trainer(nats.url, redis.url, replay_samples=100) as trainer:
                await trainer.taken(99)
                await until(lambda: _settled(context), "the durable consumer is there")
                assert sorted(await dead_letters(context)) == [
                    ("malformed", b"not a sample"),
                    ("malformed", b"too old"),
                ]


async def test_poison_of_the_replay_whose_dead_letter_cannot_be_stored_comes_again(nats, redis, monkeypatch):
    monkeypatch.setattr(consumer, "DEAD_LETTER_AGAIN_S", 0.2)
    send, failures = DeadLetters.send, []

    async def fail_at_first(self, *arguments):
        if len(failures) < 2:
            failures.append(arguments)
            return False
        return await send(self, *arguments)

    monkeypatch.setattr(DeadLetters, "send", fail_at_first)
    async with stream(nats.url) as context:
        await context.publish(samples_subject("default"), b"not a sample")
        await publish(context, SAMPLES[:20])
        async with running_trainer(nats.url, redis.url) as trainer:
            await until(lambda: _exists(context, DEAD_STREAM), "the dead-letter stream is made")
            await until(lambda: _stored(context, DEAD_STREAM, 1), "stored at last")
            await trainer.taken(20)
            assert await dead_letters(context) == [("malformed", b"not a sample")]


async def test_a_dead_letter_that_cannot_be_stored_blocks_no_sample_and_is_tried_again(nats, redis, monkeypatch):
    monkeypatch.setattr(consumer, "DEAD_LETTER_AGAIN_S", 0.2)
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url) as trainer:
        await trainer.taken(0)
        await until(lambda: _exists(context, DEAD_STREAM), "the dead-letter stream is made")
        await context.delete_stream(DEAD_STREAM)
        await context.publish(samples_subject("default"), b"not a sample")
        await publish(context, SAMPLES[:20])
        await trainer.taken(20)

        async def failed():
            return await trainer.metric('leadtime_trainer_dead_letters_total{reason="failed"}') > 0

        await until(failed, "the dead letter could not be stored")
        await context.add_stream(StreamConfig(**dead_stream_config()))
        await until(lambda: _stored(context, DEAD_STREAM, 1), "stored at last")
        assert await dead_letters(context) == [("malformed", b"not a sample")]


async def test_a_message_that_was_delivered_too_often_becomes_a_dead_letter(nats, redis):
    """Somebody took it twice and never acknowledged it, as a trainer that ends each time would."""
    chosen = {"max_deliver": 2, "ack_wait_ms": 3_000}
    async with stream(nats.url) as context:
        async with running_trainer(nats.url, redis.url, **chosen) as trainer:
            await trainer.taken(0)
            await until(lambda: _settled(context), "the durable consumer is there")
        await context.publish(samples_subject("default"), encoded := encode_sample(SAMPLES[0]))
        taker = await context.pull_subscribe_bind(durable=trainer_durable("default"), stream=SAMPLES_STREAM)
        assert len(await taker.fetch(1)) == 1
        assert len(await taker.fetch(1, timeout=20)) == 1
        await taker.unsubscribe()
        async with running_trainer(nats.url, redis.url, **chosen) as trainer:
            await until(lambda: _stored(context, DEAD_STREAM, 1), "the dead letter is stored")
            assert await dead_letters(context) == [("max_deliver", encoded)]
            await publish(context, SAMPLES[1:20])
            await trainer.taken(20)


async def test_a_durable_consumer_of_an_earlier_setting_is_changed_in_place(nats, redis):
    async with stream(nats.url) as context:
        async with running_trainer(nats.url, redis.url, max_deliver=3) as trainer:
            await publish(context, SAMPLES[:20])
            await trainer.taken(20)
            await until(lambda: _settled(context), "all are acknowledged")
        before = await consumer_state(context)
        changed = {"ack_wait_ms": 5_000, "max_deliver": 7, "max_ack_pending": 123}
        async with running_trainer(nats.url, redis.url, **changed) as trainer:
            await publish(context, SAMPLES[20:40])
            await trainer.taken(40)

            async def changed_in_place():
                after = await consumer_state(context)
                found = after.config
                there = (found.ack_wait, found.max_deliver, found.max_ack_pending) == (5.0, 7, 123)
                return there and found.backoff == [5.0, 10.0, 20.0, 40.0] and after.created == before.created

            await until(changed_in_place, "the consumer has the new settings")


async def test_a_durable_consumer_that_cannot_be_changed_is_made_anew_where_it_had_got_to(nats, redis):
    async with stream(nats.url) as context:
        await publish(context, SAMPLES[:30])
        old = ConsumerConfig(
            durable_name=trainer_durable("default"),
            filter_subject=samples_subject("default"),
            ack_policy=AckPolicy.ALL,
        )
        await context.add_consumer("LEADTIME_SAMPLES", old)
        half = await context.pull_subscribe_bind(durable=trainer_durable("default"), stream="LEADTIME_SAMPLES")
        await (await half.fetch(10))[-1].ack_sync()
        async with running_trainer(nats.url, redis.url) as trainer:
            await trainer.taken(30)
            await until(lambda: _settled(context), "all are acknowledged")
            found = await consumer_state(context)
            assert found.config.ack_policy == AckPolicy.EXPLICIT
            assert found.config.opt_start_seq == 11


async def _exists(context, name):
    with contextlib.suppress(NotFoundError):
        return await context.stream_info(name)


async def _stored(context, name, count):
    return (await context.stream_info(name)).state.messages >= count


async def _settled(context):
    with contextlib.suppress(NotFoundError):
        state = await consumer_state(context)
        return state.num_pending == 0 and state.num_ack_pending == 0


async def test_nats_may_restart(nats, redis):
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url) as trainer:
        await publish(context, SAMPLES[:50])
        await trainer.taken(50)
        await nats.stop()
        assert (await fetch(f"{trainer.url}/healthz"))[0] == 200
        await nats.start()

        async def again():
            try:
                await publish(context, SAMPLES[50:120])
            except Exception:
                return False
            return True

        await until(again, "the publisher has reconnected")
        await trainer.taken(120)
        assert (await trainer.model())["window"]["rows"] == 120


async def test_a_connection_that_the_client_gave_up_is_made_anew(tmp_path, redis):
    """nats-py closes for good after most errors that a server sends, as this one for a limit of one subscription."""
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 1\n")
    async with (
        nats_server(tmp_path, extra=["-c", str(config)]) as server,
        running_trainer(server.url, redis.url) as trainer,
    ):
        await until(lambda: "maximum subscriptions" in server.log(), "the limit was met")
        config.write_text("max_subscriptions: 0\n")
        await server.restart()
        async with stream(server.url) as context:
            await publish(context, SAMPLES[:50])
            await trainer.taken(50)


async def test_a_stream_that_was_lost_is_made_again(nats, redis):
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url) as trainer:
        await publish(context, SAMPLES[:50])
        await trainer.taken(50)
        await context.delete_stream(SAMPLES_STREAM)

        async def there():
            with contextlib.suppress(Exception):
                return await consumer_state(context)

        await until(there, "stream and consumer are back")
        await publish(context, SAMPLES[50:80])
        await trainer.taken(80)


@pytest.mark.parametrize("sealed", [b"no seal", seal(b"{}", b"another key"), seal(b"{}", KEY)])
async def test_a_calibration_that_cannot_be_read_is_replaced(nats, redis, sealed):
    """Damaged, signed by a key that was changed since, or of no form: none stops a trainer from starting."""
    async with store(redis) as client, stream(nats.url) as context:
        await client.set(calibration_key("default"), sealed)
        async with running_trainer(nats.url, redis.url, signing_key=KEY.decode()) as trainer:
            await publish(context, SAMPLES[:50])
            version = await trainer.published()

            async def replaced():
                found = await client.get(calibration_key("default"))
                return found != sealed and Calibration.decode(unseal(found, KEY), pool="default")

            assert (await until(replaced, "a calibration")).bundle_version >= version


async def test_redis_may_come_back_empty(nats, redis):
    """Lease, bundle and calibration are written again, from memory."""
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url, lease_ttl_ms=1_000) as trainer:
        await publish(context, SAMPLES[:120])
        await trainer.taken(120)
        version = await trainer.published()
        await redis.stop()
        await publish(context, SAMPLES[120:200])
        await trainer.taken(200)

        async def noticed():
            return await trainer.metric("leadtime_trainer_store_errors_total")

        await until(noticed, "the loss is noticed")
        assert (await fetch(f"{trainer.url}/readyz"))[0] == 503
        await redis.start()
        async with store(redis) as client:

            async def whole():
                pointer = await client.get(POINTER)
                return (
                    pointer
                    and await client.exists(bundle_key("default", SCHEMA.hash, pointer.decode()))
                    and await client.exists(calibration_key("default"))
                    and await client.exists(trainer_lease_key("default"))
                )

            await until(whole, "bundle, calibration and lease are back")
            assert (await client.get(POINTER)).decode() >= version
        assert (await trainer.model())["window"]["taken"] == 200


@pytest.mark.parametrize("first", ["nats", "redis"])
async def test_it_starts_with_nothing_there_and_takes_what_comes(tmp_path: Path, first):
    (tmp_path / "nats").mkdir()
    (tmp_path / "redis").mkdir()
    broker = NatsServer(tmp_path / "nats")
    data = RedisServer(tmp_path / "redis")
    try:
        async with running_trainer(broker.url, data.url) as trainer:
            await until(trainer.model, "an answer")
            assert (await fetch(f"{trainer.url}/readyz"))[0] == 503
            for server in (broker, data) if first == "nats" else (data, broker):
                await server.start()

            async def ready():
                return (await fetch(f"{trainer.url}/readyz"))[0] == 200

            await until(ready, "the trainer is ready")
            async with stream(broker.url) as context:
                await publish(context, SAMPLES[:30])
                await trainer.published()
    finally:
        await broker.stop()
        await data.stop()


async def test_a_long_fit_holds_up_neither_intake_nor_probes_and_causes_no_redelivery(nats, redis, monkeypatch):
    release, began = threading.Event(), threading.Event()
    real = conductor.run_cycle

    def slow(*arguments):
        began.set()
        assert release.wait(30)
        return real(*arguments)

    monkeypatch.setattr(conductor, "run_cycle", slow)
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url, ack_wait_ms=1_000) as trainer:
        try:
            await publish(context, SAMPLES[:50])
            await until(began.is_set, "a fit has begun")
            await publish(context, SAMPLES[50:300])
            await trainer.taken(300)

            async def settled():
                state = await consumer_state(context)
                return state.num_ack_pending == 0 and state.num_pending == 0

            await until(settled, "everything is acknowledged while the fit runs")
            assert (await fetch(f"{trainer.url}/readyz"))[0] == 200
            assert (await trainer.model())["bundle"] is None
        finally:
            release.set()
        await trainer.published()
        assert (await consumer_state(context)).num_redelivered == 0


async def test_a_fit_that_fails_leaves_the_rest_running(nats, redis, monkeypatch):
    def broken(*_):
        raise RuntimeError("a library's bad day")

    monkeypatch.setattr(conductor, "run_cycle", broken)
    async with stream(nats.url) as context, running_trainer(nats.url, redis.url) as trainer:
        await publish(context, SAMPLES[:50])

        async def counted():
            return await trainer.metric('leadtime_trainer_cycles_total{verdict="error"}')

        await until(counted, "the failure is counted")
        monkeypatch.undo()
        await publish(context, SAMPLES[50:100])
        await trainer.published()


@contextlib.asynccontextmanager
async def trainer_process(nats, redis, log_file: Path, **environment: str):
    """`python -m services.trainer` on a free port, ready; yields the process and its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = ServerProcess(
        "trainer",
        log_file,
        {
            "LEADTIME_NATS_SERVERS": nats.url,
            "LEADTIME_REDIS_URL": redis.url,
            "LEADTIME_TRAINER_HTTP_PORT": str(port),
            **environment,
        },
    )
    try:
        process.spawn([sys.executable, "-m", "services.trainer"])

        async def ready():
            return (await fetch(f"{url}/readyz"))[0] == 200

        await process.ready(ready)
        yield process, url
    finally:
        await process.stop()


async def test_a_standby_takes_over_when_the_holder_is_killed(nats, redis, tmp_path):
    short = {"LEADTIME_TRAINER_LEASE_TTL_MS": "1000", "LEADTIME_TRAINER_RETRAIN_INTERVAL_MS": "200"}
    async with (
        stream(nats.url) as context,
        store(redis) as client,
        trainer_process(nats, redis, tmp_path / "first.log", **short) as (first, _),
        running_trainer(nats.url, redis.url, lease_ttl_ms=1_000) as second,
    ):
        await publish(context, SAMPLES[:60])
        version = await until(lambda: client.get(POINTER), "the first trainer has published")
        view = await second.model()
        assert (view["active"], view["window"]["taken"]) == (False, 0)
        assert (await fetch(f"{second.url}/readyz"))[0] == 200
        await first.kill()
        await second.taken(60)
        await publish(context, SAMPLES[60:200])
        await second.taken(200)
        view = await second.model()
        assert view["active"] is True
        assert view["bundle"]["version"] >= version.decode()


async def test_a_killed_trainers_standby_has_lease_and_window_within_15_s(nats, redis, tmp_path):
    """Two real processes with the default lease; kill -9."""
    async with (
        stream(nats.url) as context,
        trainer_process(nats, redis, tmp_path / "first.log") as (first, first_url),
        trainer_process(nats, redis, tmp_path / "second.log") as (_, second_url),
    ):
        await publish(context, SAMPLES[:300])

        async def took_over(url):
            status, body = await fetch(f"{url}/v1/model")
            model = orjson.loads(body) if status == 200 else {}
            return model.get("active") and model["window"]["taken"] == 300

        await until(lambda: took_over(first_url), "the first trainer has the window")
        loop = asyncio.get_running_loop()
        killed_s = loop.time()
        await first.kill()
        await until(lambda: took_over(second_url), "the standby has the window")
        assert loop.time() - killed_s < 15.0


async def test_who_lost_the_lease_does_not_overwrite_its_successors_bundle(nats, redis):
    async with (
        stream(nats.url) as context,
        store(redis) as client,
        running_trainer(nats.url, redis.url, lease_ttl_ms=60_000) as trainer,
    ):
        await publish(context, SAMPLES[:60])
        await trainer.published()
        await client.set(trainer_lease_key("default"), "successor")
        await client.set(POINTER, "9999999999999-00000000")
        await publish(context, SAMPLES[60:300])

        async def standing_by():
            return (await trainer.model())["active"] is False

        await until(standing_by, "the trainer stands by")
        assert await client.get(POINTER) == b"9999999999999-00000000"


async def test_all_but_the_newest_five_bundles_expire(nats, redis):
    async with stream(nats.url) as context, store(redis) as client, running_trainer(nats.url, redis.url) as trainer:
        waiting = [SAMPLES[start : start + 20] for start in range(0, len(SAMPLES), 20)]

        async def seven():
            """The gate may refuse some: go on until enough have passed."""
            if waiting:
                await publish(context, waiting.pop(0))
            return await trainer.metric("leadtime_trainer_bundles_published_total") >= 7

        await until(seven, "seven bundles are published", poll_s=0.2)
        prefix = bundle_key("default", SCHEMA.hash, "")
        keys = {key.decode().removeprefix(prefix) for key in await client.keys(prefix + "*")} - {"current"}
        lasting = [name for name in keys if await client.ttl(prefix + name) == -1]
        assert len(keys) >= 7
        assert len(lasting) <= 5
        assert (await client.get(POINTER)).decode() in lasting


async def test_what_is_published_is_signed_by_the_key(nats, redis):
    key = "a key of 16 chars"
    async with (
        stream(nats.url) as context,
        store(redis) as client,
        running_trainer(nats.url, redis.url, signing_key=key) as trainer,
    ):
        await publish(context, SAMPLES[:60])
        version = await trainer.published()
        blob = await client.get(bundle_key("default", SCHEMA.hash, version))
        assert BundleGate("default", key.encode()).open(version, blob)
        with pytest.raises(BundleRefusedError):
            BundleGate("default", b"another key of 16").open(version, blob)


async def test_the_process_ends_on_a_signal_and_gives_the_lease_up(nats, redis, tmp_path):
    async with store(redis) as client, trainer_process(nats, redis, tmp_path / "trainer.log") as (process, _):
        assert await client.exists(trainer_lease_key("default"))
        assert await process.stop(signal.SIGTERM) == 0
        assert not await client.exists(trainer_lease_key("default"))


async def test_a_setting_out_of_range_stops_the_start_and_is_named(tmp_path):
    process = ServerProcess("trainer", tmp_path / "trainer.log", {"LEADTIME_TRAINER_DEPTH": "9"})
    process.spawn([sys.executable, "-m", "services.trainer"])
    await until(lambda: not process.running, "the trainer has ended")
    assert await process.stop() == 78
    assert "LEADTIME_TRAINER_DEPTH" in process.log()
