"""One access-log entry as plain numbers and text: what the rest of the collector judges. Pure.

`envoy_log.py` fills it from Envoy's protobuf message; tests fill it by hand. Instants are microseconds since the
epoch by Envoy's clock, spans are microseconds since `start_unix_us` unless said otherwise, unknown is None.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogEntry:
    """A request as Envoy saw it, from its first byte in to its last byte out."""

    start_unix_us: int
    duration_us: int
    """Start → end of the request, whichever way it ended."""
    tx_end_us: int | None
    """Start → last byte of the request sent upstream, on the last attempt: the zero of all labels."""
    rx_end_us: int | None
    """Start → last byte of the answer; None for an answer that didn't end."""
    first_body_us: int | None = None
    """Zero → first byte of the answer's body, which may be a role chunk or a comment: a lower bound, never a label."""
    last_byte_us: int | None = None
    """Zero → last byte of the answer."""
    first_content_unix_us: int | None = None
    """Instant at which the first event with content passed Envoy."""
    status: int
    """0 when the client left before there was one."""
    details: str = ""
    """Envoy's response code details, a fixed vocabulary."""
    flags: frozenset[str] = frozenset()
    """Names of Envoy's response flags that are set."""
    upstream_address: str | None
    """`ip:port` of the endpoint of the last attempt, IPv6 in brackets."""
    attempts: int = 1
    method: str = "POST"
    path: str = ""
    """Without its query."""
    user_agent: str = ""
    probe_marked: bool = False
    """The request carried the probe header."""
    event_stream: bool | None = None
    """Whether the answer was an event stream, where its content type was logged."""
    response_bytes: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    decision: str | None = None
    """The router's decision metadata, still encoded."""
    intermediate: bool = False
    """A start or periodic entry of a request that goes on."""
