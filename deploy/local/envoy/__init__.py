"""Renders the one Envoy config: typed addresses in, a bootstrap as plain data out. Pure.

Envoy carries the bytes, a router picks the upstream over ext-proc, and each finished request becomes one access-log
entry to a collector. What each choice does was measured on Envoy 1.40:

- Shape `buffered`, ours: request body BUFFERED, response headers SKIP, response body NONE: two messages a request, and
  Python never sees an answer. Response trailers SEND keeps the picker's stream open to the end of the request, so that
  its close is the end (abort included), and sends no message for an answer without trailers. `failure_mode_allow`: a
  picker that is down, slow or wrong costs the decision, not the request; the pool falls back to round robin.
- Shape `full_duplex`, what Istio makes of an InferencePool: headers, bodies and trailers both ways, bodies
  FULL_DUPLEX_STREAMED. `failure_mode_allow` holds only while the picker is known to be gone, and no timeout holds, so
  the picker's cluster drops a member at its first failed connection and pings every second: with one router its death
  costs at most a request, with several none. Two Envoy defects bound it: two ext-proc filters of this shape on a route
  truncate bodies; and with retries on the route, request trailers make Envoy 1.40 send the body on twice (its router's
  copy for retries is played again), so clients speak HTTP/1.1, where trailers are dropped.
- Bodies above `body_limit_bytes` are a 413: in `buffered` by Envoy itself, in `full_duplex` by the router. Both come
  from the router's setting (`of_router`). A route that keeps no more than that of a body also can't try again with
  more.
- `restored_routes`, in `buffered`: their responses pass through the router, which puts the client's model name back;
  STREAMED, so that a router which dies in the middle costs the name and not the answer.
- Upgrades (WebSocket) have a route of their own without bodies shown: theirs end with the connection.
- `override_host` reads the pick from metadata only, tries the listed endpoints in order, and writes down the one that
  served. A client's own headers that would steer are removed before any filter sees them.
- `first_content.lua` writes the labels of event streams into metadata, and `json_to_metadata` those of JSON answers.
  accept-encoding is removed: an encoded answer blinds them. Envoy's own filter for event streams, `sse_to_metadata`, is
  not used: in 1.40 an event whose data is a JSON scalar (`data: null`) ends the whole process.

Limits: plain HTTP to endpoints, HTTP/1.1; the first body byte's time is missing before Envoy 1.37. For an Envoy that
lacks it, or Lua: `completions` "response_stream" in `full_duplex`, which leaves out all that labels need and lets the
router make the samples.

Worth watching in Envoy's own stats: `http.ingress.ext_proc.{streams_started,failure_mode_allowed,message_timeouts}`,
`cluster.picker.membership_healthy`, `cluster.pool.{upstream_rq_retry,upstream_cx_connect_fail}`,
`access_logs.grpc_access_log.{logs_written,logs_dropped}`, `http.ingress.lua.first_content.errors`.
"""

from typing import Any

from deploy.local.envoy.clusters import api_cluster, collector_cluster, picker_cluster, pool_cluster
from deploy.local.envoy.config import Address, Completions, EnvoyConfig, RouterAddress, Shape, of_router, parse_endpoint
from deploy.local.envoy.listener import MESSAGE_TIMEOUT_S, first_content_source, listener
from deploy.local.envoy.messages import socket

__all__ = [
    "MESSAGE_TIMEOUT_S",
    "Address",
    "Completions",
    "EnvoyConfig",
    "RouterAddress",
    "Shape",
    "first_content_source",
    "of_router",
    "parse_endpoint",
    "render",
]


def render(config: EnvoyConfig) -> dict[str, Any]:
    """The bootstrap, ready for `json.dumps` and `envoy -c`."""
    clusters = [pool_cluster(config), picker_cluster(config)]
    if config.completions == "access_log":
        clusters.append(collector_cluster(config))
    if config.api:
        clusters.append(api_cluster(config))
    return {
        "node": {"id": "leadtime-envoy", "cluster": "leadtime"},
        "admin": {"address": socket(config.admin)},
        "static_resources": {"listeners": [listener(config)], "clusters": clusters},
    }
