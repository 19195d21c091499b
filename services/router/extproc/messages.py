"""Envoy's ext-proc messages ↔ plain values. The only module that knows the protobufs' shapes. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from services.router.request.errors import RequestRejected
from shared.names import (
    DECISION_ID,
    DESTINATION,
    DESTINATION_SUBSET,
    LB_NAMESPACE,
    METADATA_KEY,
    METADATA_NAMESPACE,
    REASON,
    SUBSET_NAMESPACE,
)

BodyMode = processing_mode_pb2.ProcessingMode.BodySendMode

# Answers that say "go on" to one phase each.
CONTINUE_REQUEST_HEADERS: Final = ep.ProcessingResponse(request_headers=ep.HeadersResponse())
CONTINUE_RESPONSE_HEADERS: Final = ep.ProcessingResponse(response_headers=ep.HeadersResponse())
CONTINUE_REQUEST_TRAILERS: Final = ep.ProcessingResponse(request_trailers=ep.TrailersResponse())
CONTINUE_RESPONSE_TRAILERS: Final = ep.ProcessingResponse(response_trailers=ep.TrailersResponse())


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The request line and headers as Envoy saw them. `subset`: the only addresses allowed, None without a hint.

    `response_shown`: Envoy will show the response's body on this stream.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    subset: frozenset[str] | None = None
    response_shown: bool = False

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Routed:
    """An answer with endpoints. `metadata`: the encoded decision, None for requests that teach nothing.

    `body`: a new body for the endpoint, None keeps the client's bytes. `removed_headers`: of the client's, what doesn't
    go on to the endpoint.
    """

    destinations: tuple[str, ...]
    decision_id: str
    metadata: str | None
    body: bytes | None = field(default=None, repr=False)
    removed_headers: tuple[str, ...] = ()


def request_head(message: Any) -> RequestHead:
    """`ProcessingRequest` with request headers → RequestHead. Names are lower case in Envoy already."""
    headers = {
        h.key: h.value or h.raw_value.decode("utf-8", "replace") for h in message.request_headers.headers.headers
    }
    return RequestHead(
        headers.get(":method", ""),
        headers.get(":path", ""),
        headers,
        _subset(message),
        response_shown=message.protocol_config.response_body_mode != BodyMode.NONE,
    )


def _subset(message: Any) -> frozenset[str] | None:
    namespaces = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in namespaces:
        return None
    fields = namespaces[SUBSET_NAMESPACE].fields
    if DESTINATION_SUBSET not in fields:
        return None
    value = fields[DESTINATION_SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts = [item.string_value for item in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def routed_headers(routed: Routed) -> ep.ProcessingResponse:
    """The pick as the answer to the request-headers phase (requests without a body)."""
    return ep.ProcessingResponse(
        request_headers=ep.HeadersResponse(response=_common(routed)), dynamic_metadata=_metadata(routed)
    )


def routed_body(routed: Routed) -> ep.ProcessingResponse:
    """The pick as the answer to the buffered request body. Its length is touched only with a new body."""
    common = _common(routed)
    if routed.body is not None:
        common.body_mutation.body = routed.body
        common.header_mutation.set_headers.append(_header("content-length", str(len(routed.body))))
    return ep.ProcessingResponse(request_body=ep.BodyResponse(response=common), dynamic_metadata=_metadata(routed))


def _common(routed: Routed) -> ep.CommonResponse:
    return ep.CommonResponse(
        header_mutation=ep.HeaderMutation(
            set_headers=[_header(DESTINATION, ",".join(routed.destinations)), _header(DECISION_ID, routed.decision_id)],
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


def immediate(rejection: RequestRejected) -> ep.ProcessingResponse:
    """A rejection as Envoy's immediate response, in whichever phase it falls."""
    headers = [_header("content-type", "application/json"), _header(REASON, rejection.reason.value)]
    return ep.ProcessingResponse(
        immediate_response=ep.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=rejection.status),
            headers=ep.HeaderMutation(set_headers=headers),
            body=rejection.body(),
            details=f"leadtime_{rejection.reason.value}",
        )
    )
