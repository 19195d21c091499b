"""The client of the predictors: rows of concurrent decisions → one call, within one deadline. Edge: HTTP (aiohttp).

Rows that wait together share a call (`shared/coalescing.py`); the call goes to the live replica with the fewest calls
outstanding; one that fails is followed by another in what is left of the one budget: the first try gets at most half of
it while there is another to try. All addresses of every configured name are replicas, resolved again and again; where a
name doesn't resolve, the addresses known before stay. Replicas that are ejected or have no model yet are probed in the
background (`/readyz`).

Answers are checked before they are split: a row's answer can't go to another request.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import structlog

from services.router.predict.errors import FailureReason, PredictError
from services.router.predict.metrics import PredictMetrics
from services.router.predict.replicas import Address, CircuitConfig, Probe, Replica, ReplicaSet
from shared.clock import Clock
from shared.coalescing import Coalescer, OverloadedError
from shared.errors import FieldError
from shared.features import SCHEMA_HASH, FloatMatrix
from shared.names import (
    BUNDLE_CONDITION_PREFIX,
    HEADER_BUNDLE,
    HEADER_OUTPUTS,
    HEADER_POOL,
    HEADER_SCHEMA,
    PREDICT_PATH,
    REASON_NO_BUNDLE,
    ROWS_CONTENT_TYPE,
)
from shared.prediction import OUTPUTS, plausible

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_UPKEEP_S: Final = 0.1
_PROBE_TIMEOUT_S: Final = 1.0
_RESOLVE_TIMEOUT_S: Final = 2.0
_RESOLVE_RETRY_MS: Final = 1_000.0
_MAX_VERSION_BYTES: Final = 64
_MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
# Of an answer that says why not.
_MAX_REFUSAL_BYTES: Final = 64 * 1024
# Below the predictor's own 75 s: who ends an idle connection first knows that nothing is under way on it.
_KEEP_ALIVE_S: Final = 60.0

_STATUS_REASONS: Final = {
    400: FailureReason.REJECTED,
    413: FailureReason.REJECTED,
    503: FailureReason.UNAVAILABLE,
}


class _Why(msgspec.Struct):
    reason: str


class _Refusal(msgspec.Struct):
    """A predictor's answer other than 200."""

    error: _Why


class _Readiness(msgspec.Struct):
    """Its `/readyz` while it isn't ready."""

    waiting_for: dict[str, str]


_Said = TypeVar("_Said", _Refusal, _Readiness)

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


@dataclass(slots=True)
class _Peer:
    """The connections to one replica. No redirection is followed: rows and token are for it alone."""

    session: aiohttp.ClientSession
    url: str
    """Scheme and address, without a path."""
    server_name: str | None
    """Whose certificate is asked for, where it is TLS."""
    calls: int = 0
    left: bool = False

    async def post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        return await self.session.post(
            self.url + path, data=body, server_hostname=self.server_name, allow_redirects=False
        )

    async def get(self, path: str) -> aiohttp.ClientResponse:
        return await self.session.get(self.url + path, server_hostname=self.server_name, allow_redirects=False)

    async def leave(self) -> None:
        """End with the last call under way."""
        self.left = True
        if not self.calls:
            await self.session.close()


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
        self._peers: dict[Address, _Peer] = {}
        self._addresses: dict[_Origin, list[Address]] = {}
        self._unresolved: set[_Origin] = set()
        self._resolve_at_ms = float("-inf")
        self._own_bundle = BUNDLE_CONDITION_PREFIX + pool
        self._headers = {HEADER_POOL: pool, HEADER_SCHEMA: SCHEMA_HASH, "content-type": ROWS_CONTENT_TYPE}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._source: tuple[tuple[str, str], _Source] | None = None
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
        metrics.watch_replicas(
            self._replicas.live_count, self._replicas.without_model_count, self._replicas.ejected_count
        )

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
        self._replicas.update([])
        for peer in self._peers.values():
            await peer.leave()

    async def predict(self, rows: FloatMatrix, deadline_ms: float) -> RawAnswer:
        """Answer checked rows, float32 (n, F), within `deadline_ms` from now; raises PredictError."""
        if not self._replicas.live_count():
            raise self._none_live()
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

    def _none_live(self) -> PredictError:
        known, ejected = len(self._replicas), self._replicas.ejected_count()
        without_model = self._replicas.without_model_count()
        reason = FailureReason.NO_BUNDLE if without_model else FailureReason.NO_REPLICA
        return PredictError(reason, f"{known} known, {ejected} ejected, {without_model} without a model")

    def describe(self) -> list[dict[str, Any]]:
        """Each replica's state, for people."""
        return [
            {
                "address": str(replica.address),
                "origin": replica.address.origin,
                "live": replica.live,
                "without_model": replica.without_model,
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
        failure: PredictError | None = None
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
                    values, source = await self._ask(replica.address, body, len(rows))
            except TimeoutError:
                failure = PredictError(FailureReason.TIMEOUT, f"{replica.address}: no answer")
            except aiohttp.ClientConnectorError as error:
                failure = PredictError(FailureReason.REFUSED, f"{replica.address}: {type(error).__name__}")
            except (aiohttp.ClientError, OSError) as error:
                failure = PredictError(FailureReason.RESET, f"{replica.address}: {type(error).__name__}")
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
        raise failure or self._none_live()

    def _failed(self, replica: Replica, failure: PredictError) -> None:
        self._metrics.call_failed(failure.reason)
        if failure.reason is FailureReason.REJECTED:
            return
        lived = replica.live
        if self._replicas.failed(replica, failure.reason, self._clock.monotonic_ms()):
            self._ejected(replica, failure.reason)
        elif lived and replica.without_model:
            self._log.info("predictor has no model yet", replica=str(replica.address))

    def _ejected(self, replica: Replica, reason: FailureReason) -> None:
        self._metrics.ejected()
        self._log.warning("predictor ejected", replica=str(replica.address), reason=reason.value)

    async def _ask(self, address: Address, body: bytes, count: int) -> tuple[FloatMatrix, _Source]:
        """One POST of `count` rows; raises PredictError, aiohttp.ClientError or OSError."""
        peer = self._peers[address]
        peer.calls += 1
        try:
            try:
                response = await peer.post(PREDICT_PATH, body)
            except aiohttp.ClientConnectorError:
                raise
            except aiohttp.ClientConnectionError:
                # It may have closed an idle connection as we wrote, which is no sign of ill health. Asking twice does
                # no harm.
                response = await peer.post(PREDICT_PATH, body)
            async with response:
                if response.status != 200:
                    reason = _STATUS_REASONS.get(response.status, FailureReason.STATUS)
                    if reason is FailureReason.UNAVAILABLE:
                        refusal = await _read_refusal(response, _Refusal)
                        if refusal is not None and refusal.error.reason == REASON_NO_BUNDLE:
                            raise PredictError(FailureReason.NO_BUNDLE, "it has no model yet")
                    raise PredictError(reason, f"status {response.status}")
                if (response.content_length or 0) > _MAX_ANSWER_BYTES:
                    raise PredictError(FailureReason.BAD_ANSWER, f"an answer of {response.content_length} bytes")
                return self._read(response, await response.read(), count)
        finally:
            peer.calls -= 1
            if peer.left:
                await peer.leave()

    def _read(self, response: aiohttp.ClientResponse, body: bytes, count: int) -> tuple[FloatMatrix, _Source]:
        named = response.headers.get(HEADER_BUNDLE, ""), response.headers.get(HEADER_OUTPUTS, "")
        if self._source is None or self._source[0] != named:
            if not all(named):
                raise PredictError(FailureReason.BAD_ANSWER, f"no {HEADER_BUNDLE} or {HEADER_OUTPUTS} header")
            version, outputs = named[0], tuple(named[1].split(","))
            if not set(outputs) <= set(OUTPUTS) or len(set(outputs)) != len(outputs):
                raise PredictError(FailureReason.BAD_ANSWER, f"{HEADER_OUTPUTS} names columns that don't exist")
            if len(version) > _MAX_VERSION_BYTES:
                raise PredictError(FailureReason.BAD_ANSWER, f"{HEADER_BUNDLE} has {len(version)} characters")
            self._source = named, _Source(outputs, version)
        source = self._source[1]
        if len(body) != 4 * count * len(source.outputs):
            detail = f"{len(body)} bytes for {count} rows of {len(source.outputs)} outputs"
            raise PredictError(FailureReason.BAD_ANSWER, detail)
        values = np.frombuffer(body, "<f4").reshape(count, len(source.outputs))
        if not plausible(values):
            raise PredictError(FailureReason.BAD_ANSWER, "a value that no latency can have")
        return values, source

    def _peer(self, address: Address) -> _Peer:
        origin = urlsplit(address.origin)
        session = aiohttp.ClientSession(
            # The coalescer bounds the calls at once, and each has a deadline of its own.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={**self._headers, "host": origin.netloc},
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return _Peer(session, f"{origin.scheme}://{address}", origin.hostname if origin.scheme == "https" else None)

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
        gone = self._replicas.update(a for addresses in self._addresses.values() for a in addresses)
        for replica in self._replicas:
            if replica.address not in self._peers:
                self._peers[replica.address] = self._peer(replica.address)
        for replica in gone:
            await self._peers.pop(replica.address).leave()
        return complete

    async def _probe(self, replica: Replica) -> None:
        """Ask over new connections: those from before may be dead without a sign, and are left if it answers."""
        peer, found = self._peer(replica.address), Probe.FAILED
        reason = FailureReason.UNAVAILABLE
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                async with await peer.get("/readyz") as response:
                    found = await self._found(response)
        except TimeoutError:
            reason = FailureReason.TIMEOUT
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            reason = FailureReason.REFUSED if refused else FailureReason.RESET
        finally:
            if found is Probe.READY and replica.address in self._peers:
                self._peers[replica.address], peer = peer, self._peers[replica.address]
            await peer.leave()
        if self._replicas.probed(replica, found, self._clock.monotonic_ms()):
            replica.last_failure = reason
            self._ejected(replica, reason)
        elif found is Probe.READY:
            self._log.info("predictor is back", replica=str(replica.address))

    async def _found(self, response: aiohttp.ClientResponse) -> Probe:
        """What `/readyz` says of this pool: a predictor of several isn't ready as long as any has no bundle."""
        if response.status == 200:
            return Probe.READY
        waits = await _read_refusal(response, _Readiness) if response.status == 503 else None
        if waits is None or not waits.waiting_for:
            return Probe.FAILED
        if any(not each.startswith(BUNDLE_CONDITION_PREFIX) for each in waits.waiting_for):
            return Probe.FAILED
        return Probe.NO_MODEL if self._own_bundle in waits.waiting_for else Probe.READY

    def _probe_ended(self, address: Address, _: "asyncio.Task[None]") -> None:
        self._probes.pop(address, None)


async def _read_refusal(response: aiohttp.ClientResponse, kind: type[_Said]) -> _Said | None:
    """The body of an answer that isn't 200, or None: a gateway in between says what it likes."""
    if response.content_length is None or response.content_length > _MAX_REFUSAL_BYTES:
        return None
    try:
        return msgspec.json.decode(await response.read(), type=kind)
    except (msgspec.DecodeError, RecursionError):  # the other one: nested thousands deep
        return None


def _expire(answer: "asyncio.Future[tuple[FloatMatrix, _Source]]", deadline_ms: float) -> None:
    if not answer.done():
        answer.set_exception(PredictError(FailureReason.TIMEOUT, f"no answer within {deadline_ms:g} ms"))


async def _resolve(host: str, port: int) -> Sequence[tuple[str, int]]:
    """All addresses of a name; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(info[4][0]), int(info[4][1])) for info in found))
