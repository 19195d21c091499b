"""GET on one keep-alive connection: what the scraper asks its endpoints through. Edge: HTTP/1.1 without TLS.

Hundreds of endpoints are asked a few times a second, each for 50 KB, by the process that also decides: a general client
took 390–680 µs of CPU a scrape, of which parsing the page is 50. This is a protocol on httptools' parser, with one
connection and one request at a time. A connection that turns out dead before a byte has come is made anew once: servers
close idle ones.

Limits: no redirects, no encodings (none is asked for), no pipelining. Answers are cut off at a size.
"""

import asyncio

import httptools


class PageTooLargeError(Exception):
    """The answer is over the limit."""


class PageBrokenError(Exception):
    """What came is no HTTP answer, or ended too early."""


class PageClient:
    """One endpoint's connection; `get` one at a time."""

    def __init__(self, address: str, headers: dict[str, str], *, timeout_ms: float, max_bytes: int) -> None:
        """`address`: `ip:port`, IPv6 in brackets."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": address, **headers}.items())
        self._timeout_s = timeout_ms / 1e3
        self._max_bytes = max_bytes
        self._connection: _Connection | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError, TimeoutError, PageTooLargeError or PageBrokenError."""
        request = f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode("latin-1")
        async with asyncio.timeout(self._timeout_s):
            kept = self._connection
            if kept is not None and kept.usable:
                try:
                    return await kept.ask(request)
                except ConnectionResetError:
                    if kept.answered:
                        raise
            loop = asyncio.get_running_loop()
            _, fresh = await loop.create_connection(lambda: _Connection(self._max_bytes), self._host, self._port)
            self._connection = fresh
            return await fresh.ask(request)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None


class _Connection(asyncio.Protocol):
    """The parser's callbacks and the transport's in one object."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body = bytearray()
        self._until_close = False
        self._counted = False
        self.answered = False
        """Whether a byte of the present answer has come."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError
        self.answered = False
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        transport.write(request)
        try:
            return await answer
        except BaseException:
            self.abort()  # what is left of this answer must not become the next one's
            raise
        finally:
            self._answer = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's calls ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, PageTooLargeError) else PageBrokenError(type(error).__name__))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._until_close and exc is None:
            self.on_message_complete()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_exception(PageBrokenError("cut off") if self.answered else ConnectionResetError())

    # --- the parser's calls -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._body = bytearray()
        self._until_close = self._counted = False

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered in {b"content-length", b"transfer-encoding"}:
            self._counted = True
        if lowered == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
            raise PageTooLargeError

    def on_headers_complete(self) -> None:
        self._until_close = not self._counted

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > self._max_bytes:
            raise PageTooLargeError
        self._body += body

    def on_message_complete(self) -> None:
        self._until_close = False
        answer = self._answer
        if answer is None or answer.done():
            self.abort()  # an answer to nothing
            return
        answer.set_result((self._parser.get_status_code(), bytes(self._body)))
        if not self._parser.should_keep_alive():
            self.abort()
        self._body = bytearray()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
