"""What the rendered config makes a real Envoy do: who is asked, what a client can't do, and how it fails."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from deploy.local.envoy import MESSAGE_TIMEOUT_S, Address, EnvoyConfig, RouterAddress, render
from services.router.discovery.names import resolve
from shared import names
from tests.fakes.access_log_receiver import AccessLogReceiver, access_log_receiver
from tests.fakes.fake_model_server import FakeModelServer, Script, Seen, fake_model_server, stream_script
from tests.fakes.fake_picker import FakePicker, fake_picker
from tests.servers import EnvoyProxy, envoy, free_port, until

ANSWER = Script([(0.0, b'{"ok":true}')], content_type="application/json")
STEERING = {
    **dict.fromkeys(names.STRIPPED_FROM_CLIENTS, "10.9.9.9:1"),
    "x-data-parallel-rank": "3",
    "x-kv-cache-source-host": "10.9.9.9",
    "X-Data-Parallel-Host-Port": "10.9.9.9:1",
}


@dataclass(frozen=True)
class Gateway:
    """Envoy, two endpoints behind it, a picker that lists the first, a service under /api, and the access log."""

    proxy: EnvoyProxy
    picker: FakePicker
    one: FakeModelServer
    two: FakeModelServer
    api: FakeModelServer
    log: AccessLogReceiver
    client: httpx.AsyncClient

    async def ask(self, **options: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", **{"json": {"model": "m"}, **options})


def address_of(server: FakeModelServer) -> Address:
    return Address("127.0.0.1", int(server.address.rpartition(":")[2]))


@contextlib.asynccontextmanager
async def gateway(choose: Callable[[Seen], Script] = lambda _: ANSWER, **config: Any) -> AsyncIterator[Gateway]:
    async with (
        fake_model_server(choose) as one,
        fake_model_server(choose) as two,
        fake_model_server(lambda _: Script([(0.0, b"api")], content_type="text/plain")) as api,
        fake_picker([one.address]) as picker,
        access_log_receiver() as log,
    ):
        settings: dict[str, Any] = {
            "endpoints": (address_of(one), address_of(two)),
            "routers": (RouterAddress(Address("127.0.0.1", picker.port), picker.health_port),),
            "collectors": (Address("127.0.0.1", log.port),),
            "api": (address_of(api),),
            "log_flush_s": 0.05,
        }
        async with (
            envoy(render(EnvoyConfig(**{**settings, **config}))) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30.0) as client,
        ):
            yield Gateway(proxy, picker, one, two, api, log, client)


async def test_the_request_reaches_the_endpoint_that_is_listed_first() -> None:
    async with gateway() as running:
        for server in (running.one, running.two):
            running.picker.destination = [server.address]
            assert (await running.ask()).content == ANSWER.body
            assert len(server.requests) == 1
            assert server.requests[0].headers[names.DESTINATION] == server.address


async def test_an_endpoint_given_by_name_is_reached_at_the_address_that_the_router_lists() -> None:
    async with fake_model_server(lambda _: ANSWER) as named:
        port = address_of(named).port
        (listed,) = await resolve("localhost", port)
        async with gateway(endpoints=(Address("127.0.0.1", free_port()), Address("localhost", port))) as running:
            running.picker.destination = [listed]
            for _ in range(4):
                assert (await running.ask()).status_code == 200
        assert len(named.requests) == 4


async def test_a_client_s_steering_headers_reach_neither_picker_nor_endpoint() -> None:
    async with gateway() as running:
        assert (await running.ask(headers=STEERING)).status_code == 200
        given = {name.lower() for name in STEERING}
        assert given.isdisjoint(running.picker.headers[0])
        sent = running.one.requests[0].headers
        assert given & sent.keys() == {names.DESTINATION}
        assert sent[names.DESTINATION] == running.one.address


async def test_without_a_pick_a_client_s_destination_still_has_no_effect() -> None:
    async with gateway() as running:
        running.picker.destination = []
        for _ in range(4):
            assert (await running.ask(headers={names.DESTINATION: running.one.address})).status_code == 200
        assert (len(running.one.requests), len(running.two.requests)) == (2, 2)
        assert names.DESTINATION not in running.one.requests[0].headers


async def test_a_client_cannot_set_timeouts_or_retries() -> None:
    slow = Script(ANSWER.writes, content_type="application/json", header_delay_ms=100.0)
    async with gateway(lambda _: slow) as running:
        headers = {"x-envoy-upstream-rq-timeout-ms": "1", "x-envoy-retry-on": "5xx", "x-envoy-max-retries": "9"}
        answer = await running.ask(headers=headers)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-envoy")]


async def test_the_picker_is_told_by_which_route_a_request_came() -> None:
    async with gateway() as running:
        await running.ask()
        await running.client.get("/v1/models")
        assert running.picker.routes == ["pool", "pool"]


async def test_credentials_reach_the_endpoint_and_not_the_picker() -> None:
    async with gateway() as running:
        await running.ask(headers={"authorization": "Bearer key", "cookie": "a=b", "x-api-key": "k"})
        sent = running.one.requests[0].headers
        assert (sent["authorization"], sent["cookie"], sent["x-api-key"]) == ("Bearer key", "a=b", "k")
        assert {"authorization", "cookie", "x-api-key"}.isdisjoint(running.picker.headers[0])


async def test_api_is_an_ordinary_service_that_no_picker_and_no_sample_sees() -> None:
    async with gateway() as running:
        for path in ("/api", "/api/things?x=1"):
            assert (await running.client.get(path, headers={"accept-encoding": "gzip"})).content == b"api"
        assert running.api.requests[0].headers["accept-encoding"] == "gzip"
        await running.client.post("/apiary", json={})
        assert len(running.api.requests) == 2
        assert len(running.picker.headers) == 1
        await running.log.entry(lambda entry: entry.request.path == "/apiary")
        assert len(running.log.entries) == 1


async def test_a_picker_s_refusal_reaches_the_client_as_it_was_written() -> None:
    async with gateway() as running:
        for status in (400, 404, 413, 429, 503):
            body = json.dumps({"error": {"message": "said by the router", "param": "model"}}).encode()
            running.picker.refusal = (status, body)
            answer = await running.ask()
            assert (answer.status_code, answer.content) == (status, body)
            assert answer.headers["content-type"] == "application/json"
        assert running.one.requests == []


async def test_a_body_over_the_limit_is_a_413_of_openai_s_shape() -> None:
    async with gateway(body_limit_bytes=65_536) as running:
        answer = await running.ask(content=b"x" * 1_000_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert running.one.requests == []


async def test_a_large_body_below_the_limit_arrives_whole() -> None:
    async with gateway() as running:
        body = b"y" * 5_000_000
        assert (await running.ask(content=body)).status_code == 200
        assert running.picker.bodies == [body]
        assert running.one.requests[0].body == body


async def test_no_endpoint_that_answers_is_a_503_of_openai_s_shape() -> None:
    dead = (Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port()))
    async with gateway(endpoints=dead) as running:
        running.picker.destination = [str(dead[0])]
        answer = await running.ask()
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"


async def test_a_dead_first_endpoint_is_passed_over_and_the_log_names_the_one_that_served() -> None:
    async with gateway() as running:
        dead = Address("127.0.0.1", free_port())
        async with gateway(endpoints=(dead, address_of(running.two))) as other:
            other.picker.destination = [str(dead), running.two.address]
            assert (await other.ask()).status_code == 200
            entry = await other.log.entry(lambda _: True)
            spaces = entry.common_properties.metadata.filter_metadata
            assert spaces[names.LB_NAMESPACE][names.DESTINATION_SERVED] == running.two.address
            assert entry.common_properties.upstream_request_attempt_count == 2


async def test_a_503_is_tried_on_the_next_listed_endpoint() -> None:
    busy = Script([(0.0, b"{}")], status=503, content_type="application/json")
    served: list[str] = []

    def choose(seen: Seen) -> Script:
        served.append(seen.headers["host"])
        return busy if len(served) == 1 else ANSWER

    async with gateway(choose) as running:
        running.picker.destination = [running.one.address, running.two.address]
        assert (await running.ask()).status_code == 200
        assert (len(running.one.requests), len(running.two.requests)) == (1, 1)


async def test_a_frozen_picker_costs_a_second_and_not_the_request() -> None:
    async with gateway() as running:
        running.picker.hang = True
        answer = await asyncio.wait_for(running.ask(), 5.0)
        assert answer.content == ANSWER.body
        assert (await running.proxy.stats("ext_proc.message_timeouts"))["http.ingress.ext_proc.message_timeouts"] == 1


async def test_a_picker_that_stays_frozen_is_left_out_and_comes_back() -> None:
    async with gateway() as running:
        running.picker.hang = True
        await running.picker.set_healthy(False)

        async def left_out() -> bool:
            stats = await running.proxy.stats("cluster.picker.membership_healthy")
            return stats["cluster.picker.membership_healthy"] == 0

        async def asked_again() -> bool:
            assert (await running.ask()).content == ANSWER.body
            return bool(running.picker.headers)

        await until(left_out, "the health check found it out")
        for _ in range(4):  # together they take less than one of them waited for the picker
            assert (await asyncio.wait_for(running.ask(), MESSAGE_TIMEOUT_S / 4)).content == ANSWER.body
        assert not running.picker.headers
        running.picker.hang = False
        await running.picker.set_healthy(True)
        await until(asked_again, "it is taken back")


async def test_a_picker_that_holds_a_request_on_purpose_may_take_longer() -> None:
    async with gateway() as running:
        running.picker.destination = [running.two.address]
        running.picker.hold_s = 1.0 + MESSAGE_TIMEOUT_S
        assert (await running.ask()).content == ANSWER.body
        assert len(running.two.requests) == 1
        stats = await running.proxy.stats("ext_proc.message_timeouts")
        assert stats["http.ingress.ext_proc.message_timeouts"] == 0


async def test_a_picker_that_is_not_there_costs_the_decision_and_not_the_request() -> None:
    nobody = RouterAddress(Address("127.0.0.1", free_port()), free_port())
    async with gateway(routers=(nobody,)) as running:
        for _ in range(4):
            assert (await running.ask()).content == ANSWER.body
        assert len(running.one.requests) + len(running.two.requests) == 4


async def test_requests_go_on_with_the_router_that_is_left() -> None:
    async with fake_picker() as other:
        nobody = RouterAddress(Address("127.0.0.1", free_port()), free_port())
        left = RouterAddress(Address("127.0.0.1", other.port), other.health_port)
        async with gateway(routers=(nobody, left)) as running:
            other.destination = [running.two.address]

            async def only_one_is_healthy() -> bool:
                stats = await running.proxy.stats("cluster.picker.membership_healthy")
                return stats["cluster.picker.membership_healthy"] == 1

            await until(only_one_is_healthy, "the health check found the one that answers")
            for _ in range(6):
                assert (await running.ask()).status_code == 200
            assert len(running.two.requests) == 6


async def test_the_picker_s_stream_ends_with_the_request_normal_or_aborted() -> None:
    async with gateway(lambda _: stream_script()) as running:
        await running.ask()

        async def ended(count: int) -> None:
            async with asyncio.timeout(5.0), running.picker.changed:
                await running.picker.changed.wait_for(lambda: running.picker.ended_streams == count)
            assert running.picker.open_streams == 0

        await ended(1)
        async with running.client.stream("POST", "/v1/chat/completions", json={"model": "m"}) as response:
            assert running.picker.open_streams == 1
            async for _ in response.aiter_raw():
                break
        await ended(2)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_request_without_a_body_is_picked_from_its_headers(method: str) -> None:
    async with gateway() as running:
        assert (await running.client.request(method, "/v1/models")).status_code == 200
        assert running.picker.bodies == []
        assert len(running.one.requests) == 1
