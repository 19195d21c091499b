"""The ext-proc state machine: every phase is answered once, in order, in the mode in force, and nothing ends early."""

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.extproc import messages
from services.router.extproc.messages import Routed
from services.router.extproc.stream import (
    Abort,
    Decide,
    Effect,
    Rejected,
    ResponseChunk,
    ResponseEnd,
    ResponseHead,
    Send,
    Stream,
)
from services.router.request.errors import InvalidRequest, RejectReason
from sim.extproc_client import (
    body_message,
    headers_message,
    read_answer,
    response_body_message,
    response_headers_message,
    response_trailers_message,
    trailers_message,
)

POST = {":method": "POST", ":path": "/v1/chat/completions?x=1", "x-a": "b"}
ROUTED = Routed(("127.0.0.1:1", "[::1]:2"), "id-1", "meta")
Mode = processing_mode_pb2.ProcessingMode
DUPLEX = Mode.FULL_DUPLEX_STREAMED
CAP = 200_000


def headers(
    fields: dict[str, str] | None = None, *, mode: int = Mode.BUFFERED, response: int = Mode.NONE, **options: Any
) -> Any:
    return headers_message(fields or POST, body_mode=mode, response_body_mode=response, **options)


def duplex_headers(fields: dict[str, str] | None = None, **options: Any) -> Any:
    return headers(fields, mode=DUPLEX, response=DUPLEX, **options)


def only(effects: list[Effect]) -> Effect:
    assert len(effects) == 1, effects
    return effects[0]


def sent(effects: Iterable[Effect]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def decide(effects: list[Effect]) -> Decide:
    effect = only(effects)
    assert isinstance(effect, Decide)
    return effect


def kinds(effects: Iterable[Effect]) -> list[str]:
    return [message.WhichOneof("response") for message in sent(effects)]


def chunks(effects: Iterable[Effect], phase: str) -> list[tuple[bytes, bool]]:
    """(bytes, end flag) of the streamed chunks among the answers."""
    found = []
    for message in sent(effects):
        if message.WhichOneof("response") == phase:
            streamed = getattr(message, phase).response.body_mutation.streamed_response
            found.append((streamed.body, streamed.end_of_stream))
    return found


def run(sequence: Iterable[Any], result: Any = ROUTED, stream: Stream | None = None) -> list[Effect]:
    """All effects of a sequence of messages, each decision answered with `result`."""
    stream = stream or Stream(CAP)
    effects: list[Effect] = []
    for message in sequence:
        step = stream.receive(message)
        effects += step
        if step and isinstance(step[-1], Decide):
            effects += stream.decided(result)
    return effects


# --- request bodies BUFFERED and NONE ---------------------------------------------------------------------------------


def test_a_buffered_request_is_decided_at_its_body() -> None:
    stream = Stream(CAP)
    assert kinds(stream.receive(headers())) == ["request_headers"]
    step = decide(stream.receive(body_message(b"{}")))
    assert (step.head.method, step.head.route, step.body) == ("POST", "/v1/chat/completions", b"{}")
    answer = read_answer(sent(stream.decided(ROUTED))[0])
    assert answer.destinations == ROUTED.destinations
    assert answer.header == "127.0.0.1:1,[::1]:2"
    assert answer.metadata == "meta"


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX, Mode.NONE])
def test_header_and_metadata_are_byte_equal(mode: int) -> None:
    for message in sent(run([headers(mode=mode), body_message(b"{}")])):
        if message.HasField("dynamic_metadata"):
            answer = read_answer(message)
            assert answer.header == ",".join(ROUTED.destinations) == ",".join(answer.destinations)
            return
    pytest.fail("no answer carried the pick")


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX, Mode.NONE])
def test_a_request_without_a_body_is_decided_at_its_headers(mode: int) -> None:
    stream = Stream(CAP)
    step = decide(stream.receive(headers({":method": "GET", ":path": "/v1/models"}, mode=mode, end_of_stream=True)))
    assert step.body is None
    assert not step.head.body_hidden
    message = only(stream.decided(Routed(("127.0.0.1:1",), "id", None))).message  # type: ignore[union-attr]
    assert message.WhichOneof("response") == "request_headers"
    assert read_answer(message).metadata is None


def test_a_body_that_isn_t_shown_is_decided_at_the_headers() -> None:
    stream = Stream(CAP)
    step = decide(stream.receive(headers(mode=Mode.NONE)))
    assert step.body is None
    assert step.head.body_hidden
    assert kinds(stream.decided(ROUTED)) == ["request_headers"]


def test_a_new_body_goes_out_with_its_own_length_in_bytes() -> None:
    body = '{"prompt":"日本語"}'.encode()
    effects = run([headers(), body_message(b"{}")], Routed(("127.0.0.1:1",), "id", None, body))
    response = sent(effects)[1].request_body.response
    assert response.body_mutation.body == body
    lengths = [o.header.raw_value for o in response.header_mutation.set_headers if o.header.key == "content-length"]
    assert lengths == [str(len(body)).encode()]


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX])
def test_an_unchanged_body_sets_no_length_and_no_hop_by_hop_header(mode: int) -> None:
    response = {":status": "200", "transfer-encoding": "chunked", "connection": "keep-alive", "content-length": "812"}
    effects = run([headers(mode=mode, response=mode), body_message(b"{}"), response_headers_message(response)])
    names = set()
    for message in sent(effects):
        phase = getattr(message, message.WhichOneof("response"))
        if hasattr(phase, "response"):
            names |= {option.header.key for option in phase.response.header_mutation.set_headers}
    assert names == {"x-gateway-destination-endpoint", "x-leadtime-decision-id"}


def test_a_body_over_the_limit_is_a_413_once_it_is_there() -> None:
    """Not at the headers, though they declare the length: a client that is still sending would see a reset instead."""
    stream = Stream(10)
    assert kinds(stream.receive(headers({**POST, "content-length": "11"}))) == ["request_headers"]
    counted, answer = stream.receive(body_message(b"x" * 11))
    assert counted == Rejected(RejectReason.BODY_TOO_LARGE)
    assert read_answer(sent([answer])[0]).status == 413


def test_a_body_at_the_limit_passes() -> None:
    stream = Stream(10)
    stream.receive(headers({**POST, "content-length": "10"}))
    assert decide(stream.receive(body_message(b"x" * 10))).body == b"x" * 10


def test_a_buffered_body_is_whole_even_where_trailers_follow_it() -> None:
    effects = run([headers(), body_message(b"{}", end_of_stream=False), trailers_message()])
    assert kinds(effects) == ["request_headers", "request_body", "request_trailers"]


def test_trailers_in_place_of_a_buffered_body_carry_the_pick() -> None:
    effects = run([headers(), trailers_message()])
    assert kinds(effects) == ["request_headers", "request_trailers"]
    picked = sent(effects)[1].dynamic_metadata.fields["envoy.lb"].struct_value
    assert picked.fields["x-gateway-destination-endpoint"].string_value == "127.0.0.1:1,[::1]:2"


def test_a_repeated_buffered_body_is_answered_too() -> None:
    effects = run([headers(), body_message(b"{}"), body_message(b"")])
    assert kinds(effects) == ["request_headers", "request_body", "request_body"]
    assert sum(isinstance(effect, Decide) for effect in effects) == 1


# --- request bodies FULL_DUPLEX_STREAMED ------------------------------------------------------------------------------


def test_in_full_duplex_nothing_is_answered_before_the_body_s_end() -> None:
    stream = Stream(CAP)
    assert stream.receive(duplex_headers()) == []
    assert stream.receive(body_message(b'{"a"', end_of_stream=False)) == []
    assert stream.receive(body_message(b":1}", end_of_stream=False)) == []
    assert decide(stream.receive(body_message(b""))).body == b'{"a":1}'
    effects = stream.decided(ROUTED)
    assert kinds(effects) == ["request_headers", "request_body"]
    assert read_answer(sent(effects)[0]).header == "127.0.0.1:1,[::1]:2"
    assert chunks(effects, "request_body") == [(b'{"a":1}', True)]


@pytest.mark.parametrize(
    ("size", "lengths"),
    [(0, [0]), (1, [1]), (62_000, [62_000]), (62_001, [62_000, 1]), (125_000, [62_000, 62_000, 1_000])],
)
def test_the_body_comes_back_in_chunks_with_one_end(size: int, lengths: list[int]) -> None:
    body = hashlib.sha256(b"seed").digest() * (size // 32 + 1)
    effects = run([duplex_headers(), body_message(body[:size])])
    echoed = chunks(effects, "request_body")
    assert [len(chunk) for chunk, _ in echoed] == lengths
    assert b"".join(chunk for chunk, _ in echoed) == body[:size]
    assert [end for _, end in echoed] == [False] * (len(lengths) - 1) + [True]


def test_what_follows_the_end_of_a_body_changes_nothing() -> None:
    effects = run([duplex_headers(), body_message(b"{}"), body_message(b""), body_message(b"{}")])
    assert chunks(effects, "request_body") == [(b"{}", True)]
    assert sum(isinstance(effect, Decide) for effect in effects) == 1


def test_trailers_end_a_body_and_come_after_it() -> None:
    effects = run([duplex_headers(), body_message(b"{}", end_of_stream=False), trailers_message()])
    assert kinds(effects) == ["request_headers", "request_body", "request_trailers"]
    assert chunks(effects, "request_body") == [(b"{}", False)]
    empty = run([duplex_headers(), trailers_message()])
    assert kinds(empty) == ["request_headers", "request_trailers"]


def test_a_new_body_comes_back_in_place_of_the_old_one() -> None:
    effects = run([duplex_headers(), body_message(b"{}")], Routed(("127.0.0.1:1",), "id", None, b'{"m":1}'))
    assert chunks(effects, "request_body") == [(b'{"m":1}', True)]


@pytest.mark.parametrize(
    "fields",
    [
        {":method": "POST", ":path": "/sse"},
        {":method": "POST", ":path": "/v1/audio/transcriptions", "content-type": "multipart/form-data; boundary=x"},
        {":method": "GET", ":path": "/v1/chat/completions", "upgrade": "websocket", "connection": "upgrade"},
        {":method": "CONNECT", ":path": "/v1/chat/completions"},
    ],
)
def test_a_body_that_isn_t_needed_is_not_waited_for(fields: dict[str, str]) -> None:
    """It may be large, or never end: the pick comes with the headers, and each chunk goes back as it comes."""
    stream = Stream(10)
    step = decide(stream.receive(duplex_headers(fields)))
    assert step.body is None
    assert kinds(stream.decided(ROUTED)) == ["request_headers"]
    assert chunks(stream.receive(body_message(b"x" * 100, end_of_stream=False)), "request_body") == [
        (b"x" * 100, False)
    ]
    assert chunks(stream.receive(body_message(b"")), "request_body") == [(b"", True)]
    assert stream.receive(body_message(b"")) == []


def test_a_body_over_the_cap_is_dropped_and_refused_at_its_end() -> None:
    stream = Stream(10)
    stream.receive(duplex_headers())
    assert stream.receive(body_message(b"x" * 11, end_of_stream=False)) == []
    counted, answer = stream.receive(body_message(b""))
    assert counted == Rejected(RejectReason.BODY_TOO_LARGE)
    assert read_answer(sent([answer])[0]).status == 413
    assert stream.receive(body_message(b"")) == []
    assert stream.receive(trailers_message()) == []


def test_a_client_that_sends_on_and_on_is_refused_before_its_end() -> None:
    stream = Stream(10)
    stream.receive(duplex_headers())
    assert stream.receive(body_message(b"x" * 20, end_of_stream=False)) == []
    assert isinstance(stream.receive(body_message(b"x", end_of_stream=False))[0], Rejected)
    assert stream.receive(body_message(b"x", end_of_stream=False)) == []


def test_a_rejection_is_an_immediate_response_of_openai_shape_in_every_mode() -> None:
    rejection = InvalidRequest("model is missing", RejectReason.MODEL_INVALID, param="model")
    for mode in (Mode.BUFFERED, DUPLEX):
        effects = run([headers(mode=mode), body_message(b"{}")], rejection)
        answer = read_answer(sent(effects)[-1])
        assert answer.status == 400
        assert orjson.loads(answer.body)["error"]["param"] == "model"
        assert answer.headers["x-leadtime-reason"] == "model_invalid"
        assert answer.headers["content-type"] == "application/json"


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_response_is_sent_on_before_anyone_looks_at_it() -> None:
    stream = Stream(CAP)
    run([duplex_headers(), body_message(b"{}")], stream=stream)
    response = {":status": "200", "content-type": "text/event-stream"}
    answer, head = stream.receive(response_headers_message(response, served="127.0.0.1:2"))
    assert kinds([answer]) == ["response_headers"]
    assert head == ResponseHead(200, response, "127.0.0.1:2", body_shown=True)
    assert stream.response_cut
    echo, seen = stream.receive(response_body_message(b"data: x\n\n"))
    assert chunks([echo], "response_body") == [(b"data: x\n\n", False)]
    assert seen == ResponseChunk(b"data: x\n\n")
    echo, end = stream.receive(response_body_message(b"", end_of_stream=True))
    assert chunks([echo], "response_body") == [(b"", True)]
    assert end == ResponseEnd()
    assert not stream.response_cut


def test_a_large_chunk_of_a_response_comes_back_in_parts_with_one_end() -> None:
    stream = Stream(CAP)
    run([duplex_headers(), body_message(b"{}"), response_headers_message({":status": "200"})], stream=stream)
    body = b"abc" * 40_000
    effects = stream.receive(response_body_message(body, end_of_stream=True))
    echoed = chunks(effects, "response_body")
    assert [(len(chunk), end) for chunk, end in echoed] == [(62_000, False), (58_000, True)]
    assert b"".join(chunk for chunk, _ in echoed) == body
    assert stream.receive(response_body_message(b"", end_of_stream=True)) == []


def test_a_streamed_response_is_answered_chunk_by_chunk_without_touching_it() -> None:
    stream = Stream(CAP)
    run([headers(response=Mode.STREAMED), body_message(b"{}")], stream=stream)
    stream.receive(response_headers_message({":status": "200"}))
    for end in (False, True, True):
        effects = stream.receive(response_body_message(b"x", end_of_stream=end))
        message = sent(effects)[0]
        assert message.WhichOneof("response") == "response_body"
        assert not message.response_body.HasField("response")
    assert not stream.response_cut


def test_trailers_end_a_response() -> None:
    stream = Stream(CAP)
    run([duplex_headers(), body_message(b"{}"), response_headers_message({":status": "200"})], stream=stream)
    assert chunks(stream.receive(response_body_message(b"x")), "response_body") == [(b"x", False)]
    answer, end = stream.receive(response_trailers_message())
    assert kinds([answer]) == ["response_trailers"]
    assert end == ResponseEnd()
    assert kinds(stream.receive(response_trailers_message())) == ["response_trailers"]


def test_a_response_that_is_all_headers_has_its_end_there() -> None:
    stream = Stream(CAP)
    run([duplex_headers(), body_message(b"{}")], stream=stream)
    effects = stream.receive(response_headers_message({":status": "204"}, end_of_stream=True))
    assert [type(effect) for effect in effects] == [Send, ResponseHead, ResponseEnd]


def test_a_response_that_isn_t_shown_is_not_called_cut() -> None:
    stream = Stream(CAP)
    run([headers(), body_message(b"{}")], stream=stream)
    head = stream.receive(response_headers_message({":status": "x"}))[1]
    assert head == ResponseHead(0, {":status": "x"}, None, body_shown=False)
    assert not stream.response_cut


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX])
def test_envoy_s_own_answer_before_the_pick_is_let_pass(mode: int) -> None:
    """A request that Envoy itself refuses goes through the response phase while its request phase is open."""
    effects = run([headers(mode=mode, response=mode), response_headers_message({":status": "413"}, end_of_stream=True)])
    assert kinds(effects)[-1] == "response_headers"
    assert not any(isinstance(effect, Decide | Abort) for effect in effects)


@pytest.mark.parametrize("kind", ["response_headers", "response_trailers", "response_body"])
def test_a_stream_may_begin_with_the_response(kind: str) -> None:
    """Where Envoy is told to skip request headers."""
    message = ep.ProcessingRequest()
    getattr(message, kind).SetInParent()
    assert kinds(Stream(CAP).receive(message)) == [kind]


# --- what can't be answered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        ([body_message(b"{}")], "request_body_without_headers"),
        ([trailers_message()], "request_trailers_without_headers"),
        ([headers(), headers()], "repeated_request_headers"),
        ([headers(mode=Mode.STREAMED)], "request_body_mode_streamed"),
        ([headers(mode=Mode.BUFFERED_PARTIAL)], "request_body_mode_buffered_partial"),
        ([headers(mode=77)], "request_body_mode_77"),
        ([ep.ProcessingRequest()], "unexpected_None"),
    ],
)
def test_what_breaks_the_protocol_aborts_with_a_status(sequence: list[Any], reason: str) -> None:
    assert run(sequence)[-1] == Abort(reason)


# --- what a message says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX, Mode.NONE])
@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        ("127.0.0.1:1, [::1]:2", {"127.0.0.1:1", "[::1]:2"}),
        (["127.0.0.1:1", "10.0.0.7"], {"127.0.0.1:1", "10.0.0.7"}),
        (["127.0.0.1:1,10.0.0.7:2"], {"127.0.0.1:1", "10.0.0.7:2"}),
        ("[FD00:0:0::5]:8000", {"[fd00::5]:8000"}),
        ("fd00:0::5, [fd00::6]", {"fd00::5", "fd00::6"}),
        ("", set()),
        ([], set()),
        (None, None),
    ],
)
def test_the_subset_hint_is_read_from_metadata_also_without_a_body(mode: int, hint: Any, subset: Any) -> None:
    step = decide(
        Stream(CAP).receive(headers({":method": "GET", ":path": "/"}, mode=mode, end_of_stream=True, subset=hint))
    )
    assert step.head.subset == subset


@pytest.mark.parametrize(
    ("told", "name"), [({"xds.route_name": "chat"}, "chat"), ({"xds.route_name": "r" * 257}, ""), ({}, ""), (None, "")]
)
def test_the_gateways_route_is_read_from_its_attributes(told: dict[str, str] | None, name: str) -> None:
    message = headers()
    if told is not None:
        message.attributes["envoy.filters.http.ext_proc"].update(told)
    assert messages.request_head(message).route_name == name
    assert ("envoy.filters.http.ext_proc" in message.attributes) is (told is not None)


def test_a_header_given_twice_has_both_values() -> None:
    message = headers({":method": "POST", ":path": "/", "x-slo-ttft-ms": "100"})
    for value in ("200", "300"):
        message.request_headers.headers.headers.add(key="x-slo-ttft-ms", raw_value=value.encode())
    assert messages.request_head(message).headers["x-slo-ttft-ms"] == "100, 200, 300"


def test_a_flood_of_headers_is_read_in_linear_time() -> None:
    message = headers()
    for number in range(50_000):
        message.request_headers.headers.headers.add(key="x-same", raw_value=b"value")
        message.request_headers.headers.headers.add(key=f"x-{number}", raw_value=b"\xff\x00")
    found = messages.request_head(message).headers
    assert found["x-same"].count("value") == 50_000
    assert found["x-7"] == "\ufffd\x00"


@pytest.mark.parametrize("mode", [Mode.BUFFERED, DUPLEX, Mode.NONE])
@pytest.mark.parametrize("fields", [{f"x-{n}": "v" for n in range(90)}, {"x-large": "v" * 50_000}])
def test_where_headers_come_near_envoy_s_limits_nothing_is_added_to_them(mode: int, fields: dict[str, str]) -> None:
    """Envoy would answer with a 500. The pick goes by metadata; what must not go on is still taken off."""
    effects = run(
        [headers({**POST, **fields}, mode=mode), *([] if mode == Mode.NONE else [body_message(b"{}")])],
        Routed(("127.0.0.1:1",), "id", None, removed_headers=("x-a",)),
    )
    (answer,) = [message for message in sent(effects) if "envoy.lb" in message.dynamic_metadata.fields]
    mutation = getattr(answer, answer.WhichOneof("response")).response.header_mutation
    assert len(mutation.set_headers) == 0
    assert list(mutation.remove_headers) == ["x-a"]
    bare = messages.routed_headers(ROUTED, crowded=True).request_headers.response
    assert not bare.HasField("header_mutation"), "an empty one is checked against the limits as well"


@pytest.mark.parametrize("status", ["", "no", "2000", "9" * 5_000, "\u0662\u0660\u0660", "-20", "20"])
def test_a_status_that_is_none_is_0(status: str) -> None:
    stream = Stream(CAP)
    run([duplex_headers(), body_message(b"{}")], stream=stream)
    _, head = stream.receive(response_headers_message({":status": status}))
    assert isinstance(head, ResponseHead)
    assert head.status == 0


def test_an_answer_s_text_never_holds_the_body() -> None:
    step = decide(_up_to_decide(b'{"secret":1}'))
    assert "secret" not in repr(step)


def _up_to_decide(body: bytes) -> list[Effect]:
    stream = Stream(CAP)
    stream.receive(duplex_headers())
    return stream.receive(body_message(body))


# --- laws -------------------------------------------------------------------------------------------------------------

pieces = st.lists(st.binary(max_size=50), max_size=12)


@settings(max_examples=200)
@given(pieces, st.booleans(), st.booleans())
def test_any_chunking_of_a_request_gives_the_same_decision_and_the_same_bytes(
    parts: list[bytes], with_trailers: bool, empty_end: bool
) -> None:
    body = b"".join(parts)
    sequence = [duplex_headers()]
    if with_trailers or empty_end or not parts:
        sequence += [body_message(part, end_of_stream=False) for part in parts]
        sequence.append(trailers_message() if with_trailers else body_message(b""))
    else:
        sequence += [body_message(part, end_of_stream=i == len(parts) - 1) for i, part in enumerate(parts)]
    effects = run(sequence)
    decisions = [effect for effect in effects if isinstance(effect, Decide)]
    assert [decision.body for decision in decisions] == [body]
    whole = run([duplex_headers(), body_message(body)])
    assert decisions[0] == whole[0]
    echoed = chunks(effects, "request_body")
    assert b"".join(chunk for chunk, _ in echoed) == body
    assert sum(end for _, end in echoed) == (0 if with_trailers else 1)
    assert all(len(chunk) <= messages.MAX_CHUNK_BYTES for chunk, _ in echoed)


@settings(max_examples=200)
@given(pieces, st.sampled_from([Mode.STREAMED, DUPLEX]))
def test_any_chunking_of_a_response_gives_the_same_bytes(parts: list[bytes], mode: int) -> None:
    stream = Stream(CAP)
    run([headers(response=mode), body_message(b"{}"), response_headers_message({":status": "200"})], stream=stream)
    effects: list[Effect] = []
    for part in [*parts, b""]:
        effects += stream.receive(response_body_message(part, end_of_stream=False))
    effects += stream.receive(response_body_message(b"", end_of_stream=True))
    seen = b"".join(effect.chunk for effect in effects if isinstance(effect, ResponseChunk))
    assert seen == b"".join(parts)
    assert effects[-1] == ResponseEnd()
    if mode == DUPLEX:
        assert b"".join(chunk for chunk, _ in chunks(effects, "response_body")) == seen
    assert len(sent(effects)) == len(parts) + 2


def test_a_thousand_chunks_of_one_byte_pass() -> None:
    body = bytes(range(256)) * 4
    sequence = [duplex_headers(), *(body_message(bytes([b]), end_of_stream=False) for b in body), body_message(b"")]
    assert chunks(run(sequence), "request_body") == [(body, True)]


# --- requests held on purpose ----------------------------------------------------------------------------------------


def test_envoy_is_asked_for_more_time_where_it_keeps_time() -> None:
    stream = Stream(CAP)
    stream.receive(headers())
    assert stream.more_time(5_000.0) == [], "nothing is being decided yet"
    decide(stream.receive(body_message(b"{}")))
    (message,) = sent(stream.more_time(1_500.4))
    assert message.override_message_timeout.ToMilliseconds() == 1_500
    assert message.WhichOneof("response") is None
    assert kinds(stream.decided(ROUTED)) == ["request_body"]


def test_in_full_duplex_envoy_keeps_no_time_and_is_asked_for_none() -> None:
    stream = Stream(CAP)
    stream.receive(duplex_headers())
    decide(stream.receive(body_message(b"{}")))
    assert stream.more_time(5_000.0) == []
