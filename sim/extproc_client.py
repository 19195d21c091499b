"""Envoy's half of an ext-proc stream, for tests and benchmarks that need no Envoy. Real gRPC, BUFFERED request bodies.

Limits: sends what Envoy 1.40 sends in the shape we deploy (request body BUFFERED, response body NONE, trailers SEND);
its timing is the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_MODE: Final = processing_mode_pb2.ProcessingMode


def headers_message(
    headers: Mapping[str, str],
    *,
    end_of_stream: bool = False,
    subset: str | None = None,
    body_mode: int = _MODE.BUFFERED,
) -> Any:
    """The first message of a stream."""
    message = ep.ProcessingRequest(
        request_headers=ep.HttpHeaders(
            headers=base_pb2.HeaderMap(
                headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
            ),
            end_of_stream=end_of_stream,
        ),
        protocol_config=ep.ProtocolConfiguration(request_body_mode=body_mode, response_body_mode=_MODE.NONE),
    )
    if subset is not None:
        namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        namespace.fields["x-gateway-destination-endpoint-subset"].string_value = subset
    return message


def body_message(body: bytes) -> Any:
    """A buffered request body."""
    return ep.ProcessingRequest(request_body=ep.HttpBody(body=body, end_of_stream=True))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the router said: a pick or an immediate response."""

    destinations: tuple[str, ...]
    header: str | None
    metadata: str | None
    status: int | None
    body: bytes
    headers: Mapping[str, str]


def read_answer(response: Any) -> Answer:
    """A ProcessingResponse that ends the request phase → Answer."""
    kind = response.WhichOneof("response")
    if kind == "immediate_response":
        immediate = response.immediate_response
        return Answer((), None, None, immediate.status.code, immediate.body, _headers(immediate.headers))
    phase = getattr(response, kind)
    header = _headers(phase.response.header_mutation).get("x-gateway-destination-endpoint")
    metadata = response.dynamic_metadata.fields
    picked = metadata["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
    ours = metadata["leadtime"].struct_value.fields["d"].string_value if "leadtime" in metadata else None
    return Answer(
        tuple(picked.split(",")) if picked else (), header, ours, None, b"", _headers(phase.response.header_mutation)
    )


def _headers(mutation: Any) -> dict[str, str]:
    return {
        option.header.key: (option.header.raw_value or option.header.value.encode()).decode()
        for option in mutation.set_headers
    }


class ExtProcClient:
    """A channel to a router's ext-proc port."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        )
        self._process = self._channel.stream_stream(
            _METHOD,
            request_serializer=ep.ProcessingRequest.SerializeToString,
            response_deserializer=ep.ProcessingResponse.FromString,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def stream(self) -> "RequestStream":
        """Open the stream of one request."""
        return RequestStream(self._process())

    async def pick(
        self, path: str, body: bytes | None, headers: Mapping[str, str] | None = None, subset: str | None = None
    ) -> Answer:
        """One whole request that ends at once."""
        stream = self.stream()
        answer = await stream.request(path, body, headers, subset)
        await stream.end()
        return answer


class RequestStream:
    """One HTTP request as the router sees it: open until `end` or `reset`."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: Any) -> Any:
        """Send one message and wait for its answer."""
        await self.call.write(message)
        return await self.call.read()

    async def request(
        self, path: str, body: bytes | None, headers: Mapping[str, str] | None = None, subset: str | None = None
    ) -> Answer:
        """The request phase; raises grpc.aio.AioRpcError if the router ended the stream with a status."""
        head = {
            ":method": "GET" if body is None else "POST",
            ":path": path,
            ":authority": "test",
            "content-type": "application/json",
            **({} if body is None else {"content-length": str(len(body))}),
            **(headers or {}),
        }
        response = await self.send(headers_message(head, end_of_stream=body is None, subset=subset))
        if body is not None and response is not grpc.aio.EOF and response.WhichOneof("response") == "request_headers":
            response = await self.send(body_message(body))
        if response is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self.call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details()
            )
        return read_answer(response)

    async def end(self) -> None:
        """The HTTP request is over: Envoy closes its side, the router closes its own."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass

    def reset(self) -> None:
        """The client went away: Envoy resets the stream."""
        self.call.cancel()
