"""The router's predictions against predictors behind real sockets and a real Redis-protocol server."""

import asyncio
import contextlib
import os
import signal
import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from bench.queueing import observe
from services.router.predict.bundles import BundleWatcher
from services.router.predict.client import ClientConfig, PredictorClient
from services.router.predict.errors import FailureReason, PredictError
from services.router.predict.ladder import Ladder, LadderConfig
from services.router.predict.metrics import PredictMetrics
from services.router.predict.replicas import CircuitConfig
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.train import FitOptions
from shared import prediction
from shared.bundle import Calibration, seal
from shared.clock import SystemClock
from shared.names import CALIBRATIONS_CHANNEL, calibration_key
from shared.prior import PriorModel
from shared.samples import Rung
from tests.bundles import OUTPUTS, expected, make_bundle, rows_of, sealed
from tests.fakes.fake_predictor import VERSION, Behaviour, fake_predictor
from tests.predictors import predictor, publish
from tests.servers import until
from tests.unit.trainer.snapshots import snapshot_of

DEADLINE_MS = 2_000.0
QUICK = CircuitConfig(max_failures=3, probe_ms=50.0, max_probe_ms=50.0)


@contextlib.asynccontextmanager
async def connected(*urls, deadline_ms=DEADLINE_MS, live=None, **options):
    """A client that has resolved its replicas."""
    registry = CollectorRegistry()
    config = ClientConfig(**{"call_ms": deadline_ms, "circuit": QUICK, **options.pop("config", {})})
    metrics = PredictMetrics(registry, SystemClock())
    async with PredictorClient(urls, "default", metrics, SystemClock(), config=config, **options) as client:
        await until(lambda: len(client.describe()) == (len(urls) if live is None else live), "resolved")
        yield client, registry


def calls(registry, result):
    return registry.get_sample_value("leadtime_router_predict_calls_total", {"result": result})


async def ask(client, rows, deadline_ms=DEADLINE_MS):
    answer = await client.predict(rows, deadline_ms)
    return answer.values


async def failure(client, rows=None, deadline_ms=DEADLINE_MS):
    with pytest.raises(PredictError) as caught:
        await client.predict(rows_of(1) if rows is None else rows, deadline_ms)
    return caught.value.reason


async def test_rows_are_answered_with_the_bundles_version_and_names():
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        answer = await client.predict(rows_of(3, 1), DEADLINE_MS)
        assert np.array_equal(answer.values, expected(rows_of(3, 1)))
        assert (answer.outputs, answer.bundle_version) == (OUTPUTS, VERSION)


async def test_one_decision_is_one_call_whatever_the_number_of_candidates():
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        await ask(client, rows_of(*range(100)))
        assert fake.calls == [100]


async def test_concurrent_decisions_share_a_call_and_each_gets_its_own_rows():
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        requests = [rows_of(*(1_000 * i + j for j in range(1 + i % 5))) for i in range(40)]
        answers = await asyncio.gather(*(ask(client, rows) for rows in requests))
        for rows, values in zip(requests, answers, strict=True):
            assert np.array_equal(values, expected(rows))
        assert fake.calls == [sum(map(len, requests))]


async def test_while_a_call_is_in_flight_decisions_gather_for_a_millisecond_only():
    gate = asyncio.Event()
    async with fake_predictor(gate=gate) as fake, connected(fake.url) as (client, _):
        first = asyncio.ensure_future(ask(client, rows_of(1)))
        await until(lambda: fake.calls == [1], "first call")
        second = asyncio.ensure_future(ask(client, rows_of(2)))
        third = asyncio.ensure_future(ask(client, rows_of(3)))
        await until(lambda: fake.calls == [1, 2], "second call beside the first")
        gate.set()
        answers = await asyncio.gather(first, second, third)
        assert [float(values[0, 0]) for values in answers] == [2.0, 3.0, 4.0]


async def test_calls_in_a_row_use_one_connection():
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        for i in range(10):
            await ask(client, rows_of(i))
        assert fake.connections == 1


async def test_a_predictor_that_closes_idle_connections_costs_no_failure():
    async with fake_predictor(Behaviour.CLOSE_AFTER) as fake, connected(fake.url) as (client, registry):
        for i in range(10):
            assert np.array_equal(await ask(client, rows_of(i)), expected(rows_of(i)))
        assert calls(registry, "ok") == 10
        assert [calls(registry, reason.value) for reason in FailureReason] == [0] * len(FailureReason)


async def test_replicas_share_the_calls():
    async with fake_predictor() as one, fake_predictor() as two, connected(one.url, two.url) as (client, _):
        for i in range(10):
            await ask(client, rows_of(i))
        assert (len(one.calls), len(two.calls)) == (5, 5)


async def test_a_busy_replica_is_passed_over():
    gate = asyncio.Event()
    async with (
        fake_predictor(gate=gate) as slow,
        fake_predictor() as quick,
        connected(slow.url, quick.url) as (client, _),
    ):
        held = []
        while not slow.calls:
            held.append(asyncio.ensure_future(ask(client, rows_of(0))))
            await until(lambda: len(slow.calls) + len(quick.calls) == len(held), "called")
        before = len(quick.calls)
        for i in range(5):
            await ask(client, rows_of(i))
        assert (len(slow.calls), len(quick.calls)) == (1, before + 5)
        gate.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour.RESET, FailureReason.RESET),
        (Behaviour.CUT, FailureReason.RESET),
        (Behaviour.NOT_HTTP, FailureReason.RESET),
        (Behaviour.UNAVAILABLE, FailureReason.UNAVAILABLE),
        (Behaviour.NESTED, FailureReason.UNAVAILABLE),
        (Behaviour.NO_MODEL, FailureReason.NO_BUNDLE),
        (Behaviour.WRONG_SCHEMA, FailureReason.STATUS),
        (Behaviour.REDIRECT, FailureReason.STATUS),
        (Behaviour.SHORT, FailureReason.BAD_ANSWER),
        (Behaviour.NOT_A_NUMBER, FailureReason.BAD_ANSWER),
        (Behaviour.NEGATIVE, FailureReason.BAD_ANSWER),
        (Behaviour.UNKNOWN_OUTPUTS, FailureReason.BAD_ANSWER),
        (Behaviour.TWICE, FailureReason.BAD_ANSWER),
        (Behaviour.ENDLESS_VERSION, FailureReason.BAD_ANSWER),
        (Behaviour.NO_HEADERS, FailureReason.BAD_ANSWER),
        (Behaviour.REJECT, FailureReason.REJECTED),
    ],
)
async def test_every_way_to_fail_is_a_typed_error_and_counted(behaviour, reason):
    async with fake_predictor(behaviour) as fake, connected(fake.url) as (client, registry):
        assert await failure(client) is reason
        assert calls(registry, reason.value) == 1


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour.RESET,
        Behaviour.CUT,
        Behaviour.UNAVAILABLE,
        Behaviour.NO_MODEL,
        Behaviour.WRONG_SCHEMA,
        Behaviour.SHORT,
    ],
)
async def test_where_one_replica_fails_the_other_answers_the_same_request(behaviour):
    async with fake_predictor(behaviour) as bad, fake_predictor() as good, connected(bad.url, good.url) as (client, _):
        for i in range(6):
            assert np.array_equal(await ask(client, rows_of(i)), expected(rows_of(i)))
        assert len(bad.calls) >= 1


async def test_rows_that_are_at_fault_are_not_sent_to_every_replica():
    async with (
        fake_predictor(Behaviour.REJECT) as one,
        fake_predictor(Behaviour.REJECT) as two,
        connected(one.url, two.url) as (client, _),
    ):
        assert await failure(client) is FailureReason.REJECTED
        assert len(one.calls) + len(two.calls) == 1
        assert all(replica["live"] for replica in client.describe())


async def test_one_hangs_and_one_refuses_within_the_one_deadline():
    """A fallback gets what is left of the budget, not a budget of its own."""
    async with fake_predictor(Behaviour.HANG) as hangs, fake_predictor() as gone:
        await gone.stop()
        async with connected(hangs.url, gone.url, deadline_ms=400.0) as (client, _):
            for _ in range(2):
                started = time.monotonic()
                assert await failure(client, deadline_ms=400.0) in {
                    FailureReason.TIMEOUT,
                    FailureReason.REFUSED,
                    FailureReason.NO_REPLICA,
                }
                assert time.monotonic() - started < 3.0  # its deadline is 0.4 s, on a machine that others use too


async def test_a_hanging_replica_leaves_half_of_the_deadline_to_the_other():
    async with (
        fake_predictor(Behaviour.HANG) as hangs,
        fake_predictor() as good,
        connected(hangs.url, good.url, deadline_ms=400.0) as (client, registry),
    ):
        for i in range(2):
            assert np.array_equal(await ask(client, rows_of(i), 400.0), expected(rows_of(i)))
        assert calls(registry, "timeout") >= 1


async def test_an_ejected_replica_costs_no_time_and_a_probe_brings_it_back():
    async with fake_predictor() as fake, connected(fake.url) as (client, registry):
        await ask(client, rows_of(1))
        await fake.stop()
        assert await failure(client) is FailureReason.REFUSED
        started = time.monotonic()
        assert await failure(client) is FailureReason.NO_REPLICA
        assert time.monotonic() - started < DEADLINE_MS / 4e3
        assert registry.get_sample_value("leadtime_router_predict_replicas", {"state": "ejected"}) == 1
        await fake.start()
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert np.array_equal(await ask(client, rows_of(2)), expected(rows_of(2)))


@pytest.mark.parametrize("behaviour", [Behaviour.UNAVAILABLE, Behaviour.NESTED])
async def test_an_unready_replica_is_probed_until_it_is_ready(behaviour):
    async with fake_predictor(behaviour) as fake, connected(fake.url) as (client, _):
        assert await failure(client) is FailureReason.UNAVAILABLE
        await until(lambda: fake.probes >= 2, "probed again")
        assert not client.describe()[0]["live"]
        fake.behaviour = Behaviour.ANSWER
        await until(lambda: client.describe()[0]["live"], "back by a probe")


def replicas_by_state(registry):
    states = ("live", "without_model", "ejected")
    return [registry.get_sample_value("leadtime_router_predict_replicas", {"state": state}) for state in states]


async def test_a_predictor_without_a_model_is_not_ejected_and_is_called_once_it_has_one():
    async with fake_predictor(Behaviour.NO_MODEL) as fake, connected(fake.url) as (client, registry):
        assert await failure(client) is FailureReason.NO_BUNDLE
        assert await failure(client) is FailureReason.NO_BUNDLE
        await until(lambda: fake.probes >= 3, "probed again and again")
        assert len(fake.calls) == 1
        assert replicas_by_state(registry) == [0, 1, 0]
        assert registry.get_sample_value("leadtime_router_predict_ejections_total") == 0
        assert client.describe()[0]["without_model"]
        fake.behaviour = Behaviour.ANSWER
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert np.array_equal(await ask(client, rows_of(1)), expected(rows_of(1)))
        assert replicas_by_state(registry) == [1, 0, 0]


async def test_a_predictor_that_waits_for_another_pools_model_comes_back_all_the_same():
    """It isn't ready until every pool has a bundle; this router's has one."""
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        await fake.stop()
        assert await failure(client) is FailureReason.REFUSED
        fake.behaviour = Behaviour.NO_OTHER_MODEL
        await fake.start()
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert np.array_equal(await ask(client, rows_of(1)), expected(rows_of(1)))


async def test_a_predictor_without_a_model_that_dies_is_ejected():
    async with fake_predictor(Behaviour.NO_MODEL) as fake, connected(fake.url) as (client, registry):
        assert await failure(client) is FailureReason.NO_BUNDLE
        await fake.stop()
        await until(lambda: replicas_by_state(registry) == [0, 0, 1], "ejected")
        assert client.describe()[0]["last_failure"] == "refused"
        assert await failure(client) is FailureReason.NO_REPLICA


async def test_a_predictor_that_dies_while_it_is_probed_is_ejected_and_comes_back():
    async with fake_predictor(Behaviour.NO_MODEL) as fake, connected(fake.url) as (client, registry):
        assert await failure(client) is FailureReason.NO_BUNDLE
        before = fake.connections
        fake.behaviour = Behaviour.HANG
        await until(lambda: fake.connections > before, "a probe hangs")
        await fake.stop()
        await until(lambda: replicas_by_state(registry) == [0, 0, 1], "ejected")
        assert registry.get_sample_value("leadtime_router_predict_ejections_total") == 1
        fake.behaviour = Behaviour.ANSWER
        await fake.start()
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert np.array_equal(await ask(client, rows_of(1)), expected(rows_of(1)))


async def test_what_a_predictor_says_of_its_missing_models_is_understood(tmp_path, redis):
    """A real one of two pools: without both, with this router's alone, and started again so."""
    async with (
        predictor(tmp_path, redis.url, pools="default,other") as process,
        connected(process.url) as (client, registry),
    ):
        assert await failure(client, rows_of(0)) is FailureReason.NO_BUNDLE
        assert replicas_by_state(registry) == [0, 1, 0]
        version = await publish(redis.url, make_bundle())
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert (await client.predict(rows_of(1), DEADLINE_MS)).bundle_version == version
        await process.kill()
        assert await failure(client) is FailureReason.REFUSED
        await process.start()
        await until(lambda: client.describe()[0]["live"], "back by a probe")
        assert not await process.is_ready()
        assert (await client.predict(rows_of(2), DEADLINE_MS)).bundle_version == version


async def test_a_decision_that_gives_up_leaves_the_others_of_its_call_alone():
    gate = asyncio.Event()
    async with fake_predictor(gate=gate) as fake, connected(fake.url) as (client, _):
        patient = asyncio.ensure_future(ask(client, rows_of(1)))
        assert await failure(client, rows_of(2), deadline_ms=10.0) is FailureReason.TIMEOUT
        gate.set()
        assert np.array_equal(await patient, expected(rows_of(1)))
        assert fake.calls == [2]


async def test_an_answer_that_comes_too_late_is_never_taken_for_the_next_ones():
    gate = asyncio.Event()
    async with fake_predictor(gate=gate) as fake, connected(fake.url, deadline_ms=30.0) as (client, _):
        assert await failure(client, rows_of(1), 30.0) is FailureReason.TIMEOUT
        gate.set()
        await until(lambda: client.describe()[0]["outstanding"] == 0, "given up")
        fake.gate = None
        for i in range(2, 6):
            assert np.array_equal((await client.predict(rows_of(i), DEADLINE_MS)).values, expected(rows_of(i)))


async def test_more_waiting_rows_than_the_bound_are_refused_here():
    gate = asyncio.Event()
    limits = {"max_waiting_rows": 3, "max_in_flight": 1}
    async with fake_predictor(gate=gate) as fake, connected(fake.url, config=limits) as (client, _):
        first = asyncio.ensure_future(ask(client, rows_of(1)))
        await until(lambda: fake.calls == [1], "in flight")
        second = asyncio.ensure_future(ask(client, rows_of(2, 2, 2)))
        await asyncio.sleep(0)
        assert await failure(client, rows_of(3)) is FailureReason.OVERLOADED
        gate.set()
        await asyncio.gather(first, second)


async def test_all_addresses_of_a_name_are_replicas_and_those_that_leave_are_dropped():
    async with fake_predictor() as one, fake_predictor() as two:
        found = [("127.0.0.1", one.port), ("127.0.0.1", two.port)]

        async def resolve(host, port):
            assert (host, port) == ("predictors.example", 8080)
            if not found:
                raise OSError("no such name")
            return list(found)

        url = "http://predictors.example:8080"
        limits = {"resolve_ms": 50.0}
        async with connected(url, live=2, resolve=resolve, config=limits) as (client, registry):
            for i in range(4):
                await ask(client, rows_of(i))
            assert (len(one.calls), len(two.calls)) == (2, 2)
            del found[0]
            await until(lambda: len(client.describe()) == 1, "one left")
            await ask(client, rows_of(9))
            assert len(two.calls) == 3
            found.clear()
            failures = "leadtime_router_predict_resolve_failures_total"
            await until(lambda: registry.get_sample_value(failures), "not resolved")
            assert np.array_equal(await ask(client, rows_of(9)), expected(rows_of(9)))


async def test_the_token_is_sent_where_one_is_set():
    async with fake_predictor(token="secret") as fake:
        async with connected(fake.url, token="secret") as (client, _):
            await ask(client, rows_of(1))
        async with connected(fake.url) as (client, _):
            assert await failure(client) is FailureReason.STATUS


async def test_a_new_bundle_with_other_outputs_is_read_by_its_own_names():
    async with fake_predictor() as fake, connected(fake.url) as (client, _):
        await ask(client, rows_of(1))
        fake.version, fake.outputs = "1700000000001-fa4efa4e", ("ttft_p50",)
        answer = await client.predict(rows_of(1, 2), DEADLINE_MS)
        assert (answer.bundle_version, answer.outputs, answer.values.shape) == (fake.version, ("ttft_p50",), (2, 1))


@contextlib.asynccontextmanager
async def watched(redis_url, *, key=None):
    registry = CollectorRegistry()
    redis = Redis.from_url(redis_url)
    metrics = PredictMetrics(registry, SystemClock())
    watcher = BundleWatcher(redis, "default", key, metrics, SystemClock(), poll_ms=100.0)
    running = asyncio.create_task(watcher.run())
    try:
        yield watcher, registry
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await redis.aclose()


async def calibrate(redis_url, version, *, sequence=1, key=None, blob=None):
    calibration = Calibration(
        pool="default",
        bundle_version=version,
        sequence=sequence,
        updated_unix_ms=time.time() * 1e3,
        log_bias={"ttft": float(np.log(2))},
    )
    redis = Redis.from_url(redis_url)
    await redis.set(calibration_key("default"), seal(calibration.encode(), key) if blob is None else blob)
    await redis.publish(CALIBRATIONS_CHANNEL, b"{}")
    await redis.aclose()


async def test_a_bundle_of_answers_that_were_not_streamed_predicts_all_and_says_what_is_the_priors(redis):
    """What the trainer makes of sixty whole answers, as the router reads it from Redis."""
    observed = observe(60, seed=3)
    options = CycleOptions("default", fit=FitOptions(prior="8b"))
    learned = run_cycle(snapshot_of(observed.rows, e2e=observed.e2e_ms), None, options, time.time() * 1e3).champion
    async with watched(redis.url) as (watcher, _):
        version = await publish(redis.url, learned.bundle)
        await until(lambda: watcher.model, "the bundle")
        assert watcher.model.outputs == prediction.OUTPUTS
        assert watcher.prior_targets(version) == {"ttft", "tpot"}
        assert watcher.prior_targets("another") == frozenset()
        assert watcher.describe()["bundle"]["prior_targets"] == ["ttft", "tpot"]
        answers, prior = watcher.model.predict(observed.rows), PriorModel("8b").predict(observed.rows)
        assert answers[:, 0] == pytest.approx(prior[:, 0], rel=1e-4)


async def test_the_own_copy_and_the_calibration_follow_what_is_published(redis):
    async with watched(redis.url) as (watcher, registry):
        first = await publish(redis.url, make_bundle())
        await until(lambda: watcher.model, "first bundle")
        assert watcher.model.bundle_version == first
        await calibrate(redis.url, first)
        await until(lambda: watcher.calibration, "calibration")
        second = await publish(redis.url, make_bundle(created_unix_ms=1_700_000_001_000.0))
        await until(lambda: watcher.model.bundle_version == second, "second bundle")
        assert watcher.calibration_for(second, OUTPUTS) is None
        await calibrate(redis.url, second, sequence=2)
        await until(lambda: watcher.calibration.sequence == 2, "second calibration")
        for version in (first, second):
            assert watcher.calibration_for(version, OUTPUTS).calibration.bundle_version == version
        described = watcher.describe()
        assert (described["bundle"]["version"], described["calibration"]["sequence"]) == (second, 2)
        assert registry.get_sample_value("leadtime_router_predict_bundle_info", {"version": first}) is None


async def test_what_is_damaged_or_unsigned_is_refused_and_what_was_before_stays(redis):
    key = b"a key of 16 chars"
    async with watched(redis.url, key=key) as (watcher, registry):
        good = await publish(redis.url, make_bundle(), key=key)
        await calibrate(redis.url, good, key=key)
        await until(lambda: watcher.model and watcher.calibration, "both")
        bad = make_bundle(created_unix_ms=1_700_000_001_000.0)
        await publish(redis.url, bad, blob=sealed(bad))
        refusals = "leadtime_router_predict_bundle_refusals_total"
        await until(lambda: registry.get_sample_value(refusals, {"reason": "integrity"}), "bundle refused")
        await calibrate(redis.url, good, sequence=2)
        calibrations = "leadtime_router_predict_calibration_refusals_total"
        await until(lambda: registry.get_sample_value(calibrations), "calibration refused")
        assert (watcher.model.bundle_version, watcher.calibration.sequence) == (good, 1)


async def test_the_own_copy_outlives_redis(redis):
    async with watched(redis.url) as (watcher, _):
        first = await publish(redis.url, make_bundle())
        await until(lambda: watcher.model, "bundle")
        await redis.kill()
        await until(lambda: not watcher.describe()["redis_connected"], "noticed")
        assert watcher.model.bundle_version == first
        await redis.start()
        second = await publish(redis.url, make_bundle(created_unix_ms=1_700_000_001_000.0))
        await until(lambda: watcher.model.bundle_version == second, "new bundle after the return")


async def test_the_watch_can_be_stopped_at_any_moment(redis):
    """Python 3.11 loses a cancellation that meets the end of a send."""
    await publish(redis.url, make_bundle())
    for passes in range(40):
        client = Redis.from_url(redis.url)
        metrics = PredictMetrics(CollectorRegistry(), SystemClock())
        watcher = BundleWatcher(client, "default", None, metrics, SystemClock(), poll_ms=60_000.0)
        running = asyncio.create_task(watcher.run())
        for _ in range(passes):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=10.0)
        assert done, f"still running when cancelled after {passes} passes"
        await client.aclose()


async def test_down_the_ladder_and_up_again_with_real_predictors(redis, tmp_path):
    """No bundle → None; predictors → predictor; one frozen, one killed → own copy in time; one back → predictor."""
    async with (
        predictor(tmp_path / "one", redis.url) as one,
        predictor(tmp_path / "two", redis.url) as two,
        watched(redis.url) as (watcher, _),
        connected(one.url, two.url, deadline_ms=400.0) as (client, _),
    ):
        metrics = PredictMetrics(CollectorRegistry(), SystemClock())
        ladder = Ladder(client, watcher, metrics, SystemClock(), config=LadderConfig(reserve_ms=100.0))
        addresses, backlog = ["10.0.0.1:8000", "10.0.0.2:8000"], np.zeros(2, np.float32)

        async def decide(deadline_ms=400.0):
            return await ladder.predict(rows_of(1, 2), addresses, backlog, deadline_ms)

        assert await decide() is None
        version = await publish(redis.url, make_bundle())
        await until(lambda: watcher.model, "own copy")
        await until(one.is_ready, "one ready")
        await until(two.is_ready, "two ready")
        await until(lambda: all(replica["live"] for replica in client.describe()), "probed")
        await calibrate(redis.url, version)
        await until(lambda: watcher.calibration, "calibration")

        prediction = await decide(DEADLINE_MS)
        assert (prediction.rung, prediction.bundle_version) == (Rung.PREDICTOR, version)
        raw = expected(rows_of(1, 2))
        assert np.allclose(prediction.columns["ttft_p50"], 2 * raw[:, 0])

        one_frozen = one.pid
        os.kill(one_frozen, signal.SIGSTOP)
        try:
            await two.kill()
            for _ in range(5):
                started = time.monotonic()
                prediction = await decide()
                assert time.monotonic() - started < 3.0  # its deadline is 0.4 s, on a machine that others use too
                assert prediction.rung is Rung.IN_PROCESS
                assert np.allclose(prediction.columns["ttft_p50"], 2 * raw[:, 0])
        finally:
            os.kill(one_frozen, signal.SIGCONT)

        async def by_predictor():  # the first call after a thaw may meet a connection from before
            return (await decide(DEADLINE_MS)).rung is Rung.PREDICTOR

        await until(by_predictor, "one is back")
        by_rung = ladder.describe()["by_rung"]
        assert by_rung.pop("in_process") >= 5
        assert by_rung == {"predictor": 2, "prior": 0, "heuristic": 1}
