"""A request's path, headers and body → `InferenceRequest`, in one pass over the body. The first stage of a decision.

The body is decoded once: up to 2 MB by orjson, above by msgspec, since orjson works in a buffer of 12 times the body,
which the kernel maps anew for each large one (5 MB: 0.3 µs a KB become 0.9). Both accept the same (a test says so).
Whatever a client sends ends in a request or in a typed error, never in a crash: nesting beyond 1,024 levels is refused
by the decoder, a large body with more than `MAX_BREAKS` commas and brackets before decoding (an 8 MB body of `[],`
would take 700 MB as objects), and a compressed one is unpacked up to the body limit. Duplicate keys keep the last, as
model servers do. No I/O.

Limits: only what routing needs is checked; the rest is the model server's to judge. Nothing of the body is in an error.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from services.router.request.errors import (
    BodyTooLarge,
    InvalidRequest,
    RejectReason,
    RequestRejected,
    UnsupportedEncoding,
)
from services.router.request.inference_request import InferenceRequest
from services.router.request.objectives import Objectives
from services.router.request.prompt import (
    Prompt,
    anthropic_prompt,
    chat_prompt,
    completions_prompt,
    embeddings_prompt,
    responses_prompt,
)
from services.router.request.slo import (
    MAX_SESSION_CHARACTERS,
    parse_fairness_id,
    parse_objective,
    parse_prediction_wanted,
    parse_priority,
    parse_session_id,
    parse_slo,
)
from services.router.request.tokens import TokenEstimator
from shared.errors import kind_of
from shared.samples import TEXT_LIMITS

DEFAULT_MAX_BODY_BYTES: Final = 32 * 1024 * 1024
MAX_MODEL_CHARACTERS: Final = TEXT_LIMITS["model"]
MAX_TOKENS: Final = 16_777_216
MAX_BREAKS: Final = 2_000_000
# No smaller body has so many, so it isn't counted through.
_LARGE_BYTES: Final = MAX_BREAKS
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_GZIP_OR_ZLIB: Final = 47  # 32 + 15: told by its header
_RAW_DEFLATE: Final = -15  # what many clients send as deflate
_MAX_MEMBERS: Final = 64  # each copies what follows it: more would cost time by the square


class Route(StrEnum):
    """The request forms that are read; a closed list, fit for a metric's label."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"


_SUFFIXES: Final = (
    ("/chat/completions", Route.CHAT),
    ("/completions", Route.COMPLETIONS),
    ("/responses", Route.RESPONSES),
    ("/embeddings", Route.EMBEDDINGS),
    ("/v1/messages", Route.MESSAGES),
)
_PROMPTS: Final[Mapping[Route, Callable[[dict[str, Any]], Prompt]]] = {
    Route.CHAT: chat_prompt,
    Route.COMPLETIONS: completions_prompt,
    Route.RESPONSES: responses_prompt,
    Route.EMBEDDINGS: embeddings_prompt,
    Route.MESSAGES: anthropic_prompt,
}
_CAPS: Final[Mapping[Route, tuple[str, ...]]] = {
    Route.CHAT: ("max_completion_tokens", "max_tokens"),
    Route.COMPLETIONS: ("max_tokens",),
    Route.RESPONSES: ("max_output_tokens",),
    Route.EMBEDDINGS: (),
    Route.MESSAGES: ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class ParseConfig:
    """`objectives`: by name and by model. Priority, objective and fairness headers need `trust_request_headers`.

    `max_body_bytes`: limit of the body, and of what a compressed one unpacks to.
    """

    trust_request_headers: bool = False
    objectives: Objectives = field(default_factory=Objectives)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES


_DEFAULTS: Final = ParseConfig()


def _no_alias(_: str) -> None:
    return None


def route_of(path: str) -> Route:
    """The request form that a path asks for, by its last segments; the query doesn't matter."""
    bare = path.partition("?")[0]
    for suffix, route in _SUFFIXES:
        if bare.endswith(suffix):
            return route
    return Route.OTHER


def parse(
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    tokens: TokenEstimator,
    config: ParseConfig = _DEFAULTS,
    target: Callable[[str], str | None] = _no_alias,
    gateway_route: str = "",
) -> InferenceRequest:
    """Read one request; `headers` have lower-case names, `gateway_route` is the gateway's. Raises RequestRejected.

    `target`: the model behind a client's name for one, None where it is the model's own.
    A path of `Route.OTHER` is refused here: callers that let such requests pass ask `route_of` first.
    """
    route = route_of(path)
    if route is Route.OTHER:
        raise _UnknownPath("this path isn't served here", RejectReason.PATH_UNKNOWN, code="not_found")
    document = _decode(plain_body(headers, body, config.max_body_bytes))
    name = _model(document)
    behind = target(name)
    model = name if behind is None else behind
    prompt = _PROMPTS[route](document)
    max_tokens = _cap(document, _CAPS[route])
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong_kind("stream", stream, "a boolean")
    trusted = config.trust_request_headers
    priority, slo = config.objectives.resolve(
        parse_objective(headers) if trusted else None,
        model,
        parse_priority(headers) if trusted else None,
        parse_slo(headers),
    )
    return InferenceRequest(
        model=model,
        prompt=prompt.data,
        input_tokens=(
            tokens.estimate(model, len(prompt.data))
            if prompt.token_count is None
            else float(max(prompt.token_count, 1))
        ),
        max_tokens=max_tokens,
        streamed=stream is True,
        slo=slo,
        priority=priority,
        fairness_id=parse_fairness_id(headers) if trusted else "",
        text_bytes=len(prompt.data) if prompt.text_only else 0,
        alias=None if behind is None else name,
        prediction_wanted=parse_prediction_wanted(headers),
        session_id=parse_session_id(headers) or _cache_key(document),
        route=gateway_route,
    )


def _cache_key(document: dict[str, Any]) -> str:
    """OpenAI's wish to be answered where its prompts are cached; what isn't fit for one is left to the model server."""
    key = document.get("prompt_cache_key")
    return key if isinstance(key, str) and len(key) <= MAX_SESSION_CHARACTERS else ""


class _UnknownPath(RequestRejected):
    status = 404


def plain_body(headers: Mapping[str, str], body: bytes, limit_bytes: int) -> bytes:
    """The body as its content-encoding leaves it, without a byte order mark, which some editors put in front and model
    servers pass over. Raises RequestRejected.
    """
    if len(body) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    encoding = headers.get("content-encoding")
    if encoding is None or not (encoding := _encoding(encoding)):
        return body.removeprefix(_BYTE_ORDER_MARK)
    if encoding not in {"gzip", "x-gzip", "deflate"}:
        raise UnsupportedEncoding(
            f"content-encoding: found text of {len(encoding)} characters; allowed: gzip, deflate, identity",
            RejectReason.CONTENT_ENCODING,
            param="content-encoding",
        )
    plain = _unpacked(body, limit_bytes, _GZIP_OR_ZLIB)
    if plain is None and encoding == "deflate":
        plain = _unpacked(body, limit_bytes, _RAW_DEFLATE)
    if plain is None:
        raise InvalidRequest(
            f"the body's {len(body)} bytes are not whole in their content-encoding ({encoding})",
            RejectReason.CONTENT_ENCODING,
            param="content-encoding",
        )
    return plain.removeprefix(_BYTE_ORDER_MARK)


def _encoding(text: str) -> str:
    """What is left to undo, in lower case; "" for nothing."""
    parts = (part.strip().lower() for part in text.split(","))
    return ",".join(part for part in parts if part not in {"", "identity"})


def _unpacked(body: bytes, limit_bytes: int, wbits: int) -> bytes | None:
    """The whole body unpacked, member after member (RFC 1952); None if it isn't whole. Raises BodyTooLarge."""
    parts: list[bytes] = []
    size = 0
    rest = body
    for _ in range(_MAX_MEMBERS):
        unpacker = zlib.decompressobj(wbits)
        try:
            part = unpacker.decompress(rest, limit_bytes + 1 - size)
        except zlib.error:
            return None
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        rest = unpacker.unused_data
        if not unpacker.eof:
            return None
        if not rest:
            return b"".join(parts)
    return None


def _decode(body: bytes) -> dict[str, Any]:
    if len(body) <= _LARGE_BYTES:
        document = _small(body)
    elif _breaks(body) > MAX_BREAKS:
        raise InvalidRequest(
            f"the request body has more than {MAX_BREAKS} commas and brackets", RejectReason.BODY_TOO_COMPLEX
        )
    else:
        document = _large(body)
    if not isinstance(document, dict):
        raise InvalidRequest(
            f"the request body: found {kind_of(document)}; allowed: an object", RejectReason.BODY_NOT_OBJECT
        )
    return document


def _large(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):  # the other one reads 1,024 levels deep, and says where it stopped
        return _small(body)


def _small(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        deep = "depth" in error.msg
        raise InvalidRequest(
            "the request body is nested more than 1024 levels deep"
            if deep
            else f"the request body isn't valid JSON: {_what(error)} at byte {_byte_position(error, body)}",
            RejectReason.BODY_TOO_COMPLEX if deep else RejectReason.BODY_NOT_JSON,
        ) from None


def _breaks(body: bytes) -> int:
    codes = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(codes == code)) for code in b",[{")


def _what(error: orjson.JSONDecodeError) -> str:
    return error.msg.partition(":")[0]


def _byte_position(error: orjson.JSONDecodeError, body: bytes) -> int:
    # The decoder counts characters, and none where the body isn't UTF-8.
    try:
        return len(body.decode()[: error.pos].encode())
    except UnicodeDecodeError as undecodable:
        return undecodable.start


def _model(document: dict[str, Any]) -> str:
    model = document.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARACTERS:
        found = f"text of {len(model)} characters" if isinstance(model, str) else kind_of(model)
        raise InvalidRequest(
            f"model: found {found}; allowed: text of 1 to {MAX_MODEL_CHARACTERS} characters",
            RejectReason.MODEL_INVALID,
            param="model",
        )
    return model


def _cap(document: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = document.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_kind(name, value, "an integer")
        if value < 0:
            raise InvalidRequest(
                f"{name}: found {_number(value)}; allowed: an integer from 0", RejectReason.FIELD_INVALID, param=name
            )
        return min(value, MAX_TOKENS)
    return None


def _number(value: int) -> str:
    """A number says nothing of a prompt; one that is long is none that a client means."""
    text = str(value) if abs(value) < 10**15 else ""
    return text or "an integer of more than 15 digits"


def _wrong_kind(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: found {kind_of(value)}; allowed: {allowed}", RejectReason.FIELD_INVALID, param=name)
