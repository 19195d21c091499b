"""Another model's name in the same bytes: the one value changes, wherever it stands, and nothing else does."""

import json
import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.rewrite import replace_model, scan

NEW = "base-v2"
QUOTED = b'"base-v2"'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a"}', b'{"model":"base-v2"}'),
        (b' {\n "x" : 1 ,\t"model" : "a" , "y": [ ] } \n', b' {\n "x" : 1 ,\t"model" : "base-v2" , "y": [ ] } \n'),
        (
            '{"prompt":"日本語 \\"model\\":\\"a\\"","model":"a"}'.encode(),
            '{"prompt":"日本語 \\"model\\":\\"a\\"","model":"base-v2"}'.encode(),
        ),
        (
            b'{"x":{"model":"a"},"y":[{"model":"a"}],"model":"a"}',
            b'{"x":{"model":"a"},"y":[{"model":"a"}],"model":"base-v2"}',
        ),
        (b'{"model":"a","x":"model","z":"a"}', b'{"model":"base-v2","x":"model","z":"a"}'),
        (b'{"model":"a","n":1,"model":"b"}', b'{"model":"a","n":1,"model":"base-v2"}'),
        (
            rb'{"mod\u0065l":"a","models":"a","m":"\\","k\"":2}',
            rb'{"mod\u0065l":"base-v2","models":"a","m":"\\","k\"":2}',
        ),
        (b'{"x":1.50e3,"t":true,"n":null,"model":"a"}', b'{"x":1.50e3,"t":true,"n":null,"model":"base-v2"}'),
        (b'{"model":"a","x":[[],[{}],{"]":"["}]}', b'{"model":"base-v2","x":[[],[{}],{"]":"["}]}'),
    ],
)  # fmt: skip
def test_only_the_value_of_the_top_level_model_changes(body: bytes, expected: bytes) -> None:
    assert replace_model(body, NEW) == expected
    start, end = scan(body)
    assert body[:start] + QUOTED + body[end:] == expected


def test_the_name_is_written_as_json_wants_it() -> None:
    body = replace_model(b'{"model":"a"}', 'a"\\\n日')
    assert orjson.loads(body) == {"model": 'a"\\\n日'}


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'"model"', b'{"x":1}', b'{"model":', b'{"model":"a"', b'{"model"}', b'{"model":"a" "b"}',
     b'{"x":[[]', b'{"model":"a",}', b'{"model":"a}'],
)  # fmt: skip
def test_what_is_no_object_with_a_model_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"byte|model"):
        scan(body)


def test_a_body_without_an_object_is_not_rewritten() -> None:
    with pytest.raises(ValueError, match=r"byte|model"):
        replace_model(b"[1]", NEW)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("model"), inner, max_size=4),
    max_leaves=20,
)
forms = st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}])


@settings(max_examples=300, deadline=None)
@given(document=st.dictionaries(st.text(), json_values, max_size=5), name=st.text(min_size=1), form=forms)
def test_any_document_is_the_same_but_for_its_model(document: dict[str, object], name: str, form: dict) -> None:
    wanted = {**document, "model": name}
    body = json.dumps({**document, "model": "alias"}, **form).encode("utf-8", "surrogatepass")
    try:
        orjson.loads(body)
        written = orjson.dumps(name)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return  # text that is no Unicode: the parser refuses it before
    result = replace_model(body, name)
    start, end = scan(body)
    assert result == body[:start] + written + body[end:]
    assert orjson.loads(result) == orjson.loads(json.dumps(wanted))
    before = json.dumps({**document, "model": "alias"}, **form).encode()
    assert len(result) == len(before) - len(b'"alias"') + len(written)


def test_time_is_linear_in_the_body() -> None:
    def seconds(size: int) -> float:
        text = 'a \\"b\\" [{' * (size // 10)
        body = json.dumps({"messages": [{"role": "user", "content": text}] * 1, "model": "a"}).encode()
        started = time.process_time()
        scan(body)
        return time.process_time() - started

    seconds(10_000)
    assert seconds(5_000_000) < 1.0


def test_a_million_brackets_do_not_stop_the_loop() -> None:
    body = b'{"model":"a","x":[' + b"[]," * 600_000 + b"[]]}"
    started = time.process_time()
    scan(body)
    assert time.process_time() - started < 2.0
    deep = b'{"x":' + b"[" * 1_000 + b"]" * 1_000 + b',"model":"a"}'
    assert QUOTED in replace_model(deep, NEW)
