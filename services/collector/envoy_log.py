"""The edge to Envoy's protobuf: one `HTTPAccessLogEntry` → one plain entry. Nothing is judged here.

Reads only what a label needs; headers other than content type and the probe mark aren't logged by the config that
`deploy/local/envoy` renders, and a path loses its query here, so no prompt and no secret goes further.
"""

from typing import Any, Final

from envoy.data.accesslog.v3 import accesslog_pb2

from services.collector.entry import AccessLogEntry
from shared import names

_NO_FLAGS: Final[frozenset[str]] = frozenset()
_FINAL: Final = frozenset(
    {accesslog_pb2.AccessLogType.NotSet, accesslog_pb2.AccessLogType.DownstreamEnd}
)  # an Envoy that doesn't know the type sends one entry, at the end
_TOKENS_LIMIT: Final = 16_777_216


def plain_entry(message: Any) -> AccessLogEntry:
    """Fill a plain entry; a value that Envoy didn't write, or that isn't of its kind, is None."""
    common = message.common_properties
    request = message.request
    response = message.response
    spaces = common.metadata.filter_metadata
    tags = common.custom_tags
    input_tokens = output_tokens = cached_tokens = None
    if names.USAGE_NAMESPACE in spaces:
        usage = spaces[names.USAGE_NAMESPACE].fields
        input_tokens = _count(usage, names.USAGE_INPUT)
        output_tokens = _count(usage, names.USAGE_OUTPUT)
        cached_tokens = _count(usage, names.USAGE_CACHED)
    content_type = response.response_headers.get("content-type", "")
    return AccessLogEntry(
        start_unix_us=common.start_time.seconds * 1_000_000 + common.start_time.nanos // 1_000,
        duration_us=_span(common, "duration") or _span(common, "time_to_last_downstream_tx_byte") or 0,
        tx_end_us=_span(common, "time_to_last_upstream_tx_byte"),
        rx_end_us=_span(common, "time_to_last_upstream_rx_byte"),
        first_body_us=_number(tags.get(names.TAG_FIRST_BODY_BYTE_US)),
        last_byte_us=_number(tags.get(names.TAG_LAST_BYTE_US)),
        first_content_unix_us=_number(_text(spaces, names.LUA_NAMESPACE, names.LUA_FIRST_CONTENT)),
        status=response.response_code.value,
        details=response.response_code_details,
        flags=_flags(common),
        upstream_address=_address(common) or _text(spaces, names.LB_NAMESPACE, names.DESTINATION_SERVED),
        attempts=max(1, common.upstream_request_attempt_count),
        method=accesslog_method(request.request_method),
        path=request.path.partition("?")[0],
        user_agent=request.user_agent,
        probe_marked=names.PROBE in request.request_headers,
        event_stream=content_type.lower().startswith("text/event-stream") if content_type else None,
        response_bytes=response.response_body_bytes,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        decision=_text(spaces, names.METADATA_NAMESPACE, names.METADATA_KEY),
        intermediate=common.intermediate_log_entry or common.access_log_type not in _FINAL,
    )


def accesslog_method(number: int) -> str:
    """Name of Envoy's method enum; an unknown one is empty."""
    if number == _POST:
        return "POST"
    return _METHODS.get(number, "")


_METHODS: Final[dict[int, str]] = {
    value.number: value.name
    for value in accesslog_pb2.HTTPRequestProperties.DESCRIPTOR.fields_by_name["request_method"].enum_type.values
}
_POST: Final = next(number for number, name in _METHODS.items() if name == "POST")


def _span(common: Any, field: str) -> int | None:
    """Microseconds of a duration field; Envoy leaves out the ones that didn't happen."""
    if not common.HasField(field):
        return None
    duration = getattr(common, field)
    return int(duration.seconds * 1_000_000 + duration.nanos // 1_000)


def _number(text: str | None) -> int | None:
    """A count of microseconds as Envoy writes it: `-` or nothing where unknown."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 18 else None


def _text(spaces: Any, namespace: str, key: str) -> str | None:
    if namespace not in spaces:
        return None
    fields = spaces[namespace].fields
    return (fields[key].string_value or None) if key in fields else None


def _count(fields: Any, key: str) -> int | None:
    """A token count; Envoy's metadata holds numbers as doubles."""
    if key not in fields or fields[key].WhichOneof("kind") != "number_value":
        return None
    value = fields[key].number_value
    return int(value) if 0 <= value <= _TOKENS_LIMIT and value == int(value) else None


def _address(common: Any) -> str | None:
    if not common.HasField("upstream_remote_address"):
        return None
    address = common.upstream_remote_address
    if not address.HasField("socket_address"):
        return None
    host, port = address.socket_address.address, address.socket_address.port_value
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _flags(common: Any) -> frozenset[str]:
    if not common.HasField("response_flags"):
        return _NO_FLAGS
    return frozenset(field.name for field, _ in common.response_flags.ListFields())
