"""Requests through each overlay's Envoy config, with the real Envoy, router, collector and NATS on this machine.

The router has the overlay's own variables, but for addresses; the pods (and the InferencePool) come from a fake API
server, by the calls that the Role has to allow.
"""

import asyncio
import contextlib
import copy
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.k8s.check import Check
from deploy.local.envoy import Address, RouterAddress
from shared import names
from shared.samples import LatencySample, TtftSource
from tests.fakes.fake_kube import PODS, POOLS, FakeKube, fake_kube, make_pod
from tests.fakes.fake_model_server import FakeModelServer, Script, Seen, event, fake_model_server, stream_script
from tests.integration.collector.running import running_collector, stored
from tests.manifests.gateways import Places, bootstrap
from tests.manifests.overlays import OVERLAYS, Overlay, overlay
from tests.servers import EnvoyProxy, ServerProcess, envoy, fetch, free_port, nats_server, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TOKEN = "a-token-of-the-test"
STREAM = stream_script(((20.0, event({"choices": [{"delta": {"content": "a"}}]})),), (), tokens=4, gap_ms=5.0)
NOT_FOUND = Script([(0.0, b"{}")], status=404, content_type="application/json")


def answer(seen: Seen) -> Script:
    return STREAM if seen.path == CHAT else NOT_FOUND


@dataclass
class Driven:
    """What runs, and where to ask."""

    overlay: Overlay
    proxy: EnvoyProxy
    router: ServerProcess
    router_http: str
    models: list[FakeModelServer]
    api: FakeModelServer
    kube: FakeKube
    nats_url: str
    client: httpx.AsyncClient

    async def ask(self, **headers: str) -> httpx.Response:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        return await self.client.post(CHAT, json=body, headers=headers)

    async def json(self, path: str) -> Any:
        response = await self.client.get(f"{self.router_http}{path}", headers={"authorization": f"Bearer {TOKEN}"})
        response.raise_for_status()
        return response.json()

    async def decided(self) -> int:
        return sum((await self.json("/v1/stats"))["served_by"].values())

    async def samples(self) -> list[LatencySample]:
        return [sample for _, sample in await stored(self.nats_url)]


def variables(whole: Overlay, nats_url: str, collector_url: str, kube: FakeKube, directory: Path) -> dict[str, str]:
    """The router's, as in its pod but for addresses and what Secrets and files hold."""
    given = whole.environment(whole.workload("leadtime-router"))
    token = directory / "token"
    token.write_text("the-service-account-s")
    changed = {
        "LEADTIME_ROUTER_HTTP_HOST": "127.0.0.1",
        "LEADTIME_ROUTER_HTTP_PORT": str(free_port()),
        "LEADTIME_ROUTER_HTTP_TOKEN": TOKEN,
        "LEADTIME_ROUTER_EXTPROC_HOST": "127.0.0.1",
        "LEADTIME_ROUTER_EXTPROC_PORT": str(free_port()),
        "LEADTIME_ROUTER_HEALTH_PORT": str(free_port()),
        "LEADTIME_ROUTER_PREDICTORS": "",
        "LEADTIME_ROUTER_WATCHDOG_S": "0",  # it would end a router that a test froze
        "LEADTIME_ROUTER_KUBERNETES_API": kube.url,
        "LEADTIME_ROUTER_KUBERNETES_NAMESPACE": "ns",
        "LEADTIME_ROUTER_KUBERNETES_TOKEN_FILE": str(token),
        "LEADTIME_NATS_SERVERS": nats_url,
        "LEADTIME_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
    }
    if "LEADTIME_ROUTER_COLLECTORS" in given:
        changed["LEADTIME_ROUTER_COLLECTORS"] = collector_url
    return {**given, **changed}


async def pods(whole: Overlay, kube: FakeKube, ports: list[int], environment: dict[str, str]) -> None:
    """One pod with the labels of the model servers, that answers at several ports."""
    if pool := environment.get("LEADTIME_ROUTER_KUBERNETES_POOL"):
        document = copy.deepcopy(whole.get("InferencePool", pool))
        document["spec"]["targetPorts"] = [{"number": port} for port in ports]
        await kube.put(POOLS, document)
    else:
        environment["LEADTIME_ROUTER_KUBERNETES_PORTS"] = ",".join(map(str, ports))
    await kube.put(PODS, make_pod("model", "127.0.0.1"))


@contextlib.asynccontextmanager
async def driven(whole: Overlay, directory: Path) -> AsyncIterator[Driven]:
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(directory / "nats"))
        collector = await stack.enter_async_context(
            running_collector(
                nats.url,
                **({"als_token": ALS_TOKEN} if whole.name == "plain-envoy" else {}),
                http_token=whole.environment(whole.workload("leadtime-collector"))["LEADTIME_COLLECTOR_HTTP_TOKEN"],
            )
        )
        models = [await stack.enter_async_context(fake_model_server(answer)) for _ in range(2)]
        api = await stack.enter_async_context(
            fake_model_server(lambda _: Script([(0.0, b"api")], content_type="text/plain"))
        )
        kube = await stack.enter_async_context(fake_kube())
        environment = variables(whole, nats.url, collector.url, kube, directory)
        ports = [int(model.address.rpartition(":")[2]) for model in models]
        await pods(whole, kube, ports, environment)
        router = ServerProcess("router", directory / "router.log", environment)
        stack.push_async_callback(router.stop, grace_s=2.0)
        http = f"http://127.0.0.1:{environment['LEADTIME_ROUTER_HTTP_PORT']}"
        router.spawn([sys.executable, "-P", "-m", "services.router"])

        async def ready() -> bool:
            return (await fetch(f"{http}/readyz"))[0] == 200

        await router.ready(ready)
        extproc = Address("127.0.0.1", int(environment["LEADTIME_ROUTER_EXTPROC_PORT"]))
        places = Places(
            tuple(Address("127.0.0.1", port) for port in ports),
            (RouterAddress(extproc, int(environment["LEADTIME_ROUTER_HEALTH_PORT"])),),
            (Address("127.0.0.1", collector.settings.als_port),),
            (Address("127.0.0.1", int(api.address.rpartition(":")[2])),),
        )
        with pytest.MonkeyPatch.context() as patch:
            if whole.name == "plain-envoy":
                for name, value in whole.environment(whole.workload("leadtime-envoy")).items():
                    patch.setenv(name, value)
            proxy = await stack.enter_async_context(envoy(bootstrap(whole, places), directory / "envoy"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=30.0))
        running = Driven(whole, proxy, router, http, models, api, kube, nats.url, client)

        async def decides() -> bool:
            before = await running.decided()
            return (await running.ask()).status_code == 200 and await running.decided() == before + 1

        await until(decides, "the router decides on requests through Envoy")
        yield running


ALS_TOKEN = overlay("plain-envoy").environment(overlay("plain-envoy").workload("leadtime-collector"))[
    "LEADTIME_COLLECTOR_ALS_TOKEN"
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=OVERLAYS)
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driven]:
    async with driven(overlay(request.param), tmp_path_factory.mktemp(request.param)) as found:
        yield found


def chats(models: list[FakeModelServer]) -> list[tuple[FakeModelServer, Seen]]:
    return [(model, seen) for model in models for seen in model.requests if seen.path == CHAT]


async def test_a_streamed_answer_comes_from_the_endpoint_that_was_picked(running: Driven) -> None:
    for model in running.models:
        model.requests.clear()
    response = await running.ask()
    assert response.status_code == 200
    assert response.content == STREAM.body
    ((model, seen),) = chats(running.models)
    decision = (await running.json("/v1/decisions?limit=1"))["decisions"][0]
    assert seen.headers[names.DESTINATION].split(",")[0] == model.address
    assert model.address in json.dumps(decision)


async def test_a_client_can_t_steer(running: Driven) -> None:
    for model in running.models:
        model.requests.clear()
    steering = {**dict.fromkeys(names.STRIPPED_FROM_CLIENTS, "127.0.0.1:1"), "x-data-parallel-rank": "3"}
    assert (await running.ask(**steering)).status_code == 200
    ((model, seen),) = chats(running.models)
    assert seen.headers[names.DESTINATION].split(",")[0] == model.address
    assert "127.0.0.1:1" not in seen.headers.values()
    assert "x-data-parallel-rank" not in seen.headers


async def test_its_sample_has_a_time_to_first_token(running: Driven) -> None:
    before = {sample.decision_id for sample in await running.samples()}
    await running.ask()

    async def there() -> LatencySample | None:
        return next((each for each in await running.samples() if each.decision_id not in before), None)

    sample: LatencySample = await until(there, "a sample is on the stream", poll_s=0.05)
    expected = TtftSource.RESPONSE_STREAM if running.overlay.name == "istio" else TtftSource.ACCESS_LOG
    assert sample.ttft_source is expected
    assert sample.output_tokens == 21
    assert sample.endpoint in {model.address for model in running.models}


async def test_the_check_after_an_installation_finds_all_well(running: Driven) -> None:
    said: list[str] = []
    check = Check(str(running.client.base_url).rstrip("/"), running.router_http, TOKEN, "m")
    await asyncio.to_thread(check.run, said.append)
    assert len(said) == 3
    assert "2 endpoints that are ready" in said[0]


async def test_the_ordinary_service_is_none_of_the_router_s_business(running: Driven) -> None:
    before = await running.decided()
    response = await running.client.post("/api/orders", json={"model": "m", "messages": []})
    assert (response.status_code, response.content) == (200, b"api")
    assert names.DESTINATION not in running.api.requests[-1].headers
    assert await running.decided() == before


async def test_the_role_allows_what_the_router_asked_for_and_no_more(running: Driven) -> None:
    def asked() -> set[tuple[str, str, str]]:
        found = set()
        for call in running.kube.calls:
            *group, _, _, resource = call.path.removeprefix("/apis/").removeprefix("/api/").split("/")
            found.add((group[0] if len(group) > 1 else "", resource, "watch" if "watch" in call.query else "list"))
        return found

    (role,) = running.overlay.of("Role")
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    await until(lambda: asked() == allowed, f"asked for {sorted(asked())}, allowed {sorted(allowed)}")
    assert {call.authorization for call in running.kube.calls} == {"Bearer the-service-account-s"}
    (binding,) = running.overlay.of("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == ["leadtime-router"]


async def test_a_frozen_router_holds_up_requests_for_seconds(running: Driven) -> None:
    """In full duplex those that meet it fail once a ping has; without pings they would wait for ever."""
    running.router.send(signal.SIGSTOP)
    try:

        async def served() -> bool:
            return (await running.ask()).status_code == 200

        await until(served, "requests go on without it", poll_s=0.1)
    finally:
        running.router.send(signal.SIGCONT)

    async def decides() -> bool:
        before = await running.decided()
        return (await running.ask()).status_code == 200 and await running.decided() > before

    await until(decides, "the router decides again", poll_s=0.1)


async def test_without_a_router_requests_go_on(running: Driven) -> None:
    """The last of this module's, since it takes the router away. In full duplex once Envoy knows that it is gone."""
    await running.router.kill()

    async def asked() -> list[httpx.Response]:
        return await asyncio.gather(*(running.ask() for _ in range(5)))

    async def served() -> bool:
        return all(each.status_code == 200 and each.content == STREAM.body for each in await asked())

    if running.overlay.name == "istio":
        await until(served, "Envoy has put the router aside", poll_s=0.1)
    else:
        assert await served()
