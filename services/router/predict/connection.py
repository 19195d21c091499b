"""One keep-alive HTTP/1.1 connection to a predictor: a request out, its whole answer in. Edge: sockets.

On httptools and an asyncio protocol, since a general client costs 100 µs of CPU a call more (aiohttp 104–167, this
17–53, measured on 2 cores): as much as the rest of a decision's policy.

Limits: one request at a time, no redirects, no compression, answers up to `MAX_ANSWER_BYTES`.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, cast

import httptools

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024


class BrokenConnectionError(ConnectionError):
    """The connection ended before the answer was whole. `untouched`: not one byte of an answer had come."""

    def __init__(self, detail: str, *, untouched: bool) -> None:
        super().__init__(detail)
        self.untouched = untouched


@dataclass(frozen=True, slots=True)
class Response:
    """Status, headers by lower-case name, body."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Connection(asyncio.Protocol):
    """Reusable while `open`."""

    def __init__(self) -> None:
        self.open = False
        self.used = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0

    def exchange(self, request: bytes) -> "asyncio.Future[Response]":
        """Send a whole request; the future gives its answer or raises BrokenConnectionError."""
        if self._transport is None or self._waiter is not None:
            raise RuntimeError("the connection isn't idle")
        self._headers, self._body, self._size = {}, [], 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        """End the connection at once: an answer that is still to come would be taken for the next one's."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no asyncio.Transport
        self.open = True

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()  # bytes that nobody asked for
            return
        self._size += len(data)
        try:
            if self._size > MAX_ANSWER_BYTES:
                raise httptools.HttpParserError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._break("closed by the predictor" if exc is None else type(exc).__name__)

    def _break(self, detail: str) -> None:
        waiter, self._waiter = self._waiter, None
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(BrokenConnectionError(detail, untouched=self._size == 0))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        waiter, self._waiter = self._waiter, None
        self.used = True
        if not self._parser.should_keep_alive():
            self.close()
        if waiter is not None and not waiter.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            waiter.set_result(Response(self._parser.get_status_code(), self._headers, body))
