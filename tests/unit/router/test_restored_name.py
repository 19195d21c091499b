"""The client's model name in responses: which string changes, and that chunks don't matter."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.restored_name import DocumentRestorer, EventRestorer, Restorer, restorer

MODEL = "org/base-v2"
NAME = "my alias é"
QUOTED = json.dumps(NAME, ensure_ascii=False).encode()


def through(restoring: Restorer, body: bytes, cuts: list[int]) -> bytes:
    """The body in chunks that end at `cuts`."""
    out = b""
    start = 0
    for cut in [*sorted(cut % (len(body) + 1) for cut in cuts), len(body)]:
        out += restoring.feed(body[start:cut])
        start = cut
    return out + restoring.flush()


def event(document: Any, end: str = "\n") -> bytes:
    return f"data: {json.dumps(document)}{end}{end}".encode()


CHAT = {"id": "c", "object": "chat.completion.chunk", "created": 17, "model": MODEL, "choices": [{"delta": {}}]}
LATE = {"choices": [{"delta": {"content": f'say "model":"{MODEL}"'}, "model": MODEL}], "usage": None, "model": MODEL}
WRAPPED = {"type": "response.created", "response": {"id": "r", "metadata": {"model": MODEL}, "model": MODEL}}
ANTHROPIC = {"type": "message_start", "message": {"content": [], "model": MODEL, "role": "assistant"}}
DEEP = {"a": {"model": MODEL}, "response": [{"model": MODEL}], "message": "model", "list": ["model", MODEL, {}]}


def expected(body: bytes) -> bytes:
    """What an unhurried reader makes of the documents above: the last name of each is the one to change."""
    before, _, after = body.rpartition(f'"model": "{MODEL}"'.encode())
    return before + b'"model": ' + QUOTED + after


@pytest.mark.parametrize("document", [CHAT, LATE, WRAPPED, ANTHROPIC], ids=["chat", "late", "responses", "anthropic"])
def test_the_name_changes_and_nothing_else(document: Any) -> None:
    body = json.dumps(document).encode()
    assert through(DocumentRestorer(MODEL, NAME), body, []) == expected(body)
    assert through(EventRestorer(MODEL, NAME), event(document), []) == expected(event(document))


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(DEEP).encode(),
        json.dumps({"model": "another"}).encode(),
        json.dumps({"model": None, "text": MODEL}).encode(),
        json.dumps({"model": [MODEL]}).encode(),
        json.dumps([{"model": MODEL}]).encode(),
        json.dumps({"text": f'{{"model":"{MODEL}"}}', "model ": MODEL}).encode(),
        json.dumps({"model": "x" * 20_000}).encode(),
        b'{"model":"' + MODEL.encode(),
        b'{"model":"' + MODEL.encode() + b"\n\n",
        b'"model":"' + MODEL.encode() + b'"',
        b"",
        b"no JSON at all: {]}",
        b"\xff\xfe{",
    ],
)
def test_what_isn_t_the_served_model_s_name_passes(body: bytes) -> None:
    assert through(DocumentRestorer(MODEL, NAME), body, []) == body
    assert through(EventRestorer(MODEL, NAME), b"data: " + body + b"\n\n", []) == b"data: " + body + b"\n\n"
    assert through(EventRestorer(MODEL, NAME), body, []) == body


def test_a_chunk_without_the_name_is_handed_on_itself() -> None:
    """So that an edge need not send it anew."""
    chunk = event({"id": "c", "model": "another", "choices": []})
    assert EventRestorer(MODEL, NAME).feed(chunk) is chunk


@pytest.mark.parametrize("spelt", [r"org\/base-v2", r"org/base\u002dv2", r"\u006frg/base-v2"])
def test_a_name_that_is_written_with_escapes_is_known(spelt: str) -> None:
    body = f'{{"mod\\u0065l" :\r\n "{spelt}", "x": 1}}'.encode()
    assert through(DocumentRestorer(MODEL, NAME), body, [5, 9, 22]) == b'{"mod\\u0065l" :\r\n ' + QUOTED + b', "x": 1}'


def test_only_lines_of_data_are_read() -> None:
    line = b'{"model": "' + MODEL.encode() + b'"}'
    stream = b": " + line + b"\nevent: " + line + b"\nid: 1\ndat: " + line + b"\ndata:" + line + b"\r\rdata:\r\n\r\n"
    changed = stream.replace(b"\ndata:" + line, b'\ndata:{"model": ' + QUOTED + b"}")
    assert through(EventRestorer(MODEL, NAME), stream, []) == changed


def test_an_event_of_several_data_lines_is_one_document() -> None:
    stream = b'data: {"id": 1,\r\ndata: "model": "' + MODEL.encode() + b'"}\r\n\r\n'
    changed = b'data: {"id": 1,\r\ndata: "model": ' + QUOTED + b"}\r\n\r\n"
    assert through(EventRestorer(MODEL, NAME), stream, []) == changed


def test_nothing_is_held_back_but_the_value_itself() -> None:
    restoring = EventRestorer(MODEL, NAME)
    assert restoring.feed(b'data: {"id": "c", "model": ') == b'data: {"id": "c", "model": '
    assert restoring.feed(b'"org/') == b""
    assert restoring.feed(b'base-v2"') == QUOTED
    assert restoring.feed(b', "more') == b', "more'


def test_an_endless_value_is_let_go() -> None:
    restoring = DocumentRestorer(MODEL, NAME)
    out = restoring.feed(b'{"model": "') + b"".join(restoring.feed(b"x" * 100) for _ in range(100))
    assert len(out) > 9_000
    assert out + restoring.flush() == b'{"model": "' + b"x" * 10_000


@pytest.mark.parametrize(
    ("kind", "encoding", "made"),
    [
        ("text/event-stream; charset=utf-8", "", EventRestorer),
        ("application/json", "identity", DocumentRestorer),
        ("application/problem+json;x", "", DocumentRestorer),
        ("application/json", "gzip", None),
        ("application/octet-stream", "", None),
        ("", "", None),
    ],
)
def test_which_bodies_are_read(kind: str, encoding: str, made: type | None) -> None:
    found = restorer(MODEL, NAME, kind, encoding)
    assert found is None if made is None else isinstance(found, made)


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([MODEL, "x", 'quote " and \\', "日本\n", f'"{MODEL}"']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "response", "message", "a", 'mo"del', "é"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def model_of(document: Any) -> tuple[Any, ...]:
    """The names that must have changed, read by a parser."""
    return tuple(
        part.get("model")
        for part in (document, document.get("response"), document.get("message"))
        if isinstance(part, dict)
    )


@given(
    st.dictionaries(st.sampled_from(["model", "response", "message", "choices", "id"]), documents, max_size=5),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "\r : ")]),
    st.lists(st.integers(0, 5_000), max_size=12),
)
def test_a_document_in_any_chunks_is_the_same_document_with_another_name(
    document: dict[str, Any], ascii_only: bool, separators: tuple[str, str], cuts: list[int]
) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, separators=separators).encode()
    whole = through(DocumentRestorer(MODEL, NAME), body, [])
    assert through(DocumentRestorer(MODEL, NAME), body, cuts) == whole
    read = json.loads(whole)
    named = [name for name in model_of(document) if isinstance(name, str)]
    if document.get("model") == MODEL and next(iter(document)) == "model":
        assert read["model"] == NAME
        read["model"] = MODEL
        assert read == document
    elif not named:
        assert whole == body


@given(
    st.lists(
        st.one_of(
            st.sampled_from([CHAT, LATE, WRAPPED, ANTHROPIC, DEEP]).map(event),
            st.sampled_from([CHAT, LATE]).map(lambda document: event(document, "\r\n")),
            st.sampled_from([CHAT]).map(lambda document: event(document, "\r")),
            st.sampled_from([b"data: [DONE]\n\n", b": ping\n\n", b"\n", b"\r\n", b"data", b'"', b"{", b"\\", b"d"]),
            st.binary(max_size=8),
        ),
        max_size=6,
    ).map(b"".join),
    st.lists(st.integers(0, 5_000), max_size=30),
)
@example(event(CHAT) + event(LATE), list(range(600)))
def test_a_stream_in_any_chunks_gives_the_same_bytes(stream: bytes, cuts: list[int]) -> None:
    whole = through(EventRestorer(MODEL, NAME), stream, [])
    assert through(EventRestorer(MODEL, NAME), stream, cuts) == whole
    assert whole.replace(QUOTED, b'"' + MODEL.encode() + b'"') == stream
