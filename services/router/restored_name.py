"""A response's model name put back to the one that the client used: chunks in, chunks out. Pure.

Where an operator turns it on for a route, the answer to an alias names the alias: in JSON answers and in each event of
a stream. What changes is a string that is the value of `model`, at the top level or one level down in `response`
(responses API) or `message` (Anthropic), and that is the served model's name; every other byte stays, in its order. The
bytes that come out are the same however the answer was cut into chunks.

Nothing is held back but such a value while its end hasn't come, so an event goes on with the chunk that completed it.

Limits: of one document or event the first `model` counts. Encoded bodies aren't read: nobody is asked for one on such a
route. A value longer than any name stays as it is.
"""

import re
from enum import Enum, auto
from typing import Final, Protocol

import orjson

from shared.errors import FieldError

_SCALAR: Final = re.compile(rb'[^"{}\[\],:\s]++')
_MARK: Final = re.compile(rb'[^"{}\[\]]*+')
_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_LINE_END: Final = re.compile(rb"[\r\n]")
# The usual document in one go: flat members, none of them called model, up to the model's value or the end.
_GAP: Final = rb"[ \t\r\n]*+"
_MEMBER: Final = _GAP + rb'"(?!model")[^"\\]*+"' + _GAP + rb":" + _GAP + rb'(?:"[^"\\]*+"|[^"{}\[\],:\s]++)' + _GAP
_NAMED: Final = _GAP + rb'"model"' + _GAP + rb":" + _GAP + rb'"([^"\\\x00-\x1f]*+)"'
_USUAL: Final = re.compile(_GAP + rb"\{(?:" + _MEMBER + rb",)*+(?:" + _NAMED + rb"|" + _MEMBER + rb"\})")
_BLANK: Final = re.compile(_GAP)
_JSON: Final = re.compile(r"application/(.+\+)?json *(;|$)")
_MODEL: Final = b"model"
_WRAPPERS: Final = frozenset({b"response", b"message"})
_MAX_KEY_BYTES: Final = 64
_MAX_VALUE_BYTES: Final = 8_192
"""More than the longest name takes, each character written as an escape."""
_DATA: Final = b"data:"
_QUOTE, _BACKSLASH, _CR, _LF = b'"\\\r\n'


class Restorer(Protocol):
    """One response's body on its way: `feed` each chunk, then `flush` once. Never raises for what a body holds."""

    @property
    def held(self) -> bytes:
        """What is held back at the moment."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """What goes on of this chunk and of what was held back; the same object where nothing changes."""
        ...

    def flush(self) -> bytes:
        """What is still held back, at the end."""
        ...


def parse_routes(text: str) -> tuple[str, ...]:
    """Beginnings of paths, comma-separated; raises FieldError for one that isn't."""
    routes = tuple(part.strip() for part in text.split(",") if part.strip())
    for route in routes:
        if not route.startswith("/") or "?" in route or "#" in route:
            raise FieldError("restored_routes", f"'{route[:64]}'", "beginnings of paths, like /v1/chat/")
    return routes


def restorer(model: str, name: str, content_type: str, content_encoding: str) -> Restorer | None:
    """Whoever writes `name` for `model` in a body of this kind; None for bodies that are left alone."""
    if content_encoding.strip().lower() not in {"", "identity"}:
        return None
    kind = content_type.lower()
    if kind.startswith("text/event-stream"):
        return EventRestorer(model, name)
    return DocumentRestorer(model, name) if _JSON.match(kind) is not None else None


class _In(Enum):
    """Where in a document the next byte stands: between tokens, in a string that doesn't matter, in a key, in the
    value of `model`.
    """

    GAP = auto()
    TEXT = auto()
    KEY = auto()
    VALUE = auto()


class DocumentRestorer:
    """One JSON document, or with `begin` one after the other."""

    __slots__ = (
        "_depth",
        "_done",
        "_escaped",
        "_fresh",
        "_held",
        "_in",
        "_key",
        "_key_next",
        "_model",
        "_name",
        "_plain",
        "_wrapped",
    )

    def __init__(self, model: str, name: str) -> None:
        self._model = model
        self._plain = model.encode()
        self._name = orjson.dumps(name)
        self._held = b""
        self.begin()

    def begin(self) -> None:
        """The next byte begins a document."""
        self._fresh = True
        self._done = False
        self._depth = 0
        self._wrapped = False
        self._in = _In.GAP
        self._key = b""
        self._key_next = False
        self._escaped = False

    def feed(self, chunk: bytes) -> bytes:
        changed: list[bytes] = []
        self.part(chunk, 0, len(chunk), changed)
        if not changed:
            return chunk
        return b"".join(changed)

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def part(self, data: bytes, start: int, stop: int, out: list[bytes]) -> None:
        """Read `data[start:stop]`. Appends to `out` what goes on in its place, or nothing where that is the same."""
        if self._done or start == stop:
            return
        if self._fresh:
            usual = _USUAL.match(data, start, stop)
            if usual is not None:
                self._fresh, self._done = False, True
                if usual[1] == self._plain:
                    out += (data[start : usual.start(1) - 1], self._name, data[usual.end() : stop])
                return
        had = len(out)
        sent = self._read(data, start, stop, out)
        if len(out) > had or sent != start:
            out.append(data[sent:stop])

    @property
    def held(self) -> bytes:
        return self._held

    def release(self) -> bytes:
        """Give the document up; returns what was held back of it."""
        self._done = True
        return self.flush()

    def _read(self, data: bytes, at: int, stop: int, out: list[bytes]) -> int:
        """Token by token. Returns up to where `data` has been dealt with in `out`."""
        sent = at
        while at < stop and not self._done:
            where = self._in
            if where is _In.GAP:
                at = self._gap(data, at, stop)
                if self._in is _In.VALUE:
                    out.append(data[sent : at - 1])
                    self._held = b'"'
                    sent = at
                continue
            start = at
            if self._escaped:
                self._escaped = False
                at += 1
            at = _after(_TEXT, data, at, stop)
            if at < stop and data[at] == _BACKSLASH:  # the last byte: what it escapes is in the next chunk
                self._escaped = True
                at += 1
            ended = at < stop
            if where is _In.KEY:
                self._key = (self._key + data[start:at])[: _MAX_KEY_BYTES + 1]
            elif where is _In.VALUE:
                self._held += data[start : at + ended]
                sent = at + ended
                if ended or len(self._held) > _MAX_VALUE_BYTES:
                    out.append(self._name if ended and _text(self._held) == self._model else self._held)
                    self._held = b""
                    self._done = True
            if ended:
                at += 1
                self._in = _In.GAP
        return sent

    def _gap(self, data: bytes, at: int, stop: int) -> int:
        """One token between strings; returns the byte after it."""
        looked_at = self._depth == 1 or (self._depth == 2 and self._wrapped)
        at = _after(_BLANK if looked_at or self._depth == 0 else _MARK, data, at, stop)
        if at == stop:
            return at
        byte = data[at : at + 1]
        if self._fresh:
            self._fresh = False
            if byte != b"{":
                self._done = True
                return at
        if byte == b'"':
            if looked_at and self._key_next:
                self._in = _In.KEY
                self._key = b""
            else:
                named = looked_at and not self._key_next and _key(self._key) == _MODEL
                self._in = _In.VALUE if named else _In.TEXT
        elif byte in b"{[":
            if self._depth == 1:
                self._wrapped = byte == b"{" and _key(self._key) in _WRAPPERS
            self._depth += 1
            self._key_next = byte == b"{"
            self._key = b""
        elif byte in b"}]":
            self._depth -= 1
            self._key_next = False
            if self._depth <= 0:
                self._done = True
        elif byte == b",":
            self._key_next = True
            self._key = b""
        elif byte == b":":
            self._key_next = False
        else:
            return max(at + 1, _after(_SCALAR, data, at, stop))
        return at + 1


class EventRestorer:
    """A stream of server-sent events: each is a document."""

    __slots__ = ("_after_cr", "_document", "_line")

    def __init__(self, model: str, name: str) -> None:
        self._document = DocumentRestorer(model, name)
        self._line: int | None = 0
        """How much of `data:` the line has; None for a line of another kind."""
        self._after_cr = False

    @property
    def held(self) -> bytes:
        return self._document.held

    def feed(self, chunk: bytes) -> bytes:
        out: list[bytes] = []
        at = sent = 0
        size = len(chunk)
        while at < size:
            if self._line is not None and self._line < len(_DATA):
                at = self._line_begin(chunk, at, self._line)
                continue
            end = _LINE_END.search(chunk, at)
            stop = size if end is None else end.start()
            if self._line is not None:
                had = len(out)
                self._document.part(chunk, at, stop, out)
                if len(out) > had:
                    out.insert(had, chunk[sent:at])
                    sent = stop
            at = stop
            if end is not None:
                if self._document.held:  # no string goes over a line's end
                    out += (chunk[sent:at], self._document.release())
                    sent = at
                self._after_cr = chunk[at] == _CR
                self._line = 0
                at += 1
        if not out:
            return chunk
        out.append(chunk[sent:])
        return b"".join(out)

    def flush(self) -> bytes:
        return self._document.flush()

    def _line_begin(self, chunk: bytes, at: int, had: int) -> int:
        """Bytes of a line before it is known what it is; returns the first that isn't."""
        first = chunk[at]
        if had == 0 and first in {_CR, _LF}:
            if not (first == _LF and self._after_cr):  # an empty line ends the event
                self._document.begin()
            self._after_cr = first == _CR
            return at + 1
        self._after_cr = False
        part = chunk[at : at + len(_DATA) - had]
        if _DATA.startswith(part, had):
            self._line = had + len(part)
            return at + len(part)
        self._line = None
        return at


def _after(pattern: re.Pattern[bytes], data: bytes, at: int, stop: int) -> int:
    found = pattern.match(data, at, stop)
    return at if found is None else found.end()


def _key(raw: bytes) -> bytes:
    """A key as it reads, by its bytes between the quotes."""
    if b"\\" not in raw or len(raw) > _MAX_KEY_BYTES:
        return raw
    try:
        return str(orjson.loads(b'"' + raw + b'"')).encode()
    except orjson.JSONDecodeError:
        return raw


def _text(raw: bytes) -> str | None:
    """A string as it reads, its quotes with it; None where it isn't one."""
    try:
        return str(orjson.loads(raw))
    except orjson.JSONDecodeError:
        return None
