"""What a client sees of each failure at the edge, with the real Envoy, in both shapes (the table of the router's
README). After each: the ledger is back to zero, and the sample is the right one, or none.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shared.samples import LatencySample, Outcome
from tests.e2e.edge import (
    CAP_BYTES,
    CHAT,
    JSON_ANSWER,
    OTHER,
    QUICK_STREAM,
    Edge,
    chat,
    chat_of,
    running_edge,
    sha,
    timed,
)
from tests.fakes.fake_model_server import Script, event, stream_script
from tests.fakes.fake_predictor import Behaviour
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Content at once, then a token every 50 ms for a second and a half.
SLOW_STREAM = stream_script(
    ((20.0, event({"choices": [{"delta": {"content": "first"}}]})),), (), tokens=30, gap_ms=50.0
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "full_duplex"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with running_edge(request.param, tmp_path_factory.mktemp(request.param)) as edge:
        yield edge


@pytest_asyncio.fixture(loop_scope="module")
async def edge(running: Edge) -> AsyncIterator[Edge]:
    """The shared edge with nothing left over from the test before, and nothing left by this one."""
    running.forget()
    yield running
    running.answer = lambda _, __: JSON_ANSWER
    await running.idle()


@contextlib.asynccontextmanager
async def new_samples(edge: Edge) -> AsyncIterator[list[LatencySample]]:
    """What the block's requests left on the stream is in the list afterwards."""
    found: list[LatencySample] = []
    before = len(await edge.settled_samples())
    edge.forget_requests()
    yield found
    found += (await edge.settled_samples())[before:]


async def read_until(
    edge: Edge,
    enough: bytes | None = None,
    then: Callable[[], Awaitable[object]] | None = None,
    *,
    text: str = "hello",
) -> tuple[int, bytes, str | None]:
    """Stream an answer; at the first sight of `enough` await `then`. Status, bytes, and the error that broke it off."""
    got = b""
    status = 0
    fired = False
    try:
        async with edge.client.stream("POST", CHAT, json=chat(text, stream=True)) as response:
            status = response.status_code
            async for part in response.aiter_raw():
                got += part
                if then is not None and enough is not None and enough in got and not fired:
                    fired = True
                    await then()
    except httpx.HTTPError as error:
        return status, got, type(error).__name__
    return status, got, None


async def router_decides(edge: Edge) -> None:
    """Wait until the router is asked again."""

    async def asked() -> bool:
        before = await edge.decided()
        response = await edge.ask()
        return response.status_code == 200 and await edge.decided() > before

    await until(asked, "the router decides again", poll_s=0.05)


# --- the router is up -------------------------------------------------------------------------------------------------


async def test_with_everything_up_the_answer_is_the_server_s_and_the_sample_says_so(edge: Edge) -> None:
    edge.answer = lambda _, __: QUICK_STREAM
    async with new_samples(edge) as found:
        response = await edge.ask(chat(stream=True))
        assert response.status_code == 200
        assert response.content == QUICK_STREAM.body
        (seen,) = edge.seen()
    listed = seen.headers["x-gateway-destination-endpoint"].split(",")
    assert len(listed) == 3
    (sample,) = found
    assert sample.endpoint == next(address for address in listed if address != edge.unknown.address)
    assert sample.outcome is Outcome.OK
    assert sample.route == "pool"
    assert sample.ttft_ms is not None


@pytest.mark.parametrize("size", [0, 1, 32_769, 1024 * 1024])
async def test_bodies_of_unknown_paths_pass_byte_equal(edge: Edge, size: int) -> None:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    response = await edge.ask(body, path=OTHER, headers={"content-type": "multipart/form-data; boundary=x"})
    assert response.status_code == 200
    (seen,) = edge.seen(OTHER)
    assert sha(seen.body) == sha(body)
    assert seen.headers["content-type"] == "multipart/form-data; boundary=x"


@pytest.mark.parametrize("size", [32_769, 1024 * 1024, 5 * 1024 * 1024, CAP_BYTES])
async def test_prompts_up_to_the_cap_pass_byte_equal(edge: Edge, size: int) -> None:
    body = chat_of(size)
    assert len(body) == size
    assert (await edge.ask(body)).status_code == 200
    (seen,) = edge.seen()
    assert sha(seen.body) == sha(body)
    length = seen.headers.get("content-length")
    assert length == (str(size) if edge.shape == "buffered" else None)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_a_byte_too_much_is_a_413(edge: Edge, declared: bool) -> None:
    body = chat_of(CAP_BYTES + 1)

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(body), 65_536):
            yield body[i : i + 65_536]

    content: Any = body if declared else parts()
    async with new_samples(edge) as found:
        response = await edge.client.post(CHAT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["message"]
        assert edge.seen() == []
    assert found == []


@pytest.mark.parametrize(
    "fields", [{f"x-{n}": "v" for n in range(89)}, {"x-large": "v" * 60_900}], ids=["many", "large"]
)
async def test_headers_up_to_envoy_s_limits_pass(edge: Edge, fields: dict[str, str]) -> None:
    response = await edge.ask(headers={**fields, "x-prefiller-host-port": "10.0.0.9:1"})
    assert response.status_code == 200
    (seen,) = edge.seen()
    assert {name: seen.headers[name] for name in fields} == fields
    assert "x-prefiller-host-port" not in seen.headers


@pytest.mark.parametrize(
    "lines",
    [
        ["content-length: 2", "content-length: 3"],
        ["content-length: 2", "transfer-encoding: chunked"],
        ["content-length: -1"],
        [f"x-{n}: v" for n in range(200)],
        [f"x-large: {'v' * 70_000}"],
    ],
    ids=["two lengths", "length and chunks", "a negative length", "too many headers", "too large headers"],
)
async def test_http_that_envoy_refuses_reaches_nobody(edge: Edge, lines: list[str]) -> None:
    """In full duplex its answer would have to pass the router, and the connection is closed before it has. A client
    that is still sending may see a reset in place of any answer.
    """
    request = "\r\n".join([f"POST {CHAT} HTTP/1.1", "host: x", *lines, "", "{}"]).encode()
    host, port = edge.proxy.url.removeprefix("http://").split(":")
    async with asyncio.timeout(30.0):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = b""
        with contextlib.suppress(OSError):
            await writer.drain()
            answer = await reader.read()
        writer.close()
    unanswered = edge.shape == "full_duplex" or len(request) > 60_000
    assert answer.startswith(b"HTTP/1.1 4") or (unanswered and answer == b"")
    assert edge.seen() == []


async def test_a_chunked_request_arrives_whole(edge: Edge) -> None:
    body = chat_of(100_000)

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(body), 997):
            yield body[i : i + 997]

    assert (await edge.client.post(CHAT, content=parts())).status_code == 200
    (seen,) = edge.seen()
    assert sha(seen.body) == sha(body)


async def test_a_long_event_stream_arrives_byte_equal(edge: Edge) -> None:
    """200 KB in pieces that no event ends with."""
    events = b"".join(event({"choices": [{"delta": {"content": f"token {i} " + "é" * 20}}]}) for i in range(1_800))
    assert len(events) > 200_000
    script = Script([(i / 1_000, events[i : i + 7_001]) for i in range(0, len(events), 7_001)])
    edge.answer = lambda _, __: script
    response = await edge.ask(chat(stream=True))
    assert response.status_code == 200
    assert sha(response.content) == sha(events)


async def test_a_request_that_is_refused_makes_no_sample(edge: Edge) -> None:
    async with new_samples(edge) as found:
        response = await edge.ask(b"{not json")
        assert response.status_code == 400
        assert response.headers["x-leadtime-reason"] == "body_not_json"
        assert edge.seen() == []
    assert found == []


async def test_a_slow_predictor_costs_its_deadline_and_not_the_request(edge: Edge) -> None:
    edge.predictor.behaviour = Behaviour.HANG
    try:
        response, seconds = await timed(edge.ask())
        assert response.status_code == 200
        assert seconds < 1.0
        newest = (await edge.router.json("/v1/decisions?limit=1"))["decisions"][0]
        assert newest["rung"] == "prior"
        assert newest["decision_ms"] < 200.0
    finally:
        edge.predictor.behaviour = Behaviour.ANSWER


# --- endpoints --------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_refuses_is_passed_over_and_the_sample_names_the_one_that_served(edge: Edge) -> None:
    """Round robin lists each first in turn; the router may notice in the meantime, so it is repeated."""

    async def retried() -> LatencySample | None:
        await edge.ready_endpoints(4)
        async with new_samples(edge) as found:
            await edge.servers[0].stop()
            try:
                for _ in range(4):
                    assert (await edge.ask()).status_code == 200
            finally:
                await edge.servers[0].start()
        assert len(found) == 4
        return next((sample for sample in found if sample.attempts > 1), None)

    sample = await until(retried, "a request was tried on the next endpoint", timeout_s=60.0)
    assert sample.outcome is Outcome.OK
    assert sample.endpoint in {edge.servers[1].address, edge.servers[2].address}
    await edge.ready_endpoints(4)


async def test_a_pick_that_envoy_doesn_t_know_is_passed_over(edge: Edge) -> None:
    """As one that vanished between the decision and the dispatch: the next in the list serves, and makes the sample."""
    async with new_samples(edge) as found:
        for _ in range(4):
            assert (await edge.ask()).status_code == 200
        firsts = {seen.headers["x-gateway-destination-endpoint"].split(",")[0] for seen in edge.seen()}
    assert edge.unknown.address in firsts
    assert len(found) == 4
    assert {sample.endpoint for sample in found} <= {server.address for server in edge.servers}
    assert not any(request.path == CHAT for request in edge.unknown.requests)


async def test_a_passed_over_pick_is_counted_and_its_request_moves_to_the_one_that_serves(edge: Edge) -> None:
    """Where responses are shown at their headers, else with the outcome: then the prefix index alone has to follow."""
    edge.answer = lambda _, __: SLOW_STREAM
    text = f"{edge.shape} " * 400

    async def moved() -> dict[str, int]:
        return {found["address"]: found["in_flight_requests"] for found in await edge.endpoints()}

    for _ in range(4):
        passed_over = await edge.metric("leadtime_router_picks_passed_over_total")
        during: list[dict[str, int]] = []

        async def look(during: list[dict[str, int]] = during) -> None:
            during.append(await moved())

        status, got, _ = await read_until(edge, b"first", look, text=text)
        assert (status, got) == (200, SLOW_STREAM.body)
        decision = (await edge.router.json("/v1/decisions?limit=1"))["decisions"][0]
        if decision["listed"][0] == edge.unknown.address:
            break
    else:
        raise AssertionError("no pick was the endpoint that Envoy doesn't know")
    served = decision["listed"][1]
    assert during == [
        {
            address: int(address == (served if edge.shape == "full_duplex" else edge.unknown.address))
            for address in during[0]
        }
    ]

    async def counted() -> bool:
        return await edge.metric("leadtime_router_picks_passed_over_total") == passed_over + 1

    await until(counted, "the pick that was passed over is counted")
    edge.answer = lambda _, __: JSON_ANSWER
    assert (await edge.ask(chat(text))).status_code == 200
    newest = (await edge.router.json("/v1/decisions?limit=1"))["decisions"][0]
    features = {found["address"]: found["features"] for found in newest["candidates"]}
    assert features[served]["uncached_tokens"] < 0.5 * features[served]["input_tokens"]


async def test_a_failed_request_s_end_is_shown_beside_its_decision(edge: Edge) -> None:
    edge.answer = lambda _, __: Script([(0.0, b'{"error":{}}')], status=418, content_type="application/json")
    response = await edge.ask()
    assert response.status_code == 418
    decision_id = response.headers["x-leadtime-decision-id"]

    async def outcome() -> Any:
        return (await edge.router.json(f"/v1/decisions/{decision_id}"))["outcome"]

    found = await until(outcome, "the outcome is back")
    assert (found["sample"], found["status"]) == ("not_success", 418)
    assert found["endpoint"] in {server.address for server in edge.servers}


async def test_a_reset_before_the_headers_is_a_503_with_an_error_s_shape(edge: Edge) -> None:
    """It is not tried again: the prompt that crashed one server would crash the next."""
    edge.answer = lambda _, __: Script([], refuses=True)
    async with new_samples(edge) as found:
        response = await edge.ask()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "upstream_unavailable"
        assert len(edge.seen()) == 1
    assert [(sample.outcome, sample.ttft_ms) for sample in found] == [(Outcome.UPSTREAM_RESET, None)]


async def test_a_reset_after_the_headers_cuts_the_answer_short(edge: Edge) -> None:
    first = event({"choices": [{"delta": {"content": "first"}}]})
    edge.answer = lambda _, __: Script([(0.0, first), (150.0, b"data: half")], dies=True)
    async with new_samples(edge) as found:
        status, got, broken = await read_until(edge)
        assert status == 200
        assert got.startswith(first)
        assert broken is not None
    assert [sample.outcome for sample in found] == [Outcome.UPSTREAM_RESET]


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_leaves_the_ledger_and_is_known_as_such(edge: Edge, phase: str) -> None:
    hang = Script(QUICK_STREAM.writes, header_delay_ms=20_000.0)
    edge.answer = lambda _, __: hang if phase == "prefill" else SLOW_STREAM
    content = asyncio.Event()

    async def seen_content() -> None:
        content.set()

    async with new_samples(edge) as found:
        reading = asyncio.create_task(read_until(edge, b"first", seen_content))
        if phase == "decode":
            await asyncio.wait_for(content.wait(), 5.0)
        else:
            await until(edge.seen, "the request reached a server")
        assert await edge.inflight() == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        _, seconds = await timed(edge.idle())
        assert seconds < 1.0
    (sample,) = found
    assert sample.outcome is Outcome.CLIENT_ABORT
    assert (sample.ttft_ms is not None) is (phase == "decode")


# --- the router dies --------------------------------------------------------------------------------------------------


async def test_a_router_killed_in_the_middle_of_an_answer(edge: Edge) -> None:
    """Buffered, it isn't in the answer's way. In full duplex the answer goes through it, and is cut."""
    edge.answer = lambda _, __: SLOW_STREAM
    async with new_samples(edge) as found:
        status, got, broken = await read_until(edge, b"first", edge.router.kill)
        assert status == 200
        if edge.shape == "buffered":
            assert got == SLOW_STREAM.body
            assert broken is None
        else:
            assert broken is not None
            assert SLOW_STREAM.body.startswith(got)
        edge.answer = lambda _, __: JSON_ANSWER
        await edge.router.start()
        await router_decides(edge)
    outcomes = [sample.outcome for sample in found if sample.streamed]
    assert outcomes == [Outcome.OK if edge.shape == "buffered" else Outcome.UPSTREAM_RESET]


async def test_a_router_that_refuses(edge: Edge) -> None:
    """Buffered, no request notices. In full duplex those are lost that come before Envoy has learnt it (mostly the
    first alone; Envoy doesn't fail open there), then none is.
    """
    await edge.router.kill()
    try:
        statuses: list[int] = []

        async def goes_on() -> bool:
            statuses.append((await edge.ask()).status_code)
            return statuses[-4:] == [200] * 4

        await until(goes_on, "Envoy goes on without the router", timeout_s=5.0)
        lost = [status for status in statuses if status != 200]
        if edge.shape == "buffered":
            assert lost == []
        else:
            assert set(lost) <= {500}
            assert len(lost) <= 3
    finally:
        await edge.router.start()
    await router_decides(edge)


async def test_a_router_that_is_frozen(edge: Edge) -> None:
    """Buffered, a request waits for the message timeout, then goes on by round robin. In full duplex the one that finds
    the connection silent fails when the ping does; once the router is known to be gone, requests go on without it.
    """
    edge.router.send(signal.SIGSTOP)
    try:
        first, seconds = await timed(edge.ask())
        assert seconds < 5.0
        if edge.shape == "buffered":
            assert first.status_code == 200
            assert seconds >= 0.9
        else:
            assert first.status_code in {500, 504}
            second, seconds = await timed(edge.ask())
            assert second.status_code == 200
            assert seconds < 1.0
    finally:
        edge.router.send(signal.SIGCONT)
    await router_decides(edge)


async def test_requests_through_a_restart_that_drains_all_succeed(edge: Edge) -> None:
    """SIGTERM in the middle of an answer: it ends whole, in both shapes."""
    edge.answer = lambda _, __: SLOW_STREAM
    stopping: list[asyncio.Task[int]] = []

    async def terminate() -> None:
        stopping.append(asyncio.create_task(edge.router.stop()))

    status, got, broken = await read_until(edge, b"first", terminate)
    assert (status, broken) == (200, None)
    assert got == SLOW_STREAM.body
    assert await stopping[0] == 0
    edge.answer = lambda _, __: JSON_ANSWER
    await edge.router.start()
    await router_decides(edge)
