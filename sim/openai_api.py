"""The OpenAI dialect of a vLLM server: request bodies in, answer bodies and stream events out.

Pure; `server` is the edge around it. Requests accept every form of prompt (messages with string or text-part content;
string, strings, token ids, lists of token ids) and ignore fields that do not change timing. Answers have the fields,
order and spelling of vLLM 0.32's. One choice per prompt: `n` above 1 is refused.
"""

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import orjson

from sim.tokens import render_messages, render_text, render_token_ids

MAX_TOKEN_ID = 2**32 - 1


class ApiError(Exception):
    """A request that is answered with an error: HTTP status, OpenAI error type, message, offending field."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> bytes:
        return error_body(self.status, self.kind, self.message, self.param)


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None) -> NoReturn:
    raise ApiError(400, "BadRequestError", message, param)


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request body asks for. `prompts` are rendered to whole tokens; `model` None: the body names none."""

    chat: bool
    model: str | None
    prompts: tuple[bytes, ...]
    max_tokens: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    cache_salt: bytes


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    n: int | None = 1
    cache_salt: str | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str | list[int]]


_CHAT = msgspec.json.Decoder(_ChatBody)
_COMPLETION = msgspec.json.Decoder(_CompletionBody)
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def parse_chat(body: bytes) -> Generation:
    """The body of `POST /v1/chat/completions`; `ApiError` 400 names the field at fault."""
    decoded: _ChatBody = _decode(_CHAT, body)
    if not decoded.messages:
        bad_request("messages must hold at least one message", "messages")
    rendered = [
        (message.role, _content(message, f"messages[{index}].content"))
        for index, message in enumerate(decoded.messages)
    ]
    limit = decoded.max_completion_tokens
    tools = orjson.dumps(decoded.tools) if decoded.tools else b""
    return _generation(
        decoded,
        chat=True,
        prompts=(render_messages(rendered, tools),),
        max_tokens=_positive(limit, "max_completion_tokens") or _positive(decoded.max_tokens, "max_tokens"),
    )


def parse_completion(body: bytes) -> Generation:
    """The body of `POST /v1/completions`; `ApiError` 400 names the field at fault."""
    decoded: _CompletionBody = _decode(_COMPLETION, body)
    prompts = _prompts(decoded.prompt)
    return _generation(decoded, chat=False, prompts=prompts, max_tokens=_positive(decoded.max_tokens, "max_tokens"))


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _MISSING.search(message) or _PATH.search(message)
        bad_request(message, found.group(1) or None if found else None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        bad_request(f"the body is not valid JSON: {error}")


def _content(message: _Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        text = content
    elif content is None:
        text = ""
    else:
        pieces: list[str] = []
        for index, part in enumerate(content):
            piece = part.get("text")
            if part.get("type") != "text" or not isinstance(piece, str):
                bad_request(f"{where}[{index}] must be a text part, got type {part.get('type')!r}", f"{where}[{index}]")
            pieces.append(piece)
        text = "\n".join(pieces)
    if message.tool_calls:
        text += orjson.dumps(message.tool_calls).decode()
    return text


def _prompts(prompt: str | list[int | str | list[int]]) -> tuple[bytes, ...]:
    if isinstance(prompt, str):
        rendered: tuple[bytes, ...] = (render_text(prompt),)
    elif not prompt:
        bad_request("prompt must not be empty", "prompt")
    elif all(isinstance(item, int) for item in prompt):
        rendered = (_token_ids(prompt),)
    elif all(isinstance(item, str) for item in prompt):
        rendered = tuple(render_text(item) for item in prompt if isinstance(item, str))
    elif all(isinstance(item, list) for item in prompt):
        rendered = tuple(_token_ids(item) for item in prompt if isinstance(item, list))
    else:
        bad_request("prompt must be a string, strings, token ids or lists of token ids, not a mixture", "prompt")
    if not all(rendered):
        bad_request("prompt must not be empty", "prompt")
    return rendered


def _token_ids(ids: Any) -> bytes:
    if not all(0 <= token <= MAX_TOKEN_ID for token in ids):
        bad_request(f"token ids must be in 0..{MAX_TOKEN_ID}", "prompt")
    return render_token_ids(ids)


def _positive(value: int | None, field: str) -> int | None:
    if value is not None and value < 1:
        bad_request(f"{field} must be at least 1, got {value}", field)
    return value


def _generation(body: _Body, *, chat: bool, prompts: tuple[bytes, ...], max_tokens: int | None) -> Generation:
    if body.n not in {None, 1}:
        bad_request(f"n must be 1 on this server, got {body.n}", "n")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        bad_request("stream_options can only be set when stream is true", "stream_options")
    return Generation(
        chat=chat,
        model=body.model,
        prompts=prompts,
        max_tokens=max_tokens,
        ignore_eos=body.ignore_eos,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        cache_salt=(body.cache_salt or "").encode(),
    )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Usage of one request, summed over its prompts; `cached_tokens` None where the server does not tell it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def document(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every event of one answer shares."""

    chat: bool
    answer_id: str
    created_unix_s: int
    model: str

    def event_start(self) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return (
            b'data: {"id":%b,"object":"%b","created":%d,"model":%b,'
            % (orjson.dumps(self.answer_id), kind.encode(), self.created_unix_s, orjson.dumps(self.model))
        )  # fmt: skip

    def role_event(self, index: int) -> bytes:
        """Chat only: the first event of a choice, without content."""
        return (
            self.event_start()
            + b'"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            b',"prompt_token_ids":null,"prompt_text":null}\n\n' % index
        )

    def token_event(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a token (which must need no JSON escape)."""
        if self.chat:
            return (
                self.event_start() + b'"choices":[{"index":%d,"delta":{"content":"' % index,
                b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
            )
        return (
            self.event_start() + b'"choices":[{"index":%d,"text":"' % index,
            b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n',
        )

    def last_token_event(self, index: int, text: bytes, finish_reason: str) -> bytes:
        start, _ = self.token_event(index)
        reason = finish_reason.encode()
        if self.chat:
            return (
                start
                + text
                + b'"},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}]}\n\n' % reason
            )
        return (
            start
            + text
            + b'","logprobs":null,"finish_reason":"%b","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}'
            b"\n\n" % reason
        )

    def usage_event(self, counts: TokenCounts) -> bytes:
        return self.event_start() + b'"choices":[],"usage":%b,"system_fingerprint":"sim"}\n\n' % orjson.dumps(
            counts.document()
        )

    def document(self, choices: list[tuple[bytes, str]], counts: TokenCounts) -> bytes:
        """The whole answer of a request that does not stream, from (text, finish reason) of each choice."""
        return orjson.dumps(
            {
                "id": self.answer_id,
                "object": "chat.completion" if self.chat else "text_completion",
                "created": self.created_unix_s,
                "model": self.model,
                "choices": [self._choice(index, text.decode(), reason) for index, (text, reason) in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": "sim",
                "usage": counts.document(),
                "kv_transfer_params": None,
            }
        )

    def _choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        if not self.chat:
            return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": [], "reasoning": None},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None,
        }


DONE_EVENT = b"data: [DONE]\n\n"


def models_document(models: tuple[str, ...], created_unix_s: int, max_model_len: int) -> bytes:
    """The answer of `GET /v1/models`; names after the first are adapters of it."""
    return orjson.dumps(
        {
            "object": "list",
            "data": [
                {
                    "id": model,
                    "object": "model",
                    "created": created_unix_s,
                    "owned_by": "vllm",
                    "root": models[0],
                    "parent": None,
                    "max_model_len": max_model_len,
                    "permission": [],
                }
                for model in models
            ],
        }
    )
