"""What Envoy does with a request: headers stripped, routes, the picker over ext-proc, labels, the access log. Pure.

The package says why each choice is as it is.
"""

from importlib import resources
from typing import Any, Final

from deploy.local.envoy.clusters import API, COLLECTOR, PICKER, POOL
from deploy.local.envoy.config import EnvoyConfig, Shape
from deploy.local.envoy.messages import duration, named, other_host, socket, typed, variable
from shared import names

MESSAGE_TIMEOUT_S: Final = 1.0
"""What Envoy waits for a picker's answer before it falls back to round robin."""
MAX_MESSAGE_TIMEOUT_S: Final = 300.0
"""How far a picker may extend that for a request it holds on purpose (`override_message_timeout`)."""
STREAM_IDLE_S: Final = 900.0
"""A stream without a byte in either direction for this long is dead; a queued prompt may well take minutes."""
RETRIES: Final = 2

_UPGRADE: Final = "upgrade"
_RESTORED: Final = "restored "
_EXT_PROC: Final = "envoy.filters.http.ext_proc"
_LUA: Final = "envoy.filters.http.lua"
_JSON: Final = "envoy.filters.http.json_to_metadata"
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


def first_content_source() -> str:
    """Source of the Lua script, inlined so that the bootstrap needs no second file."""
    return resources.files("deploy.local").joinpath("first_content.lua").read_text(encoding="utf-8")


def listener(config: EnvoyConfig) -> dict[str, Any]:
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="ingress",
        # HTTP/1.1 drops request trailers, which with full duplex and retries would send the body on twice.
        codec_type="HTTP1" if config.shape == "full_duplex" else "AUTO",
        stream_idle_timeout=duration(STREAM_IDLE_S),
        request_headers_timeout=duration(30),
        server_header_transformation="PASS_THROUGH",
        use_remote_address=True,
        preserve_external_request_id=True,
        normalize_path=True,
        upgrade_configs=[{"upgrade_type": "websocket"}],
        early_header_mutation_extensions=[_strip_steering_headers()],
        local_reply_config=_local_replies(),
        route_config={"name": "all", "virtual_hosts": [_virtual_host(config)]},
        http_filters=[
            named(_EXT_PROC, _ext_proc(config)),
            *(_label_filters() if config.completions == "access_log" else []),
            # A client sees the server's headers and none of Envoy's own.
            named(
                "envoy.filters.http.router",
                typed("extensions.filters.http.router.v3.Router", suppress_envoy_headers=True),
            ),
        ],
        access_log=[_access_log(config)] if config.completions == "access_log" else [],
    )
    return {
        "name": "ingress",
        "address": socket(config.listen),
        "per_connection_buffer_limit_bytes": config.body_limit_bytes,
        "filter_chains": [{"filters": [named("envoy.filters.network.http_connection_manager", manager)]}],
    }


def _strip_steering_headers() -> dict[str, Any]:
    """Before routing and all filters. Clients' `x-envoy-` headers go too: they would set retries and timeouts."""
    mutations: list[dict[str, Any]] = [{"remove": name} for name in names.STRIPPED_FROM_CLIENTS]
    mutations += [
        {"remove_on_match": {"key_matcher": {"prefix": prefix, "ignore_case": True}}}
        for prefix in (*names.STRIPPED_PREFIXES, "x-envoy-")
    ]
    return named(
        "envoy.http.early_header_mutation.header_mutation",
        typed("extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation", mutations=mutations),
    )


def _virtual_host(config: EnvoyConfig) -> dict[str, Any]:
    """`/api` to its ordinary cluster; everything else through the picker, which knows which paths exist."""
    routes: list[dict[str, Any]] = []
    if config.api:
        off = typed("config.route.v3.FilterConfig", disabled=True)
        routes.append(
            {
                "name": API,
                "match": {"path_separated_prefix": "/api"},
                "route": {"cluster": API, "timeout": "60s"},
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
    routes.append({"name": POOL, "match": {"prefix": "/"}, **_to_pool()})
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
            "cluster": POOL,
            "timeout": "0s",
            "retry_policy": {
                # Not `reset`: a request that crashed one server is not tried on the next.
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
                "retriable_status_codes": [503],
                "num_retries": RETRIES,
                # Without it the pick's list wraps round and a dead single pick is tried three times.
                "retry_host_predicate": [other_host()],
                "host_selection_retry_max_attempts": 5,
            },
        },
    }


def _other_modes(modes: dict[str, str]) -> dict[str, Any]:
    """A route that shows the picker other parts of a request than the listener's rest."""
    override = typed("extensions.filters.http.ext_proc.v3.ExtProcPerRoute", overrides={"processing_mode": modes})
    return {"typed_per_filter_config": {_EXT_PROC: override}}


def _ext_proc(config: EnvoyConfig) -> dict[str, Any]:
    return typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={
            "envoy_grpc": {"cluster_name": PICKER},
            **_bearer(config.router_token or variable(config.router_token_variable)),
            # A router that has just died costs no request while another is left (measured: one in full duplex without).
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": 1,
                "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"},
                "retry_host_predicate": [other_host()],
                "host_selection_retry_max_attempts": 5,
            },
        },
        message_timeout=duration(MESSAGE_TIMEOUT_S),
        max_message_timeout=duration(MAX_MESSAGE_TIMEOUT_S),
        failure_mode_allow=True,
        # Static: a mode changed by an answer lets the body's first chunk slip past the picker.
        processing_mode=dict(_PROCESSING_MODES[config.shape]),
        request_attributes=[names.ROUTE_ATTRIBUTE],
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


def _label_filters() -> list[dict[str, Any]]:
    return [named(_LUA, _lua()), named(_JSON, _usage_of_documents())]


def _lua() -> dict[str, Any]:
    return typed(
        "extensions.filters.http.lua.v3.Lua",
        stat_prefix="first_content",
        default_source_code={"inline_string": first_content_source()},
    )


def _usage_of_documents() -> dict[str, Any]:
    return typed(
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
    service = {"envoy_grpc": {"cluster_name": COLLECTOR}, **_bearer(config.collector_token)}
    logger = named(
        "envoy.access_loggers.http_grpc",
        typed(
            "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            common_config={
                "log_name": "leadtime",
                "transport_api_version": "V3",
                "grpc_service": service,
                "buffer_flush_interval": duration(config.log_flush_s),
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

    too_large = named(
        "envoy.access_loggers.extension_filters.cel",
        typed(
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
