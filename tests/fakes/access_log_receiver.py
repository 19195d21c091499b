"""An access-log gRPC service that keeps every entry as Envoy sent it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

HEALTH_SERVICE = "envoy.service.accesslog.v3.AccessLogService"


@dataclass
class AccessLogReceiver(als_pb2_grpc.AccessLogServiceServicer):
    """Entries in order of arrival, and the address to give to Envoy."""

    entries: list[accesslog_pb2.HTTPAccessLogEntry] = field(default_factory=list)
    messages: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0

    async def StreamAccessLogs(self, requests: AsyncIterator[als_pb2.StreamAccessLogsMessage], context: object):  # noqa: N802
        async for message in requests:
            self.messages += 1
            self.entries.extend(message.http_logs.log_entry)
            async with self.changed:
                self.changed.notify_all()
        return als_pb2.StreamAccessLogsResponse()

    async def entry(
        self, matches: Callable[[accesslog_pb2.HTTPAccessLogEntry], bool], *, timeout_s: float = 10.0
    ) -> accesslog_pb2.HTTPAccessLogEntry:
        """The first entry that matches, as soon as it is here."""

        def found() -> accesslog_pb2.HTTPAccessLogEntry | None:
            return next((entry for entry in self.entries if matches(entry)), None)

        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: found() is not None)
        entry = found()
        assert entry is not None
        return entry


@contextlib.asynccontextmanager
async def access_log_receiver() -> AsyncIterator[AccessLogReceiver]:
    """A running receiver; its `port` is set."""
    receiver = AccessLogReceiver()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(receiver, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set(HEALTH_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0.2)
