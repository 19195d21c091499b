"""What the router says to gRPC health checks: Envoy's, and those of whoever runs it."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.router.extproc.server import HEALTH_SERVICES, SERVICE, ExtProcServer
from shared.clock import SystemClock
from tests.fakes.fake_director import FakeDirector
from tests.fakes.fake_model_server import Script, Seen, fake_model_server
from tests.integration.test_life_of_services import Service
from tests.servers import fetch, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def said(port: int) -> dict[str, int]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        return {name: (await check(health_pb2.HealthCheckRequest(service=name))).status for name in HEALTH_SERVICES}


@pytest.mark.parametrize("ready", [True, False])
async def test_a_router_without_an_endpoint_is_still_asked_and_is_not_called_ready(ready: bool) -> None:
    server = ExtProcServer(FakeDirector(), CollectorRegistry(), SystemClock(), max_body_bytes=1024)
    _, port = await server.start("127.0.0.1", 0, 0)
    try:
        await server.set_ready(ready)
        answers = await said(port)
        assert (answers[SERVICE], answers["liveness"]) == (SERVING, SERVING)
        assert answers["readiness"] == answers[""] == (SERVING if ready else NOT_SERVING)
    finally:
        await server.stop(0.0)


async def test_requests_that_come_to_an_endpoint_past_the_routers_are_told(tmp_path: Path) -> None:
    page = (
        b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
    )

    def script(seen: Seen) -> Script:
        return Script([(0, page)], content_type="text/plain") if seen.path == "/metrics" else Script((), status=404)

    async with fake_model_server(script) as server:
        router = Service("router", tmp_path, LEADTIME_ROUTER_ENDPOINTS=server.address, LEADTIME_ROUTER_PREDICTORS="")
        try:
            await router.start()
            await until(lambda: "requests that no router dispatched" in router.log(), "the log says it", timeout_s=60.0)
            _, metrics = await fetch(f"http://127.0.0.1:{router.port}/metrics")
            line = f'leadtime_router_foreign_requests{{endpoint="{server.address}"}} 3.0'
            assert line in metrics.decode().splitlines()
        finally:
            await router.kill()


async def test_a_stopping_router_is_alive_and_gets_no_more_requests() -> None:
    server = ExtProcServer(FakeDirector(), CollectorRegistry(), SystemClock(), max_body_bytes=1024)
    _, port = await server.start("127.0.0.1", 0, 0)
    await server.set_ready(True)
    server._enter()  # a request under way, which the stop waits for
    stopping = asyncio.create_task(server.stop(30.0))
    await asyncio.sleep(0)
    try:
        answers = await said(port)
        assert answers["liveness"] == SERVING
        assert {answers[name] for name in ("", "readiness", SERVICE)} == {NOT_SERVING}
    finally:
        server._leave()
        await stopping
