"""Any sequence of messages, in any mode, cut off anywhere: the stream ends, and nothing of it is left behind.

The real edge, conductor and state are driven with raw messages over a fake gRPC context. `LEADTIME_FUZZ_CASES` says how
many sequences; `make fuzz` runs 200,000.
"""

import asyncio
import os
from typing import Any

import orjson
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from services.router.extproc.messages import MAX_CHUNK_BYTES
from sim.extproc_client import (
    body_message,
    headers_message,
    response_body_message,
    response_headers_message,
    response_trailers_message,
    trailers_message,
)
from tests.unit.router.edge import ALIAS, Edge, FakeContext, Fault

CASES = int(os.environ.get("LEADTIME_FUZZ_CASES", "2000"))
BATCH = 500
"""Cases that share one search: what it remembers of them grows, and one batch has to end within the limit of a hanging
test on the busiest machine (2,000 at the lowest priority beside twelve busy processes took more than four minutes).
"""
CAP = 400
CHAT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True})
CALLED = CHAT.replace(b'"m"', f'"{ALIAS}"'.encode())
NAMED = b'data: {"id":1,"model":"m"}\n\n'
EVENTS, DOCUMENT = {"content-type": "text/event-stream"}, {"content-type": "application/json"}
STREAMED = processing_mode_pb2.ProcessingMode.STREAMED
MODES = tuple(processing_mode_pb2.ProcessingMode.BodySendMode.values())


def parsed(data: bytes) -> Any:
    try:
        return ep.ProcessingRequest.FromString(data)
    except DecodeError:
        return ep.ProcessingRequest()


bodies = st.one_of(
    st.just(CHAT),
    st.just(CALLED),
    st.just(b""),
    st.integers(0, len(NAMED)).map(lambda cut: NAMED[:cut]),
    st.integers(0, len(NAMED)).map(lambda cut: NAMED[cut:]),
    st.binary(max_size=30),
    st.integers(1, CAP + 50).map(lambda size: b"x" * size),
)
heads = st.fixed_dictionaries(
    {
        ":method": st.sampled_from(["POST", "POST", "POST", "GET", "CONNECT", ""]),
        ":path": st.sampled_from(["/v1/chat/completions", "/v1/chat/completions?a", "/sse", "", "/v1/embeddings"]),
    },
    optional={
        "upgrade": st.just("websocket"),
        "content-encoding": st.sampled_from(["gzip", "zstd", "x"]),
        "x-slo-ttft-ms": st.sampled_from(["1", "-1", "nan"]),
    },
)
modes = st.sampled_from([*MODES, 2, 2, 4, 4, 4])
messages = st.one_of(
    st.builds(
        headers_message,
        heads,
        end_of_stream=st.booleans(),
        body_mode=modes,
        response_body_mode=modes,
        subset=st.sampled_from([None, None, None, "127.0.0.1:1", "", "10.0.0.9", "[::1]:3"]),
    ),
    st.builds(body_message, bodies, end_of_stream=st.booleans()),
    st.just(trailers_message()),
    st.builds(
        response_headers_message,
        st.sampled_from(
            [{":status": "200", **EVENTS}, {":status": "200", **DOCUMENT}, {":status": "200"}, {":status": "no"}, {}]
        ),
        served=st.sampled_from([None, "127.0.0.1:2", "elsewhere"]),
        end_of_stream=st.booleans(),
    ),
    st.builds(response_body_message, bodies, end_of_stream=st.booleans()),
    st.just(response_trailers_message()),
    st.binary(max_size=40).map(parsed),
)


def in_order(first: Any, parts: list[bytes], tail: list[Any]) -> list[Any]:
    """A request as Envoy would send it, so that most cases get past the first phase."""
    return [first, *(body_message(part, end_of_stream=False) for part in parts), body_message(b""), *tail]


sequences = st.one_of(
    st.lists(messages, max_size=10),
    st.builds(
        in_order,
        st.builds(headers_message, heads, body_mode=modes, response_body_mode=modes),
        st.lists(bodies, max_size=4),
        st.lists(messages, max_size=8),
    ),
    st.builds(
        in_order,
        st.builds(
            headers_message,
            st.just({":method": "POST", ":path": "/v1/chat/completions"}),
            body_mode=st.sampled_from([2, 4]),
            response_body_mode=st.sampled_from([0, 1, 4]),
        ),
        st.sampled_from([[CHAT], [CALLED]]),
        st.lists(messages, max_size=8),
    ),
)


@pytest.mark.parametrize("batch", range(-(-CASES // BATCH)))
def test_no_sequence_of_messages_crashes_hangs_or_leaks(batch: int) -> None:
    with asyncio.Runner() as runner:

        async def make() -> Edge:
            return Edge(CAP)

        edge = runner.run(make())

        @seed(batch)
        @settings(
            max_examples=min(CASES, BATCH),
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(sequences, st.sampled_from([*Fault, Fault.NONE, Fault.NONE]), st.booleans(), st.integers(0, 5))
        def fuzz(script: list[Any], fault: Fault, reset: bool, write: int) -> None:
            fails_at = write if fault is Fault.WRITE_FAILS else None
            context = FakeContext(script, reset=reset, write_fails_at=fails_at)
            runner.run(edge.play(context, fault))
            check_answers(context)

        fuzz()


def check_answers(context: FakeContext) -> None:
    """What holds of any stream's answers, told from the messages alone."""
    kinds = [message.WhichOneof("response") for message in context.written]
    assert None not in kinds
    assert kinds.count("request_headers") <= 1
    assert kinds.count("immediate_response") <= 1
    if "immediate_response" in kinds:
        after = kinds[kinds.index("immediate_response") + 1 :]
        assert not {"request_headers", "request_body", "request_trailers"} & set(after)
    for phase in ("request_body", "response_body"):
        came, came_end = _passed(context.received, phase)
        echoed = [
            getattr(message, phase).response.body_mutation.streamed_response
            for message in context.written
            if message.WhichOneof("response") == phase
            and getattr(message, phase).response.body_mutation.WhichOneof("mutation") == "streamed_response"
        ]
        if echoed:
            assert phase == "response_body" or kinds.index("request_headers") < kinds.index(phase)
            assert _called(came).startswith(_called(b"".join(part.body for part in echoed)))
            assert sum(part.end_of_stream for part in echoed) <= 1
            assert came_end or not any(part.end_of_stream for part in echoed)
            assert not any(part.end_of_stream for part in echoed[:-1])
            assert max(len(part.body) for part in echoed) <= MAX_CHUNK_BYTES
    _check_streamed_response(context)


def _check_streamed_response(context: FakeContext) -> None:
    """Response body STREAMED: an answer for each chunk, and together the same bytes but for the model's name."""
    if not context.received or context.received[0].protocol_config.response_body_mode != STREAMED:
        return
    chunks = [message.response_body for message in context.received if message.WhichOneof("request") == "response_body"]
    answers = [
        message.response_body for message in context.written if message.WhichOneof("response") == "response_body"
    ]
    came = sent = b""
    for chunk, answer in zip(chunks, answers, strict=False):
        mutation = answer.response.body_mutation
        came += chunk.body
        sent += {"body": mutation.body, "clear_body": b""}.get(mutation.WhichOneof("mutation"), chunk.body)
        if chunk.end_of_stream:
            assert _called(came) == _called(sent)
            return
    assert _called(came).startswith(_called(sent))


def _called(body: bytes) -> bytes:
    """One name for the model, whoever wrote it."""
    return body.replace(f'"{ALIAS}"'.encode(), b'"m"')


def _passed(received: list[Any], phase: str) -> tuple[bytes, bool]:
    """The bytes of a body up to its end, and whether the end came."""
    body = b""
    for message in received:
        if message.WhichOneof("request") == phase:
            part = getattr(message, phase)
            body += part.body
            if part.end_of_stream:
                return body, True
    return body, False
