"""An ext-proc server with a fixed pick, for tests of Envoy's config and of what follows a decision.

It answers BUFFERED requests as a router does: an empty answer to the headers, then header and metadata with the body
(at once with the headers where a request has no body), and then keeps the stream until Envoy closes it. It records
what it saw, so that tests can ask what reached a picker.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.router.extproc.messages import request_head
from shared import names

HEALTH_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


@dataclass
class FakePicker(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Lists `destination` for every request, with `metadata` as the decision when there is one."""

    destination: Sequence[str] = ()
    """`ip:port` in order; none answers without a pick."""
    metadata: str | None = None
    """The string under namespace `leadtime`, key `d`."""
    hang: bool = False
    """Never answer, as a frozen router."""
    hold_s: float = 0.0
    """Ask Envoy for more time, then answer this much later, as a router that holds a request on purpose."""
    refusal: tuple[int, bytes] | None = None
    """Answer with this status and JSON body instead of a pick, as a router does for a bad request."""
    headers: list[dict[str, str]] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    """Names of Envoy's routes, as a router reads them."""
    bodies: list[bytes] = field(default_factory=list)
    open_streams: int = 0
    ended_streams: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0
    health_port: int = 0
    checks: health.aio.HealthServicer = field(default_factory=health.aio.HealthServicer)

    async def set_healthy(self, healthy: bool) -> None:
        """What it answers to health checks."""
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.checks.set(HEALTH_SERVICE, status)

    async def Process(self, requests: AsyncIterator[ext_proc.ProcessingRequest], context: grpc.aio.ServicerContext):  # noqa: N802
        self.open_streams += 1
        try:
            async for message in requests:
                kind = message.WhichOneof("request")
                if self.hang:
                    await asyncio.Event().wait()
                if kind == "request_headers":
                    sent = message.request_headers
                    self.headers.append({h.key: h.raw_value.decode() or h.value for h in sent.headers.headers})
                    self.routes.append(request_head(message).route_name)
                    if sent.end_of_stream:
                        yield self._pick("request_headers")
                    else:
                        yield ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
                elif kind == "request_body":
                    if self.hold_s:
                        longer = ext_proc.ProcessingResponse()
                        longer.override_message_timeout.FromMilliseconds(int(2_000 * self.hold_s))
                        yield longer
                        await asyncio.sleep(self.hold_s)
                    self.bodies.append(message.request_body.body)
                    yield self._pick("request_body")
                elif kind == "response_trailers":
                    yield ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())
                else:
                    raise AssertionError(f"Envoy sent {kind}, which the config doesn't ask for")
        finally:
            self.open_streams -= 1
            self.ended_streams += 1
            async with self.changed:
                self.changed.notify_all()

    def _pick(self, kind: str) -> ext_proc.ProcessingResponse:
        response = ext_proc.ProcessingResponse()
        if self.refusal is not None:
            status, body = self.refusal
            response.immediate_response.status.code = status
            response.immediate_response.body = body
            kind_of_body = base_pb2.HeaderValue(key="content-type", raw_value=b"application/json")
            response.immediate_response.headers.set_headers.append(base_pb2.HeaderValueOption(header=kind_of_body))
            return response
        namespaces = struct_pb2.Struct()
        if self.destination:
            listed = ",".join(self.destination)
            option = base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=names.DESTINATION, raw_value=listed.encode()),
                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            getattr(response, kind).response.header_mutation.set_headers.append(option)
            namespaces.update({names.LB_NAMESPACE: {names.DESTINATION: listed}})
        else:
            getattr(response, kind).SetInParent()
        if self.metadata is not None:
            namespaces.update({names.METADATA_NAMESPACE: {names.METADATA_KEY: self.metadata}})
        response.dynamic_metadata.CopyFrom(namespaces)
        return response


@contextlib.asynccontextmanager
async def fake_picker(destination: Sequence[str] = (), metadata: str | None = None) -> AsyncIterator[FakePicker]:
    """A running fake picker; its `port` and `health_port` are set."""
    picker = FakePicker(tuple(destination), metadata)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    health_pb2_grpc.add_HealthServicer_to_server(picker.checks, server)
    await picker.set_healthy(True)
    picker.port = picker.health_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield picker
    finally:
        await server.stop(0.2)
