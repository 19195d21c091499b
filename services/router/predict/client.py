"""The client of the predictors: rows of concurrent decisions → one call, within one deadline. Edge: HTTP.

Rows that wait together share a call (`shared/coalescing.py`); the call goes to the live replica with the fewest calls
outstanding; one that fails is followed by another in what is left of the one budget: the first try gets at most half of
it while there is another to try. All addresses of every configured name are replicas, resolved again and again; where a
name doesn't resolve, the addresses known before stay. Ejected replicas are probed in the background (`/readyz`).

Answers are checked before they are split: a row's answer can't go to another request.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np
import structlog

from services.router.predict.connection import BrokenConnectionError, Connection, Response
from services.router.predict.errors import FailureReason, PredictError
from services.router.predict.metrics import PredictMetrics
from services.router.predict.replicas import Address, CircuitConfig, Replica, ReplicaSet
from shared.clock import Clock
from shared.coalescing import Coalescer, OverloadedError
from shared.errors import FieldError
from shared.features import SCHEMA_HASH, FloatMatrix
from shared.names import HEADER_BUNDLE, HEADER_OUTPUTS, HEADER_POOL, HEADER_SCHEMA, PREDICT_PATH, ROWS_CONTENT_TYPE
from shared.prediction import OUTPUTS, plausible

_BUNDLE: Final = HEADER_BUNDLE.encode()
_OUTPUTS: Final = HEADER_OUTPUTS.encode()
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_UPKEEP_S: Final = 0.1
_PROBE_TIMEOUT_S: Final = 1.0
_RESOLVE_TIMEOUT_S: Final = 2.0
_RESOLVE_RETRY_MS: Final = 1_000.0
_MAX_VERSION_BYTES: Final = 64

Resolve = Callable[[str, int], Awaitable[Sequence[tuple[str, int]]]]


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Limits of the client; the deadline of one prediction comes with each."""

    call_ms: float = 40.0
    """Budget of one call, all replicas together."""
    window_ms: float = 1.0
    max_rows: int = 1_024
    max_waiting_rows: int = 16_384
    max_in_flight: int = 16
    """Calls at once; each holds a connection."""
    resolve_ms: float = 10_000.0
    circuit: CircuitConfig = field(default_factory=CircuitConfig)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """Raw model output, float32 (n, K): `outputs` names the K columns, `bundle_version` the bundle."""

    values: FloatMatrix
    outputs: tuple[str, ...]
    bundle_version: str


@dataclass(frozen=True, slots=True)
class _Origin:
    """One configured URL."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Source:
    outputs: tuple[str, ...]
    bundle_version: str


def parse_urls(urls: Sequence[str]) -> list[_Origin]:
    """`http(s)://host[:port]` each; raises FieldError."""
    origins = []
    for url in urls:
        allowed = "http://host:port or https://host:port"
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise FieldError("predictors", f"'{url[:128]}'", allowed) from None
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.path.strip("/") or parts.query:
            raise FieldError("predictors", f"'{url[:128]}'", allowed)
        origins.append(_Origin(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme]))
    return origins


class PredictorClient:
    """Use as an async context manager: it resolves, probes and closes in the background."""

    def __init__(
        self,
        urls: Sequence[str],
        pool: str,
        metrics: PredictMetrics,
        clock: Clock,
        *,
        config: ClientConfig | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """`urls` may be names with many addresses. `token`: the predictors' bearer token, where they ask for one.

        Raises FieldError for a URL that can't be one.
        """
        self._origins = parse_urls(urls)
        self._metrics = metrics
        self._clock = clock
        self._config = config or ClientConfig()
        self._resolve = resolve or _resolve
        secure = any(origin.scheme == "https" for origin in self._origins)
        self._tls = tls or (ssl.create_default_context() if secure else None)
        self._replicas = ReplicaSet(self._config.circuit)
        self._idle: dict[Address, list[Connection]] = {}
        self._addresses: dict[_Origin, list[Address]] = {}
        self._unresolved: set[_Origin] = set()
        self._resolve_at_ms = float("-inf")
        authorization = f"authorization: Bearer {token}\r\n" if token else ""
        self._head = (
            f"{HEADER_POOL}: {pool}\r\n{HEADER_SCHEMA}: {SCHEMA_HASH}\r\ncontent-type: {ROWS_CONTENT_TYPE}\r\n"
            f"{authorization}content-length: "
        ).encode()
        self._heads: dict[str, bytes] = {}
        self._source: tuple[tuple[bytes, bytes], _Source] | None = None
        self._coalescer: Coalescer[_Source] = Coalescer(
            self._call,
            window_ms=self._config.window_ms,
            max_rows=self._config.max_rows,
            max_waiting_rows=self._config.max_waiting_rows,
            max_in_flight=self._config.max_in_flight,
        )
        self._upkeep: asyncio.Task[None] | None = None
        self._probes: dict[Address, asyncio.Task[None]] = {}
        self._log = structlog.get_logger()
        metrics.watch_replicas(self._replicas.live_count, self._replicas.ejected_count)

    async def __aenter__(self) -> Self:
        self._upkeep = asyncio.create_task(self._keep_up(), name="predictors")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = [task for task in (self._upkeep, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._coalescer.close()
        for replica in self._replicas.update([]):
            self._drop(replica.address)

    async def predict(self, rows: FloatMatrix, deadline_ms: float) -> RawAnswer:
        """Answer checked rows, float32 (n, F), within `deadline_ms` from now; raises PredictError."""
        if not self._replicas.live_count():
            raise PredictError(FailureReason.NO_REPLICA, f"{len(self._replicas)} known, all ejected")
        try:
            answer = self._coalescer.submit(rows)
        except OverloadedError as error:
            raise PredictError(FailureReason.OVERLOADED, str(error)) from None
        # A bare timer: a timeout context costs 5 µs more, and the future is ours alone.
        timer = asyncio.get_running_loop().call_later(deadline_ms / 1e3, _expire, answer, deadline_ms)
        try:
            values, source = await answer
        finally:
            timer.cancel()
            answer.cancel()
        return RawAnswer(values, source.outputs, source.bundle_version)

    def describe(self) -> list[dict[str, Any]]:
        """Each replica's state, for people."""
        return [
            {
                "address": str(replica.address),
                "origin": replica.address.origin,
                "live": replica.live,
                "outstanding": replica.outstanding,
                "calls": replica.calls,
                "failures_in_a_row": replica.failures,
                "last_failure": replica.last_failure.value if replica.last_failure else None,
            }
            for replica in self._replicas
        ]

    # One call

    async def _call(self, rows: FloatMatrix) -> tuple[FloatMatrix, _Source]:
        """One merged call over as many replicas as the budget allows; raises the last PredictError."""
        end_ms = self._clock.monotonic_ms() + self._config.call_ms
        body = np.ascontiguousarray(rows, "<f4").tobytes()
        tried: set[Address] = set()
        failure = PredictError(FailureReason.NO_REPLICA, "all are ejected")
        while (replica := self._replicas.choose(tried)) is not None:
            started_ms = self._clock.monotonic_ms()
            left_ms = end_ms - started_ms
            if left_ms <= 0:
                break
            tried.add(replica.address)
            replica.outstanding += 1
            replica.calls += 1
            try:
                async with asyncio.timeout((left_ms / 2 if self._replicas.others(tried) else left_ms) / 1e3):
                    response = await self._exchange(replica.address, self._request(replica.address, body))
                values, source = self._read(response, len(rows))
            except TimeoutError:
                failure = PredictError(FailureReason.TIMEOUT, f"{replica.address}: no answer")
            except BrokenConnectionError as error:
                failure = PredictError(FailureReason.RESET, f"{replica.address}: {error}")
            except OSError as error:
                failure = PredictError(FailureReason.REFUSED, f"{replica.address}: {type(error).__name__}")
            except PredictError as error:
                failure = PredictError(error.reason, f"{replica.address}: {error.detail}")
            else:
                self._replicas.succeeded(replica)
                self._metrics.called(len(rows), self._clock.monotonic_ms() - started_ms)
                return values, source
            finally:
                replica.outstanding -= 1
            self._failed(replica, failure)
            if failure.reason is FailureReason.REJECTED:
                break
        raise failure

    def _failed(self, replica: Replica, failure: PredictError) -> None:
        self._metrics.call_failed(failure.reason)
        if failure.reason is FailureReason.REJECTED:
            return
        if self._replicas.failed(replica, failure.reason, self._clock.monotonic_ms()):
            self._metrics.ejected()
            self._drop_idle(replica.address)
            self._log.warning("predictor ejected", replica=str(replica.address), reason=failure.reason.value)

    def _request(self, address: Address, body: bytes) -> bytes:
        return b"%b%b%d\r\n\r\n%b" % (self._request_head(address, PREDICT_PATH, "POST"), self._head, len(body), body)

    def _request_head(self, address: Address, path: str, method: str) -> bytes:
        key = method + address.origin
        head = self._heads.get(key)
        if head is None:
            head = f"{method} {path} HTTP/1.1\r\nhost: {urlsplit(address.origin).netloc}\r\n".encode()
            self._heads[key] = head
        return head

    def _read(self, response: Response, count: int) -> tuple[FloatMatrix, _Source]:
        if response.status != 200:
            reason = FailureReason.STATUS
            if response.status == 503:
                reason = FailureReason.UNAVAILABLE
            elif response.status in {400, 413}:
                reason = FailureReason.REJECTED
            raise PredictError(reason, f"status {response.status}")
        named = response.headers.get(_BUNDLE, b""), response.headers.get(_OUTPUTS, b"")
        if self._source is None or self._source[0] != named:
            if not all(named):
                raise PredictError(FailureReason.BAD_ANSWER, f"no {HEADER_BUNDLE} or {HEADER_OUTPUTS} header")
            outputs = tuple(named[1].decode("latin-1").split(","))
            if not set(outputs) <= set(OUTPUTS) or len(set(outputs)) != len(outputs):
                raise PredictError(FailureReason.BAD_ANSWER, f"{HEADER_OUTPUTS} names columns that don't exist")
            if len(named[0]) > _MAX_VERSION_BYTES:
                raise PredictError(FailureReason.BAD_ANSWER, f"{HEADER_BUNDLE} has {len(named[0])} bytes")
            self._source = named, _Source(outputs, named[0].decode("latin-1"))
        source = self._source[1]
        if len(response.body) != 4 * count * len(source.outputs):
            detail = f"{len(response.body)} bytes for {count} rows of {len(source.outputs)} outputs"
            raise PredictError(FailureReason.BAD_ANSWER, detail)
        values = np.frombuffer(response.body, "<f4").reshape(count, len(source.outputs))
        if not plausible(values):
            raise PredictError(FailureReason.BAD_ANSWER, "a value that no latency can have")
        return values, source

    async def _exchange(self, address: Address, request: bytes) -> Response:
        """One request over an idle connection or a new one."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.open:
                continue
            try:
                return await self._over(connection, address, request)
            except BrokenConnectionError as error:
                # The predictor closed the idle connection as we wrote: no sign of ill health, and nothing was done.
                if not error.untouched:
                    raise
        return await self._over(await self._connect(address), address, request)

    async def _over(self, connection: Connection, address: Address, request: bytes) -> Response:
        try:
            response = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        idle = self._idle.get(address)
        if connection.open and idle is not None:
            idle.append(connection)
        else:
            connection.close()  # it ends, or its replica left meanwhile
        return response

    async def _connect(self, address: Address) -> Connection:
        secure = address.origin.startswith("https:")
        context = self._tls if secure else None
        name = urlsplit(address.origin).hostname if secure else None
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, address.host, address.port, ssl=context, server_hostname=name
        )
        return connection

    # Upkeep

    async def _keep_up(self) -> None:
        while True:
            now_ms = self._clock.monotonic_ms()
            if now_ms >= self._resolve_at_ms:
                complete = await self._resolve_all()
                pause_ms = self._config.resolve_ms if complete else min(self._config.resolve_ms, _RESOLVE_RETRY_MS)
                self._resolve_at_ms = now_ms + pause_ms
            for replica in self._replicas.due_probes(now_ms):
                if replica.address not in self._probes:
                    task = asyncio.create_task(self._probe(replica))
                    self._probes[replica.address] = task
                    task.add_done_callback(partial(self._probe_ended, replica.address))
            await asyncio.sleep(_UPKEEP_S)

    async def _resolve_all(self) -> bool:
        """Renew the addresses of every name; False if one didn't resolve."""
        complete = True
        for origin in self._origins:
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    found = await self._resolve(origin.host, origin.port)
            except (OSError, UnicodeError) as error:  # a TimeoutError is an OSError; names can be no names at all
                complete = False
                self._metrics.resolve_failed()
                if origin not in self._unresolved:
                    self._unresolved.add(origin)
                    known = len(self._addresses.get(origin, ()))
                    self._log.warning(
                        "predictor not resolved", origin=origin.url, error=type(error).__name__, known=known
                    )
            else:
                self._unresolved.discard(origin)
                self._addresses[origin] = [Address(host, port, origin.url) for host, port in found]
        for replica in self._replicas.update(a for addresses in self._addresses.values() for a in addresses):
            self._drop(replica.address)
        for replica in self._replicas:
            self._idle.setdefault(replica.address, [])
        return complete

    async def _probe(self, replica: Replica) -> None:
        answered = False
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                connection = await self._connect(replica.address)
                try:
                    head = self._request_head(replica.address, "/readyz", "GET")
                    answered = (await connection.exchange(head + b"\r\n")).status == 200
                finally:
                    connection.close()
        except OSError:  # a TimeoutError is one too
            answered = False
        self._replicas.probed(replica, answered, self._clock.monotonic_ms())
        if answered:
            self._log.info("predictor is back", replica=str(replica.address))

    def _probe_ended(self, address: Address, _: "asyncio.Task[None]") -> None:
        self._probes.pop(address, None)

    def _drop(self, address: Address) -> None:
        """Forget a replica that left."""
        self._drop_idle(address)
        self._idle.pop(address, None)

    def _drop_idle(self, address: Address) -> None:
        idle = self._idle.get(address, [])
        while idle:
            idle.pop().close()


def _expire(answer: "asyncio.Future[tuple[FloatMatrix, _Source]]", deadline_ms: float) -> None:
    if not answer.done():
        answer.set_exception(PredictError(FailureReason.TIMEOUT, f"no answer within {deadline_ms:g} ms"))


async def _resolve(host: str, port: int) -> Sequence[tuple[str, int]]:
    """All addresses of a name; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(info[4][0]), int(info[4][1])) for info in found))
