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

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from services.router.request.parse import DEFAULT_MAX_BODY_BYTES
from services.router.restored_name import parse_routes
from shared import names
from shared.errors import FieldError
from shared.settings import is_loopback

MESSAGE_TIMEOUT_S: Final = 1.0
"""What Envoy waits for a picker's answer before it falls back to round robin."""
MAX_MESSAGE_TIMEOUT_S: Final = 300.0
"""How far a picker may extend that for a request it holds on purpose (`override_message_timeout`)."""
LOG_FLUSH_S: Final = 0.1
UPSTREAM_IDLE_S: Final = 4.0
"""Below the 5 s after which vLLM's server closes an idle connection: a request never meets a closing one."""
STREAM_IDLE_S: Final = 900.0
"""A stream without a byte in either direction for this long is dead; a queued prompt may well take minutes."""
RETRIES: Final = 2

Shape = Literal["buffered", "full_duplex"]
"""How bodies reach the picker; see the module."""

Completions = Literal["access_log", "response_stream"]
"""Who tells of finished requests: Envoy's access log, or the router that the response passes through."""

_TYPE: Final = "type.googleapis.com/envoy."
_POOL: Final = "pool"
_UPGRADE: Final = "upgrade"
_RESTORED: Final = "restored "
_PICKER: Final = "picker"
_COLLECTOR: Final = "collector"
_API: Final = "api"
_HEALTH: Final = "health"
_EXT_PROC: Final = "envoy.filters.http.ext_proc"
_LUA: Final = "envoy.filters.http.lua"
_JSON: Final = "envoy.filters.http.json_to_metadata"

_EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
_CREDENTIALS: Final = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")

# Where a JSON answer says how many tokens there were (Anthropic, responses, OpenAI chat and completions), and the key
# that it becomes. Where an answer says it twice the last of these wins.
_USAGE_PATHS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (names.USAGE_INPUT, ("response", "usage", "input_tokens")),
    (names.USAGE_OUTPUT, ("response", "usage", "output_tokens")),
    (names.USAGE_CACHED, ("response", "usage", "input_tokens_details", "cached_tokens")),
    (names.USAGE_CACHED, ("usage", "cache_read_input_tokens")),
    (names.USAGE_INPUT, ("usage", "input_tokens")),
    (names.USAGE_OUTPUT, ("usage", "output_tokens")),
    (names.USAGE_CACHED, ("usage", "input_tokens_details", "cached_tokens")),
    (names.USAGE_INPUT, ("usage", "prompt_tokens")),
    (names.USAGE_OUTPUT, ("usage", "completion_tokens")),
    (names.USAGE_CACHED, ("usage", "prompt_tokens_details", "cached_tokens")),
)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or IP, IPv6 without brackets) and a port; port 0 lets Envoy's own listeners take a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """A router's ext-proc listener, and the port on the same host that answers gRPC health checks."""

    address: Address
    health_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyConfig:
    """What one Envoy needs to know of its surroundings."""

    endpoints: tuple[Address, ...]
    """The pool: model servers that serve the same models."""
    routers: tuple[RouterAddress, ...]
    collectors: tuple[Address, ...]
    api: tuple[Address, ...] = ()
    """An ordinary service under `/api`, beside the pool; none leaves `/api` to the pool."""
    listen: Address = Address("127.0.0.1", 0)
    admin: Address = Address("127.0.0.1", 0)
    """Envoy's admin interface; on loopback only, since it can stop Envoy."""
    collector_token: str | None = None
    """Bearer token of the access-log stream; collectors beyond loopback want one."""
    router_token: str | None = None
    """Bearer token of the ext-proc calls; routers beyond loopback want one."""
    collector_token_variable: str | None = None
    """In place of the token itself: the variable of Envoy's own environment that holds it, so that a rendered file is
    no secret."""
    router_token_variable: str | None = None
    """The same for the ext-proc calls."""
    body_limit_bytes: int = DEFAULT_MAX_BODY_BYTES
    """Largest request body: BUFFERED holds it whole. Above it the client gets a 413. Give it by `of_router`."""
    restored_routes: tuple[str, ...] = ()
    """Beginnings of paths whose responses go through the router for their model's name. Give them by `of_router`."""
    shape: Shape = "buffered"
    completions: Completions = "access_log"
    """`response_stream` needs `full_duplex`, no collectors here, and the router's `COLLECTORS`."""
    router_tls: bool = False
    """Speak TLS to routers without verifying them: for routers with `LEADTIME_ROUTER_TLS` self-signed or files."""
    log_flush_s: float = LOG_FLUSH_S

    def __post_init__(self) -> None:
        by_log = self.completions == "access_log"
        for field in ("endpoints", "routers", *(("collectors",) if by_log else ())):
            if not getattr(self, field):
                raise FieldError(field, "none", "at least one address")
        if not by_log and (self.shape != "full_duplex" or self.collectors):
            raise FieldError("completions", self.completions, "with the shape full_duplex and without collectors")
        if not is_loopback(self.admin.host):
            raise FieldError("admin", self.admin.host, "a loopback address")
        for service in ("router", "collector"):
            variable = getattr(self, f"{service}_token_variable")
            if variable is None:
                continue
            if getattr(self, f"{service}_token") is not None:
                raise FieldError(f"{service}_token_variable", variable, f"none beside {service}_token")
            if re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) is None:
                raise FieldError(f"{service}_token_variable", f"'{variable[:32]}'", "A-Z, 0-9 and _")
        if not 1024 <= self.body_limit_bytes < 2**32:
            raise FieldError("body_limit_bytes", str(self.body_limit_bytes), "1024 to 4294967295 bytes")


def of_router(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of EnvoyConfig that follow from the router's own settings, by the environment that it will be given:
    one place where an operator sets each. Raises FieldError.
    """
    fields: dict[str, Any] = {}
    if (limit := environment.get("LEADTIME_ROUTER_MAX_BODY_BYTES")) is not None:
        if not (limit.isascii() and limit.isdigit() and len(limit) < 12):
            raise FieldError("LEADTIME_ROUTER_MAX_BODY_BYTES", f"'{limit[:16]}'", "a number of bytes")
        fields["body_limit_bytes"] = int(limit)
    if routes := parse_routes(environment.get("LEADTIME_ROUTER_RESTORED_ROUTES", "")):
        fields["restored_routes"] = routes
    return fields


def parse_endpoint(url: str) -> Address:
    """`http://host:port` → address; raises FieldError for anything that Envoy would not reach as written."""
    allowed = "http://host:port, without path, query or credentials"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FieldError("endpoint", f"a URL with {error}", allowed) from None
    if parts.scheme != "http":
        found = f"scheme '{parts.scheme[:16]}'" if "://" in url else "no http:// in front"
        raise FieldError("endpoint", found, allowed)
    if not parts.hostname or port is None or port == 0:
        raise FieldError("endpoint", "no host or no port", allowed)
    if parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username or parts.password:
        raise FieldError("endpoint", "more than host and port", allowed)
    return Address(parts.hostname, port)


def first_content_source() -> str:
    """Source of the Lua script, inlined so that the bootstrap needs no second file."""
    return resources.files("deploy.local").joinpath("first_content.lua").read_text(encoding="utf-8")


def render(config: EnvoyConfig) -> dict[str, Any]:
    """The bootstrap, ready for `json.dumps` and `envoy -c`."""
    clusters = [_pool_cluster(config), _picker_cluster(config)]
    if config.completions == "access_log":
        clusters.append(_collector_cluster(config))
    if config.api:
        clusters.append(_api_cluster(config))
    return {
        "node": {"id": "leadtime-envoy", "cluster": "leadtime"},
        "admin": {"address": _socket(config.admin)},
        "static_resources": {"listeners": [_listener(config)], "clusters": clusters},
    }


def _listener(config: EnvoyConfig) -> dict[str, Any]:
    manager = _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="ingress",
        # HTTP/1.1 drops request trailers, which with full duplex and retries would send the body on twice.
        codec_type="HTTP1" if config.shape == "full_duplex" else "AUTO",
        stream_idle_timeout=_s(STREAM_IDLE_S),
        request_headers_timeout=_s(30),
        server_header_transformation="PASS_THROUGH",
        use_remote_address=True,
        preserve_external_request_id=True,
        normalize_path=True,
        upgrade_configs=[{"upgrade_type": "websocket"}],
        early_header_mutation_extensions=[_strip_steering_headers()],
        local_reply_config=_local_replies(),
        route_config={"name": "all", "virtual_hosts": [_virtual_host(config)]},
        http_filters=[
            _named(_EXT_PROC, _ext_proc(config)),
            *(_label_filters() if config.completions == "access_log" else []),
            # A client sees the server's headers and none of Envoy's own.
            _named(
                "envoy.filters.http.router",
                _typed("extensions.filters.http.router.v3.Router", suppress_envoy_headers=True),
            ),
        ],
        access_log=[_access_log(config)] if config.completions == "access_log" else [],
    )
    return {
        "name": "ingress",
        "address": _socket(config.listen),
        "per_connection_buffer_limit_bytes": config.body_limit_bytes,
        "filter_chains": [{"filters": [_named("envoy.filters.network.http_connection_manager", manager)]}],
    }


def _strip_steering_headers() -> dict[str, Any]:
    """Before routing and all filters. Clients' `x-envoy-` headers go too: they would set retries and timeouts."""
    mutations: list[dict[str, Any]] = [{"remove": name} for name in names.STRIPPED_FROM_CLIENTS]
    mutations += [
        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}
        for prefix in (*names.STRIPPED_PREFIXES, "x-envoy-")
    ]
    return _named(
        "envoy.http.early_header_mutation.header_mutation",
        _typed("extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation", mutations=mutations),
    )


def _virtual_host(config: EnvoyConfig) -> dict[str, Any]:
    """`/api` to its ordinary cluster; everything else through the picker, which knows which paths exist."""
    routes: list[dict[str, Any]] = []
    if config.api:
        off = _typed("config.route.v3.FilterConfig", disabled=True)
        routes.append(
            {
                "name": _API,
                "match": {"path_separated_prefix": "/api"},
                "route": {"cluster": _API, "timeout": "60s"},
                "typed_per_filter_config": dict.fromkeys(
                    (_EXT_PROC, *((_LUA, _JSON) if config.completions == "access_log" else ())), off
                ),
            }
        )
    bodiless = {"request_body_mode": "NONE", "response_body_mode": "NONE"}
    routes.append(
        {
            "name": _UPGRADE,
            "match": {"prefix": "/", "headers": [{"name": "upgrade", "present_match": True}]},
            **_to_pool(),
            **_other_modes({**_PROCESSING_MODES[config.shape], **bodiless}),
        }
    )
    if config.shape == "buffered":  # in full duplex every response is shown
        shown = {"response_header_mode": "SEND", "response_body_mode": "STREAMED"}
        routes += [
            {
                "name": f"{_RESTORED}{path}",
                "match": {"prefix": path},
                **_to_pool(),
                **_other_modes({**_PROCESSING_MODES[config.shape], **shown}),
            }
            for path in config.restored_routes
        ]
    routes.append({"name": _POOL, "match": {"prefix": "/"}, **_to_pool()})
    return {"name": "all", "domains": ["*"], "routes": routes}


def _to_pool() -> dict[str, Any]:
    """What all routes to the pool do."""
    return {
        "request_headers_to_remove": ["accept-encoding"],
        # By it a client finds its request in /v1/decisions, and an operator sees answers that no router decided.
        "response_headers_to_add": [
            {"header": {"key": names.DECISION_ID, "value": f"%REQ({names.DECISION_ID})%"}},
        ],
        "route": {
            "cluster": _POOL,
            "timeout": "0s",
            "retry_policy": {
                # Not `reset`: a request that crashed one server is not tried on the next.
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
                "retriable_status_codes": [503],
                "num_retries": RETRIES,
                # Without it the pick's list wraps round and a dead single pick is tried three times.
                "retry_host_predicate": [_other_host()],
                "host_selection_retry_max_attempts": 5,
            },
        },
    }


def _other_modes(modes: dict[str, str]) -> dict[str, Any]:
    """A route that shows the picker other parts of a request than the listener's rest."""
    override = _typed("extensions.filters.http.ext_proc.v3.ExtProcPerRoute", overrides={"processing_mode": modes})
    return {"typed_per_filter_config": {_EXT_PROC: override}}


def _other_host() -> dict[str, Any]:
    """Try again elsewhere than before."""
    return _named(
        "envoy.retry_host_predicates.previous_hosts",
        _typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
    )


_PROCESSING_MODES: Final[dict[Shape, dict[str, str]]] = {
    "buffered": {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SKIP",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SEND",
    },
    "full_duplex": {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
}


def _ext_proc(config: EnvoyConfig) -> dict[str, Any]:
    return _typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={
            "envoy_grpc": {"cluster_name": _PICKER},
            **_bearer(config.router_token or _variable(config.router_token_variable)),
            # A router that has just died costs no request while another is left (measured: one in full duplex without).
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": 1,
                "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"},
                "retry_host_predicate": [_other_host()],
                "host_selection_retry_max_attempts": 5,
            },
        },
        message_timeout=_s(MESSAGE_TIMEOUT_S),
        max_message_timeout=_s(MAX_MESSAGE_TIMEOUT_S),
        failure_mode_allow=True,
        # Static: a mode changed by an answer lets the body's first chunk slip past the picker.
        processing_mode=dict(_PROCESSING_MODES[config.shape]),
        # A picker needs no credential, so it gets none.
        forward_rules={"disallowed_headers": {"patterns": [{"exact": name} for name in _CREDENTIALS]}},
        metadata_options={
            "receiving_namespaces": {"untyped": [names.LB_NAMESPACE, names.METADATA_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [names.LB_NAMESPACE]},
        },
    )


def _bearer(token: str | None) -> dict[str, Any]:
    """What a gRPC service is sent beside its messages."""
    return {} if token is None else {"initial_metadata": [{"key": "authorization", "value": f"Bearer {token}"}]}


def _variable(name: str | None) -> str | None:
    """Envoy's word for a variable of its own environment."""
    return None if name is None else f"%ENVIRONMENT({name})%"


def _label_filters() -> list[dict[str, Any]]:
    return [_named(_LUA, _lua()), _named(_JSON, _usage_of_documents())]


def _lua() -> dict[str, Any]:
    return _typed(
        "extensions.filters.http.lua.v3.Lua",
        stat_prefix="first_content",
        default_source_code={"inline_string": first_content_source()},
    )


def _usage_of_documents() -> dict[str, Any]:
    return _typed(
        "extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
        response_rules={
            "rules": [
                {"selectors": [{"key": part} for part in path], "on_present": _usage_target(key)}
                for key, path in _USAGE_PATHS
            ],
            # By default a charset behind the type is enough to be passed over.
            "allow_content_types_regex": {"regex": r"application/(.+\+)?json *(;.*)?"},
        },
    )


def _usage_target(key: str) -> dict[str, Any]:
    return {"metadata_namespace": names.USAGE_NAMESPACE, "key": key}


def _access_log(config: EnvoyConfig) -> dict[str, Any]:
    """One entry per finished request to a collector; `/api` has none."""
    service = {"envoy_grpc": {"cluster_name": _COLLECTOR}, **_bearer(config.collector_token)}
    logger = _named(
        "envoy.access_loggers.http_grpc",
        _typed(
            "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            common_config={
                "log_name": "leadtime",
                "transport_api_version": "V3",
                "grpc_service": service,
                "buffer_flush_interval": _s(config.log_flush_s),
                "custom_tags": [
                    {"tag": names.TAG_FIRST_BODY_BYTE_US, "value": "%COMMON_DURATION(US_TX_END:US_RX_BODY_BEG:us)%"},
                    {"tag": names.TAG_LAST_BYTE_US, "value": "%COMMON_DURATION(US_TX_END:US_RX_END:us)%"},
                ],
            },
            additional_request_headers_to_log=[names.PROBE],
            additional_response_headers_to_log=["content-type"],
        ),
    )
    if config.api:
        match = {"safe_regex": {"regex": r"/api([/?].*)?"}}
        logger["filter"] = {"header_filter": {"header": {"name": ":path", "string_match": match, "invert_match": True}}}
    return logger


def _local_replies() -> dict[str, Any]:
    """Envoy's own errors in OpenAI's shape. Those that a picker sends (400, 404, 429 …) have their body already."""

    def body(kind: str, code: str, message: str) -> dict[str, Any]:
        error = {"message": message, "type": kind, "param": None, "code": code}
        return {"json_format": {"error": error}, "content_type": "application/json"}

    too_large = _named(
        "envoy.access_loggers.extension_filters.cel",
        _typed(
            "extensions.access_loggers.filters.cel.v3.ExpressionFilter",
            expression='response.code_details == "request_payload_too_large"',
        ),
    )
    return {
        "mappers": [
            {
                "filter": {"extension_filter": too_large},
                "body_format_override": body(
                    "invalid_request_error", "request_too_large", "The request's body is over the limit."
                ),
            },
            {
                "filter": {"response_flag_filter": {"flags": ["UH", "UF", "UO", "UC", "URX", "NC", "UMSDR"]}},
                "body_format_override": body(
                    "server_error", "upstream_unavailable", "No endpoint could answer: %RESPONSE_CODE_DETAILS%"
                ),
            },
        ]
    }


def _pool_cluster(config: EnvoyConfig) -> dict[str, Any]:
    override = _typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": names.LB_NAMESPACE, "path": [{"key": names.DESTINATION}]}}],
        selected_host_key={"key": names.LB_NAMESPACE, "path": [{"key": names.DESTINATION_SERVED}]},
        fallback_policy=_policies(_typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
    )
    return {
        "name": _POOL,
        **_membership(_POOL, [_endpoint(address) for address in config.endpoints], config.endpoints),
        "connect_timeout": "1s",
        "load_balancing_policy": _policies(override),
        "circuit_breakers": _no_limits(),
        # Only connections that fail put an endpoint aside: a 503 may mean "busy", which is the router's to judge.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 3,
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "interval": "1s",
            "base_ejection_time": "2s",
            "max_ejection_time": "10s",
            "max_ejection_percent": 50,
        },
        "upstream_connection_options": {"tcp_keepalive": {"keepalive_time": 30, "keepalive_interval": 5}},
        "typed_extension_protocol_options": _protocol(
            common_http_protocol_options={"idle_timeout": _s(UPSTREAM_IDLE_S)},
            explicit_http_config={"http_protocol_options": {}},
        ),
    }


def _picker_cluster(config: EnvoyConfig) -> dict[str, Any]:
    """Routers: each is one process with one core, so Envoy balances over them and drops one that doesn't answer.

    In full duplex a request that meets a dead router is lost, and one that meets a frozen router hangs until the
    connection's ping fails: there one failure, of a request or of a health check, is enough, and pings are frequent.
    """
    full_duplex = config.shape == "full_duplex"
    members = [
        {"endpoint": {"address": _socket(router.address), "health_check_config": {"port_value": router.health_port}}}
        for router in config.routers
    ]
    watch = (
        _Watch(ping_s=1.0, ping_timeout_s=1.0, failures=1) if full_duplex else _Watch(ping_s=5.0, ping_timeout_s=2.0)
    )
    return {
        "name": _PICKER,
        **_membership(_PICKER, members, [router.address for router in config.routers]),
        **_grpc_cluster(_EXT_PROC_SERVICE, watch),
        **(_unverified_tls() if config.router_tls else {}),
        "load_balancing_policy": _policies(
            _typed("extensions.load_balancing_policies.least_request.v3.LeastRequest", choice_count=2)
        ),
        # Never back to members known to be gone: the request goes on without a pick instead. And at once: by default
        # Envoy gathers such changes for a second (measured: seven requests lost in place of one).
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 1 if full_duplex else 3,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "interval": "1s",
            # Long enough for the health check to take over; its next success ends the ejection.
            "base_ejection_time": "2s",
            "max_ejection_time": "5s",
            "max_ejection_percent": 100,
        },
    }


def _unverified_tls() -> dict[str, Any]:
    """TLS with ALPN h2 to the members, and none to the port that answers health checks."""
    plain = _named("envoy.transport_sockets.raw_buffer", _typed("extensions.transport_sockets.raw_buffer.v3.RawBuffer"))
    context = _typed(
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={
            "alpn_protocols": ["h2"],
            "validation_context": {"trust_chain_verification": "ACCEPT_UNTRUSTED"},
        },
    )
    return {
        "transport_socket": _named("envoy.transport_sockets.tls", context),
        "transport_socket_matches": [{"name": _HEALTH, "match": {_HEALTH: True}, "transport_socket": plain}],
    }


def _collector_cluster(config: EnvoyConfig) -> dict[str, Any]:
    members = [_endpoint(address) for address in config.collectors]
    return {
        "name": _COLLECTOR,
        **_membership(_COLLECTOR, members, config.collectors),
        **_grpc_cluster(
            _ACCESS_LOG_SERVICE, _Watch(ping_s=5.0, ping_timeout_s=2.0), _variable(config.collector_token_variable)
        ),
        "load_balancing_policy": _policies(_typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
    }


def _api_cluster(config: EnvoyConfig) -> dict[str, Any]:
    return {
        "name": _API,
        **_membership(_API, [_endpoint(address) for address in config.api], config.api),
        "connect_timeout": "1s",
    }


@dataclass(frozen=True, slots=True)
class _Watch:
    """How a gRPC cluster's members are watched: pings on connections, and how many health checks may fail."""

    ping_s: float
    ping_timeout_s: float
    failures: int = 2


def _grpc_cluster(health_service: str, watch: _Watch, token: str | None = None) -> dict[str, Any]:
    """HTTP/2 with keep-alive, gRPC health checks of one service name, and no limit that a busy hour would meet.

    `token` is put on each call by the cluster: the access log's own `initial_metadata` is sent as it is written.
    """
    options: dict[str, Any] = {} if token is None else {"http_filters": _bearer_filters(token)}
    return {
        "connect_timeout": "0.25s",
        "circuit_breakers": _no_limits(),
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": watch.failures,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": health_service},
                "transport_socket_match_criteria": {_HEALTH: True},
            }
        ],
        "typed_extension_protocol_options": _protocol(
            explicit_http_config={
                "http2_protocol_options": {
                    "connection_keepalive": {"interval": _s(watch.ping_s), "timeout": _s(watch.ping_timeout_s)}
                }
            },
            **options,
        ),
    }


def _bearer_filters(token: str) -> list[dict[str, Any]]:
    """A cluster's own filters: the credential, then the codec, which has to be there."""
    header = {"header": {"key": "authorization", "value": f"Bearer {token}"}}
    mutation = {"append": {**header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
    return [
        _named(
            "envoy.filters.http.header_mutation",
            _typed(
                "extensions.filters.http.header_mutation.v3.HeaderMutation", mutations={"request_mutations": [mutation]}
            ),
        ),
        _named(
            "envoy.filters.http.upstream_codec",
            _typed("extensions.filters.http.upstream_codec.v3.UpstreamCodec"),
        ),
    ]


def _membership(cluster: str, members: list[dict[str, Any]], addresses: Sequence[Address]) -> dict[str, Any]:
    """Hosts of a cluster; one name among the addresses makes it a DNS cluster.

    Of a name's addresses Envoy must know those that a router lists (`services/router/discovery/names.py`: IPv4 where
    there is any), or a pick is passed over without a word: Envoy's own choice would be IPv6 first.
    """
    discovery: dict[str, Any] = {"type": "STATIC"}
    if not all(address.is_ip for address in addresses):
        dns = _typed("extensions.clusters.dns.v3.DnsCluster", dns_refresh_rate="5s", dns_lookup_family="V4_PREFERRED")
        discovery = {"cluster_type": _named("envoy.clusters.dns", dns)}
    return {**discovery, "load_assignment": {"cluster_name": cluster, "endpoints": [{"lb_endpoints": members}]}}


def _no_limits() -> dict[str, Any]:
    """Envoy's defaults (1024 requests) would refuse what the router admitted."""
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 100_000)
    return {"thresholds": [limits]}


def _policies(policy: dict[str, Any]) -> dict[str, Any]:
    name = policy["@type"].rsplit(".", 1)[1]
    return {"policies": [{"typed_extension_config": _named(name, policy)}]}


def _protocol(**options: Any) -> dict[str, Any]:
    return {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _typed(
            "extensions.upstreams.http.v3.HttpProtocolOptions", **options
        )
    }


def _endpoint(address: Address) -> dict[str, Any]:
    return {"endpoint": {"address": _socket(address)}}


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": config}


def _typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": _TYPE + kind, **fields}


def _s(seconds: float) -> str:
    """Protobuf's JSON form of a duration."""
    return f"{seconds:g}s"
