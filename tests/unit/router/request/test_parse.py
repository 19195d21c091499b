import gzip
import json
import zlib
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.errors import BodyTooLarge, InvalidRequest, RejectReason, RequestRejected
from services.router.request.inference_request import InferenceRequest
from services.router.request.parse import MAX_BREAKS, MAX_TOKENS, ParseConfig, Route, parse, route_of
from services.router.request.prompt import MAX_MEDIA, MAX_PIECES
from services.router.request.tokens import TokenEstimator

CHAT = "/v1/chat/completions"


def request_of(body, path=CHAT, headers=None, **config) -> InferenceRequest:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse(path, headers or {}, data, TokenEstimator(), ParseConfig(**config))


def rejection_of(body, path=CHAT, headers=None, **config) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        request_of(body, path, headers, **config)
    return caught.value


def chat(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **more}


def part(content_part):
    return chat(messages=[{"role": "user", "content": [content_part]}])


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route.CHAT),
        ("/api/v1/chat/completions?x=1", Route.CHAT),
        ("/v1/completions", Route.COMPLETIONS),
        ("/v1/responses", Route.RESPONSES),
        ("/v1/embeddings", Route.EMBEDDINGS),
        ("/v1/messages", Route.MESSAGES),
        ("/v1/threads/t/messages", Route.OTHER),
        ("/v1/models", Route.OTHER),
        ("/", Route.OTHER),
        ("", Route.OTHER),
    ],
)
def test_a_path_names_its_route(path, route):
    assert route_of(path) is route


@pytest.mark.parametrize(
    ("path", "body", "prompt_contains", "max_tokens"),
    [
        (CHAT, chat(max_tokens=5, stream=True), b"hello", 5),
        (CHAT, chat(max_tokens=5, max_completion_tokens=7), b"hello", 7),
        ("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 16.0}, b"hello", 16),
        ("/v1/completions", {"model": "m", "prompt": ["hello", "there"]}, b"there", None),
        ("/v1/completions", {"model": "m", "prompt_embeds": "AAAA"}, b"", None),
        ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 3}, b"hello", 3),
        ("/v1/responses", {**chat(), "input": [{"role": "user", "content": "hi"}], "instructions": "be"}, b"be", None),
        ("/v1/embeddings", {"model": "m", "input": ["hello"]}, b"hello", None),
        ("/v1/embeddings", {"model": "m", "messages": [{"role": "user", "content": "hello"}]}, b"hello", None),
        ("/v1/messages", {**chat(max_tokens=9), "system": [{"type": "text", "text": "be kind"}]}, b"be kind", 9),
    ],
)  # fmt: skip
def test_every_form_of_prompt_is_read(path, body, prompt_contains, max_tokens):
    request = request_of(body, path)
    assert prompt_contains in request.prompt
    assert request.max_tokens == max_tokens
    assert request.model == "m"
    assert request.input_tokens >= 1


def test_token_ids_are_counted_exactly_and_teach_no_bytes_per_token():
    request = request_of({"model": "m", "prompt": [1, 2, 3, 70_000]}, "/v1/completions")
    assert request.input_tokens == 4
    assert request.text_bytes == 0
    assert len(request.prompt) == 16
    nested = request_of({"model": "m", "prompt": [[1, 2], [3]]}, "/v1/completions")
    assert nested.input_tokens == 3


def test_text_is_estimated_at_four_bytes_a_token_before_anything_is_learned():
    request = request_of({"model": "m", "prompt": "x" * 400}, "/v1/completions")
    assert request.input_tokens == pytest.approx(100)
    assert request.text_bytes == 400


def test_conversations_with_a_common_beginning_share_leading_bytes():
    first = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "question"}]
    longer = [*first, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "more"}]
    short, long = (request_of({"model": "m", "messages": m, "tools": [{"name": "t"}]}).prompt for m in (first, longer))
    assert long.startswith(short)


def test_text_parts_read_as_the_same_text_as_a_plain_string():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert request_of(chat()).prompt == request_of({"model": "m", "messages": parts}).prompt


def test_tools_stand_before_messages_and_a_cache_salt_before_everything():
    plain, salted = request_of(chat(tools=[{"a": 1}])), request_of(chat(tools=[{"a": 1}], cache_salt="k"))
    assert plain.prompt.startswith(b'[{"a":1}]')
    assert b"k" in salted.prompt[:3]


def test_media_stand_as_a_digest_however_large_they_are():
    def image(data: str):
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
        return request_of({"model": "m", "messages": [{"role": "user", "content": [part]}]})

    small, large, same = image("A"), image("B" * 100_000), image("A")
    assert small.prompt == same.prompt != large.prompt
    assert len(small.prompt) == len(large.prompt)
    assert 500 < large.input_tokens < 700
    assert large.text_bytes == 0


@pytest.mark.parametrize(
    ("body", "path", "param", "reason"),
    [
        ({"messages": []}, CHAT, "model", RejectReason.MODEL_INVALID),
        (chat(model=""), CHAT, "model", RejectReason.MODEL_INVALID),
        (chat(model=7), CHAT, "model", RejectReason.MODEL_INVALID),
        (chat(model="m" * 513), CHAT, "model", RejectReason.MODEL_INVALID),
        ({"model": "m"}, CHAT, "messages", RejectReason.PROMPT_INVALID),
        (chat(messages=[]), CHAT, "messages", RejectReason.PROMPT_INVALID),
        (chat(messages="hello"), CHAT, "messages", RejectReason.PROMPT_INVALID),
        (chat(messages=["hello"]), CHAT, "messages[0]", RejectReason.PROMPT_INVALID),
        (chat(messages=[{"content": "x"}]), CHAT, "messages[0].role", RejectReason.PROMPT_INVALID),
        (chat(messages=[{"role": "u", "content": 3}]), CHAT, "messages[0].content", RejectReason.PROMPT_INVALID),
        (chat(messages=[{"role": "u", "content": [3]}]), CHAT, "messages[0].content[0]", RejectReason.PROMPT_INVALID),
        (part({"type": []}), CHAT, "messages[0].content[0].type", RejectReason.PROMPT_INVALID),
        (part({"type": "text"}), CHAT, "messages[0].content[0].text", RejectReason.PROMPT_INVALID),
        (chat(tools={"a": 1}), CHAT, "tools", RejectReason.FIELD_INVALID),
        (chat(stream="yes"), CHAT, "stream", RejectReason.FIELD_INVALID),
        (chat(stream=1), CHAT, "stream", RejectReason.FIELD_INVALID),
        (chat(max_tokens="5"), CHAT, "max_tokens", RejectReason.FIELD_INVALID),
        (chat(max_tokens=True), CHAT, "max_tokens", RejectReason.FIELD_INVALID),
        (chat(max_tokens=-1), CHAT, "max_tokens", RejectReason.FIELD_INVALID),
        (chat(max_completion_tokens=1.5), CHAT, "max_completion_tokens", RejectReason.FIELD_INVALID),
        ({"model": "m"}, "/v1/completions", "prompt", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": []}, "/v1/completions", "prompt", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": {"a": 1}}, "/v1/completions", "prompt", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": [1, -1]}, "/v1/completions", "prompt[1]", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": [1, 1.5]}, "/v1/completions", "prompt[1]", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": ["a", 1]}, "/v1/completions", "prompt[1]", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": [[1], "a"]}, "/v1/completions", "prompt[1]", RejectReason.PROMPT_INVALID),
        ({"model": "m", "prompt": [[1], [None]]}, "/v1/completions", "prompt[1][0]", RejectReason.PROMPT_INVALID),
        ({"model": "m"}, "/v1/responses", "input", RejectReason.PROMPT_INVALID),
        ({"model": "m", "input": "x", "instructions": 1}, "/v1/responses", "instructions", RejectReason.PROMPT_INVALID),
        ({"model": "m"}, "/v1/embeddings", "input", RejectReason.PROMPT_INVALID),
        ({"model": "m", "max_tokens": 1}, "/v1/messages", "messages", RejectReason.PROMPT_INVALID),
        ({**chat(), "system": 1}, "/v1/messages", "system", RejectReason.PROMPT_INVALID),
    ],
)  # fmt: skip
def test_a_wrong_body_is_a_400_that_names_the_field(body, path, param, reason):
    error = rejection_of(body, path)
    assert isinstance(error, InvalidRequest)
    assert (error.status, error.param, error.reason) == (400, param, reason)
    answer = orjson.loads(error.body())["error"]
    assert answer["param"] == param
    assert answer["type"] == "invalid_request_error"
    assert param in answer["message"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (-1, "-1; allowed: an integer from 0"),
        (-2.0, "-2; allowed: an integer from 0"),
        (-(10**18), "an integer of more than 15 digits; allowed: an integer from 0"),
        (1.5, "a number; allowed: an integer"),
        ("secret", "text; allowed: an integer"),
    ],
)
def test_a_limit_of_the_answer_that_is_none_is_told_with_the_number_that_was_sent(value, found):
    assert rejection_of(chat(max_tokens=value)).message == f"max_tokens: found {found}"


@pytest.mark.parametrize(
    ("body", "reason", "says"),
    [
        (b"", RejectReason.BODY_NOT_JSON, "byte 0"),
        (b'{"model": "secret', RejectReason.BODY_NOT_JSON, "byte 1"),
        ('{"é": "ü", secret'.encode(), RejectReason.BODY_NOT_JSON, "byte 13"),
        (b'{"model": "\xff secret"}', RejectReason.BODY_NOT_JSON, "byte 11"),
        (b'{"model": "\\ud800 secret"}', RejectReason.BODY_NOT_JSON, "byte"),
        (b"[1]", RejectReason.BODY_NOT_OBJECT, "a list"),
        (b"null", RejectReason.BODY_NOT_OBJECT, "nothing"),
        (b"[" * 10_000, RejectReason.BODY_TOO_COMPLEX, "1024"),
        (b'{"a":' * 10_000, RejectReason.BODY_TOO_COMPLEX, "1024"),
        (b'{"tools":' + b"[" * 500 + b"]" * 500 + b',"model":"m"}', RejectReason.BODY_TOO_COMPLEX, "250"),
        (b"[" + b"[]," * (MAX_BREAKS // 2 + 1) + b"1]", RejectReason.BODY_TOO_COMPLEX, str(MAX_BREAKS)),
    ],
)
def test_a_body_that_is_no_sound_json_object_is_a_400_that_says_where_and_shows_nothing(body, reason, says):
    error = rejection_of(body)
    assert (error.status, error.reason) == (400, reason)
    assert says in error.message
    assert b"secret" not in error.body()
    assert error.__context__ is None or error.__suppress_context__


IMAGE = {"type": "image_url"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": [IMAGE] * (MAX_MEDIA + 1)}], str(MAX_MEDIA)),
        ([{"role": "user", "content": [IMAGE]}] * (MAX_MEDIA + 1), str(MAX_MEDIA)),
        ([{"role": "user", "content": ""}] * (MAX_PIECES // 4 + 1), str(MAX_PIECES)),
        ([{"role": "user", "content": [""] * (MAX_PIECES + 1)}], str(MAX_PIECES)),
        ([{"role": "user", "content": [""] * 1_000}] * (MAX_PIECES // 1_000 + 1), str(MAX_PIECES)),
    ],
    ids=["images", "messages with an image", "messages", "parts", "messages with parts"],
)
def test_what_is_cheap_to_send_and_dear_to_read_is_refused(messages, says):
    """Each image of 16 bytes stands for the tokens of one: a body of 15 MB would hold the router for seconds."""
    error = rejection_of(chat(messages=messages))
    assert (error.status, error.reason) == (400, RejectReason.BODY_TOO_COMPLEX)
    assert says in error.message


def test_as_many_images_as_are_allowed_are_read():
    request = request_of(chat(messages=[{"role": "user", "content": [IMAGE] * MAX_MEDIA}]))
    assert request.text_bytes == 0


def test_duplicate_keys_keep_the_last_as_model_servers_do():
    assert request_of(b'{"model":"a","model":"b","prompt":"x"}', "/v1/completions").model == "b"


LARGE = "x" * (MAX_BREAKS + 1)
"""Text that makes a body one of those that the other decoder reads."""


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 10**30},
        {"tools": [{"maximum": 2**70, "minimum": -(2**70)}]},
        {"seed": 2**64, "temperature": 1e-320, "n": -0.0},
    ],
)
@pytest.mark.parametrize("text", ["x", LARGE], ids=["small", "large"])
def test_numbers_that_json_allows_are_read_however_large_the_body(text: str, more: dict[str, Any]) -> None:
    request = request_of(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode())
    assert request.max_tokens in {None, MAX_TOKENS}
    assert len(request.prompt) >= len(text)


@pytest.mark.parametrize("text", ["x", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("value", "reason", "says"),
    [
        ("[" * 1_000 + "]" * 1_000, None, ""),
        ("[" * 50_000 + "]" * 50_000, RejectReason.BODY_TOO_COMPLEX, "1024"),
        ("1e999", RejectReason.BODY_NOT_JSON, "byte"),
        ("9" * 5_000, RejectReason.BODY_NOT_JSON, "byte"),
        ("NaN", RejectReason.BODY_NOT_JSON, "byte"),
        ('"\\ud800"', RejectReason.BODY_NOT_JSON, "byte"),
        ('"\x00"', RejectReason.BODY_NOT_JSON, "byte"),
        ('"\\u0000"', None, ""),
    ],
)
def test_a_large_body_is_refused_for_what_a_small_one_is(text: str, value: str, reason: Any, says: str) -> None:
    body = f'{{"model":"m","prompt":"{text}","odd":{value}}}'.encode()
    if reason is None:
        assert request_of(body, "/v1/completions").text_bytes == len(text)
    else:
        error = rejection_of(body, "/v1/completions")
        assert (error.status, error.reason) == (400, reason)
        assert says in error.message


def test_a_body_over_the_limit_is_a_413():
    error = rejection_of(b"x" * 101, max_body_bytes=100)
    assert isinstance(error, BodyTooLarge)
    assert error.status == 413


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compressed_body_is_read(pack):
    encoding = "gzip" if pack is gzip.compress else "deflate"
    assert request_of(pack(orjson.dumps(chat())), headers={"content-encoding": encoding}).model == "m"


def test_a_body_compressed_in_pieces_is_read():
    body = orjson.dumps(chat())
    members = b"".join(gzip.compress(body[i : i + 20]) for i in range(0, len(body), 20))
    assert request_of(members, headers={"content-encoding": "gzip"}).model == "m"


def test_deflate_without_its_zlib_header_is_read_as_many_clients_send_it():
    packer = zlib.compressobj(wbits=-15)
    body = packer.compress(orjson.dumps(chat())) + packer.flush()
    assert request_of(body, headers={"content-encoding": "deflate"}).model == "m"


@pytest.mark.parametrize("members", [1, 30])
def test_a_compressed_bomb_stops_at_the_body_limit(members):
    bomb = gzip.compress(b" " * (3_000_000 // members)) * members
    assert rejection_of(bomb, headers={"content-encoding": "gzip"}, max_body_bytes=100_000).status == 413


def test_a_body_of_countless_empty_members_is_given_up():
    body = gzip.compress(b"") * 10_000 + gzip.compress(b"{}")
    assert rejection_of(body, headers={"content-encoding": "gzip"}).reason is RejectReason.CONTENT_ENCODING


ZIPPED = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize("body", [ZIPPED[:-3], b"not gzip", ZIPPED + b"more", b""])
def test_a_damaged_compressed_body_is_a_400(body):
    error = rejection_of(body, headers={"content-encoding": "gzip"})
    assert (error.status, error.reason) == (400, RejectReason.CONTENT_ENCODING)


@pytest.mark.parametrize("encoding", ["zstd", "gzip, gzip", "gzip,zstd", "br"])
def test_an_encoding_that_is_not_read_is_a_415(encoding):
    assert rejection_of(b"x", headers={"content-encoding": encoding}).status == 415


@pytest.mark.parametrize("encoding", ["identity", "", " ", "Identity, ", ","])
def test_an_encoding_that_changes_nothing_is_none(encoding):
    assert request_of(chat(), headers={"content-encoding": encoding}).model == "m"


@pytest.mark.parametrize("encoding", ["GZIP", " gzip ", "identity, gzip", "x-gzip"])
def test_an_encoding_is_known_however_it_is_written(encoding):
    assert request_of(gzip.compress(orjson.dumps(chat())), headers={"content-encoding": encoding}).model == "m"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_passed_over_as_model_servers_do(pack):
    body = pack(b"\xef\xbb\xbf" + orjson.dumps(chat()))
    assert request_of(body, headers={} if pack is bytes else {"content-encoding": "gzip"}).model == "m"


def test_an_unknown_path_is_a_404():
    error = rejection_of(chat(), "/v1/other")
    assert (error.status, error.reason) == (404, RejectReason.PATH_UNKNOWN)


def test_the_prompt_is_in_no_repr():
    assert "hello" not in repr(request_of(chat()))


TEXT = st.text("ab\u00e9\u2603", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "tool_calls", "name"]) | TEXT,
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = (
    "model", "messages", "prompt", "input", "system", "instructions", "stream", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "tools", "functions", "cache_salt", "prompt_embeds",
)  # fmt: skip
PATHS = st.sampled_from([CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"])


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), PATHS)
def test_any_json_object_gives_a_request_or_a_typed_rejection(body, path):
    body.setdefault("model", "m")
    result: InferenceRequest | RequestRejected
    try:
        result = request_of(orjson.dumps(body), path)
    except RequestRejected as error:
        result = error
    if isinstance(result, RequestRejected):
        assert result.status == 400
        orjson.loads(result.body())
    else:
        assert result.input_tokens >= 1
        assert result.text_bytes in {0, len(result.prompt)}


@given(st.binary(max_size=200), PATHS)
def test_any_bytes_give_a_typed_rejection(body, path):
    assert rejection_of(body, path).status == 400


PARTS = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", " ", "\n", '"a"', '"a":', '"', "\\", "\\u0041", "\\ud83d\\ude00", "\\ud800", "\\x",
     "0", "-0", "1", "-", ".5", "1.", "1.5", "1e5", "E-7", "1e999", "9223372036854775808", "18446744073709551616",
     "true", "null", "nul", "NaN", "\x00", "\x1f", "\x7f", "\u00e9", "\ufeff", "\u2028"]
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(PARTS, max_size=12).map("".join).map(str.encode) | st.binary(max_size=12) | JSON.map(orjson.dumps))
def test_both_decoders_read_the_same(text: bytes) -> None:
    """What the one for large bodies takes, the other takes too, and as the same. (The first hands on what it refuses.)
    Only integers beyond 64 bits are exact in one of them.
    """
    body = b'{"a":' + text + b"}"
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return
    assert orjson.loads(body) == _as_64_bits(document)


def _as_64_bits(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_64_bits(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_64_bits(item) for key, item in value.items()}
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def test_an_alias_is_read_as_the_model_behind_it():
    tokens = TokenEstimator()
    tokens.observe("base", 1_000_000, 1_000_000)
    body = orjson.dumps(chat(model="alias"))
    request = parse(CHAT, {}, body, tokens, ParseConfig(), {"alias": "base"}.get)
    assert (request.model, request.alias) == ("base", "alias")
    assert request.input_tokens == pytest.approx(tokens.estimate("base", len(request.prompt)))
    own = parse(CHAT, {}, orjson.dumps(chat()), tokens, ParseConfig(), {"alias": "base"}.get)
    assert (own.model, own.alias) == ("m", None)
