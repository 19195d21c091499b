"""Bytes of a response → the instant of its first content, its usage, its end; and the arithmetic of labels. Pure.

Used wherever a response passes through Python: the router's response-stream way, the load generator, tests. After
the first content only the tail is kept: no work per token. TTFT ends at the first *content* (text, reasoning, refusal,
tool call), not at headers, role chunks, empty deltas or keep-alive comments: a real vLLM 0.32 sends
`{"role":"assistant","content":""}` first.

Limits: content that isn't there within the first MiB, an encoded body or a truncated one makes labels unknown (None),
never wrong, and never an exception. Usage is seen up to the first content and in the last 16 KiB. An event's JSON
stands on one `data:` line, as all servers write it. Works on identity-encoded bodies only.
`deploy/local/first_content.lua` answers the same for Envoy; a contract test holds them together.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

MAX_BYTES_BEFORE_CONTENT: Final = 1 << 20
TAIL_BYTES: Final = 16_384
MAX_TOKENS: Final = 16_777_216
"""More than any request has: a larger count is none."""
MIN_TPOT_MS: Final = 0.05
"""20,000 tokens a second for one request: below it something between the model and us held the answer back."""
BYTES_PER_STREAMED_TOKEN: Final = 223
"""Size of one event of vLLM 0.32's chat stream, as recorded."""
BYTES_PER_PLAIN_TOKEN: Final = 4
ENVELOPE_BYTES: Final = 400

_CHAT_TEXTS: Final = (
    "content", "reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks", "refusal",
)  # fmt: skip
_CHAT_OBJECTS: Final = ("tool_calls", "function_call", "audio")
_TEXT_FIELDS: Final = ("text", "thinking", "content", "partial_json")
"""Where text lies in a list of parts, in Anthropic's deltas and blocks."""
_MAX_PARTS_DEEP: Final = 4
_LAST_EVENTS: Final = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server reported them; None where it didn't."""

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


_NO_COUNTS: Final = Usage(None, None, None)
_INPUT_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
# The last one in the answer. A key named so inside generated text would be written \"usage\".
_USAGE_KEY: Final = re.compile(rb'(?<!\\)"usage"\s*:\s*(?=\{)')
_decoder: Final = json.JSONDecoder()


def carries_content(event: Any) -> bool:
    """Whether one decoded event of a chat, completions, responses or Anthropic stream carries generated content."""
    if not isinstance(event, dict):
        return False
    choices = event.get("choices")
    if isinstance(choices, list):
        return any(_choice_has_content(choice) for choice in choices)
    kind = event.get("type")
    if not isinstance(kind, str):
        return False
    if kind.startswith("response.") and kind.endswith("delta"):
        return _has_text(event.get("delta"))
    if kind == "content_block_delta":
        return _has_text(event.get("delta"))
    if kind == "content_block_start":
        block = event.get("content_block")
        return isinstance(block, dict) and (block.get("type") == "tool_use" or _has_text(block))
    return False


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    if _has_text(choice.get("text")):
        return True
    # Some servers stream whole messages where others send deltas.
    parts = (choice.get("delta"), choice.get("message"))
    return any(
        any(_has_text(part.get(field)) for field in _CHAT_TEXTS)
        or any(part.get(field) and isinstance(part[field], list | dict) for field in _CHAT_OBJECTS)
        for part in parts
        if isinstance(part, dict)
    )


def _has_text(value: Any, deep: int = 0) -> bool:
    """Whether there is a character in a text, in one of its parts, or in a part's text fields."""
    if isinstance(value, str):
        return bool(value)
    if deep == _MAX_PARTS_DEEP:
        return False
    if isinstance(value, list):
        return any(_has_text(part, deep + 1) for part in value)
    return isinstance(value, dict) and any(_has_text(value.get(field), deep + 1) for field in _TEXT_FIELDS)


def usage_of(document: Any) -> Usage | None:
    """Usage of one decoded event or JSON answer, in OpenAI's or Anthropic's spelling; None if it has no count."""
    if not isinstance(document, dict):
        return None
    usage = document.get("usage")
    begun = False
    if not isinstance(usage, dict):
        # Anthropic's `message_start` already counts an output token: the answer's beginning, not its length.
        begun = isinstance(document.get("message"), dict)
        nested = document.get("response") or document.get("message")
        usage = nested.get("usage") if isinstance(nested, dict) else None
    if not isinstance(usage, dict):
        return None
    cached = [_members(usage, details).get("cached_tokens") for details in _INPUT_DETAILS]
    counts = Usage(
        _first_count(usage.get("prompt_tokens"), usage.get("input_tokens")),
        None if begun else _first_count(usage.get("completion_tokens"), usage.get("output_tokens")),
        _first_count(*cached, usage.get("cache_read_input_tokens")),
    )
    return None if counts == _NO_COUNTS else counts


def _members(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _first_count(*values: Any) -> int | None:
    """The first that is a number of tokens; some servers write them as 5.0."""
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            count = int(value)
            if count == value:
                return count
    return None


def usage_in_part(part: bytes | bytearray) -> Usage | None:
    """Usage of a document of which only the end is there: the last one in it."""
    found = None
    for found in _USAGE_KEY.finditer(part):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        return None
    try:
        usage, _ = _decoder.raw_decode(part[found.end() :].decode("utf-8", "replace"))
    except (json.JSONDecodeError, RecursionError):
        return None
    return usage_of({"usage": usage})


class EventStreamObserver:
    """Watches a copy of an event stream, chunk by chunk as they arrive from the network."""

    __slots__ = ("_head_usage", "_lost", "_rest", "_tail", "first_content_ms", "last_byte_ms", "size_bytes")

    def __init__(self) -> None:
        self.first_content_ms: float | None = None
        self.last_byte_ms: float | None = None
        self.size_bytes = 0
        self._rest: list[bytes] = []
        """The line whose end hasn't come."""
        self._tail = bytearray()
        self._lost = False
        self._head_usage: Usage | None = None

    def feed(self, chunk: bytes, now_ms: float) -> None:
        """Take the next chunk, received at `now_ms`. Chunks are network reads, not events."""
        if not chunk:
            return
        self.size_bytes += len(chunk)
        self.last_byte_ms = now_ms
        if len(chunk) >= TAIL_BYTES:
            self._tail[:] = chunk[-TAIL_BYTES:]
        else:
            self._tail += chunk
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]
        if self.first_content_ms is None and not self._lost:
            self._look_for_content(chunk, now_ms)

    def _look_for_content(self, chunk: bytes, now_ms: float) -> None:
        self._rest.append(chunk)
        if b"\n" in chunk or b"\r" in chunk:  # joined once a line, so that a line of many chunks isn't their square
            lines = b"".join(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            self._rest = [lines.pop()]
            for line in lines:
                event = _data(line)
                if b'"usage"' in line and (usage := usage_of(event)) is not None:
                    self._head_usage = _completed(usage, self._head_usage)
                if carries_content(event):
                    self.first_content_ms = now_ms
                    self._rest = []
                    return
        if self.size_bytes > MAX_BYTES_BEFORE_CONTENT:
            self._lost = True
            self._rest = []

    def usage(self) -> Usage | None:
        """Each count's last value, in the tail or up to the first content (Anthropic sends input first, output last).

        None if the server sent none, or sent it in between, more than 16 KiB before the end. An event without the blank
        line that ends it is none, for Envoy's filters as for browsers.
        """
        found = _NO_COUNTS
        whole, _, _ = self._tail_text().rpartition(b"\n\n")
        lines = whole.split(b"\n")
        for place in reversed(range(len(lines))):
            line = lines[place]
            if b'"usage"' not in line:
                continue
            # The event that ends an answer of the responses API holds all of it: its beginning isn't kept.
            cut = place == 0 and self.size_bytes > len(self._tail)
            usage = usage_in_part(line) if cut else usage_of(_data(line))
            if usage is not None:
                found = _completed(found, usage)
                if None not in (found.input_tokens, found.output_tokens, found.cached_tokens):
                    return found
        found = _completed(found, self._head_usage)
        return None if found == _NO_COUNTS else found

    def finished(self) -> bool:
        """Whether the stream said that it is complete (`[DONE]`, or a final event of the other dialects)."""
        return any(_is_last(line) for line in reversed(self._tail_lines()))

    def _tail_lines(self) -> list[bytes]:
        return self._tail_text().split(b"\n")

    def _tail_text(self) -> bytes:
        return bytes(self._tail).replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _completed(usage: Usage, before: Usage | None) -> Usage:
    if before is None:
        return usage
    return Usage(
        before.input_tokens if usage.input_tokens is None else usage.input_tokens,
        before.output_tokens if usage.output_tokens is None else usage.output_tokens,
        before.cached_tokens if usage.cached_tokens is None else usage.cached_tokens,
    )


def _is_last(line: bytes) -> bool:
    if not line.startswith(b"data:"):
        return False
    if line[5:].strip() == b"[DONE]":
        return True
    # Cheap look first: generated text may hold these words, an event's type only as a whole.
    if b"message_stop" not in line and b'"response.' not in line:
        return False
    event = _data(line)
    kind = event.get("type") if isinstance(event, dict) else None
    return isinstance(kind, str) and kind in _LAST_EVENTS


def _data(line: bytes) -> Any:
    if not line.startswith(b"data:"):
        return None
    try:
        return orjson.loads(line[5:])
    except orjson.JSONDecodeError:  # half an emoji, NaN: what servers write, and Envoy's script doesn't mind
        try:
            return json.loads(line[5:].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None


def usage_of_json(body: bytes) -> Usage | None:
    """Usage of a plain JSON answer; None if the body isn't one or carries none."""
    try:
        return usage_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None


def time_per_token_ms(first_ms: float, last_ms: float, output_tokens: int | None) -> float | None:
    """Milliseconds per token after the first; None below 2 tokens. Below `MIN_TPOT_MS` it is no model's pace."""
    if output_tokens is None or output_tokens < 2:
        return None
    return (last_ms - first_ms) / (output_tokens - 1)


def estimated_output_tokens(response_bytes: int, *, streamed: bool) -> int:
    """Tokens of an answer that said nothing about them, from the size of its body; good to a factor of two."""
    if streamed:
        return max(1, response_bytes // BYTES_PER_STREAMED_TOKEN)
    return max(1, (response_bytes - ENVELOPE_BYTES) // BYTES_PER_PLAIN_TOKEN)
