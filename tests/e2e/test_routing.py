"""Through the real Envoy: the pick is obeyed, bytes are kept, clients can't steer, bad input is told clearly."""

import asyncio
import json
import re
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Running, chat
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEERING = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-subset",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)


def name_of(live: Running, address: str) -> str:
    """The simulated server that listens at an address."""
    assert live.stack.simulated is not None
    return next(s.name for s in live.stack.simulated.servers if f"{s.host}:{s.port}" == address)


async def test_the_request_reaches_the_endpoint_that_the_decision_names(live: Running) -> None:
    for i in range(12):
        response = await live.chat(f"where to {i}")
        assert response.status_code == 200
        decision = await live.newest_decision()
        assert response.headers["x-sim-server"] == name_of(live, decision["listed"][0])
        assert response.headers["x-leadtime-decision-id"] == decision["decision_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_is_byte_equal_to_the_servers(live: Running, stream: bool) -> None:
    """The same request straight to the server: its text depends on the prompt and the seed alone."""
    body = chat(f"bytes {stream}", stream=stream)
    through = await live.client.post(f"{live.gateway}/v1/chat/completions", json=body)
    address = (await live.newest_decision())["listed"][0]
    direct = await live.client.post(f"http://{address}/v1/chat/completions", json=body)
    assert _without_identity(through.content) == _without_identity(direct.content)
    assert through.headers["content-type"] == direct.headers["content-type"]


# What differs from call to call on any server: an answer's id, its second, its cache's hits. All else is compared byte
# for byte, white space and order of keys included.
_IDENTITY = re.compile(rb'"id":"[^"]*"|"created":\d+|"prompt_tokens_details":(?:null|\{[^}]*\})')


def _without_identity(content: bytes) -> bytes:
    stripped, found = _IDENTITY.subn(b"", content)
    assert found >= 2
    return stripped


@pytest.mark.parametrize("header", STEERING)
async def test_a_client_cannot_steer_by_header(live: Running, header: str) -> None:
    """Every request names the same server; the router goes on spreading by its own mind."""
    await live.client.put(f"{live.router}/v1/profile", json={"name": "round-robin"})
    target = live.stack.endpoints[0].removeprefix("http://").split(";")[0]
    try:
        served = set()
        for i in range(6):
            response = await live.chat(f"steer {i}", headers={header: target})
            assert response.status_code == 200
            served.add(response.headers["x-sim-server"])
        assert len(served) == 3
    finally:
        await live.client.put(f"{live.router}/v1/profile", json={"name": "leadtime"})


async def test_api_goes_to_the_ordinary_service(live: Running) -> None:
    before = await live.served_by()
    response = await live.client.get(f"{live.gateway}/api/hello")
    assert response.status_code == 200
    assert response.json()["service"] == "api"
    assert await live.served_by() == before


async def test_paths_that_name_no_model_pass_unchanged(live: Running) -> None:
    assert (await live.client.get(f"{live.gateway}/v1/models")).json()["data"][0]["id"] == MODEL
    assert (await live.client.get(f"{live.gateway}/version")).status_code == 200
    assert (await live.client.post(f"{live.gateway}/tokenize", json={"a": 1})).status_code == 404


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"{not json", None),
        (b"", None),
        (b"[1,2]", None),
        (json.dumps({"messages": []}).encode(), "model"),
        (json.dumps({"model": 7, "messages": [{"role": "user", "content": "secret-prompt"}]}).encode(), "model"),
        (json.dumps({"model": MODEL}).encode(), "messages"),
        (json.dumps({"model": MODEL, "messages": "secret-prompt"}).encode(), "messages"),
    ],
)
async def test_bad_input_is_a_400_that_names_the_field(live: Running, content: bytes, field: str | None) -> None:
    before = await live.metric(live.router, "leadtime_router_rejections_total")
    response = await live.client.post(
        f"{live.gateway}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert "secret-prompt" not in response.text
    assert await live.metric(live.router, "leadtime_router_rejections_total") == before + 1
    await live.idle()


async def test_a_model_that_nobody_serves_is_a_404_of_openai_shape(live: Running) -> None:
    response = await live.chat("x", model="no-such-model")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    await live.idle()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_a_413(live: Running, declared: bool) -> None:
    size = 32 * 1024 * 1024 + 1

    async def chunks() -> Any:
        for _ in range(33):
            yield b"x" * (1024 * 1024)

    content: Any = b"x" * size if declared else chunks()
    response = await live.client.post(f"{live.gateway}/v1/chat/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["message"]
    await live.idle()


@pytest.mark.parametrize("kilobytes", [33, 1024, 10 * 1024])
async def test_large_prompts_are_routed(live: Running, kilobytes: int) -> None:
    """They pass through the router whole; the server then refuses what is over its context, in its own words."""
    response = await live.chat("word " * (kilobytes * 1024 // 5))
    assert response.status_code in {200, 400}
    assert response.headers["x-sim-server"]


async def test_an_upstream_error_reaches_the_client_as_it_is(live: Running) -> None:
    for i in range(3):
        await live.control(f"faults/s{i}", {"fail_status": 500})
    try:
        response = await live.chat("fail")
        assert response.status_code == 500
        assert response.headers["x-sim-server"]
    finally:
        for i in range(3):
            await live.control(f"faults/s{i}")
    await live.idle()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_leaves_the_ledger(live: Running, phase: str) -> None:
    """In prefill nothing has come back yet: the server hangs. In decode the stream runs."""
    if phase == "prefill":
        for i in range(3):
            await live.control(f"faults/s{i}", {"hang": True})
    try:
        body = chat("abort " + phase, stream=True, max_tokens=20_000, ignore_eos=True)
        async with asyncio.timeout(20):
            task = asyncio.create_task(_read_until_cancelled(live, body))

            async def counted() -> bool:
                return await live.inflight() == 1

            await until(counted, "the request is in the ledger")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await live.idle()
    finally:
        for i in range(3):
            await live.control(f"faults/s{i}")


async def _read_until_cancelled(live: Running, body: dict[str, Any]) -> None:
    async with live.client.stream("POST", f"{live.gateway}/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def test_nothing_of_a_prompt_or_answer_is_logged(live: Running) -> None:
    marker = "zebra-quartz-pelican"
    await live.chat(marker)
    await live.chat(marker, stream=True)
    await live.client.post(
        f"{live.gateway}/v1/chat/completions", content=f'{{"model": "{marker}", "messages": ['.encode()
    )
    before = await live.samples()
    await live.chat(marker, stream=True)

    async def published() -> bool:
        return await live.samples() > before

    await until(published, "the sample is on the stream")
    assert marker not in live.logs()


async def test_two_hundred_requests_at_once_all_succeed(live: Running) -> None:
    responses = await asyncio.gather(*(live.chat(f"many {i}", stream=i % 2 == 0) for i in range(200)))
    assert {response.status_code for response in responses} == {200}
    await live.idle()
