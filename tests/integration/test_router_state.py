"""The scraper and discovery against real HTTP servers: simulated model servers, and scripted ones that misbehave."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.router.discovery.endpoints import parse_endpoints
from services.router.discovery.follow import Discovery
from services.router.discovery.names import NamesSource
from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.state.exposition import EndpointCollector
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import ScrapeConfig, Scraper
from services.router.state.status import EndpointStatus
from services.router.state.vllm_metrics import parse_metrics
from shared.clock import SystemClock
from shared.lifecycle import Readiness
from shared.samples import Outcome
from sim.model_server import ModelServer
from sim.spec import Faults, ServerSpec
from tests.fakes.fake_model_server import Script, Seen, fake_model_server
from tests.samples import make_sample
from tests.servers import fetch, free_port, until

FAST = ScrapeConfig(idle_interval_ms=20.0, busy_interval_ms=20.0, timeout_ms=2_000.0, max_backoff_ms=50.0)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
METRICS = (
    b"process_start_time_seconds 100.0\n"
    b'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n'
    b'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
)


class Bed:
    """A pool with its scraper running."""

    def __init__(self, config: ScrapeConfig = FAST):
        self.clock = SystemClock()
        self.registry = CollectorRegistry()
        self.pool = PoolState(PoolConfig(), salt=b"salt", tokens=TokenEstimator())
        self.registry.register(EndpointCollector(self.pool, self.clock))
        self.scraper = Scraper(self.pool, clock=self.clock, registry=self.registry, rng=random.Random(1), config=config)

    def add(self, *addresses: str) -> None:
        for address in addresses:
            self.pool.add_endpoint(address, now_ms=self.clock.monotonic_ms())

    def status(self, address: str) -> EndpointStatus:
        return next(s for s in self.pool.endpoints(self.clock.monotonic_ms()) if s.address == address)

    def results(self, result: str) -> float:
        return self.registry.get_sample_value("leadtime_router_scrapes_total", {"result": result}) or 0.0

    async def ready(self, address: str, ready: bool = True) -> EndpointStatus:
        await until(lambda: self.status(address).ready is ready, f"{address} ready: {ready}")
        return self.status(address)

    def send(self, decision_id: str, address: str, *, ttft_ms: float = 1e9, size: int = 2_048) -> None:
        request = InferenceRequest(model="m", prompt=bytes(size), input_tokens=size / 4, max_tokens=None, streamed=True)
        now_ms = self.clock.monotonic_ms()
        _, match = self.pool.snapshot(request, None, now_ms)
        assert self.pool.dispatch(decision_id, address, request, match, predicted_ttft_ms=ttft_ms, now_ms=now_ms)


@contextlib.asynccontextmanager
async def running(config: ScrapeConfig = FAST) -> AsyncIterator[Bed]:
    bed = Bed(config)
    task = asyncio.create_task(bed.scraper.run())
    try:
        yield bed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert bed.scraper.watched == 0


@contextlib.asynccontextmanager
async def model_server(**spec) -> AsyncIterator[ModelServer]:
    server = ModelServer(ServerSpec(name="a", models=("m",), **spec), asyncio.get_running_loop())
    await server.start()
    try:
        yield server
    finally:
        server.close()


def address_of(server: ModelServer) -> str:
    return f"127.0.0.1:{server.port}"


def answers(**paths: Script | bytes):
    """A script by path, `metrics`, `health` and `models`; plain bytes are a 200."""

    def choose(seen: Seen) -> Script:
        given = paths.get(seen.path.rpartition("/")[2], Script((), status=404))
        return given if isinstance(given, Script) else Script([(0, given)], content_type="text/plain")

    return choose


async def test_a_model_server_becomes_a_candidate_with_what_it_tells():
    async with model_server() as server, running() as bed:
        bed.add(address_of(server))
        status = await bed.ready(address_of(server))
        assert (status.models, status.engine, status.waiting_requests) == (["m"], "vllm", 0.0)
        assert status.prefix_capacity_blocks > 1_000
        assert status.scrape_age_ms is not None
        assert status.scrape_age_ms < 1_000


async def test_the_simulated_servers_page_has_all_that_the_ledger_is_corrected_by():
    async with model_server() as server:
        status, page = await fetch(f"{server.base_url}/metrics")
        metrics = parse_metrics(page)
        assert (status, metrics.missing) == (200, ())
        assert (metrics.first_tokens, metrics.prompt_tokens, metrics.computed_prompt_tokens) == (0.0, 0.0, 0.0)
        assert metrics.process_start_s is not None


async def test_how_many_requests_a_server_computes_at_once_is_found_out_from_its_pages():
    async with model_server(max_num_seqs=16) as server, running() as bed, aiohttp.ClientSession() as client:
        bed.add(address_of(server))
        status = await bed.ready(address_of(server))
        assert status.sequence_limit is None

        async def ask_again_and_again(number: int) -> None:
            body = {"model": "m", "prompt": f"{number} " * 50, "max_tokens": 10 + number % 20}
            while True:
                async with client.post(f"{server.base_url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()

        clients = [asyncio.create_task(ask_again_and_again(number)) for number in range(32)]
        try:
            await until(lambda: bed.status(status.address).sequence_limit == 16, "the limit")
        finally:
            for each in clients:
                each.cancel()
            ended = await asyncio.gather(*clients, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)


async def test_a_storm_of_failed_requests_is_no_storm_of_probes():
    slow = ScrapeConfig(idle_interval_ms=3_600_000.0, busy_interval_ms=3_600_000.0)
    async with fake_model_server(answers(metrics=METRICS, models=MODELS)) as fake, running(slow) as bed:
        bed.add(fake.address)
        await bed.ready(fake.address)
        for number in range(1_000):
            bed.pool.observe_outcome(make_sample(str(number), fake.address, outcome=Outcome.UPSTREAM_RESET), 0.0)
            await asyncio.sleep(0)
        await until(lambda: bed.results("ok") >= 2, "a probe after the failures")
        assert bed.results("ok") <= 4


async def test_servers_may_be_down_at_the_start_and_join_in_any_order():
    async with model_server() as first, model_server() as second, running() as bed:
        await first.stop()
        await second.stop()
        bed.add(address_of(first), address_of(second), f"127.0.0.1:{free_port()}")
        await until(lambda: bed.results("refused") >= 3, "three refused probes")
        assert bed.pool.ready_endpoints == 0
        await second.start()
        await bed.ready(address_of(second))
        await first.start()
        await bed.ready(address_of(first))
        assert bed.pool.ready_endpoints == 2


async def test_a_killed_server_is_no_candidate_and_comes_back_as_a_cold_new_one():
    async with model_server() as server, running() as bed:
        address = address_of(server)
        bed.add(address)
        await bed.ready(address)
        bed.send("1", address)
        assert bed.status(address).prefix_blocks == 4
        await server.stop()
        await bed.ready(address, ready=False)
        await server.start()
        await bed.ready(address)
        status = bed.status(address)
        assert (status.incarnations, status.in_flight_requests, status.prefix_blocks) == (2, 0, 0)
        assert status.models == ["m"]
        assert not bed.pool.finish("1", bed.clock.monotonic_ms())
        assert bed.pool.ledger.counts.late == 1


async def test_an_endpoint_that_failed_for_long_is_still_probed_and_joins_as_soon_as_it_answers():
    """However many probes failed, the next one is never further away than the longest pause."""
    config = ScrapeConfig(busy_interval_ms=1.0, timeout_ms=2_000.0, max_backoff_ms=200.0)
    async with model_server() as server, running(config) as bed:
        await server.stop()
        bed.add(address_of(server))
        # Doubled each time, the pause before the 18th alone would be 65 s.
        await until(lambda: bed.results("refused") >= 18, "18 refused probes")
        assert bed.pool.ready_endpoints == 0
        await server.start()
        await bed.ready(address_of(server))


async def test_a_failed_request_has_its_endpoint_probed_at_once():
    slow = ScrapeConfig(idle_interval_ms=3_600_000.0, busy_interval_ms=3_600_000.0)
    async with model_server() as server, running(slow) as bed:
        address = address_of(server)
        bed.add(address)
        await bed.ready(address)
        await server.stop()
        bed.pool.observe_outcome(make_sample("1", address, outcome=Outcome.UPSTREAM_ERROR, status=503), 0.0)
        await bed.ready(address, ready=False)


async def test_a_busy_endpoint_is_scraped_again_and_again_and_an_idle_one_is_left_alone():
    config = ScrapeConfig(idle_interval_ms=3_600_000.0, busy_interval_ms=10.0)
    async with fake_model_server(answers(metrics=METRICS, models=MODELS)) as fake, running(config) as bed:
        bed.add(fake.address)
        await bed.ready(fake.address)

        def scrapes() -> int:
            return sum(seen.path == "/metrics" for seen in fake.requests)

        assert scrapes() == 1
        bed.send("1", fake.address)
        await until(lambda: scrapes() >= 5, "five scrapes of a busy endpoint")
        bed.pool.finish("1", bed.clock.monotonic_ms())
        assert bed.results("ok") >= 5


async def test_what_the_server_has_waiting_puts_a_hasty_timer_right():
    waiting = METRICS.replace(b"} 2.0", b"} 3.0")
    async with fake_model_server(answers(metrics=waiting, models=MODELS)) as fake, running() as bed:
        bed.add(fake.address)
        await bed.ready(fake.address)
        for number in range(4):
            bed.send(str(number), fake.address, ttft_ms=0.0)
        await until(lambda: bed.pool.ledger.counts.moved_back >= 3, "three requests back in prefill")


async def test_a_slow_server_is_not_ready_after_two_timeouts():
    config = ScrapeConfig(idle_interval_ms=10.0, busy_interval_ms=10.0, timeout_ms=50.0)
    async with model_server() as server, running(config) as bed:
        address = address_of(server)
        bed.add(address)
        await bed.ready(address)
        server.set_faults(Faults(metrics_delay_ms=60_000.0))
        await bed.ready(address, ready=False)
        assert bed.results("timeout") >= 2
        server.set_faults(Faults())
        await bed.ready(address)


@pytest.mark.parametrize(
    ("paths", "result"),
    [
        ({"metrics": Script([(0, b"oops")], status=500), "models": MODELS}, "http_status"),
        ({"metrics": Script((), status=302), "models": MODELS}, "http_status"),
        ({"metrics": b"vllm:num_requests_running{} x\n", "models": MODELS}, "page_invalid"),
        ({"metrics": METRICS + b"#" * 5_000, "models": MODELS}, "too_large"),
        ({"metrics": Script([(0, METRICS)], dies=True), "models": MODELS}, "connection"),
        ({"metrics": METRICS, "models": b"not json"}, "models_invalid"),
        ({"metrics": METRICS, "models": b'{"data":[{"name":"m"}]}'}, "models_invalid"),
        ({"metrics": METRICS, "models": Script((), status=503)}, "http_status"),
        ({"metrics": METRICS, "models": MODELS, "health": Script((), status=503)}, "unhealthy"),
    ],
)
async def test_a_server_that_answers_nonsense_is_not_ready_and_counted_by_reason(paths, result):
    config = ScrapeConfig(idle_interval_ms=10.0, busy_interval_ms=10.0, max_page_bytes=2_000)
    async with fake_model_server(answers(**paths)) as fake, running(config) as bed:
        bed.add(fake.address)
        await until(lambda: bed.results(result) >= 2, f"two probes that failed by {result}")
        assert not bed.status(fake.address).ready


async def test_a_server_without_metrics_and_models_is_used_with_unknown_values():
    async with fake_model_server(answers()) as fake, running() as bed:
        bed.add(fake.address)
        status = await bed.ready(fake.address)
        assert (status.models, status.waiting_requests, status.scrape_age_ms) == (None, None, None)
        assert bed.pool.any_candidates(None, 0.0).addresses == (fake.address,)


async def test_lacking_metrics_are_told_once_per_change():
    page = [b'vllm:num_requests_running{engine="0"} 1.0\n']

    def choose(seen: Seen) -> Script:
        return answers(metrics=page[0], models=MODELS)(seen)

    async with fake_model_server(choose) as fake:
        with capture_logs() as logs:
            async with running() as bed:
                bed.add(fake.address)
                await until(lambda: bed.results("ok") >= 3, "three scrapes")
                page[0] = METRICS
                await until(lambda: bed.status(fake.address).waiting_requests == 2.0, "a whole page")
        told = [entry for entry in logs if entry["event"].startswith("endpoint") and "metrics" in entry["event"]]
        assert [entry["log_level"] for entry in told] == ["warning", "info"]
        assert told[0]["missing"] == ["waiting_requests", "kv_cache_utilization"]


async def test_a_thousand_endpoints_that_come_and_go_leave_no_task_and_no_series():
    async with running(ScrapeConfig(timeout_ms=200.0)) as bed:
        port = free_port()
        before = len(asyncio.all_tasks())
        for batch in range(10):
            addresses = [f"127.{batch + 1}.0.{number + 1}:{port}" for number in range(100)]
            bed.add(*addresses)
            await until(lambda: bed.scraper.watched == 100, "a task for each endpoint")
            for address in addresses:
                bed.pool.remove_endpoint(address)
            await until(lambda: bed.scraper.watched == 0, "no task left")
        await until(lambda: len(asyncio.all_tasks()) <= before + 5, "no task left behind")
        series = [
            sample for metric in bed.registry.collect() for sample in metric.samples if "endpoint" in sample.labels
        ]
        assert series == []
        assert bed.pool.table.capacity <= 256


async def test_a_name_is_resolved_by_the_system_and_its_servers_join():
    async with model_server() as server, running() as bed:
        names = NamesSource(
            parse_endpoints(f"localhost:{server.port};hardware_class=h100"),
            clock=bed.clock,
            registry=bed.registry,
            rng=random.Random(1),
        )
        discovery = Discovery(bed.pool, [names], clock=bed.clock, registry=bed.registry, readiness=Readiness())
        task = asyncio.create_task(discovery.run())
        try:
            await until(lambda: bed.pool.table.get(address_of(server)), "an endpoint by its name")
            assert (await bed.ready(address_of(server))).hardware_class == "h100"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
