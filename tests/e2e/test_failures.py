"""Parts die and come back while requests go on: none fails, samples resume, nothing acknowledged is lost."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from shared.prior import is_prior
from tests.e2e.conftest import Running, running, servers
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def traffic(live: Running, concurrency: int = 4) -> AsyncIterator[list[int]]:
    """Requests without a pause while the block runs; yields their statuses as they come."""
    statuses: list[int] = []
    stopping = asyncio.Event()
    counter = itertools.count()

    async def sender() -> None:
        while not stopping.is_set():
            number = next(counter)
            response = await live.chat(f"traffic {number}", stream=number % 2 == 0)
            statuses.append(response.status_code)

    senders = [asyncio.create_task(sender()) for _ in range(concurrency)]
    try:
        yield statuses
    finally:
        stopping.set()
        await asyncio.gather(*senders)


async def more(statuses: list[int], count: int = 40) -> None:
    """Wait for `count` further answers."""
    goal = len(statuses) + count
    await until(lambda: len(statuses) >= goal, f"{count} more answers", timeout_s=30.0)


async def grows(live: Running) -> None:
    """Wait until a sample more is on the stream."""
    before = await live.samples()

    async def grown() -> bool:
        return await live.samples() > before

    await until(grown, "samples arrive", timeout_s=30.0)


async def rung_counts_up(live: Running, rung: str) -> None:
    before = (await live.served_by())[rung]

    async def counted() -> bool:
        return (await live.served_by())[rung] > before

    await until(counted, f"decisions come from rung {rung}", timeout_s=30.0)


@pytest.mark.parametrize(("prior", "rung"), [("8b", "prior"), ("off", "heuristic")])
async def test_before_the_first_bundle_physics_answers_and_without_it_the_heuristic(
    tmp_path: Path, prior: str, rung: str
) -> None:
    settings = {"LEADTIME_TRAINER_MIN_SAMPLES": "100000", "LEADTIME_ROUTER_PRIOR": prior}
    async for live in running(tmp_path, servers(), settings):
        response = await live.chat("first")
        assert response.status_code == 200
        newest = await live.newest_decision()
        assert (newest["rung"], newest["low_confidence"]) == (rung, prior != "off")
        predictions = [candidate["prediction"] for candidate in newest["candidates"]]
        assert all(predictions) is (prior != "off")


async def ask_and_look(live: Running) -> tuple[str, str]:
    """Send a request: the rung that decided it, and the version whose calibration the router has ("" without one)."""
    await live.chat(f"cold {time.monotonic()}", stream=True)
    calibration = (await live.stats())["ladder"]["own"]["calibration"]
    return (await live.newest_decision())["rung"], calibration["bundle"] if calibration else ""


async def prior_is_measured(live: Running) -> bool:
    rung, version = await ask_and_look(live)
    return rung == "prior" and is_prior(version)


async def own_model_decides(live: Running) -> bool:
    rung, version = await ask_and_look(live)
    return rung == "predictor" and version != "" and not is_prior(version)


async def test_a_cold_pool_goes_from_physics_to_measured_physics_to_its_own_model(tmp_path: Path) -> None:
    """No decision is without a prediction: the table's, bent by the first outcomes, then the first bundle's."""
    async for live in running(tmp_path, servers(), {"LEADTIME_TRAINER_RETRAIN_INTERVAL_MS": "1000"}):
        assert (await ask_and_look(live))[0] == "prior"
        await until(partial(prior_is_measured, live), "the prior's error has reached the router", poll_s=0.3)
        await until(partial(own_model_decides, live), "the first bundle decides", timeout_s=60.0)
        served = await live.served_by()
        assert served["heuristic"] == 0
        assert served["prior"] > 1


async def test_a_killed_predictor_leaves_the_routers_own_bundle(live: Running) -> None:
    await live.learn()
    async with traffic(live) as statuses:
        await rung_counts_up(live, "predictor")
        await live.stack.kill("predictor")
        await rung_counts_up(live, "in_process")
        await more(statuses)
        await live.stack.restart("predictor")
        await rung_counts_up(live, "predictor")
    assert set(statuses) == {200}


@pytest.mark.parametrize("part", ["nats", "redis", "collector", "trainer"])
async def test_requests_go_on_without(live: Running, part: str) -> None:
    """The part is killed under load and started again; samples resume and the window is whole."""
    await live.learn()
    async with traffic(live) as statuses:
        await grows(live)
        acknowledged = await live.samples()
        await live.stack.kill(part)
        await more(statuses, 60)
        await live.stack.restart(part)
        await more(statuses)
        await grows(live)
        assert await live.samples() >= acknowledged
    assert set(statuses) == {200}
    await live.idle()


async def test_bundles_are_swapped_under_load_without_a_failed_request(live: Running) -> None:
    await live.learn()
    await live.client.post(f"{live.router}/v1/stats/reset")
    async with traffic(live) as statuses:

        async def three() -> bool:
            return len((await live.stats())["bundles"]) >= 3

        await until(three, "three bundles have served decisions", timeout_s=60.0)
    assert set(statuses) == {200}


async def test_a_dead_endpoint_is_not_picked_first(live: Running) -> None:
    await live.control("stop/s1")
    try:

        async def two_ready() -> bool:
            endpoints = (await live.router_json("/v1/endpoints"))["endpoints"]
            return sum(bool(endpoint["ready"]) for endpoint in endpoints) == 2

        async with traffic(live) as statuses:
            await until(two_ready, "the router has noticed", timeout_s=30.0)
            await more(statuses, 60)
        assert set(statuses) == {200}
    finally:
        await live.control("start/s1")

    async def all_ready() -> bool:
        endpoints = (await live.router_json("/v1/endpoints"))["endpoints"]
        return all(endpoint["ready"] for endpoint in endpoints)

    await until(all_ready, "the endpoint is found again", timeout_s=30.0)


async def test_without_a_ready_endpoint_the_answer_is_503(live: Running) -> None:
    for i in range(3):
        await live.control(f"stop/s{i}")
    try:

        async def none_ready() -> bool:
            endpoints = (await live.router_json("/v1/endpoints"))["endpoints"]
            return not any(endpoint["ready"] for endpoint in endpoints)

        await until(none_ready, "the router has noticed", timeout_s=30.0)
        response = await live.chat("nobody")
        assert response.status_code == 503
        assert response.json()["error"]["code"]
        assert response.headers["x-leadtime-reason"] == "no_endpoint"
    finally:
        for i in range(3):
            await live.control(f"start/s{i}")

    async def all_ready() -> bool:
        endpoints = (await live.router_json("/v1/endpoints"))["endpoints"]
        return all(endpoint["ready"] for endpoint in endpoints)

    await until(all_ready, "the endpoints are found again", timeout_s=30.0)


async def test_a_killed_router_leaves_envoy_routing_by_itself(live: Running) -> None:
    async with traffic(live) as statuses:
        await more(statuses, 10)
        await live.stack.kill("router")
        await more(statuses, 40)
        await live.stack.restart("router")
        await rung_counts_up(live, "predictor")
    assert set(statuses) == {200}
