"""The client's name for a model in its response, through the real Envoy and a router process, in both shapes."""

import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shared.samples import Outcome
from tests.e2e.edge import ALIAS, CHAT, MODEL, RESTORED, Edge, chat, running_edge
from tests.fakes.fake_model_server import Script, event
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = RESTORED.rstrip("/") + CHAT
SERVED = f'"model":"{MODEL}"'.encode()
CALLED = f'"model":"{ALIAS}"'.encode()
EVENTS = [
    event({"id": "c", "model": MODEL, "choices": [{"delta": {"content": f'{{"model":"{MODEL}"}} é {n}'}}]})
    for n in range(40)
]
STREAM = (
    b"".join(EVENTS)
    + event({"model": MODEL, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 40}})
    + b"data: [DONE]\n\n"
)
DOCUMENT = json.dumps(
    {"choices": [{"message": {"content": "x" * 100_000}}], "usage": {"completion_tokens": 2}, "model": MODEL},
    separators=(",", ":"),
).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "full_duplex"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with running_edge(request.param, tmp_path_factory.mktemp(request.param)) as edge:
        yield edge


@pytest_asyncio.fixture(loop_scope="module")
async def edge(running: Edge) -> AsyncIterator[Edge]:
    running.forget()
    yield running
    running.forget()
    await running.idle()


def playing(script: Script) -> Callable[[int, Any], Script]:
    return lambda _, __: script


def in_pieces(body: bytes, size: int, gap_ms: float = 1.0) -> list[tuple[float, bytes]]:
    return [(gap_ms * n, body[start : start + size]) for n, start in enumerate(range(0, len(body), size))]


@dataclass(frozen=True)
class Got:
    """A response as it came, not decoded."""

    status_code: int
    headers: httpx.Headers
    content: bytes


async def ask(edge: Edge, path: str = PATH, **fields: Any) -> Got:
    """A request for the alias, of a client that would take an encoded answer."""
    body = json.dumps(chat(model=ALIAS, **fields)).encode()
    headers = {"content-type": "application/json", "accept-encoding": "gzip"}
    async with edge.client.stream("POST", path, content=body, headers=headers) as response:
        return Got(response.status_code, response.headers, b"".join([part async for part in response.aiter_raw()]))


@pytest.mark.parametrize("size", [13, 101, 100_000])
async def test_a_stream_names_the_alias_wherever_its_bytes_are_cut(edge: Edge, size: int) -> None:
    edge.answer = playing(Script(in_pieces(STREAM, size)))
    response = await ask(edge, stream=True)
    assert response.status_code == 200
    assert response.content == STREAM.replace(SERVED, CALLED)
    seen = edge.seen(RESTORED)[-1]
    assert json.loads(seen.body)["model"] == MODEL
    assert "accept-encoding" not in seen.headers
    sample = [found for found in await edge.settled_samples() if found.streamed][-1]
    assert (sample.outcome, sample.model, sample.output_tokens) == (Outcome.OK, MODEL, 40)


@pytest.mark.parametrize("counted", [True, False])
async def test_a_document_names_the_alias_and_its_length_is_right(edge: Edge, counted: bool) -> None:
    edge.answer = playing(Script(in_pieces(DOCUMENT, 30_001), content_type="application/json", counted=counted))
    response = await ask(edge)
    assert response.status_code == 200
    assert response.content == DOCUMENT.replace(SERVED, CALLED)
    assert response.headers.get("content-length", str(len(response.content))) == str(len(response.content))


async def test_an_encoded_answer_passes_as_it_is(edge: Edge) -> None:
    """Nobody asked for it."""
    packed = gzip.compress(DOCUMENT)
    edge.answer = playing(
        Script([(0.0, packed)], content_type="application/json", headers=(("content-encoding", "gzip"),), counted=True)
    )
    response = await ask(edge)
    assert response.headers["content-encoding"] == "gzip"
    assert response.content == packed


async def test_other_kinds_and_failures_pass_as_they_are(edge: Edge) -> None:
    for status, kind in ((200, "application/octet-stream"), (404, "text/html"), (500, "application/x-ndjson")):
        edge.answer = playing(Script([(0.0, SERVED)], status=status, content_type=kind, counted=True))
        response = await ask(edge)
        assert (response.status_code, response.content) == (status, SERVED)


async def test_where_it_is_not_turned_on_the_served_name_stays(edge: Edge) -> None:
    edge.answer = playing(Script(in_pieces(STREAM, 101)))
    assert (await ask(edge, CHAT, stream=True)).content == STREAM
    edge.answer = playing(Script(in_pieces(STREAM, 101)))
    own = await edge.ask(chat(stream=True), path=PATH)
    assert own.content == STREAM, "a client that used the model's own name"


async def test_a_router_that_dies_costs_the_name_and_in_buffered_not_the_answer(edge: Edge) -> None:
    edge.answer = playing(Script([(40.0 * n, part) for n, part in enumerate(EVENTS)]))
    got = b""
    body = json.dumps(chat(model=ALIAS, stream=True)).encode()
    broken = False
    try:
        async with edge.client.stream("POST", PATH, content=body) as response:
            assert response.status_code == 200
            async for part in response.aiter_raw():
                if not got:
                    await edge.router.kill()
                got += part
    except httpx.HTTPError:
        broken = True
    whole = b"".join(EVENTS)
    assert CALLED in got
    assert broken is (edge.shape == "full_duplex")
    if edge.shape == "buffered":
        assert got.replace(CALLED, SERVED) == whole
    else:
        assert whole.startswith(got.replace(CALLED, SERVED))
    await edge.router.start()
    edge.forget()

    async def decides() -> bool:
        before = await edge.decided()
        return (await edge.ask()).status_code == 200 and await edge.decided() > before

    await until(decides, "the router decides again", poll_s=0.05)
