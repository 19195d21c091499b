"""What a model server gets of a request that the router changed: a real Envoy, a real router edge, buffered bodies."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, render
from services.router.director import Director, DirectorOptions
from services.router.extproc.server import ExtProcServer
from services.router.metrics import RouterMetrics
from services.router.request.aliases import ModelAliases
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from shared.clock import SystemClock
from tests import servers
from tests.fakes.fake_model_server import FakeModelServer, Script, Seen, fake_model_server
from tests.fakes.no_predictions import NoPredictions

ANSWER = Script([(0.0, b'{"ok":true}')], content_type="application/json")
PATH = "/v1/completions"


@dataclass
class Edge:
    client: httpx.AsyncClient
    endpoint: FakeModelServer

    async def post(self, body: bytes, **headers: str) -> Seen:
        """Send a request; returns what the model server got of it."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.client.post(PATH, content=body, headers={"content-type": "application/json", **named})
        assert (answer.status_code, answer.content) == (200, ANSWER.body)
        return self.endpoint.requests[-1]


@pytest.fixture
async def edge(request: pytest.FixtureRequest) -> AsyncIterator[Edge]:
    options = getattr(request, "param", {})
    async with fake_model_server(lambda _: ANSWER) as endpoint:
        clock = SystemClock()
        state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
        state.add_endpoint(endpoint.address, now_ms=clock.monotonic_ms())
        state.set_models(endpoint.address, frozenset({"base-v2", "own"}))
        state.set_ready(endpoint.address, ready=True)
        registry = CollectorRegistry()
        director = Director(
            DirectorOptions(
                pool="default", listed_endpoints=2, decision_budget_ms=100.0, parsing=ParseConfig(),
                aliases=ModelAliases({"alias": "base-v2"}), **options,
            ),
            state,
            NoPredictions(),  # type: ignore[arg-type]
            Profiles(load_presets(Registry())).pipeline("leadtime"),
            RouterMetrics(registry),
            clock,
            np.random.default_rng(1),
        )  # fmt: skip
        router = ExtProcServer(director, registry, clock, max_body_bytes=8 << 20)
        ports = await router.start("127.0.0.1", 0, 0)
        await router.set_ready(True)
        config = EnvoyConfig(
            endpoints=(Address("127.0.0.1", int(endpoint.address.rpartition(":")[2])),),
            routers=(RouterAddress(Address("127.0.0.1", ports[0]), ports[1]),),
            collectors=(Address("127.0.0.1", 9),),
        )
        try:
            async with (
                servers.envoy(render(config)) as proxy,
                httpx.AsyncClient(base_url=proxy.url, timeout=30.0) as client,
            ):

                async def picks() -> bool:
                    answer = await client.post(PATH, content=b'{"model":"unknown","prompt":"x"}')
                    return answer.status_code == 404  # the router's own word: Envoy has reached it

                await servers.until(picks, "Envoy asks the router")
                yield Edge(client, endpoint)
        finally:
            await router.stop(0.1)


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"alias","prompt":"日本語"}'.encode(),
        b' { "prompt" : "say \\"model\\": \\"alias\\"" ,\n "model":"alias" } ',
        json.dumps({"prompt": "word " * 400_000, "model": "alias"}).encode(),
    ],
    ids=["multi-byte", "spaced", "2 MB"],
)
async def test_an_alias_reaches_the_server_as_its_model_with_the_right_length(edge: Edge, body: bytes) -> None:
    seen = await edge.post(body)
    expected = body.replace(b'"alias"', b'"base-v2"')  # in the prompt a backslash stands before each quote
    assert seen.body == expected
    assert seen.headers["content-length"] == str(len(expected))
    assert "transfer-encoding" not in seen.headers


async def test_a_compressed_alias_reaches_the_server_as_plain_json(edge: Edge) -> None:
    seen = await edge.post(gzip.compress(b'{"model":"alias","prompt":"x"}'), content_encoding="gzip")
    assert seen.body == b'{"model":"base-v2","prompt":"x"}'
    assert "content-encoding" not in seen.headers
    assert seen.headers["content-length"] == str(len(seen.body))


async def test_a_model_s_own_name_goes_through_untouched(edge: Edge) -> None:
    for body, encoding in (
        (b'{ "model":"own","prompt":"x"}', ""),
        (gzip.compress(b'{"model":"own","prompt":"x"}'), "gzip"),
    ):
        seen = await edge.post(body, **({"content_encoding": encoding} if encoding else {}))
        assert seen.body == body
        assert seen.headers["content-length"] == str(len(body))


CONTROL = {
    "x_slo_ttft_ms": "500", "x_llm_d_slo_tpot_ms": "50", "x_llm_d_inference_objective": "batch",
    "x_prediction_based_scheduling": "false", "x_leadtime_priority": "1", "x_gateway_inference_fairness_id": "me",
}  # fmt: skip


async def test_control_headers_end_at_the_router(edge: Edge) -> None:
    seen = await edge.post(b'{"model":"own","prompt":"x"}', x_mine="kept", **CONTROL)
    assert not {name.replace("_", "-") for name in CONTROL} & set(seen.headers)
    assert seen.headers["x-mine"] == "kept"
    assert seen.headers["x-gateway-destination-endpoint"] == edge.endpoint.address
    assert seen.headers["x-leadtime-decision-id"]


@pytest.mark.parametrize("edge", [{"forward_control_headers": True}], indirect=True)
async def test_control_headers_go_on_where_the_operator_wants_them(edge: Edge) -> None:
    seen = await edge.post(b'{"model":"own","prompt":"x"}', **CONTROL)
    assert {name.replace("_", "-") for name in CONTROL} <= set(seen.headers)


async def test_many_at_once_get_each_their_own_body(edge: Edge) -> None:
    bodies = [json.dumps({"model": "alias", "prompt": f"number {n} " * n}).encode() for n in range(40)]

    async def post(body: bytes) -> None:
        answer = await edge.client.post(PATH, content=body)
        assert answer.status_code == 200

    edge.endpoint.requests.clear()
    await asyncio.gather(*map(post, bodies))
    assert sorted(seen.body for seen in edge.endpoint.requests) == sorted(
        body.replace(b'"alias"', b'"base-v2"') for body in bodies
    )
