"""An ext-proc server that picks as told and shows each response to a `CompletionObserver`, as a router does.

The shape is the one that a control plane imposes: response bodies FULL_DUPLEX_STREAMED, each chunk sent back before it
is looked at, but for the last: Envoy resets the stream as soon as it has that, and the handler may be cancelled before
it looks. Request bodies are BUFFERED: how a request comes in has no part in its labels.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.router.completion import CompletionObserver
from services.router.extproc.messages import CONTINUE_REQUEST_HEADERS, Routed, routed_body
from shared import names
from shared.samples import DecisionMetadata, encode_decision
from shared.verdicts import Verdict
from tests.fakes.fake_picker import HEALTH_SERVICE


def monotonic_ms() -> float:
    return time.monotonic_ns() / 1e6


def observed_mode(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """The rendered bootstrap, with response headers and bodies shown to the picker."""
    manager = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
    mode.update(response_header_mode="SEND", response_body_mode="FULL_DUPLEX_STREAMED", response_trailer_mode="SEND")
    return bootstrap


@dataclass
class ObservingPicker(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Asks `decide(headers)` for each request's decision; keeps what became of it by decision id."""

    decide: Callable[[dict[str, str]], DecisionMetadata]
    completions: dict[str, Verdict] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    chunks: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0

    async def Process(self, _: Any, context: Any) -> None:  # noqa: N802 - read and written explicitly, as the router does
        headers: dict[str, str] = {}
        observer: CompletionObserver | None = None
        decision_id = ""
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    headers = _headers(message.request_headers)
                    await context.write(CONTINUE_REQUEST_HEADERS)
                elif kind == "request_body":
                    decision = self.decide(headers)
                    decision_id = decision.decision_id
                    addresses = tuple(endpoint.address for endpoint in decision.endpoints)
                    answer = routed_body(Routed(addresses, decision_id, encode_decision(decision)))
                    observer = CompletionObserver(
                        decision,
                        sent_ms=monotonic_ms(),
                        done=lambda completion, key=decision_id: self.completions.__setitem__(key, completion),
                    )
                    await context.write(answer)
                else:
                    assert observer is not None
                    await self._response(context, observer, kind, message)
        finally:
            self.ended.add(decision_id)
            if observer is not None:
                observer.closed(monotonic_ms())
            async with self.changed:
                self.changed.notify_all()

    async def _response(self, context: Any, observer: CompletionObserver, kind: str, message: Any) -> None:
        now_ms = monotonic_ms()
        if kind == "response_headers":
            served = message.metadata_context.filter_metadata[names.LB_NAMESPACE].fields[names.DESTINATION_SERVED]
            headers = _headers(message.response_headers)
            observer.headers(int(headers[":status"]), headers, served.string_value or None, now_ms)
            if message.response_headers.end_of_stream:
                observer.end(now_ms)
            await context.write(ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse()))
        elif kind == "response_body":
            self.chunks += 1
            part = message.response_body
            answer = ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse())
            streamed = answer.response_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = part.body, part.end_of_stream
            if not part.end_of_stream:
                await context.write(answer)
            if part.body:
                observer.body(part.body, now_ms)
            if part.end_of_stream:
                observer.end(now_ms)
                await context.write(answer)
        else:
            observer.end(now_ms)
            await context.write(ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse()))

    async def completion(self, decision_id: str, *, timeout_s: float = 10.0) -> Verdict:
        """What became of a request, as soon as its stream has ended."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: decision_id in self.ended)
        return self.completions[decision_id]


def _headers(part: Any) -> dict[str, str]:
    return {header.key: header.raw_value.decode() or header.value for header in part.headers.headers}


@contextlib.asynccontextmanager
async def observing_picker(decide: Callable[[dict[str, str]], DecisionMetadata]) -> AsyncIterator[ObservingPicker]:
    """A running picker; its `port` answers health checks too."""
    picker = ObservingPicker(decide)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set(HEALTH_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    picker.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield picker
    finally:
        await server.stop(0.2)
