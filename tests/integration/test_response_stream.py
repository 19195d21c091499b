"""The response stream's whole way: Envoy in full duplex, a router that looks, a collector, JetStream."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import msgspec
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
from shared.samples import LatencySample, Outcome, TtftSource
from tests import servers
from tests.fakes.fake_model_server import USAGE, FakeModelServer, Script, Seen, fake_model_server
from tests.fakes.no_predictions import NoPredictions
from tests.integration.test_first_content import SCRIPTS

PATH = "/v1/chat/completions"
BODY = {"model": "alias", "messages": [{"role": "user", "content": "日本語"}], "stream": True}
DOCUMENT = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": USAGE["usage"]}).encode()
ANSWERS = {
    "plain": Script([(5.0, DOCUMENT)], content_type="application/json"),
    "stream": SCRIPTS["plain"],
    "abort": SCRIPTS["plain"],
}


@dataclass
class Way:
    client: httpx.AsyncClient
    endpoint: FakeModelServer
    samples: list[LatencySample] = field(default_factory=list)

    async def ask(self, name: str, *, leave_after_s: float = 30.0) -> bytes:
        received = b""
        with contextlib.suppress(TimeoutError):
            async with self.client.stream("POST", PATH, json=BODY, headers={"x-variant": name}) as response:
                async with asyncio.timeout(leave_after_s):
                    async for part in response.aiter_raw():
                        received += part
        return received


@pytest.fixture
async def way() -> AsyncIterator[Way]:
    def choose(seen: Seen) -> Script:
        return ANSWERS[seen.headers["x-variant"]]

    async with fake_model_server(choose) as endpoint:
        clock = SystemClock()
        state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
        state.add_endpoint(endpoint.address, now_ms=clock.monotonic_ms())
        state.set_models(endpoint.address, frozenset({"m"}))
        state.set_ready(endpoint.address, ready=True)
        registry = CollectorRegistry()
        samples: list[LatencySample] = []
        director = Director(
            DirectorOptions(
                pool="default", listed_endpoints=2, decision_budget_ms=100.0, parsing=ParseConfig(),
                aliases=ModelAliases({"alias": "m"}),
            ),
            state,
            NoPredictions(),  # type: ignore[arg-type]
            Profiles(load_presets(Registry())).pipeline("leadtime"),
            RouterMetrics(registry),
            clock,
            np.random.default_rng(1),
            samples.append,
        )  # fmt: skip
        router = ExtProcServer(director, registry, clock, max_body_bytes=8 << 20)
        ports = await router.start("127.0.0.1", 0, 0)
        await router.set_ready(True)
        config = EnvoyConfig(
            endpoints=(Address("127.0.0.1", int(endpoint.address.rpartition(":")[2])),),
            routers=(RouterAddress(Address("127.0.0.1", ports[0]), ports[1]),),
            collectors=(Address("127.0.0.1", 9),),
            shape="full_duplex",
        )
        limits = httpx.Limits(max_connections=None)
        try:
            async with (
                servers.envoy(render(config)) as proxy,
                httpx.AsyncClient(base_url=proxy.url, timeout=30.0, limits=limits) as client,
            ):

                async def picks() -> bool:
                    answer = await client.post(PATH, json={"model": "unknown", "messages": []})
                    return answer.status_code in {400, 404}  # the router's own word: Envoy has reached it

                await servers.until(picks, "Envoy asks the router")
                yield Way(client, endpoint, samples)
        finally:
            await router.stop(0.1)


async def test_every_whole_answer_is_a_sample_of_a_whole_answer(way: Way) -> None:
    """Envoy resets the stream once it has the last chunk back: what is looked at afterwards may never be seen."""
    # Not all at once: client, server and router share this loop, and a router that is silent for a second is given up.
    for name, count in (*(("plain", 25),) * 6, ("stream", 10)):
        bodies = await asyncio.gather(*(way.ask(name) for _ in range(count)))
        assert bodies == [ANSWERS[name].body] * count
    await servers.until(lambda: len(way.samples) == 160, "every answer has its sample")
    assert {sample.outcome for sample in way.samples} == {Outcome.OK}
    assert {(sample.output_tokens, sample.output_tokens_estimated) for sample in way.samples} == {(21, False)}
    streamed = [sample for sample in way.samples if sample.streamed]
    assert len(streamed) == 10
    for sample in streamed:
        assert sample.ttft_source is TtftSource.RESPONSE_STREAM
        assert sample.ttft_ms is not None
        assert 390.0 < sample.ttft_ms < 900.0
        assert sample.tpot_ms is not None
    assert all(sample.model == "m" and sample.endpoint == way.endpoint.address for sample in way.samples)
    assert msgspec.json.decode(way.endpoint.requests[-1].body)["model"] == "m"


async def test_a_client_that_leaves_is_a_lower_bound(way: Way) -> None:
    await way.ask("abort", leave_after_s=0.5)
    await servers.until(lambda: way.samples, "the abort has its sample")
    (sample,) = way.samples
    assert (sample.outcome, sample.status, sample.tpot_ms) == (Outcome.CLIENT_ABORT, 200, None)
    assert sample.ttft_ms is not None
    assert sample.e2e_ms is not None
    assert 450.0 < sample.e2e_ms < 1_500.0
