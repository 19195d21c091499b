"""An open-loop load client: sends a workload's requests at their times, whatever the answers do, and times the answers.

An edge over raw HTTP/1.1 connections: a web client's task switch per received chunk would cost more than the simulated
server's whole token, and the client shares its machine with what it measures. Answers are read by `shared.labels`, so
"first content" means here what it means in the router. `summarize` is pure.

The client's own error is its lateness (scheduled to sent, connecting included); latencies count from the sending.
Memory grows by one small result per request; texts are not kept. Plain http only.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httptools
import orjson

from shared.labels import EventStreamObserver, Usage, usage_of_json
from sim.workload import WorkloadRequest

_MAX_BODY_BYTES: Final = 4 * 1024 * 1024
_ERROR_TEXT_BYTES: Final = 300
_MAX_FAILURE_REASONS: Final = 20
# Timers tick in milliseconds: sending up to half a tick early beats waiting for the next.
_EARLY_MS: Final = 0.5


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where and how to send. `served_header` is a response header that tells the serving endpoint."""

    base_url: str
    model: str
    stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    served_header: str = "x-sim-server"
    timeout_s: float = 120.0
    max_in_flight: int = 4096


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request's outcome; times are ms since the start of the load, None for what never happened.

    `error` is None exactly for a complete 2xx answer. Token counts are the server's usage.
    """

    index: int
    group: str
    session: str
    turn: int
    scheduled_ms: float
    sent_ms: float | None
    status: int | None
    first_content_ms: float | None
    last_byte_ms: float | None
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    served_by: str | None
    error: str | None

    @property
    def lateness_ms(self) -> float | None:
        return None if self.sent_ms is None else self.sent_ms - self.scheduled_ms

    @property
    def ttft_ms(self) -> float | None:
        if self.sent_ms is None or self.first_content_ms is None:
            return None
        return self.first_content_ms - self.sent_ms

    @property
    def e2e_ms(self) -> float | None:
        if self.sent_ms is None or self.last_byte_ms is None:
            return None
        return self.last_byte_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float | None:
        if self.first_content_ms is None or self.last_byte_ms is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_byte_ms - self.first_content_ms) / ((self.output_tokens or 0) - 1)


class LoadClient:
    """Sends to one target over kept connections. Use as an async context manager."""

    def __init__(self, target: LoadTarget) -> None:
        url = urlsplit(target.base_url)
        if url.scheme != "http" or url.hostname is None:
            raise ValueError(f"base_url must be an http:// address, got {target.base_url!r}")
        self.target = target
        self._host = url.hostname
        self._port = url.port or 80
        self._prefix = url.path.rstrip("/")
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        lines = {"host": url.netloc, "content-type": "application/json", "accept": "*/*", **target.headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def send(self, request: WorkloadRequest, origin_s: float) -> RequestResult:
        """Send one request now and wait for its whole answer; `origin_s` is the load's start on `time.monotonic()`."""
        reading = _Reading(origin_s)
        error: str | None = None
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._exchange(request, reading)
        except TimeoutError:
            error = f"no complete answer within {self.target.timeout_s:g} s"
        except OSError as failure:
            error = f"connection: {failure}"
        usage = reading.usage()
        return RequestResult(
            index=request.index,
            group=request.group,
            session=request.session,
            turn=request.turn,
            scheduled_ms=request.arrival_ms,
            sent_ms=reading.sent_ms,
            status=reading.status,
            first_content_ms=reading.first_content_ms,
            last_byte_ms=reading.last_byte_ms,
            input_tokens=usage.input_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            served_by=reading.headers.get(self.target.served_header),
            error=error or reading.error(),
        )

    async def _exchange(self, request: WorkloadRequest, reading: "_Reading") -> None:
        body = orjson.dumps(request.body(self.target.model, stream=self.target.stream))
        head = f"POST {self._prefix}{request.path} HTTP/1.1\r\n".encode()
        message = b"%b%bcontent-length: %d\r\n\r\n%b" % (head, self._headers, len(body), body)
        while True:
            connection = self._idle.pop() if self._idle else None
            is_kept = connection is not None
            if connection is None:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._open), self._host, self._port
                )
            try:
                reusable = await connection.exchange(message, reading)
            except ConnectionResetError:
                # The server closed a kept connection while it idled: it has not seen the request.
                if is_kept and reading.status is None:
                    continue
                raise
            except BaseException:
                connection.abort()
                raise
            if reusable:
                self._idle.append(connection)
            else:
                connection.abort()
            return


class _Reading:
    """What has been seen of one answer."""

    __slots__ = ("body", "complete", "headers", "is_stream", "observer", "origin_s", "sent_ms", "status")

    def __init__(self, origin_s: float) -> None:
        self.origin_s = origin_s
        self.sent_ms: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_stream = False
        self.complete = False
        self.observer = EventStreamObserver()
        self.body = bytearray()

    def now_ms(self) -> float:
        return (time.monotonic() - self.origin_s) * 1000

    @property
    def first_content_ms(self) -> float | None:
        return self.observer.first_content_ms if self.is_stream else None

    @property
    def last_byte_ms(self) -> float | None:
        return self.observer.last_byte_ms

    def feed(self, chunk: bytes) -> None:
        now_ms = self.now_ms()
        if self.is_stream:
            self.observer.feed(chunk, now_ms)
            return
        self.observer.last_byte_ms = now_ms
        if len(self.body) < _MAX_BODY_BYTES:
            self.body += chunk

    def usage(self) -> Usage | None:
        return self.observer.usage() if self.is_stream else usage_of_json(bytes(self.body))

    def error(self) -> str | None:
        if self.status is None:
            return "no answer"
        if not 200 <= self.status < 300:
            text = bytes(self.body[:_ERROR_TEXT_BYTES]).decode("utf-8", "replace")
            return f"status {self.status}: {text}"
        if not self.complete:
            return "connection lost in mid-answer"
        if self.is_stream and self.observer.first_content_ms is None:
            return "a stream without content"
        if self.is_stream and not self.observer.finished():
            return "a stream without its end"
        return None


class _Connection(asyncio.Protocol):
    """One kept connection with at most one request on it."""

    def __init__(self, open_connections: "set[_Connection]") -> None:
        self._open_connections = open_connections
        self._transport: Any = None
        self._parser: Any = None
        self._reading: _Reading | None = None
        self._done: asyncio.Future[bool] | None = None
        self._lost = False

    async def exchange(self, message: bytes, reading: _Reading) -> bool:
        """Send and wait for the whole answer; whether the connection can take another request."""
        if self._lost:
            raise ConnectionResetError("closed by the server")
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reading = reading
        reading.sent_ms = reading.now_ms()
        self._transport.write(message)
        return await self._done

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._reading is None:  # bytes that no request asked for
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionResetError(f"not a valid HTTP answer: {error}"))
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._open_connections.discard(self)
        self._fail(ConnectionResetError(str(exc) if exc else "closed by the server"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not None:
            self._reading.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        reading = self._reading
        if reading is not None:
            reading.status = self._parser.get_status_code()
            is_event_stream = reading.headers.get("content-type", "").startswith("text/event-stream")
            reading.is_stream = reading.status == 200 and is_event_stream

    def on_body(self, body: bytes) -> None:
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        reading, done = self._reading, self._done
        if reading is None or done is None:
            return
        if reading.status is not None and reading.status < 200:  # 100 Continue and the like precede the answer
            reading.status = None
            return
        reading.complete = True
        self._reading = None
        if not done.done():
            done.set_result(self._parser.should_keep_alive())

    def _fail(self, error: ConnectionResetError) -> None:
        self._reading = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


async def send_load(
    requests: Iterable[WorkloadRequest],
    target: LoadTarget,
    on_result: Callable[[RequestResult], None] | None = None,
) -> list[RequestResult]:
    """Send all requests at their times and wait for all answers; results in order of completion.

    Cancelling it closes its connections. A request that finds `max_in_flight` others unanswered fails unsent.
    """
    results: list[RequestResult] = []
    in_flight = 0
    origin_s = time.monotonic()

    def keep(result: RequestResult) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    async def send(request: WorkloadRequest) -> None:
        nonlocal in_flight
        result = await client.send(request, origin_s)
        in_flight -= 1
        keep(result)

    async with LoadClient(target) as client, asyncio.TaskGroup() as group:
        for request in requests:
            wait_ms = request.arrival_ms - (time.monotonic() - origin_s) * 1000
            if wait_ms > _EARLY_MS:
                await asyncio.sleep(wait_ms / 1000)
            if in_flight >= target.max_in_flight:
                keep(unsent(request, f"{in_flight} requests in flight already"))
            else:
                in_flight += 1
                group.create_task(send(request))
    return results


def unsent(request: WorkloadRequest, error: str) -> RequestResult:
    return RequestResult(
        index=request.index,
        group=request.group,
        session=request.session,
        turn=request.turn,
        scheduled_ms=request.arrival_ms,
        sent_ms=None,
        status=None,
        first_content_ms=None,
        last_byte_ms=None,
        input_tokens=None,
        output_tokens=None,
        cached_tokens=None,
        served_by=None,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one latency, in ms; all None (and count 0) without values."""

    count: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        ordered = sorted(values)
        if not ordered:
            return cls(0, None, None, None, None)
        return cls(
            len(ordered),
            sum(ordered) / len(ordered),
            percentile(ordered, 0.50),
            percentile(ordered, 0.90),
            percentile(ordered, 0.99),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of all values at or below it; `ordered` ascending, not empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """A load's outcome. Latencies and tokens are of complete answers only; lateness of all that were sent.

    `prefix_hit_ratio` is cached over prompt tokens where the server told both, None where it told none. `failures` maps
    the first 20 kinds of error (cut to 80 characters) to their number.
    """

    requests: int
    failed: int
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    lateness: Distribution
    input_tokens: int
    output_tokens: int
    prefix_hit_ratio: float | None
    served_by: Mapping[str, int]
    failures: Mapping[str, int]


def summarize(results: Sequence[RequestResult]) -> LoadSummary:
    answered = [result for result in results if result.error is None]
    told = [result for result in answered if result.cached_tokens is not None and result.input_tokens is not None]
    prompt_tokens = sum(result.input_tokens or 0 for result in told)
    failures: Counter[str] = Counter()
    for result in results:
        if result.error is not None:
            reason = result.error[:80]
            failures[reason if reason in failures or len(failures) < _MAX_FAILURE_REASONS else "other"] += 1
    return LoadSummary(
        requests=len(results),
        failed=len(results) - len(answered),
        ttft=Distribution.of(result.ttft_ms for result in answered if result.ttft_ms is not None),
        tpot=Distribution.of(result.tpot_ms for result in answered if result.tpot_ms is not None),
        e2e=Distribution.of(result.e2e_ms for result in answered if result.e2e_ms is not None),
        lateness=Distribution.of(result.lateness_ms for result in results if result.lateness_ms is not None),
        input_tokens=sum(result.input_tokens or 0 for result in answered),
        output_tokens=sum(result.output_tokens or 0 for result in answered),
        prefix_hit_ratio=sum(result.cached_tokens or 0 for result in told) / prompt_tokens if prompt_tokens else None,
        served_by=dict(Counter(result.served_by for result in answered if result.served_by is not None)),
        failures=dict(failures),
    )
