"""A small HTTP/1.1 server protocol: requests in, and direct access to the connection for the answer.

The edge under `model_server` and `control`. It exists beside the web frameworks for two reasons: a token of a stream
must cost one write and no task switch, and faults below a framework's reach (a held-back header, a reset in mid-stream)
must be exact. Requests are parsed by httptools; one request of a connection is answered at a time, later ones wait.

Limits: no TLS, no HTTP/2, no trailers, request bodies up to 64 MiB in memory.
"""

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final

import httptools

from shared.errors import reason_of
from sim.openai_api import error_body

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
# A reader this far behind is cut off; an answer is at most a few MB.
MAX_UNSENT_BYTES: Final = 16 * 1024 * 1024
JSON_TYPE: Final = b"application/json"

_logger = logging.getLogger("sim.http")


class ListenError(OSError):
    """Nobody can listen there; names who wanted to, where, and why not."""

    def __init__(self, who: str, host: str, port: int, cause: OSError) -> None:
        super().__init__(f"{who}: can't listen on {host}, port {port}: {reason_of(cause)}")


class HttpRequest:
    """One complete request. Header names are lower case; `path` is without the query."""

    __slots__ = ("body", "headers", "is_http10", "keep_alive", "method", "path")

    def __init__(
        self, method: str, path: bytes, headers: dict[bytes, bytes], body: bytes, *, keep_alive: bool, is_http10: bool
    ) -> None:
        self.method = method
        self.path = path.decode("latin-1")
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive
        self.is_http10 = is_http10


class Exchange:
    """The answer to one request. Call `respond`, or `write` raw bytes (head included) and then `end`.

    `on_disconnect` is called once if the client goes before the end. After `end` or a disconnect, writes do nothing.
    """

    __slots__ = ("_protocol", "closed", "extra_headers", "is_head", "keep_alive", "on_disconnect")

    def __init__(self, protocol: "HttpProtocol", request: HttpRequest, extra_headers: bytes) -> None:
        self._protocol = protocol
        self.keep_alive = request.keep_alive
        self.is_head = request.method == "HEAD"
        self.extra_headers = extra_headers
        self.closed = False
        self.on_disconnect: Callable[[], None] | None = None

    def head(self, status: int, content_type: bytes, more: bytes = b"") -> bytes:
        """Status line and headers up to the empty line; `more` holds whole lines, such as a length or an encoding."""
        return b"HTTP/1.1 %d %b\r\ndate: %b\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b%b%b\r\n" % (
            status,
            _PHRASES.get(status, b"Unknown"),
            self._protocol.clock.http_date(),
            content_type,
            self.extra_headers,
            more,
            b"" if self.keep_alive else b"connection: close\r\n",
        )

    def respond(self, status: int, body: bytes, content_type: bytes = JSON_TYPE, more: bytes = b"") -> None:
        """A whole answer, head and body in one write."""
        length = b"content-length: %d\r\n" % len(body)
        self.write(self.head(status, content_type, length + more) + (b"" if self.is_head else body))
        self.end()

    def write(self, data: bytes) -> None:
        if not self.closed:
            self._protocol.write(data)

    def end(self) -> None:
        """The answer is complete: the connection goes on to its next request, or closes."""
        if not self.closed:
            self.closed = True
            self._protocol.exchange_ended(keep_alive=self.keep_alive)

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        if not self.closed:
            self.closed = True
            self._protocol.reset()

    def disconnected(self) -> None:
        if not self.closed:
            self.closed = True
            if self.on_disconnect is not None:
                self.on_disconnect()


Handler = Callable[[HttpRequest, Exchange], None]


class DateClock:
    """The Date header, formatted once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = b""

    def http_date(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._text = formatdate(second, usegmt=True).encode()
        return self._text


class HttpProtocol(asyncio.Protocol):
    """One connection. `connections` is the set it enters itself into while it is open."""

    def __init__(
        self, handler: Handler, clock: DateClock, connections: "set[HttpProtocol]", extra_headers: bytes = b""
    ) -> None:
        self.clock = clock
        self._handler = handler
        self._connections = connections
        self._extra_headers = extra_headers
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._exchange: Exchange | None = None
        self._queue: deque[HttpRequest] = deque()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._connections.discard(self)
        self._queue.clear()
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.disconnected()

    def pause_writing(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the request itself is complete; it is answered as if it had not offered another protocol
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _BodyTooLargeError):
                raise
            self._refuse(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not a valid HTTP request: {error}")

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            raise _BodyTooLargeError
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = HttpRequest(
            self._parser.get_method().decode(),
            self._url.partition(b"?")[0],
            self._headers,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            is_http10=self._parser.get_http_version() == "1.0",
        )
        self._body = []
        if self._exchange is None:
            self._handle(request)
        else:
            self._queue.append(request)
            self._transport.pause_reading()

    # for Exchange

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def exchange_ended(self, *, keep_alive: bool) -> None:
        self._exchange = None
        if not keep_alive:
            self._transport.close()
        elif self._queue:
            request = self._queue.popleft()
            if not self._queue:
                self._transport.resume_reading()
            self._handle(request)

    def reset(self) -> None:
        """Close with RST instead of FIN, dropping what is unsent."""
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._transport.abort()

    def abort(self) -> None:
        """Close at once, as a killed process would."""
        self._transport.abort()

    def _handle(self, request: HttpRequest) -> None:
        exchange = Exchange(self, request, self._extra_headers)
        self._exchange = exchange
        try:
            self._handler(request, exchange)
        except Exception:
            _logger.exception("handler failed")
            exchange.respond(500, error_body(500, "InternalServerError", "the simulated server failed; see its log"))

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(status, "BadRequestError", message)
        self._transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, _PHRASES[status], len(body), body)
        )
        self._transport.close()


class _BodyTooLargeError(Exception):
    pass


_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
