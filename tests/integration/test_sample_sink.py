"""Samples reach collectors in batches, through whatever the collectors do, and what doesn't arrive is counted."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry

from services.router.sample_sink import SampleSink, SinkConfig
from shared.lifecycle import serve_http
from shared.samples import LatencySample
from tests.contract.test_samples import SAMPLE
from tests.integration.collector.running import running_collector, stored_ids
from tests.servers import NatsServer, free_port, until

QUICK = SinkConfig(batch=10, linger_ms=5.0, first_delay_ms=5.0, last_delay_ms=20.0, flush_ms=1_000.0)
REGISTRY_FATES = ("delivered", "rejected", "refused", "pushed_out", "abandoned")


def numbered(number: int, **changes: Any) -> LatencySample:
    return msgspec.structs.replace(SAMPLE, decision_id=f"d{number}", **changes)


@dataclass
class FakeCollector:
    """Answers each POST as told; remembers what it was sent."""

    answer: Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]]
    batches: list[list[str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""

    @property
    def ids(self) -> list[str]:
        return [decision_id for batch in self.batches for decision_id in batch]


def takes(samples: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    return 200, {"published": len(samples), "duplicates": 0, "rejected": 0}


def is_away(_: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    return 503, {"error": {"code": "not_stored"}}


@contextlib.asynccontextmanager
async def fake_collector(
    answer: Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]] = takes,
) -> AsyncIterator[FakeCollector]:
    fake = FakeCollector(answer)
    app = FastAPI()

    @app.post("/v1/samples")
    async def post(request: Request) -> JSONResponse:
        samples = orjson.loads(await request.body())
        status, document = fake.answer(samples)
        fake.tokens.append(request.headers.get("authorization"))
        if status == 200:
            fake.batches.append([sample["decision_id"] for sample in samples])
        return JSONResponse(document, status_code=status)

    async with serve_http(app, "127.0.0.1", 0) as (host, port):
        fake.url = f"http://{host}:{port}"
        yield fake


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def fates(registry: CollectorRegistry) -> dict[str, float]:
    found = {
        fate: registry.get_sample_value("leadtime_router_samples_total", {"fate": fate}) or 0.0
        for fate in REGISTRY_FATES
    }
    return {fate: count for fate, count in found.items() if count}


def sink(registry: CollectorRegistry, *urls: str, config: SinkConfig = QUICK, token: str | None = None) -> SampleSink:
    return SampleSink(urls, registry, random.Random(1), config=config, token=token)


async def test_samples_arrive_once_in_order_and_in_batches(registry: CollectorRegistry) -> None:
    async with fake_collector() as collector, sink(registry, collector.url, token="secret") as out:
        for number in range(25):
            out.offer(numbered(number))
        await until(lambda: len(collector.ids) == 25, "all arrived")
    assert collector.ids == [f"d{number}" for number in range(25)]
    assert [len(batch) for batch in collector.batches] == [10, 10, 5]
    assert set(collector.tokens) == {"Bearer secret"}
    assert fates(registry) == {"delivered": 25.0}


async def test_a_single_sample_does_not_wait_for_a_batch(registry: CollectorRegistry) -> None:
    async with fake_collector() as collector, sink(registry, collector.url) as out:
        out.offer(numbered(1))
        await until(lambda: collector.ids == ["d1"], "it arrived")
        out.offer(numbered(2))
        await until(lambda: collector.ids == ["d1", "d2"], "so did the next")


async def test_the_next_collector_is_tried_where_one_is_away(registry: CollectorRegistry) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with (
        fake_collector(is_away) as away,
        fake_collector() as collector,
        sink(registry, gone, away.url, collector.url) as out,
    ):
        for number in range(40):
            out.offer(numbered(number))
        await until(lambda: len(collector.ids) == 40, "all arrived")
    assert sorted(collector.ids) == sorted(f"d{number}" for number in range(40))
    assert fates(registry) == {"delivered": 40.0}


async def test_a_batch_is_repeated_until_a_collector_is_back(registry: CollectorRegistry) -> None:
    async with fake_collector(is_away) as collector, sink(registry, collector.url) as out:
        out.offer(numbered(1))
        await until(
            lambda: (registry.get_sample_value("leadtime_router_sample_posts_total", {"result": "failed"}) or 0) > 2,
            "it was tried again",
        )
        assert out.waiting == 1
        collector.answer = takes
        await until(lambda: collector.ids == ["d1"], "it arrived")


async def test_a_sample_at_fault_is_given_up_and_the_others_arrive(registry: CollectorRegistry) -> None:
    def picky(samples: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        for index, sample in enumerate(samples):
            if sample["decision_id"] in {"d3", "d7"}:
                return 400, {"error": {"field": f"samples[{index}].sample.model"}}
        return takes(samples)

    async with fake_collector(picky) as collector, sink(registry, collector.url) as out:
        for number in range(10):
            out.offer(numbered(number))
        await until(lambda: len(collector.ids) == 8, "the sound ones arrived")
    assert fates(registry) == {"delivered": 8.0, "refused": 2.0}


async def test_a_list_that_is_too_large_is_cut_in_halves(registry: CollectorRegistry) -> None:
    def small(samples: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        return takes(samples) if len(samples) <= 3 else (413, {"error": {"field": None}})

    async with fake_collector(small) as collector, sink(registry, collector.url) as out:
        for number in range(10):
            out.offer(numbered(number))
        await until(lambda: len(collector.ids) == 10, "all arrived")
    assert collector.ids == [f"d{number}" for number in range(10)]
    assert fates(registry) == {"delivered": 10.0}


async def test_what_the_collector_found_useless_is_counted(registry: CollectorRegistry) -> None:
    def judges(samples: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        return 200, {"published": len(samples) - 1, "duplicates": 0, "rejected": 1}

    async with fake_collector(judges) as collector, sink(registry, collector.url) as out:
        for number in range(4):
            out.offer(numbered(number))
        await until(lambda: len(collector.ids) == 4, "all arrived")
    assert fates(registry) == {"delivered": 3.0, "rejected": 1.0}


async def test_a_stop_delivers_what_waits(registry: CollectorRegistry) -> None:
    async with fake_collector() as collector:
        async with sink(registry, collector.url) as out:
            for number in range(95):
                out.offer(numbered(number))
        assert len(collector.ids) == 95
    assert fates(registry) == {"delivered": 95.0}


async def test_a_stop_without_a_collector_gives_up_in_time_and_counts(registry: CollectorRegistry) -> None:
    config = SinkConfig(batch=10, linger_ms=5.0, first_delay_ms=5.0, flush_ms=100.0)
    started = time.monotonic()
    async with sink(registry, f"http://127.0.0.1:{free_port()}", config=config) as out:
        for number in range(25):
            out.offer(numbered(number))
    assert time.monotonic() - started < 5.0
    assert fates(registry) == {"abandoned": 25.0}
    assert out.waiting == 0


async def test_a_collector_that_never_answers_slows_no_offer(registry: CollectorRegistry) -> None:
    """Ten minutes at 500 a second, offered at once: memory is the buffer's, and an offer costs microseconds."""

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = SinkConfig(capacity=1_000, batch=10, linger_ms=1.0, flush_ms=50.0)
    async with sink(registry, f"http://127.0.0.1:{port}", config=config) as out:
        out.offer(SAMPLE)
        await until(lambda: held, "a POST is under way")
        started = time.process_time()
        for _ in range(300_000):
            out.offer(SAMPLE)
        each_us = (time.process_time() - started) / 300_000 * 1e6
        assert out.waiting <= 1_010
    assert each_us < 20.0
    server.close()
    for writer in held:
        writer.close()
    found = fates(registry)
    assert found["pushed_out"] + found["abandoned"] == 300_001.0


async def test_a_real_collector_stores_them_under_their_decision_id(
    nats: NatsServer, registry: CollectorRegistry
) -> None:
    async with running_collector(nats.url) as collector:
        async with sink(registry, collector.url) as out:
            out.offer(numbered(1))
            out.offer(numbered(1))
            out.offer(numbered(2, status=500))
            out.offer(numbered(3, model=""))
            out.offer(numbered(4))
        assert await stored_ids(nats.url) == ["d1", "d4"]
    assert fates(registry) == {"delivered": 3.0, "rejected": 1.0, "refused": 1.0}
