"""Envoy's ext-proc messages ↔ plain values. The only module that knows the protobufs' shapes. No I/O."""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from services.router.request.errors import RequestRejected
from shared.names import (
    ATTRIBUTES_FILTER,
    DECISION_ID,
    DESTINATION,
    DESTINATION_SERVED,
    DESTINATION_SUBSET,
    LB_NAMESPACE,
    METADATA_KEY,
    METADATA_NAMESPACE,
    REASON,
    ROUTE_ATTRIBUTE,
    SUBSET_NAMESPACE,
)
from shared.samples import MAX_ROUTE_CHARACTERS

BodyMode = processing_mode_pb2.ProcessingMode.BodySendMode

MAX_CHUNK_BYTES: Final = 62_000
"""Of a body that is sent back in full duplex: below the 64 KB that Envoy asks for."""

# Envoy takes 100 headers of 60 KB unless told otherwise, and doesn't show a picker all of them (credentials).
_CROWDED_COUNT: Final = 80
_CROWDED_BYTES: Final = 40_960

# Answers that say "go on" to one phase each.
CONTINUE_REQUEST_HEADERS: Final = ep.ProcessingResponse(request_headers=ep.HeadersResponse())
CONTINUE_RESPONSE_HEADERS: Final = ep.ProcessingResponse(response_headers=ep.HeadersResponse())
CONTINUE_REQUEST_BODY: Final = ep.ProcessingResponse(request_body=ep.BodyResponse())
CONTINUE_RESPONSE_BODY: Final = ep.ProcessingResponse(response_body=ep.BodyResponse())
CONTINUE_REQUEST_TRAILERS: Final = ep.ProcessingResponse(request_trailers=ep.TrailersResponse())
CONTINUE_RESPONSE_TRAILERS: Final = ep.ProcessingResponse(response_trailers=ep.TrailersResponse())


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The request line and headers as Envoy saw them.

    `subset`: the only endpoints allowed, `ip:port` (IPv6 in brackets, short form) or a bare `ip`; None without a hint,
    empty where the hint names nobody. `response_shown`: Envoy will show the response's body on this stream.
    `body_hidden`: there is a body, but this stream isn't shown it, or need not wait for it. `crowded`: the headers come
    near Envoy's limits. `route_name`: of the gateway's route that matched, "" where it doesn't say.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    subset: frozenset[str] | None = None
    response_shown: bool = False
    body_hidden: bool = False
    crowded: bool = False
    route_name: str = ""

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


@dataclass(frozen=True, slots=True)
class RestoredName:
    """In the response the served `model` is to be called `name`, as the client called it."""

    model: str
    name: str


@dataclass(frozen=True, slots=True)
class Routed:
    """An answer with endpoints, best first, each `ip:port` with IPv6 in brackets.

    `metadata`: the encoded decision, None for requests that teach nothing. `body`: a new body for the endpoint, None
    keeps the client's bytes. `removed_headers`: of the client's, what doesn't go on to the endpoint. `restored`: the
    name to put back in the response, None leaves it alone.
    """

    destinations: tuple[str, ...]
    decision_id: str
    metadata: str | None
    body: bytes | None = field(default=None, repr=False)
    removed_headers: tuple[str, ...] = ()
    restored: RestoredName | None = None


def header_map(message: Any) -> dict[str, str]:
    """Envoy's headers by name, lower case already; of a repeated name the values in a row, as HTTP reads them."""
    headers: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    for header in message.headers.headers:
        value = header.value or header.raw_value.decode("utf-8", "replace")
        if header.key in headers:
            repeated.setdefault(header.key, [headers[header.key]]).append(value)
        else:
            headers[header.key] = value
    for name, values in repeated.items():
        headers[name] = ", ".join(values)
    return headers


def request_head(message: Any, *, body_hidden: bool = False) -> RequestHead:
    """`ProcessingRequest` with request headers → RequestHead."""
    headers = header_map(message.request_headers)
    return RequestHead(
        headers.get(":method", ""),
        headers.get(":path", ""),
        headers,
        _subset(message),
        response_shown=message.protocol_config.response_body_mode != BodyMode.NONE,
        body_hidden=body_hidden,
        crowded=(
            len(message.request_headers.headers.headers) > _CROWDED_COUNT
            or message.request_headers.ByteSize() > _CROWDED_BYTES
        ),
        route_name=_route_name(message),
    )


def _route_name(message: Any) -> str:
    """A longer name than a sample may carry is none."""
    if ATTRIBUTES_FILTER not in message.attributes:  # a look-up would add it
        return ""
    value = message.attributes[ATTRIBUTES_FILTER].fields.get(ROUTE_ATTRIBUTE)
    name = value.string_value if value is not None else ""
    return name if len(name) <= MAX_ROUTE_CHARACTERS else ""


def served_endpoint(message: Any) -> str | None:
    """The endpoint that Envoy says it reached, from a message of the response phase; None where it doesn't say."""
    value = _metadata_value(message, LB_NAMESPACE, DESTINATION_SERVED)
    return (value.string_value or None) if value is not None else None


def _metadata_value(message: Any, namespace: str, key: str) -> Any:
    namespaces = message.metadata_context.filter_metadata
    if namespace not in namespaces:  # a look-up would add it
        return None
    fields = namespaces[namespace].fields
    return fields.get(key)


def _subset(message: Any) -> frozenset[str] | None:
    value = _metadata_value(message, SUBSET_NAMESPACE, DESTINATION_SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        texts = [part for item in value.list_value.values for part in item.string_value.split(",")]
    else:
        texts = value.string_value.split(",")
    return frozenset(_endpoint(text.strip()) for text in texts if text.strip())


def _endpoint(text: str) -> str:
    """One spelling for each endpoint of a hint; what is no address stays as it is, and names nobody."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return text
    if not port:
        return str(address)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def routed_headers(routed: Routed, *, crowded: bool = False) -> ep.ProcessingResponse:
    """The pick as the answer to the request-headers phase: no body, one that isn't seen, or full duplex."""
    return ep.ProcessingResponse(
        request_headers=ep.HeadersResponse(response=_common(routed, crowded=crowded)),
        dynamic_metadata=_metadata(routed),
    )


def routed_body(routed: Routed, *, crowded: bool = False) -> ep.ProcessingResponse:
    """The pick as the answer to the buffered request body. Its length is touched only with a new body."""
    common = _common(routed, crowded=crowded)
    if routed.body is not None:
        common.body_mutation.body = routed.body
        common.header_mutation.set_headers.append(_header("content-length", str(len(routed.body))))
    return ep.ProcessingResponse(request_body=ep.BodyResponse(response=common), dynamic_metadata=_metadata(routed))


def routed_trailers(routed: Routed) -> ep.ProcessingResponse:
    """The pick as the answer to the request trailers, where a request had no byte of a body before them: by metadata
    alone, since the headers have been answered.
    """
    return ep.ProcessingResponse(request_trailers=ep.TrailersResponse(), dynamic_metadata=_metadata(routed))


def request_chunks(body: bytes, *, end: bool) -> Iterator[ep.ProcessingResponse]:
    """A request body as Envoy wants it back in full duplex; `end` marks the last chunk, which may be empty."""
    for chunk, last in _chunks(body, end=end):
        yield ep.ProcessingResponse(request_body=_streamed(chunk, end=last))


def response_chunks(body: bytes, *, end: bool) -> Iterator[ep.ProcessingResponse]:
    """A chunk of the response, the same way."""
    for chunk, last in _chunks(body, end=end):
        yield ep.ProcessingResponse(response_body=_streamed(chunk, end=last))


def changed_response_headers() -> ep.ProcessingResponse:
    """Go on, with a body that may get another length."""
    mutation = ep.HeaderMutation(remove_headers=["content-length"])
    return ep.ProcessingResponse(
        response_headers=ep.HeadersResponse(response=ep.CommonResponse(header_mutation=mutation))
    )


def changed_response_body(body: bytes) -> ep.ProcessingResponse:
    """A chunk of the response to send on in place of the one that came (response body STREAMED)."""
    response = ep.BodyResponse()
    if body:
        response.response.body_mutation.body = body
    else:
        response.response.body_mutation.clear_body = True
    return ep.ProcessingResponse(response_body=response)


def _chunks(body: bytes, *, end: bool) -> Iterator[tuple[bytes, bool]]:
    if len(body) <= MAX_CHUNK_BYTES:
        yield body, end
        return
    for start in range(0, len(body), MAX_CHUNK_BYTES):
        yield body[start : start + MAX_CHUNK_BYTES], end and start + MAX_CHUNK_BYTES >= len(body)


def _streamed(chunk: bytes, *, end: bool) -> ep.BodyResponse:
    response = ep.BodyResponse()
    streamed = response.response.body_mutation.streamed_response
    streamed.body = chunk
    streamed.end_of_stream = end
    return response


def _common(routed: Routed, *, crowded: bool) -> ep.CommonResponse:
    """`crowded`: nothing is added. Envoy answers with a 500 where an answer's headers pass the limits that a client's
    have just met; the metadata carries the pick there.
    """
    if crowded and not routed.removed_headers:
        return ep.CommonResponse()  # an empty mutation is checked as well
    added = () if crowded else ((DESTINATION, ",".join(routed.destinations)), (DECISION_ID, routed.decision_id))
    return ep.CommonResponse(
        header_mutation=ep.HeaderMutation(
            set_headers=[_header(name, value) for name, value in added],
            remove_headers=routed.removed_headers,
        ),
    )


def _metadata(routed: Routed) -> struct_pb2.Struct:
    metadata = struct_pb2.Struct()
    metadata.fields[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = ",".join(routed.destinations)
    if routed.metadata is not None:
        metadata.fields[METADATA_NAMESPACE].struct_value.fields[METADATA_KEY].string_value = routed.metadata
    return metadata


def _header(name: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def more_time(longest_ms: float) -> ep.ProcessingResponse:
    """Asks Envoy to wait so long for the answer to the present phase, once; it grants its `max_message_timeout`."""
    response = ep.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(max(int(longest_ms), 1))
    return response


def immediate(rejection: RequestRejected) -> ep.ProcessingResponse:
    """A rejection as Envoy's immediate response, in whichever phase it falls."""
    headers = [_header("content-type", "application/json"), _header(REASON, rejection.reason.value)]
    headers += [_header(name, value) for name, value in rejection.headers().items()]
    return ep.ProcessingResponse(
        immediate_response=ep.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=rejection.status),
            headers=ep.HeaderMutation(set_headers=headers),
            body=rejection.body(),
            details=f"leadtime_{rejection.reason.value}",
        )
    )
