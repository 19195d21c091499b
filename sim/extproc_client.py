"""Envoy's half of an ext-proc stream, for tests and benchmarks that need no Envoy. Real gRPC.

Two shapes, as Envoy 1.40 speaks them: `buffered` is what we deploy (request body BUFFERED, response body NONE, trailers
SEND); `full_duplex` is what Istio imposes on an InferencePool (both bodies FULL_DUPLEX_STREAMED), where the body goes
out in chunks, nothing comes back before its end, and then headers and the body come back.

Limits: timing is the caller's; request trailers are messages that the caller sends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_MODE: Final = processing_mode_pb2.ProcessingMode
_CHUNK_BYTES: Final = 65_536

Shape = Literal["buffered", "full_duplex"]


def headers_message(
    headers: Mapping[str, str],
    *,
    end_of_stream: bool = False,
    subset: str | Sequence[str] | None = None,
    body_mode: int = _MODE.BUFFERED,
    response_body_mode: int = _MODE.NONE,
) -> Any:
    """The first message of a stream. `subset`: the hint as text, or as a list value."""
    message = ep.ProcessingRequest(
        request_headers=ep.HttpHeaders(headers=_header_map(headers), end_of_stream=end_of_stream),
        protocol_config=ep.ProtocolConfiguration(request_body_mode=body_mode, response_body_mode=response_body_mode),
    )
    if subset is not None:
        namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        value = namespace.fields["x-gateway-destination-endpoint-subset"]
        if isinstance(subset, str):
            value.string_value = subset
        else:
            value.list_value.extend(subset)
    return message


def body_message(body: bytes, *, end_of_stream: bool = True) -> Any:
    """A buffered request body, or a chunk of one."""
    return ep.ProcessingRequest(request_body=ep.HttpBody(body=body, end_of_stream=end_of_stream))


def trailers_message() -> Any:
    """Request trailers: in full duplex the end of a body whose last chunk didn't say so."""
    message = ep.ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def response_headers_message(
    headers: Mapping[str, str], *, served: str | None = None, end_of_stream: bool = False
) -> Any:
    """The response's headers (`:status` among them), with the endpoint that Envoy reached."""
    message = ep.ProcessingRequest(
        response_headers=ep.HttpHeaders(headers=_header_map(headers), end_of_stream=end_of_stream)
    )
    if served is not None:
        namespace = message.metadata_context.filter_metadata["envoy.lb"]
        namespace.fields["x-gateway-destination-endpoint-served"].string_value = served
    return message


def response_body_message(body: bytes, *, end_of_stream: bool = False) -> Any:
    """A chunk of the response."""
    return ep.ProcessingRequest(response_body=ep.HttpBody(body=body, end_of_stream=end_of_stream))


def response_trailers_message() -> Any:
    """The response's trailers."""
    message = ep.ProcessingRequest()
    message.response_trailers.SetInParent()
    return message


def _header_map(headers: Mapping[str, str]) -> Any:
    return base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    )


def chunked(body: bytes, size: int = _CHUNK_BYTES) -> list[tuple[bytes, bool]]:
    """(chunk, end of stream) of a body; its end comes as an empty chunk, as Envoy sends it."""
    return [*((body[i : i + size], False) for i in range(0, len(body), size)), (b"", True)]


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
    """A channel to a router's ext-proc port; its streams have one `shape`."""

    def __init__(
        self,
        address: str,
        *,
        shape: Shape = "buffered",
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`metadata` goes with every call: a bearer token, say."""
        self._shape: Shape = shape
        self._metadata = tuple(metadata)
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = (
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
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
        return RequestStream(self._process(metadata=self._metadata), self._shape)

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

    def __init__(self, call: Any, shape: Shape = "buffered") -> None:
        self.call = call
        self.shape = shape
        self.echo = b""
        """In full duplex: the request body as it came back."""

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
        if self.shape == "full_duplex":
            return await self._full_duplex(head, body, subset)
        response = await self.send(headers_message(head, end_of_stream=body is None, subset=subset))
        if body is not None and response is not grpc.aio.EOF and response.WhichOneof("response") == "request_headers":
            response = await self.send(body_message(body))
        return read_answer(await self._answered(response))

    async def _full_duplex(self, head: Mapping[str, str], body: bytes | None, subset: str | None) -> Answer:
        mode = _MODE.FULL_DUPLEX_STREAMED
        await self.call.write(
            headers_message(head, end_of_stream=body is None, subset=subset, body_mode=mode, response_body_mode=mode)
        )
        for chunk, end in chunked(body) if body is not None else ():
            await self.call.write(body_message(chunk, end_of_stream=end))
        response = await self._answered(await self.call.read())
        if body is not None and response.WhichOneof("response") == "request_headers":
            self.echo = await self._streamed("request_body")
        return read_answer(response)

    async def respond(self, headers: Mapping[str, str], chunks: Iterable[bytes], served: str | None = None) -> bytes:
        """The response phase in full duplex, message by message; returns the response as it came back."""
        await self._answered(await self.send(response_headers_message(headers, served=served)))
        parts = list(chunks)
        for number, chunk in enumerate(parts):
            await self.call.write(response_body_message(chunk, end_of_stream=number == len(parts) - 1))
        return await self._streamed("response_body")

    async def _streamed(self, phase: str) -> bytes:
        """Read a body that comes back in chunks, to its end."""
        parts = []
        while True:
            response = await self._answered(await self.call.read())
            streamed = getattr(response, phase).response.body_mutation.streamed_response
            parts.append(streamed.body)
            if streamed.end_of_stream:
                return b"".join(parts)

    async def _answered(self, response: Any) -> Any:
        if response is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self.call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details()
            )
        return response

    async def end(self) -> None:
        """The HTTP request is over: Envoy closes its side, the router closes its own."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass

    def reset(self) -> None:
        """The client went away: Envoy resets the stream."""
        self.call.cancel()
