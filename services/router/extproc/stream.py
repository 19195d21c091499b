"""One ext-proc stream as a state machine: messages in, steps out. No I/O.

Every phase message gets exactly one answer, in order. A stream never ends early on our side: a clean end without an
answer makes Envoy send the request on with an empty body in some modes (measured), so what can't be answered aborts
with a status, and Envoy fails open.

Request bodies: NONE and BUFFERED. Response bodies: NONE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from services.router.extproc import messages
from services.router.extproc.messages import BodyMode, RequestHead, Routed
from services.router.request.errors import BodyTooLarge, RequestRejected


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
class Answer:
    """Send this message."""

    message: Any


@dataclass(frozen=True, slots=True)
class Decide:
    """Find endpoints for this request and give the result to `Stream.decided`. `body` is None without one."""

    head: RequestHead
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Abort:
    """End the stream with a status; `reason` is for the counter and the log."""

    reason: str


class _Phase(Enum):
    START = auto()
    BODY = auto()
    ANSWERED = auto()


class Stream:
    """State of one stream: one HTTP request."""

    __slots__ = ("_head", "_max_body_bytes", "_phase", "_reply_to_body")

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._phase = _Phase.START
        self._head: RequestHead | None = None
        self._reply_to_body = False

    def receive(self, message: Any) -> Answer | Decide | Abort:
        """Take Envoy's next message; returns what to do about it."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return self._request_headers(message)
        if kind == "request_body":
            return self._request_body(message)
        if kind == "request_trailers":
            return Answer(messages.CONTINUE_REQUEST_TRAILERS)
        if kind == "response_headers":
            return Answer(messages.CONTINUE_RESPONSE_HEADERS)
        if kind == "response_trailers":
            return Answer(messages.CONTINUE_RESPONSE_TRAILERS)
        return Abort(f"unexpected_{kind}")

    def decided(self, result: Routed | RequestRejected) -> Answer:
        """The result of the last Decide → the message that answers its phase."""
        if isinstance(result, RequestRejected):
            return Answer(messages.immediate(result))
        return Answer(messages.routed_body(result) if self._reply_to_body else messages.routed_headers(result))

    def _request_headers(self, message: Any) -> Answer | Decide | Abort:
        if self._phase is not _Phase.START:
            return Abort("repeated_request_headers")
        mode = message.protocol_config.request_body_mode
        if mode not in {BodyMode.NONE, BodyMode.BUFFERED}:
            return Abort(f"request_body_mode_{BodyMode.Name(mode).lower()}")
        self._head = messages.request_head(message)
        if message.request_headers.end_of_stream or mode == BodyMode.NONE:
            self._phase = _Phase.ANSWERED
            return Decide(self._head, None)
        self._phase = _Phase.BODY
        return Answer(messages.CONTINUE_REQUEST_HEADERS)

    def _request_body(self, message: Any) -> Answer | Decide | Abort:
        if self._phase is not _Phase.BODY or self._head is None:
            return Abort("unexpected_request_body")
        self._phase = _Phase.ANSWERED
        self._reply_to_body = True
        body = message.request_body.body
        if len(body) > self._max_body_bytes:
            return Answer(messages.immediate(BodyTooLarge(self._max_body_bytes)))
        return Decide(self._head, body)
