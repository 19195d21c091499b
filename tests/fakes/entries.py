"""Access-log entries as they come out of Envoy, plain and as protobuf, for tests of the collector."""

from typing import Any

from envoy.data.accesslog.v3 import accesslog_pb2

from services.collector.entry import AccessLogEntry
from shared import names
from shared.samples import encode_decision
from tests.fakes.decisions import make_decision

SERVED = "10.0.0.7:8000"
START_UNIX_US = 1_796_000_000_000_000


def make_entry(**changes: Any) -> AccessLogEntry:
    """A streamed answer of 21 tokens: zero at 4 ms, role chunk 100 later, content 400 later, end 600 later."""
    values: dict[str, Any] = {
        "start_unix_us": START_UNIX_US,
        "duration_us": 604_100,
        "tx_end_us": 4_000,
        "rx_end_us": 604_000,
        "first_body_us": 100_000,
        "last_byte_us": 600_000,
        "first_content_unix_us": START_UNIX_US + 404_000,
        "status": 200,
        "details": "via_upstream",
        "upstream_address": SERVED,
        "path": "/v1/chat/completions",
        "user_agent": "python-httpx/0.28.1",
        "event_stream": True,
        "response_bytes": 2_382,
        "input_tokens": 30,
        "output_tokens": 21,
        "cached_tokens": 16,
        "decision": encode_decision(make_decision(SERVED, "10.0.0.8:8000")),
    }
    return AccessLogEntry(**{**values, **changes})


def make_message(entry: AccessLogEntry) -> accesslog_pb2.HTTPAccessLogEntry:
    """The protobuf message from which Envoy's edge reads `entry`."""
    message = accesslog_pb2.HTTPAccessLogEntry()
    common = message.common_properties
    common.start_time.seconds, micros = divmod(entry.start_unix_us, 1_000_000)
    common.start_time.nanos = micros * 1_000
    spans = {
        "duration": entry.duration_us,
        "time_to_last_upstream_tx_byte": entry.tx_end_us,
        "time_to_last_upstream_rx_byte": entry.rx_end_us,
    }
    for field, span_us in spans.items():
        if span_us is not None:
            getattr(common, field).FromMicroseconds(span_us)
    common.custom_tags[names.TAG_FIRST_BODY_BYTE_US] = "-" if entry.first_body_us is None else str(entry.first_body_us)
    common.custom_tags[names.TAG_LAST_BYTE_US] = "-" if entry.last_byte_us is None else str(entry.last_byte_us)
    for flag in entry.flags:
        setattr(common.response_flags, flag, True)
    if entry.upstream_address is not None:
        host, _, port = entry.upstream_address.rpartition(":")
        common.upstream_remote_address.socket_address.address = host.strip("[]")
        common.upstream_remote_address.socket_address.port_value = int(port)
    common.upstream_request_attempt_count = entry.attempts
    common.access_log_type = (
        accesslog_pb2.AccessLogType.DownstreamPeriodic
        if entry.intermediate
        else accesslog_pb2.AccessLogType.DownstreamEnd
    )
    common.intermediate_log_entry = entry.intermediate
    spaces = common.metadata.filter_metadata
    if entry.decision is not None:
        spaces[names.METADATA_NAMESPACE].update({names.METADATA_KEY: entry.decision})
    if entry.first_content_unix_us is not None:
        spaces[names.LUA_NAMESPACE].update({names.LUA_FIRST_CONTENT: str(entry.first_content_unix_us)})
    usage = {
        names.USAGE_INPUT: entry.input_tokens,
        names.USAGE_OUTPUT: entry.output_tokens,
        names.USAGE_CACHED: entry.cached_tokens,
    }
    if any(count is not None for count in usage.values()):
        spaces[names.USAGE_NAMESPACE].update({key: count for key, count in usage.items() if count is not None})
    methods = accesslog_pb2.HTTPRequestProperties.DESCRIPTOR.fields_by_name["request_method"].enum_type
    message.request.request_method = methods.values_by_name[entry.method].number
    message.request.path = entry.path
    message.request.user_agent = entry.user_agent
    if entry.probe_marked:
        message.request.request_headers[names.PROBE] = "1"
    message.response.response_code.value = entry.status
    message.response.response_code_details = entry.details
    message.response.response_body_bytes = entry.response_bytes
    if entry.event_stream is not None:
        kind = "text/event-stream; charset=utf-8" if entry.event_stream else "application/json"
        message.response.response_headers["content-type"] = kind
    return message
