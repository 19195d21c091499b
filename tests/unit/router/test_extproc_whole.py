"""One stream through edge, conductor and state: how often work is done, what a hint allows, what a fault costs."""

import gzip
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2

from services.router.request import parse
from sim.extproc_client import body_message, chunked, headers_message, read_answer
from tests.unit.router.edge import ADDRESSES, ALIAS, Edge, FakeContext, Fault

Mode = processing_mode_pb2.ProcessingMode
CAP = 8_000_000
GET = {":method": "GET", ":path": "/v1/models"}
POST = {":method": "POST", ":path": "/v1/chat/completions"}


def chat(size: int, model: str = "m") -> bytes:
    return orjson.dumps({"model": model, "messages": [{"role": "user", "content": "word " * (size // 5)}]})


def duplex(body: bytes, chunk: int = 65_536, headers: Mapping[str, str] | None = None) -> list[Any]:
    mode = Mode.FULL_DUPLEX_STREAMED
    head = headers_message({**POST, **(headers or {})}, body_mode=mode, response_body_mode=mode)
    return [head, *(body_message(part, end_of_stream=end) for part, end in chunked(body, chunk))]


def echoed(context: FakeContext) -> bytes:
    return b"".join(
        message.request_body.response.body_mutation.streamed_response.body for message in context.written[1:]
    )


@pytest.mark.parametrize("size", [100_000, 3_000_000])
@pytest.mark.parametrize("form", ["plain", "gzip", "alias"])
async def test_the_body_is_parsed_once_in_whatever_form_and_chunks_it_came(
    monkeypatch: pytest.MonkeyPatch, size: int, form: str
) -> None:
    """By either decoder. Where an alias is replaced, its place is looked up in the bytes beside that."""
    parsed: list[int] = []

    def counting(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def counted(data: bytes) -> Any:
            parsed.append(len(data))
            return decode(data)

        return counted

    small = SimpleNamespace(loads=counting(orjson.loads), JSONDecodeError=orjson.JSONDecodeError)
    large = SimpleNamespace(
        json=SimpleNamespace(decode=counting(msgspec.json.decode)), MsgspecError=msgspec.MsgspecError
    )
    monkeypatch.setattr(parse, "orjson", small)
    monkeypatch.setattr(parse, "msgspec", large)
    plain = chat(size, model=ALIAS if form == "alias" else "m")
    body = gzip.compress(plain, 1) if form == "gzip" else plain
    headers = {"content-encoding": "gzip"} if form == "gzip" else {}
    for sequence in (
        duplex(body, 1_000, headers),
        duplex(body, 65_536, headers),
        [headers_message({**POST, **headers}), body_message(body)],
    ):
        context = FakeContext(sequence)
        await Edge(CAP, decision_budget_ms=1_000.0).play(context)
        assert read_answer(context.written[-1] if len(sequence) == 2 else context.written[0]).destinations
    assert parsed == [len(plain)] * 3


async def test_ten_times_the_body_takes_no_more_than_ten_times_the_work() -> None:
    """With room for noise: quadratic joining would take a hundred times as much."""
    edge = Edge(CAP, decision_budget_ms=1_000.0)

    async def cpu_s(size: int) -> float:
        spent = []
        for _ in range(3):
            body = chat(size)
            context = FakeContext(duplex(body, 4_000))
            started = time.process_time()
            await edge.play(context)
            spent.append(time.process_time() - started)
            assert echoed(context) == body
        return min(spent)

    small, large = await cpu_s(500_000), await cpu_s(5_000_000)
    assert large < 20 * small


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize(
    ("hint", "allowed"),
    [
        ("127.0.0.1:2", {ADDRESSES[1]}),
        ("127.0.0.1", {ADDRESSES[0], ADDRESSES[1]}),
        (["[::1]:3", "127.0.0.1:1"], {ADDRESSES[0], ADDRESSES[2]}),
        ("0:0::1", {ADDRESSES[2]}),
        ("[0:0::1]:3", {ADDRESSES[2]}),
        (None, set(ADDRESSES)),
    ],
)
async def test_a_subset_hint_holds_for_a_request_of_headers_alone(mode: int, hint: Any, allowed: set[str]) -> None:
    context = FakeContext([headers_message(GET, end_of_stream=True, body_mode=mode, subset=hint)])
    await Edge(CAP).play(context)
    answer = read_answer(context.written[0])
    assert set(answer.destinations) == allowed
    assert answer.header == ",".join(answer.destinations)


@pytest.mark.parametrize("head", [GET, POST])
@pytest.mark.parametrize("hint", ["", "127.0.0.1:9", "[::1]:4", "10.0.0.1"])
async def test_a_hint_that_names_no_endpoint_is_a_503(head: dict[str, str], hint: str) -> None:
    context = FakeContext(
        [
            headers_message(head, end_of_stream=head is GET, subset=hint),
            *([] if head is GET else [body_message(chat(10))]),
        ]
    )
    await Edge(CAP).play(context)
    answer = read_answer(context.written[-1])
    assert answer.status == 503
    assert answer.headers["x-leadtime-reason"] == "subset_empty"


@pytest.mark.parametrize("fault", [Fault.PREDICTOR_HANGS, Fault.PREDICTOR_RAISES])
async def test_in_full_duplex_a_failed_decision_is_the_least_loaded_endpoint_and_the_body_comes_back(
    fault: Fault,
) -> None:
    body = chat(200_000)
    context = FakeContext(duplex(body))
    await Edge(CAP).play(context, fault)
    answer = read_answer(context.written[0])
    assert set(answer.destinations) == set(ADDRESSES)
    assert echoed(context) == body
    assert context.aborted is None


async def test_a_request_whose_body_is_not_shown_is_routed_by_load() -> None:
    context = FakeContext([headers_message(POST, body_mode=Mode.NONE)])
    await Edge(CAP).play(context)
    answer = read_answer(context.written[0])
    assert set(answer.destinations) == set(ADDRESSES)
    assert answer.metadata is None
