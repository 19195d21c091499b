"""One ext-proc stream as a state machine: messages in, effects out. No I/O.

`Stream.receive` takes Envoy's next message and returns what to do, in order; a `Decide` is always the last of its list
and is answered with `Stream.decided`. Which bodies are shown, and how they are answered, is said by Envoy in the first
message (`protocol_config`), stream by stream:

- Request NONE: decided from the headers. BUFFERED: headers answered at once, decided at the body.
- Request FULL_DUPLEX_STREAMED: nothing is answered until the body's end; then headers with the pick, and the body back
  in chunks of at most 62,000 bytes. Where the body isn't needed (unknown paths, uploads, upgrades) the headers are
  answered at once, and chunks as they come.
- Response NONE, STREAMED, FULL_DUPLEX_STREAMED: each chunk goes on at once, unchanged but for a model's name that the
  decision said to put back; what it tells an observer comes after it.

A stream never ends early on our side: a clean end without an answer makes Envoy send the request on with an empty body
in full duplex (measured). Only what breaks the protocol, or a mode that isn't spoken, aborts with a status.

Limits: a whole request body is held in memory, up to the cap. Request bodies STREAMED, BUFFERED_PARTIAL and GRPC abort:
Envoy releases such headers before a body has been seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Protocol

from services.router.extproc import messages
from services.router.extproc.messages import BodyMode, RequestHead, RestoredName, Routed
from services.router.request.errors import BodyTooLarge, RejectReason, RequestRejected
from services.router.request.parse import Route, route_of
from services.router.restored_name import Restorer, restorer

_DRAIN_FACTOR: Final = 2
"""A body over the cap is read on, and dropped, up to this many caps: a client that is cut off while it sends may see a
reset in place of the 413."""

_STATUS_DIGITS: Final = 3


class ResponseObserver(Protocol):
    """Looks at one response on its way through (response bodies STREAMED or FULL_DUPLEX_STREAMED), after its echo.

    Called in order: `headers` once, `body` for each chunk that isn't empty, `end` once, when the answer was whole. A
    response that breaks off has no `end`: the end of its stream tells the director. Must not wait, and must not raise.
    """

    def headers(self, status: int, headers: Mapping[str, str], served: str | None, now_ms: float) -> None:
        """`served`: the endpoint that Envoy says it reached (`ip:port`), None where it doesn't say."""
        ...

    def body(self, chunk: bytes, now_ms: float) -> None: ...

    def end(self, now_ms: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to Envoy."""

    message: Any


@dataclass(frozen=True, slots=True)
class Decide:
    """Find endpoints for this request and give the result to `Stream.decided`. `body` is None without one."""

    head: RequestHead
    body: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rejected:
    """The stream itself refuses the request, with the message that follows: count it."""

    reason: RejectReason


@dataclass(frozen=True, slots=True)
class Abort:
    """End the stream with a status; `reason` is for the counter and the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The response's headers have gone on. `status` is 0 where Envoy sent none that is a number."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    served: str | None
    body_shown: bool


@dataclass(frozen=True, slots=True)
class ResponseChunk:
    """A part of the response has gone on; never empty."""

    chunk: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """The response was whole."""


@dataclass(frozen=True, slots=True)
class RestoringFailed:
    """A fault of ours: the response goes on as the endpoint wrote it."""

    error: str


Effect = Send | Decide | Rejected | Abort | ResponseHead | ResponseChunk | ResponseEnd | RestoringFailed


class _Phase(Enum):
    """Of the request: before its headers; its body is awaited; its decision is; answered; refused."""

    START = auto()
    BODY = auto()
    DECIDING = auto()
    ANSWERED = auto()
    REFUSED = auto()


class _ReplyTo(Enum):
    """The message that a decision answers."""

    HEADERS = auto()
    BODY = auto()
    TRAILERS = auto()


class Stream:
    """State of one stream: one HTTP request."""

    __slots__ = (
        "_chunks",
        "_head",
        "_max_body_bytes",
        "_phase",
        "_received_bytes",
        "_reply_to",
        "_request_ended",
        "_request_mode",
        "_response_ended",
        "_response_mode",
        "_response_started",
        "_restored",
        "_restorer",
        "_trailers",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._phase = _Phase.START
        self._reply_to = _ReplyTo.HEADERS
        self._request_mode: int | None = None
        self._response_mode: int = BodyMode.NONE
        self._head: RequestHead | None = None
        self._chunks: list[bytes] | None = None
        """The body so far, in full duplex; None where it isn't held."""
        self._received_bytes = 0
        self._request_ended = False
        self._trailers = False
        self._response_started = False
        self._response_ended = False
        self._restored: RestoredName | None = None
        self._restorer: Restorer | None = None

    @property
    def response_cut(self) -> bool:
        """Whether a response was on its way through here, and hasn't come to its end."""
        return self._response_started and not self._response_ended

    @property
    def response_whole(self) -> bool:
        """Whether a response was seen to come to its end here."""
        return self._response_ended

    def receive(self, message: Any) -> list[Effect]:
        """Take Envoy's next message; returns what to do about it, in order."""
        if self._phase is _Phase.DECIDING:
            raise RuntimeError("a message was received before the decision that the last one asked for")
        if self._request_mode is None:  # Envoy says it once, in whichever message comes first
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        match message.WhichOneof("request"):
            case "response_body":
                return self._response_body(message.response_body)
            case "request_body":
                return self._request_body(message.request_body)
            case "request_headers":
                return self._request_headers(message)
            case "response_headers":
                return self._response_headers(message)
            case "request_trailers":
                return self._request_trailers()
            case "response_trailers":
                return self._response_trailers()
            case kind:
                return [Abort(f"unexpected_{kind}")]

    def more_time(self, longest_ms: float) -> list[Effect]:
        """The decision will take up to so long, on purpose: what Envoy has to be told.

        In full duplex nothing: it keeps no time there.
        """
        if self._phase is not _Phase.DECIDING or self._request_mode == BodyMode.FULL_DUPLEX_STREAMED:
            return []
        return [Send(messages.more_time(longest_ms))]

    def decided(self, result: Routed | RequestRejected) -> list[Effect]:
        """The result of the last Decide → the messages that answer its phase."""
        if self._phase is not _Phase.DECIDING:
            raise RuntimeError("a decision that wasn't asked for")
        chunks, self._chunks = self._chunks, None
        if isinstance(result, RequestRejected):
            self._phase = _Phase.REFUSED
            return [Send(messages.immediate(result))]
        self._phase = _Phase.ANSWERED
        self._restored = result.restored
        assert self._head is not None  # noqa: S101 - decided about
        crowded = self._head.crowded
        if self._reply_to is _ReplyTo.BODY:
            return [Send(messages.routed_body(result, crowded=crowded))]
        if self._reply_to is _ReplyTo.TRAILERS:
            return [Send(messages.routed_trailers(result))]
        effects: list[Effect] = [Send(messages.routed_headers(result, crowded=crowded))]
        if chunks is not None:
            body = b"".join(chunks) if result.body is None else result.body
            if body or not self._trailers:
                effects += _sends(messages.request_chunks(body, end=not self._trailers))
            if self._trailers:
                effects.append(Send(messages.CONTINUE_REQUEST_TRAILERS))
        return effects

    def _decide(self, body: bytes | None, reply_to: _ReplyTo) -> list[Effect]:
        assert self._head is not None  # noqa: S101 - every phase after START has it
        self._phase = _Phase.DECIDING
        self._reply_to = reply_to
        return [Decide(self._head, body)]

    def _request_headers(self, message: Any) -> list[Effect]:
        if self._phase is not _Phase.START:
            return [Abort("repeated_request_headers")]
        mode = self._request_mode
        if mode not in {BodyMode.NONE, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED}:
            return [Abort(f"request_body_mode_{_mode_name(mode)}")]
        self._request_ended = message.request_headers.end_of_stream
        self._head = messages.request_head(message)
        if self._request_ended:
            return self._decide(None, _ReplyTo.HEADERS)
        if mode == BodyMode.NONE or _body_is_not_read(self._head):
            self._head = messages.request_head(message, body_hidden=True)
            return self._decide(None, _ReplyTo.HEADERS)
        self._phase = _Phase.BODY
        if mode == BodyMode.BUFFERED:
            return [Send(messages.CONTINUE_REQUEST_HEADERS)]
        self._chunks = []
        return []

    def _request_body(self, part: Any) -> list[Effect]:
        if self._phase is _Phase.START:
            return [Abort("request_body_without_headers")]
        if self._request_mode == BodyMode.FULL_DUPLEX_STREAMED:
            return self._request_chunk(part)
        if self._phase is not _Phase.BODY:  # a repeated one, or one that the decision didn't wait for
            return [] if self._phase is _Phase.REFUSED else [Send(messages.CONTINUE_REQUEST_BODY)]
        if len(part.body) > self._max_body_bytes:
            return self._refuse()
        return self._decide(part.body, _ReplyTo.BODY)

    def _request_chunk(self, part: Any) -> list[Effect]:
        """Full duplex: the end comes once, whatever follows it is dropped."""
        if self._request_ended or self._phase is _Phase.REFUSED:
            return []
        self._request_ended = part.end_of_stream
        if self._phase is _Phase.ANSWERED:
            return _sends(messages.request_chunks(part.body, end=part.end_of_stream))
        self._received_bytes += len(part.body)
        if self._received_bytes > self._max_body_bytes:
            self._chunks = None
            too_much = self._received_bytes > _DRAIN_FACTOR * self._max_body_bytes
            return self._refuse() if part.end_of_stream or too_much else []
        assert self._chunks is not None  # noqa: S101 - held from the headers to the decision, up to the cap
        self._chunks.append(part.body)
        return self._decide_on_chunks() if part.end_of_stream else []

    def _decide_on_chunks(self) -> list[Effect]:
        body = b"".join(self._chunks or ())
        self._chunks = [body]
        return self._decide(body, _ReplyTo.HEADERS)

    def _request_trailers(self) -> list[Effect]:
        if self._phase is _Phase.START:
            return [Abort("request_trailers_without_headers")]
        if self._phase is _Phase.REFUSED:
            return []
        if self._phase is _Phase.BODY:
            if self._request_mode == BodyMode.BUFFERED:
                return self._decide(b"", _ReplyTo.TRAILERS)
            self._request_ended = self._trailers = True
            return self._refuse() if self._chunks is None else self._decide_on_chunks()
        self._request_ended = True
        return [Send(messages.CONTINUE_REQUEST_TRAILERS)]

    def _refuse(self) -> list[Effect]:
        rejection = BodyTooLarge(self._max_body_bytes)
        self._phase = _Phase.REFUSED
        return [Rejected(rejection.reason), Send(messages.immediate(rejection))]

    def _response_headers(self, message: Any) -> list[Effect]:
        headers = messages.header_map(message.response_headers)
        status = headers.get(":status", "")
        self._response_started = shown = self._response_mode != BodyMode.NONE
        if self._restored is not None and shown and not message.response_headers.end_of_stream:
            self._restorer = restorer(
                self._restored.model,
                self._restored.name,
                headers.get("content-type", ""),
                headers.get("content-encoding", ""),
            )
        answer = messages.CONTINUE_RESPONSE_HEADERS
        return [
            Send(answer if self._restorer is None else messages.changed_response_headers()),
            ResponseHead(
                int(status) if status.isascii() and status.isdigit() and len(status) == _STATUS_DIGITS else 0,
                headers,
                messages.served_endpoint(message),
                shown,
            ),
            *self._response_over(over=message.response_headers.end_of_stream),
        ]

    def _response_body(self, part: Any) -> list[Effect]:
        chunk, end = part.body, part.end_of_stream
        full_duplex = self._response_mode == BodyMode.FULL_DUPLEX_STREAMED
        if self._response_ended:
            return [] if full_duplex else [Send(messages.CONTINUE_RESPONSE_BODY)]
        effects: list[Effect] = []
        sent = chunk if self._restorer is None else self._restore(chunk, effects, end=end)
        if full_duplex:
            if sent or end or not chunk:  # a chunk that is held back whole is answered with the next
                effects += _sends(messages.response_chunks(sent, end=end))
        elif sent is chunk:
            effects.append(Send(messages.CONTINUE_RESPONSE_BODY))
        else:
            effects.append(Send(messages.changed_response_body(sent)))
        if chunk:
            effects.append(ResponseChunk(chunk))
        if part.end_of_stream:
            effects += self._response_over(over=True)
        return effects

    def _restore(self, chunk: bytes, effects: list[Effect], *, end: bool) -> bytes:
        """What goes on in a chunk's place; the chunk itself where nothing changes."""
        assert self._restorer is not None  # noqa: S101 - asked by the caller
        held = self._restorer.held
        try:
            sent = self._restorer.feed(chunk)
            rest = self._restorer.flush() if end else b""
        except Exception as error:  # a fault of ours must not cost the answer
            self._restorer = None
            effects.append(RestoringFailed(type(error).__name__))
            return held + chunk if held else chunk
        return sent + rest if rest else sent

    def _response_trailers(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._restorer is not None and self._response_mode == BodyMode.FULL_DUPLEX_STREAMED:
            held = self._restorer.flush()
            if held and not self._response_ended:
                effects += _sends(messages.response_chunks(held, end=False))
        effects.append(Send(messages.CONTINUE_RESPONSE_TRAILERS))
        return effects + self._response_over(over=True)

    def _response_over(self, *, over: bool) -> list[Effect]:
        if not over or self._response_ended:
            return []
        self._response_ended = True
        return [ResponseEnd()]


def _sends(answers: Iterable[Any]) -> list[Effect]:
    return [Send(answer) for answer in answers]


def _body_is_not_read(head: RequestHead) -> bool:
    """Paths that name no model, and connections that become something else: their body may never end."""
    return route_of(head.path) is Route.OTHER or head.method == "CONNECT" or "upgrade" in head.headers


def _mode_name(mode: int | None) -> str:
    return BodyMode.Name(mode).lower() if mode in BodyMode.values() else str(mode)
