"""The prompt of every request form → the bytes by which prefixes are compared.

Model servers reuse the KV cache of a common beginning of the *rendered* prompt. The router renders nothing: it lays the
pieces out in the order in which chat templates do (tools, system text, then message by message: role, content), so two
conversations with a common beginning have common leading bytes. No I/O, no work per token but C loops.

Limits: an image, sound or file stands as a digest repeated to the bytes of `MEDIA_TOKENS` tokens, whatever its true
size. Several prompts in one request are laid one after the other: only the first one's prefix is compared.
"""

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from services.router.request.errors import InvalidRequest, RejectReason
from shared.errors import kind_of

# Order of magnitude of one image (LLaVA-1.5: 24 × 24 patches).
MEDIA_TOKENS: Final = 576
_DIGEST_REPEATS: Final = MEDIA_TOKENS * 4 // 64
MAX_MEDIA: Final = 1_024
"""Images and the like of one request, far more than servers take. Each is 16 bytes of a body and 2.3 KB here: without a
bound 15 MB of them were 2 GB and 8 s.
"""
MAX_PIECES: Final = 500_000
"""Pieces of text in one request, four a message."""

_MESSAGE: Final = "\x1e"
_ROLE_END: Final = "\x1f"
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "summary_text"})
_MEDIA_PARTS: Final = frozenset(
    {
        "image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file", "document",
    }
)  # fmt: skip
_PLAIN_MESSAGE_KEYS: Final = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """`data`: see the module. `token_count`: exact where the client sent token ids, else None.

    `text_only`: whether the size of `data` says something about bytes per token (no media, no token ids).
    """

    data: bytes
    token_count: int | None = None
    text_only: bool = True


class _Pieces(list[str]):
    """Text pieces in template order; counts the media among them."""

    __slots__ = ("media",)

    def __init__(self) -> None:
        super().__init__()
        self.media = 0

    def expect(self, more: int, field: str) -> None:
        """Raise InvalidRequest where so many more are too many."""
        if len(self) + more > MAX_PIECES:
            raise _too_many(field, f"pieces of text, of which a request may have {MAX_PIECES}")

    def finish(self) -> Prompt:
        return Prompt("".join(self).encode(), None, self.media == 0)


def chat_prompt(body: dict[str, Any]) -> Prompt:
    """`messages` of chat completions, with the tools before them."""
    pieces = _start(body)
    _add_tools(pieces, body)
    _add_messages(pieces, body.get("messages"), "messages")
    return pieces.finish()


def anthropic_prompt(body: dict[str, Any]) -> Prompt:
    """`system` and `messages` of Anthropic's messages interface, with the tools before them."""
    pieces = _start(body)
    _add_tools(pieces, body)
    system = body.get("system")
    if system is not None:
        pieces.append(_MESSAGE + "system" + _ROLE_END)
        _add_content(pieces, system, "system")
    _add_messages(pieces, body.get("messages"), "messages")
    return pieces.finish()


def responses_prompt(body: dict[str, Any]) -> Prompt:
    """`instructions` and `input` (text or items) of the responses interface, with the tools before them."""
    pieces = _start(body)
    _add_tools(pieces, body)
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise _wrong("instructions", instructions, "text")
        pieces += (_MESSAGE, "system", _ROLE_END, instructions)
    given = body.get("input")
    if isinstance(given, str):
        pieces += (_MESSAGE, "user", _ROLE_END, given)
    else:
        _add_messages(pieces, given, "input")
    return pieces.finish()


def completions_prompt(body: dict[str, Any]) -> Prompt:
    """`prompt`: text, a list of texts, token ids, or a list of those."""
    given = body.get("prompt")
    if given is None and isinstance(body.get("prompt_embeds"), str):
        pieces = _start(body)
        _add_media(pieces, body["prompt_embeds"])
        return pieces.finish()
    return _texts_or_tokens(body, given, "prompt")


def embeddings_prompt(body: dict[str, Any]) -> Prompt:
    """`input` of embeddings, in the same forms as a completion's prompt, or chat messages where a server takes them."""
    if "input" not in body and isinstance(body.get("messages"), list):
        return chat_prompt(body)
    return _texts_or_tokens(body, body.get("input"), "input")


def _start(body: dict[str, Any]) -> _Pieces:
    pieces = _Pieces()
    salt = body.get("cache_salt")  # vLLM: requests with different salts never share cache blocks
    if isinstance(salt, str):
        pieces += (_MESSAGE, salt, _ROLE_END)
    return pieces


def _add_tools(pieces: _Pieces, body: dict[str, Any]) -> None:
    tools = body.get("tools") or body.get("functions")
    if tools:
        if not isinstance(tools, list):
            raise _wrong("tools", tools, "a list", RejectReason.FIELD_INVALID)
        pieces.append(_json(tools, "tools"))


def _add_messages(pieces: _Pieces, messages: Any, field: str) -> None:
    if not isinstance(messages, list):
        raise _wrong(field, messages, "a list of messages")
    if not messages:
        raise InvalidRequest(
            f"{field}: found an empty list; allowed: at least one message", RejectReason.PROMPT_INVALID, param=field
        )
    pieces.expect(4 * len(messages), field)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"{field}[{index}]", message, "an object")
        role = message.get("role", message.get("type"))
        if not isinstance(role, str):
            raise _wrong(f"{field}[{index}].role", role, "text")
        content = message.get("content")
        if isinstance(content, str):
            pieces += (_MESSAGE, role, _ROLE_END, content)
        else:
            pieces += (_MESSAGE, role, _ROLE_END)
            if content is not None:
                _add_content(pieces, content, f"{field}[{index}].content")
        if len(message) > _PLAIN_MESSAGE_KEYS:
            rest = {key: value for key, value in message.items() if key not in {"role", "content"}}
            pieces.append(_json(rest, f"{field}[{index}]"))


def _add_content(pieces: _Pieces, content: Any, field: str) -> None:
    if isinstance(content, str):
        pieces.append(content)
        return
    if not isinstance(content, list):
        raise _wrong(field, content, "text or a list of parts")
    pieces.expect(len(content), field)
    for index, part in enumerate(content):
        if isinstance(part, str):
            pieces.append(part)
            continue
        if not isinstance(part, dict):
            raise _wrong(f"{field}[{index}]", part, "an object")
        kind = part.get("type")
        if not isinstance(kind, str):
            raise _wrong(f"{field}[{index}].type", kind, "text")
        if kind in _TEXT_PARTS:
            text = part.get(kind if kind in {"refusal", "thinking"} else "text")
            if not isinstance(text, str):
                raise _wrong(f"{field}[{index}].text", text, "text")
            pieces.append(text)
        elif kind in _MEDIA_PARTS:
            if pieces.media == MAX_MEDIA:
                raise _too_many(field, f"images, sounds or files, of which a request may have {MAX_MEDIA}")
            _add_media(pieces, _json(part, f"{field}[{index}]"))
        else:
            pieces.append(_json(part, f"{field}[{index}]"))


def _json(value: Any, field: str) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError as error:
        if "64-bit" in str(error):  # an integer that JSON allows, and this encoder doesn't
            return msgspec.json.encode(value, order="sorted").decode()
        # The encoder's own limit of 254 levels.
        raise InvalidRequest(
            f"{field}: nested more than 250 levels deep", RejectReason.BODY_TOO_COMPLEX, param=field
        ) from None


def _add_media(pieces: _Pieces, data: str) -> None:
    digest = hashlib.sha256(data.encode()).hexdigest()
    pieces.append(digest * _DIGEST_REPEATS)
    pieces.media += 1


def _texts_or_tokens(body: dict[str, Any], given: Any, field: str) -> Prompt:
    if isinstance(given, str):
        pieces = _start(body)
        pieces.append(given)
        return pieces.finish()
    forms = "text, a list of texts, a list of token ids, or a list of those"
    if not isinstance(given, list):
        raise _wrong(field, given, forms)
    if not given:
        raise InvalidRequest(
            f"{field}: found an empty list; allowed: {forms}", RejectReason.PROMPT_INVALID, param=field
        )
    first = given[0]
    if isinstance(first, str):
        _require_all(given, str, field, "text")
        pieces = _start(body)
        pieces.append(_MESSAGE.join(given))
        return pieces.finish()
    if isinstance(first, list):
        _require_all(given, list, field, "a list of token ids")
        parts = [_token_bytes(ids, f"{field}[{index}]") for index, ids in enumerate(given)]
        return Prompt(b"".join(parts), sum(len(part) for part in parts) // 4, text_only=False)
    data = _token_bytes(given, field)
    return Prompt(data, len(data) // 4, text_only=False)


def _token_bytes(ids: list[Any], field: str) -> bytes:
    try:
        return array("I", ids).tobytes()
    except (TypeError, OverflowError):
        for index, value in enumerate(ids):
            if not isinstance(value, int) or not 0 <= value < 1 << 32:
                raise _wrong(f"{field}[{index}]", value, "a token id from 0 to 4294967295") from None
        raise


def _require_all(values: list[Any], kind: type, field: str, allowed: str) -> None:
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise _wrong(f"{field}[{index}]", value, allowed)


def _wrong(field: str, value: Any, allowed: str, reason: RejectReason = RejectReason.PROMPT_INVALID) -> InvalidRequest:
    return InvalidRequest(f"{field}: found {kind_of(value)}; allowed: {allowed}", reason, param=field)


def _too_many(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: more {what}", RejectReason.BODY_TOO_COMPLEX, param=field)
