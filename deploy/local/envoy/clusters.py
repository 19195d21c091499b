"""Whom Envoy speaks to: the pool of model servers, the routers, the collectors, a service under `/api`. Pure.

How each is found, watched, limited and put aside; `listener.py` says which request goes to which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.local.envoy.config import Address, EnvoyConfig
from deploy.local.envoy.messages import duration, named, socket, typed, variable
from shared import names

POOL: Final = "pool"
PICKER: Final = "picker"
COLLECTOR: Final = "collector"
API: Final = "api"
_HEALTH: Final = "health"
UPSTREAM_IDLE_S: Final = 4.0
"""Below the 5 s after which vLLM's server closes an idle connection: a request never meets a closing one."""

_EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"


def pool_cluster(config: EnvoyConfig) -> dict[str, Any]:
    override = typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": names.LB_NAMESPACE, "path": [{"key": names.DESTINATION}]}}],
        selected_host_key={"key": names.LB_NAMESPACE, "path": [{"key": names.DESTINATION_SERVED}]},
        fallback_policy=_policies(typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
    )
    return {
        "name": POOL,
        **_membership(POOL, [_endpoint(address) for address in config.endpoints], config.endpoints),
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
            common_http_protocol_options={"idle_timeout": duration(UPSTREAM_IDLE_S)},
            explicit_http_config={"http_protocol_options": {}},
        ),
    }


def picker_cluster(config: EnvoyConfig) -> dict[str, Any]:
    """Routers: each is one process with one core, so Envoy balances over them and drops one that doesn't answer.

    In full duplex a request that meets a dead router is lost, and one that meets a frozen router hangs until the
    connection's ping fails: there one failure, of a request or of a health check, is enough, and pings are frequent.
    """
    full_duplex = config.shape == "full_duplex"
    members = [
        {"endpoint": {"address": socket(router.address), "health_check_config": {"port_value": router.health_port}}}
        for router in config.routers
    ]
    watch = (
        _Watch(ping_s=1.0, ping_timeout_s=1.0, failures=1) if full_duplex else _Watch(ping_s=5.0, ping_timeout_s=2.0)
    )
    return {
        "name": PICKER,
        **_membership(PICKER, members, [router.address for router in config.routers]),
        **_grpc_cluster(_EXT_PROC_SERVICE, watch),
        **(_unverified_tls() if config.router_tls else {}),
        "load_balancing_policy": _policies(
            typed("extensions.load_balancing_policies.least_request.v3.LeastRequest", choice_count=2)
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
    plain = named("envoy.transport_sockets.raw_buffer", typed("extensions.transport_sockets.raw_buffer.v3.RawBuffer"))
    context = typed(
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={
            "alpn_protocols": ["h2"],
            "validation_context": {"trust_chain_verification": "ACCEPT_UNTRUSTED"},
        },
    )
    return {
        "transport_socket": named("envoy.transport_sockets.tls", context),
        "transport_socket_matches": [{"name": _HEALTH, "match": {_HEALTH: True}, "transport_socket": plain}],
    }


def collector_cluster(config: EnvoyConfig) -> dict[str, Any]:
    members = [_endpoint(address) for address in config.collectors]
    return {
        "name": COLLECTOR,
        **_membership(COLLECTOR, members, config.collectors),
        **_grpc_cluster(
            _ACCESS_LOG_SERVICE, _Watch(ping_s=5.0, ping_timeout_s=2.0), variable(config.collector_token_variable)
        ),
        "load_balancing_policy": _policies(typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
    }


def api_cluster(config: EnvoyConfig) -> dict[str, Any]:
    return {
        "name": API,
        **_membership(API, [_endpoint(address) for address in config.api], config.api),
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
                    "connection_keepalive": {
                        "interval": duration(watch.ping_s),
                        "timeout": duration(watch.ping_timeout_s),
                    }
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
        named(
            "envoy.filters.http.header_mutation",
            typed(
                "extensions.filters.http.header_mutation.v3.HeaderMutation", mutations={"request_mutations": [mutation]}
            ),
        ),
        named(
            "envoy.filters.http.upstream_codec",
            typed("extensions.filters.http.upstream_codec.v3.UpstreamCodec"),
        ),
    ]


def _membership(cluster: str, members: list[dict[str, Any]], addresses: Sequence[Address]) -> dict[str, Any]:
    """Hosts of a cluster; one name among the addresses makes it a DNS cluster.

    Of a name's addresses Envoy must know those that a router lists (`services/router/discovery/names.py`: IPv4 where
    there is any), or a pick is passed over without a word: Envoy's own choice would be IPv6 first.
    """
    discovery: dict[str, Any] = {"type": "STATIC"}
    if not all(address.is_ip for address in addresses):
        dns = typed("extensions.clusters.dns.v3.DnsCluster", dns_refresh_rate="5s", dns_lookup_family="V4_PREFERRED")
        discovery = {"cluster_type": named("envoy.clusters.dns", dns)}
    return {**discovery, "load_assignment": {"cluster_name": cluster, "endpoints": [{"lb_endpoints": members}]}}


def _no_limits() -> dict[str, Any]:
    """Envoy's defaults (1024 requests) would refuse what the router admitted."""
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 100_000)
    return {"thresholds": [limits]}


def _policies(policy: dict[str, Any]) -> dict[str, Any]:
    name = policy["@type"].rsplit(".", 1)[1]
    return {"policies": [{"typed_extension_config": named(name, policy)}]}


def _protocol(**options: Any) -> dict[str, Any]:
    return {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
            "extensions.upstreams.http.v3.HttpProtocolOptions", **options
        )
    }


def _endpoint(address: Address) -> dict[str, Any]:
    return {"endpoint": {"address": socket(address)}}
