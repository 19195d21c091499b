"""The edge to Envoy: the access-log gRPC service. Each message may carry many entries; all are judged at once.

Judging is synchronous and the outbox never blocks, so a message is done before the next is read: a flood is held back
by HTTP/2's flow control, and no queue grows here. A stream is ended after a set age and when the service stops, right
after a message: Envoy writes the next one no sooner than its flush interval, so hardly anything is in flight, and its
next stream goes to whichever collector is next.

Limits: Envoy sends and forgets. What it couldn't deliver it drops and counts in its own stats (`logs_dropped`).
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import structlog
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.collector.entry import AccessLogEntry
from services.collector.envoy_log import plain_entry
from services.collector.metrics import CollectorMetrics
from services.collector.settings import CollectorSettings
from shared.clock import Clock
from shared.errors import ConfigurationError

HEALTH_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
MAX_MESSAGE_BYTES: Final = 16 << 20
STOP_GRACE_S: Final = 0.5
"""A few flush intervals: a stream that stays silent that long has nothing in flight."""


class AccessLogIntake(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Hands each entry to `take`. One object serves all streams of the process."""

    def __init__(
        self,
        take: Callable[[AccessLogEntry], None],
        settings: CollectorSettings,
        metrics: CollectorMetrics,
        clock: Clock,
    ) -> None:
        self._take = take
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._open = 0
        self._stopping = asyncio.Event()
        self._token = settings.als_token.get_secret_value().encode() if settings.als_token else None
        self._log = structlog.get_logger()

    async def StreamAccessLogs(  # noqa: N802
        self, requests: AsyncIterator[Any], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> Any:
        """One Envoy worker's stream."""
        await self._admit(context)
        self._open += 1
        self._metrics.als_streams.set(self._open)
        end_ms = self._clock.monotonic_ms() + self._settings.als_stream_age_s * 1e3
        try:
            async for message in requests:
                self._metrics.als_messages.inc()
                for entry in message.http_logs.log_entry:
                    self._take(plain_entry(entry))
                if self._stopping.is_set() or self._clock.monotonic_ms() >= end_ms:
                    break
        finally:
            self._open -= 1
            self._metrics.als_streams.set(self._open)
        return als_pb2.StreamAccessLogsResponse()

    async def _admit(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        if self._token is not None:
            given = dict(context.invocation_metadata() or ()).get("authorization", "")
            if not hmac.compare_digest(str(given).encode(), b"Bearer " + self._token):
                self._metrics.als_refused.labels("token").inc()
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
        if self._open >= self._settings.als_max_streams:
            self._metrics.als_refused.labels("limit").inc()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many access-log streams")

    def stop(self) -> None:
        """End every stream after its next message."""
        self._stopping.set()


@contextlib.asynccontextmanager
async def serve_access_logs(intake: AccessLogIntake, settings: CollectorSettings) -> AsyncIterator[int]:
    """Serve access logs and gRPC health while the context is open; yields the port.

    On leaving, health turns to NOT_SERVING, streams end after their next message, and silent ones after a grace.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # A forgotten second process on the same port would swallow entries in silence.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ]
    )
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(intake, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for service in ("", HEALTH_SERVICE):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    host = f"[{settings.als_host}]" if ":" in settings.als_host.strip("[]") else settings.als_host
    try:
        port = server.add_insecure_port(f"{host}:{settings.als_port}")
    except RuntimeError:  # grpc says no more than that it failed
        address = f"{host}:{settings.als_port}"
        raise ConfigurationError(f"ALS_PORT: can't listen on {address}: taken, or no address of this machine") from None
    if port == 0:
        raise OSError(f"can't listen on {host}:{settings.als_port}")
    await server.start()
    try:
        yield port
    finally:
        await checks.enter_graceful_shutdown()
        intake.stop()
        await server.stop(STOP_GRACE_S)
