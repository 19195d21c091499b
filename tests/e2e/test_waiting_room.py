"""Requests held on purpose, through the real Envoy in both shapes: they outlive Envoy's usual second of patience, go
when an endpoint is free, are refused at their limit where they may be, and a client that leaves is forgotten.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.local.envoy import MESSAGE_TIMEOUT_S
from tests.e2e.edge import JSON_ANSWER, Edge, chat, running_edge, timed
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROFILE = """
name: waiting
producer: {plugin: predicted-latency-producer}
scorers: [{plugin: predicted-cost-scorer}]
picker: {plugin: max-score-picker}
waiting_room: {mode: overload, enough_work_ms: 0, ttl_ms: 3000, hungry: any}
fallback: token-load
"""
HELD_MS = 1000.0 * MESSAGE_TIMEOUT_S + 800.0
URGENT = {"x-slo-ttft-ms": "100"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "full_duplex"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    (directory / "profile.yaml").write_text(PROFILE)
    environment = {
        "LEADTIME_ROUTER_PROFILE": "waiting",
        "LEADTIME_ROUTER_PROFILE_FILE": str(directory / "profile.yaml"),
        "LEADTIME_ROUTER_TRUST_REQUEST_HEADERS": "true",
        # A busy machine must not take the predictions away that this is about.
        "LEADTIME_ROUTER_PREDICT_DEADLINE_MS": "300",
        "LEADTIME_ROUTER_DECISION_BUDGET_MS": "350",
    }
    async with running_edge(request.param, directory, servers=1, environment=environment) as edge:
        yield edge


@pytest_asyncio.fixture(loop_scope="module")
async def edge(running: Edge) -> AsyncIterator[Edge]:
    """One busy endpoint: a request in prefill, and predictions that nobody can be in time."""
    running.forget()
    running.predictor.offset = 1.0
    yield running
    running.answer = lambda _, __: JSON_ANSWER
    running.predictor.offset = 1.0
    await running.idle()
    assert (await room(running))["waiting"] == 0


async def room(edge: Edge) -> Any:
    return (await edge.router.json("/v1/stats"))["waiting_room"]


async def waiting(edge: Edge, count: int) -> None:
    async def there() -> bool:
        return bool((await room(edge))["waiting"] == count)

    await until(there, f"{count} requests are held")


@contextlib.asynccontextmanager
async def busy(edge: Edge) -> AsyncIterator[None]:
    """Every endpoint has a request in prefill inside the block, and is predicted to be late."""
    release = asyncio.Event()
    edge.answer = lambda _, __: replace(JSON_ANSWER, gate=release)
    edge.predictor.offset = 60_000.0
    occupied: list[asyncio.Task[httpx.Response]] = []

    async def all_busy() -> bool:
        """A request more for each look that finds one without work: how they are spread is the policy's affair."""
        if all(endpoint["pending_uncached_tokens"] > 0 for endpoint in await edge.endpoints()):
            return True
        if len(occupied) < 100:  # each with a prompt that no endpoint has in its cache
            occupied.append(asyncio.create_task(edge.ask(chat(f"busy {uuid.uuid4()} " * 100))))
        return False

    try:
        await until(all_busy, "every endpoint has work", poll_s=0.02)
        yield
    finally:
        release.set()
        await asyncio.gather(*occupied)


async def test_a_held_request_outlives_envoy_s_patience_and_goes_when_an_endpoint_is_free(edge: Edge) -> None:
    async with busy(edge):
        task = asyncio.create_task(timed(edge.ask(headers=URGENT)))
        await waiting(edge, 1)
        await asyncio.sleep(HELD_MS / 1e3)
        assert not task.done(), "Envoy neither gave up nor went on without us"
    answer, took_s = await task
    assert answer.status_code == 200
    assert took_s > HELD_MS / 1e3
    decision = (await edge.router.json("/v1/decisions?limit=1"))["decisions"][0]
    assert decision["queue_ms"] > HELD_MS
    assert decision["decision_ms"] < 500.0
    sample = next(s for s in await edge.settled_samples() if s.decision_id == decision["decision_id"])
    assert sample.queue_ms == pytest.approx(decision["queue_ms"], abs=0.01)


async def test_at_its_limit_a_request_is_refused_where_it_may_be_and_goes_where_not(edge: Edge) -> None:
    async with busy(edge):
        batch = asyncio.create_task(edge.ask(headers={**URGENT, "x-leadtime-priority": "-1"}))
        await waiting(edge, 1)
        refused = await batch
        assert refused.status_code == 429, refused.text
        assert refused.headers["x-leadtime-reason"] == "waited_too_long"
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.content)["error"]["code"] == "waited_too_long"
        kept: list[asyncio.Task[httpx.Response]] = []
        for _ in range(5):  # a predictor that misses its deadline lets one go before
            kept.append(asyncio.create_task(edge.ask(headers=URGENT)))
            await waiting(edge, 1)
            await waiting(edge, 0)
            if (await room(edge))["outlived"] >= 1:
                break
    assert [(await task).status_code for task in kept] == [200] * len(kept)
    assert (await room(edge))["outlived"] >= 1


async def test_a_client_that_leaves_is_forgotten_within_a_second(edge: Edge) -> None:
    async with busy(edge):
        left = (await room(edge))["left"]
        task = asyncio.create_task(edge.ask(headers=URGENT))
        await waiting(edge, 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        _, took_s = await timed(waiting(edge, 0))
        assert took_s < 1.0
        assert (await room(edge))["left"] == left + 1


async def test_what_can_be_served_in_time_is_never_held(edge: Edge) -> None:
    held = (await room(edge))["held"]
    for _ in range(5):
        assert (await edge.ask(headers={"x-slo-ttft-ms": "80000000"})).status_code == 200
    async with busy(edge):
        ask = asyncio.create_task(edge.ask(headers={"x-slo-ttft-ms": "80000000"}))
        await until(lambda: sum(b"hello" in seen.body for seen in edge.seen()) >= 6, "it has reached the endpoint")
    assert (await ask).status_code == 200
    assert (await room(edge))["held"] == held
