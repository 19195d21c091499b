"""The ext-proc state machine: every phase gets one answer, and nothing ends early."""

import orjson
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from services.router.extproc.messages import Routed
from services.router.extproc.stream import Abort, Answer, Decide, Stream
from services.router.request.errors import InvalidRequest, RejectReason
from sim.extproc_client import body_message, headers_message, read_answer

POST = {":method": "POST", ":path": "/v1/chat/completions?x=1", "x-a": "b"}
ROUTED = Routed(("127.0.0.1:1", "[::1]:2"), "id-1", "meta")
Mode = processing_mode_pb2.ProcessingMode


def test_a_buffered_request_is_decided_at_its_body() -> None:
    stream = Stream(1_000)
    first = stream.receive(headers_message(POST))
    assert isinstance(first, Answer)
    assert first.message.WhichOneof("response") == "request_headers"
    second = stream.receive(body_message(b"{}"))
    assert isinstance(second, Decide)
    assert (second.head.method, second.head.route, second.body) == ("POST", "/v1/chat/completions", b"{}")
    answer = read_answer(stream.decided(ROUTED).message)
    assert answer.destinations == ROUTED.destinations
    assert answer.header == "127.0.0.1:1,[::1]:2"
    assert answer.metadata == "meta"


def test_header_and_metadata_are_byte_equal() -> None:
    stream = Stream(1_000)
    stream.receive(headers_message(POST))
    stream.receive(body_message(b"{}"))
    answer = read_answer(stream.decided(ROUTED).message)
    assert answer.header == ",".join(answer.destinations)


def test_a_request_without_a_body_is_decided_at_its_headers() -> None:
    stream = Stream(1_000)
    step = stream.receive(headers_message({":method": "GET", ":path": "/v1/models"}, end_of_stream=True))
    assert isinstance(step, Decide)
    assert step.body is None
    message = stream.decided(Routed(("127.0.0.1:1",), "id", None)).message
    assert message.WhichOneof("response") == "request_headers"
    assert read_answer(message).metadata is None


def test_a_rejection_is_an_immediate_response_of_openai_shape() -> None:
    stream = Stream(1_000)
    stream.receive(headers_message(POST))
    stream.receive(body_message(b"{}"))
    rejection = InvalidRequest("model is missing", RejectReason.MODEL_INVALID, param="model")
    answer = read_answer(stream.decided(rejection).message)
    assert answer.status == 400
    assert orjson.loads(answer.body)["error"]["param"] == "model"
    assert answer.headers["x-leadtime-reason"] == "model_invalid"
    assert answer.headers["content-type"] == "application/json"


def test_a_body_over_the_limit_is_a_413_once_it_is_there() -> None:
    """Not at the headers, though they declare the length: a client that is still sending would see a reset instead."""
    stream = Stream(10)
    assert isinstance(stream.receive(headers_message({**POST, "content-length": "11"})), Answer)
    step = stream.receive(body_message(b"x" * 11))
    assert isinstance(step, Answer)
    assert read_answer(step.message).status == 413


def test_a_body_at_the_limit_passes() -> None:
    stream = Stream(10)
    stream.receive(headers_message({**POST, "content-length": "10"}))
    assert isinstance(stream.receive(body_message(b"x" * 10)), Decide)


def test_the_subset_hint_is_read_from_metadata() -> None:
    stream = Stream(1_000)
    step = stream.receive(
        headers_message({":method": "GET", ":path": "/"}, end_of_stream=True, subset="127.0.0.1:1, [::1]:2")
    )
    assert isinstance(step, Decide)
    assert step.head.subset == {"127.0.0.1:1", "[::1]:2"}


@pytest.mark.parametrize("kind", ["request_trailers", "response_headers", "response_trailers"])
def test_every_other_phase_is_answered_in_kind(kind: str) -> None:
    stream = Stream(1_000)
    message = ep.ProcessingRequest()
    getattr(message, kind).SetInParent()
    step = stream.receive(message)
    assert isinstance(step, Answer)
    assert step.message.WhichOneof("response") == kind


@pytest.mark.parametrize(
    "messages",
    [
        [body_message(b"{}")],
        [headers_message(POST), headers_message(POST)],
        [headers_message(POST), body_message(b"{}"), body_message(b"{}")],
        [headers_message(POST, body_mode=Mode.STREAMED)],
        [ep.ProcessingRequest()],
    ],
)
def test_what_cannot_be_answered_aborts_with_a_status(messages: list[ep.ProcessingRequest]) -> None:
    stream = Stream(1_000)
    for message in messages:
        step = stream.receive(message)
    assert isinstance(step, Abort)
