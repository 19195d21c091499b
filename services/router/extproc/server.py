"""The ext-proc edge: gRPC streams from Envoy, one per request, over grpc.aio.

A stream stays open until the HTTP request is over (`response_trailer_mode: SEND`): its end, normal or reset, is how the
router learns that a request has left its endpoint, at no cost per token where the response body isn't shown. Hence the
`finally`. What a message means is `stream.py`'s to say; here its effects are carried out, in order.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import grpc
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.router.extproc.messages import RequestHead, Routed
from services.router.extproc.stream import (
    Abort,
    Decide,
    Effect,
    Rejected,
    ResponseChunk,
    ResponseEnd,
    ResponseHead,
    ResponseObserver,
    RestoringFailed,
    Send,
    Stream,
)
from services.router.request.errors import RejectReason, RequestRejected
from shared.clock import Clock
from shared.errors import ConfigurationError

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_METHOD: Final = "Process"
HEALTH_SERVICES: Final = ("", "liveness", "readiness", SERVICE)


class Director(Protocol):
    """What the edge needs of the conductor."""

    async def decide(
        self, head: RequestHead, body: bytes | None, on_hold: Callable[[float], Awaitable[None]] | None = None
    ) -> Routed | RequestRejected:
        """Within its own deadline, whatever fails: in full duplex Envoy has none.

        Longer only after `on_hold` has been awaited, with the longest time that may take, ms.
        """
        ...

    def response_observer(self, decision_id: str) -> ResponseObserver | None:
        """Who wants to see this request's response, which passes through here chunk by chunk; None: nobody."""
        ...

    def served(self, decision_id: str, address: str) -> None:
        """Envoy says which endpoint answers this request."""
        ...

    def answered(self, decision_id: str, address: str, status: int) -> None:
        """And with which status."""
        ...

    def finished(self, decision_id: str, *, completed: bool) -> None: ...

    def rejected(self, reason: RejectReason) -> None: ...


@dataclass(slots=True)
class _Run:
    """What the edge knows of one stream beside its machine."""

    stream: Stream
    decision_id: str | None = None
    observer: ResponseObserver | None = None


class ExtProcServer:
    """Serves `ExternalProcessor` and, on its own port, gRPC health."""

    def __init__(
        self,
        director: Director,
        registry: CollectorRegistry,
        clock: Clock,
        *,
        max_body_bytes: int,
        token: str | None = None,
    ) -> None:
        """`token`: the bearer token that callers must bring; None asks for none."""
        self._director = director
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._log = structlog.get_logger()
        self._open = Gauge(
            "leadtime_router_extproc_streams", "Open ext-proc streams: requests under way.", registry=registry
        )
        self._aborts = Counter(
            "leadtime_router_extproc_aborts_total", "Streams ended with a status.", ["reason"], registry=registry
        )
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._streams = 0
        self._called = False
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_streams(self) -> int:
        return self._streams

    async def start(
        self,
        host: str,
        port: int,
        health_port: int,
        credentials: grpc.ServerCredentials | None = None,
    ) -> tuple[int, int]:
        """Bind both ports (0 takes a free one) and serve; returns the bound ports.

        Raises ConfigurationError where nobody can listen there.
        """
        server = grpc.aio.server(
            options=[
                # A buffered body is one message; the stream refuses what is over its own limit with a 413.
                ("grpc.max_receive_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                # An Envoy that is gone without a word must not keep its requests in the ledger.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ep.ProcessingRequest.FromString,
            response_serializer=ep.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {_METHOD: handler}),))
        bound = _bind(server, "EXTPROC_PORT", host, port, credentials)
        probes = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, probes)
        bound_health = _bind(probes, "HEALTH_PORT", host, health_port, None)
        self._servers = [server, probes]
        for item in self._servers:
            await item.start()
        return bound, bound_health

    async def set_ready(self, ready: bool) -> None:
        """What gRPC health says. Liveness stays SERVING while the process runs, and the service that Envoy asks for
        until it stops: a router without an endpoint answers for itself (503 with a reason), and one that doesn't answer
        health either is left out.
        """
        for name in HEALTH_SERVICES:
            serving = name == "liveness" or (name == SERVICE and not self._stopping) or ready
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(name, status)

    async def stop(self, grace_s: float, *, lame_duck_s: float = 0.0) -> None:
        """Turn health to NOT_SERVING; take new streams for as long as Envoy may need to see that, if it ever sent one;
        let the running ones end within the grace; close.
        """
        self._stopping = True
        await self.set_ready(False)
        if self._called:
            await asyncio.sleep(lame_duck_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for server in self._servers:
            await server.stop(0.5)

    async def _process(self, _requests: Any, context: Any) -> None:
        # Explicit reads and writes, not an async generator: a cancelled generator is finalised some time later, and the
        # ledger must be told at once.
        if self._authorization is not None:
            await self._admit(context)
        run = _Run(Stream(self._max_body_bytes))
        completed = False
        self._enter()
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await self._carry_out(run, run.stream.receive(message), context)
            completed = not run.stream.response_cut
        except (asyncio.CancelledError, grpc.aio.AbortError):
            completed = run.stream.response_whole
            raise
        except DecodeError:  # the caller's fault: counted, and no traceback for each
            await self._abort(context, "not_a_message")
        except Exception:  # whatever it was, the stream must end with a status: where Envoy can, it fails open
            self._log.exception("ext-proc stream failed")
            await self._abort(context, "internal_error")
        finally:
            if run.decision_id is not None:
                self._director.finished(run.decision_id, completed=completed)
            self._leave()

    async def _admit(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), self._authorization or b""):
            self._aborts.labels("unauthenticated").inc()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")

    async def _carry_out(self, run: "_Run", effects: list[Effect], context: Any) -> None:
        if effects and isinstance(effects[-1], ResponseEnd):
            # Once Envoy has the last chunk back it resets the stream: what comes after that write may never be run.
            effects = sorted(effects, key=lambda effect: isinstance(effect, Send))
        for effect in effects:
            match effect:
                case Send():
                    await context.write(effect.message)
                case Decide():
                    result = await self._director.decide(
                        effect.head, effect.body, partial(self._more_time, run, context)
                    )
                    if isinstance(result, Routed):
                        run.decision_id = result.decision_id
                    await self._carry_out(run, run.stream.decided(result), context)
                case Abort():
                    await self._abort(context, effect.reason)
                case Rejected():
                    self._director.rejected(effect.reason)
                case RestoringFailed():
                    self._log.error("restoring a model's name failed", error=effect.error)
                case ResponseHead() | ResponseChunk() | ResponseEnd():
                    self._show(run, effect)

    async def _more_time(self, run: "_Run", context: Any, longest_ms: float) -> None:
        await self._carry_out(run, run.stream.more_time(longest_ms), context)

    def _show(self, run: "_Run", effect: ResponseHead | ResponseChunk | ResponseEnd) -> None:
        """Tell the observer, whose fault must not cost a response that is under way."""
        try:
            match effect:
                case ResponseHead():
                    if effect.served is not None and run.decision_id is not None:
                        self._director.served(run.decision_id, effect.served)
                        self._director.answered(run.decision_id, effect.served, effect.status)
                    if effect.body_shown and run.decision_id is not None:
                        run.observer = self._director.response_observer(run.decision_id)
                    if run.observer is not None:
                        run.observer.headers(effect.status, effect.headers, effect.served, self._clock.monotonic_ms())
                case ResponseChunk() if run.observer is not None:
                    run.observer.body(effect.chunk, self._clock.monotonic_ms())
                case ResponseEnd() if run.observer is not None:
                    run.observer.end(self._clock.monotonic_ms())
        except Exception:
            self._log.exception("response observer failed")
            run.observer = None

    async def _abort(self, context: Any, reason: str) -> None:
        self._aborts.labels(reason).inc()
        await context.abort(grpc.StatusCode.INTERNAL, reason)

    def _enter(self) -> None:
        self._called = True
        self._streams += 1
        self._open.inc()
        self._idle.clear()

    def _leave(self) -> None:
        self._streams -= 1
        self._open.dec()
        if self._streams == 0:
            self._idle.set()


def _bind(
    server: grpc.aio.Server, setting: str, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Bind one listener; raises ConfigurationError where nobody can listen there."""
    address = f"{host}:{port}"
    try:
        bound: int = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:  # grpc says no more than that it failed
        raise ConfigurationError(
            f"{setting}: can't listen on {address}: taken, or no address of this machine"
        ) from None
    return bound
