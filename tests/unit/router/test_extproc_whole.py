"""One stream through edge, conductor and state: how often work is done, what a hint allows, what a fault costs."""

import time
from typing import Any

import orjson
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2

from services.router.request import parse
from sim.extproc_client import body_message, chunked, headers_message, read_answer
from tests.unit.router.edge import ADDRESSES, Edge, FakeContext, Fault

Mode = processing_mode_pb2.ProcessingMode
CAP = 8_000_000
GET = {":method": "GET", ":path": "/v1/models"}
POST = {":method": "POST", ":path": "/v1/chat/completions"}


def chat(size: int) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * (size // 5)}]})


def duplex(body: bytes, chunk: int = 65_536) -> list[Any]:
    mode = Mode.FULL_DUPLEX_STREAMED
    head = headers_message(POST, body_mode=mode, response_body_mode=mode)
    return [head, *(body_message(part, end_of_stream=end) for part, end in chunked(body, chunk))]


def echoed(context: FakeContext) -> bytes:
    return b"".join(
        message.request_body.response.body_mutation.streamed_response.body for message in context.written[1:]
    )


async def test_the_body_is_parsed_once_in_however_many_chunks_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    class Counting:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(data: bytes) -> Any:
            parsed.append(len(data))
            return orjson.loads(data)

    monkeypatch.setattr(parse, "orjson", Counting)
    body = chat(100_000)
    for sequence in (duplex(body, 1_000), [headers_message(POST), body_message(body)]):
        await Edge(CAP).play(FakeContext(sequence))
    assert parsed == [len(body)] * 2


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
