"""Envoy's config as each overlay's control plane would make it of our manifests, rebuilt by hand from their sources.

Only what matters to a request is there. Clusters lead to loopback addresses that a test gives, and have the names,
policies and patches of the manifests; istiod's and Envoy Gateway's own code doesn't run here.
"""

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deploy.local.envoy import Address, RouterAddress
from shared import names
from tests.manifests.overlays import Document, Overlay

TYPE = "type.googleapis.com/envoy."
HCM = "envoy.filters.network.http_connection_manager"
EXT_PROC = "envoy.filters.http.ext_proc"


@dataclass(frozen=True)
class Places:
    """Where on loopback things are."""

    models: tuple[Address, ...]
    routers: tuple[RouterAddress, ...]
    collectors: tuple[Address, ...]
    api: tuple[Address, ...]

    def of(self, host: str) -> tuple[Address, ...]:
        service = host.split(".", 1)[0]
        if service.startswith("leadtime-router"):
            return tuple(router.address for router in self.routers)
        return {"leadtime-models": self.models, "leadtime-collector": self.collectors, "api": self.api}[service]


SOMEWHERE = Places(
    (Address("127.0.0.1", 1),),
    (RouterAddress(Address("127.0.0.1", 2), 3),),
    (Address("127.0.0.1", 4),),
    (Address("127.0.0.1", 5),),
)
"""For a config that is only validated."""


def bootstrap(overlay: Overlay, places: Places) -> Document:
    """The config of the overlay's gateway."""
    makers = {
        "istio": istio,
        "istio-envoyfilter": istio,
        "envoy-gateway": envoy_gateway,
        "plain-envoy": plain,
    }
    return makers[overlay.name](overlay, places)


def typed(kind: str, **fields: Any) -> Document:
    return {"@type": TYPE + kind, **fields}


def named(name: str, config: Document) -> Document:
    return {"name": name, "typed_config": config}


def socket(address: Address) -> Document:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def members(addresses: Iterable[Address]) -> list[Document]:
    return [{"endpoint": {"address": socket(address)}} for address in addresses]


def cluster(name: str, addresses: Iterable[Address], **more: Any) -> Document:
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": members(addresses)}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "10s", "load_assignment": load, **more}


def http2(**settings: Any) -> Document:
    explicit = {"http2_protocol_options": settings}
    options = typed("extensions.upstreams.http.v3.HttpProtocolOptions", explicit_http_config=explicit)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}


def placed(config: Document, places: Places) -> Document:
    """Listeners and admin on free loopback ports; clusters of DNS names at the places given."""
    config.setdefault("admin", {})["address"] = socket(Address("127.0.0.1", 0))
    for listener in config["static_resources"]["listeners"]:
        listener["address"] = socket(Address("127.0.0.1", 0))
    for each in config["static_resources"]["clusters"]:
        (group,) = each["load_assignment"]["endpoints"]
        address = (
            group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["address"]
            if group["lb_endpoints"]
            else ""
        )
        if "cluster_type" not in each:
            continue
        health = "health_check_config" in group["lb_endpoints"][0]["endpoint"]
        del each["cluster_type"]
        each["type"] = "STATIC"
        group["lb_endpoints"] = members(places.of(address))
        if health:
            for member, router in zip(group["lb_endpoints"], places.routers, strict=True):
                member["endpoint"]["health_check_config"] = {"port_value": router.health_port}
    return config


# --- plain ------------------------------------------------------------------------------------------------------------


def plain(overlay: Overlay, places: Places) -> Document:
    """The file in the ConfigMap that Envoy's Deployment mounts."""
    (volume,) = (each for each in overlay.workload("leadtime-envoy").pod["volumes"] if "configMap" in each)
    return placed(json.loads(overlay.config_map(volume["configMap"]["name"])["envoy.json"]), places)


# --- Istio ------------------------------------------------------------------------------------------------------------


def istio(overlay: Overlay, places: Places) -> Document:
    """A gateway's listener, routes and clusters as istiod makes them, then the EnvoyFilters' patches."""
    (gateway,) = overlay.of("Gateway")
    (listener,) = gateway["spec"]["listeners"]
    clusters = [_istio_router(overlay, places)]
    routes = []
    for rule in (rule for route in overlay.of("HTTPRoute") for rule in route["spec"]["rules"]):
        (backend,) = rule["backendRefs"]
        made: Document = {
            "name": rule["name"],
            "match": {"path_separated_prefix": rule["matches"][0]["path"]["value"]},
            "route": {"timeout": rule.get("timeouts", {}).get("request", "0s")},
        }
        if backend.get("kind") == "InferencePool":
            made["typed_per_filter_config"] = {
                EXT_PROC: _per_route(overlay, overlay.get("InferencePool", backend["name"]))
            }
            clusters.append(_inference_cluster(backend["name"], places))
        else:
            clusters.append(
                cluster(service_cluster(overlay, backend["name"], backend["port"]), places.of(backend["name"]))
            )
        made["route"]["cluster"] = clusters[-1]["name"]
        routes.append(made)
    collector = overlay.get("Service", "leadtime-collector")
    port = next(each["port"] for each in collector["spec"]["ports"] if each["name"] == "grpc-als")
    clusters.append(
        cluster(
            service_cluster(overlay, "leadtime-collector", port),
            places.collectors,
            typed_extension_protocol_options=http2(),
        )
    )
    filters = [named("envoy.filters.http.router", typed("extensions.filters.http.router.v3.Router"))]
    if overlay.of("InferencePool"):
        clusters.append(cluster("dummy", ()))
        filters.insert(0, named(EXT_PROC, _listener_ext_proc()))
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="outbound_0.0.0.0_80",
        use_remote_address=True,
        normalize_path=True,
        stream_idle_timeout="0s",
        route_config={"name": "http.80", "virtual_hosts": [{"name": "*:80", "domains": ["*"], "routes": routes}]},
        http_filters=filters,
    )
    config = {
        "node": {"id": "router~gateway", "cluster": "gateway"},
        "static_resources": {
            "listeners": [
                {"name": f"0.0.0.0_{listener['port']}", "filter_chains": [{"filters": [named(HCM, manager)]}]}
            ],
            "clusters": clusters,
        },
    }
    for document in sorted(overlay.of("EnvoyFilter"), key=lambda each: str(each["metadata"]["name"])):
        for patch in document["spec"]["configPatches"]:
            apply(patch, config)
    return placed(config, places)


def service_cluster(overlay: Overlay, service: str, port: int) -> str:
    """Istiod's name of a Service's cluster."""
    namespace = overlay.workload("leadtime-router").document["metadata"]["namespace"]
    return f"outbound|{port}||{service}.{namespace}.svc.cluster.local"


def _istio_router(overlay: Overlay, places: Places) -> Document:
    """The picker's cluster, with what the DestinationRule says of it."""
    policy = overlay.get("DestinationRule", "leadtime-router")["spec"]["trafficPolicy"]["portLevelSettings"][0]
    outliers = policy["outlierDetection"]
    detection: Document = {
        "interval": outliers["interval"],
        "base_ejection_time": outliers["baseEjectionTime"],
        "max_ejection_percent": outliers["maxEjectionPercent"],
        "enforcing_success_rate": 0,
        "consecutive_gateway_failure": outliers["consecutiveGatewayErrors"],
        "enforcing_consecutive_gateway_failure": 100,
    }
    if "consecutive5xxErrors" in outliers:
        detection |= {"consecutive_5xx": outliers["consecutive5xxErrors"], "enforcing_consecutive_5xx": 100}
    made = cluster(
        service_cluster(overlay, "leadtime-router", policy["port"]["number"]),
        places.of("leadtime-router"),
        lb_policy=policy["loadBalancer"]["simple"],
        typed_extension_protocol_options=http2(),
        outlier_detection=detection,
        common_lb_config={"healthy_panic_threshold": {"value": outliers["minHealthPercent"]}},
    )
    made["connect_timeout"] = policy["connectionPool"]["tcp"]["connectTimeout"]
    tls = policy.get("tls", {})
    if tls.get("mode") == "SIMPLE":
        assert tls["insecureSkipVerify"], "without it istiod would verify a certificate that nobody signed"
        context = typed(
            "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            common_tls_context={
                "alpn_protocols": ["h2"],
                "validation_context": {"trust_chain_verification": "ACCEPT_UNTRUSTED"},
            },
        )
        made["transport_socket"] = named("envoy.transport_sockets.tls", context)
    return made


def _listener_ext_proc() -> Document:
    """What istiod puts on a listener with pools: to nobody; each route says to whom."""
    return typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "dummy"}, "timeout": "10s"},
        failure_mode_allow=True,
        message_timeout="1000s",
        processing_mode={"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
        metadata_options={
            "receiving_namespaces": {"untyped": [names.LB_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [names.LB_NAMESPACE]},
        },
    )


def _per_route(overlay: Overlay, pool: Document) -> Document:
    picker = pool["spec"]["endpointPickerRef"]
    overrides = {
        "grpc_service": {
            "envoy_grpc": {"cluster_name": service_cluster(overlay, picker["name"], picker["port"]["number"])}
        },
        "failure_mode_allow": picker["failureMode"] == "FailOpen",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
    }
    return typed("extensions.filters.http.ext_proc.v3.ExtProcPerRoute", overrides=overrides)


def _inference_cluster(pool: str, places: Places) -> Document:
    key = {"key": names.LB_NAMESPACE}
    override = typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {**key, "path": [{"key": names.DESTINATION}]}}],
        selected_host_key={**key, "path": [{"key": names.DESTINATION_SERVED}]},
        fallback_policy=policies(typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
    )
    return cluster(f"outbound|54321||{pool}-ip", places.models, load_balancing_policy=policies(override))


def policies(policy: Document) -> Document:
    return {"policies": [{"typed_extension_config": named(policy["@type"].rsplit(".", 1)[1], policy)}]}


def merge(into: Document, patch: Document) -> None:
    """As messages of Protobuf are merged: tables into each other, lists behind each other, all else replaced."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif isinstance(value, list) and isinstance(into.get(key), list):
            into[key] += copy.deepcopy(value)
        else:
            into[key] = copy.deepcopy(value)


def apply(patch: Document, config: Document) -> None:
    """One patch of an EnvoyFilter; one that finds nothing is a mistake here, where istiod would be silent."""
    match, value = patch["match"], patch["patch"]["value"]
    operation = (patch["applyTo"], patch["patch"]["operation"])
    (listener,) = config["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    if operation == ("LISTENER", "MERGE"):
        assert listener["name"].endswith(f"_{match['listener']['portNumber']}"), match
        merge(listener, value)
    elif operation == ("NETWORK_FILTER", "MERGE"):
        assert manager["name"] == match["listener"]["filterChain"]["filter"]["name"] == value["name"]
        merge(manager, value)
    elif operation == ("HTTP_FILTER", "INSERT_BEFORE"):
        before = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
        filters = manager["typed_config"]["http_filters"]
        (place,) = (index for index, each in enumerate(filters) if each["name"] == before)
        filters.insert(place, copy.deepcopy(value))
    elif operation == ("HTTP_ROUTE", "MERGE"):
        wanted = match["routeConfiguration"]["vhost"]["route"]["name"]
        (found,) = (
            route
            for host in manager["typed_config"]["route_config"]["virtual_hosts"]
            for route in host["routes"]
            if route["name"] == wanted
        )
        merge(found, value)
    elif operation == ("CLUSTER", "MERGE"):
        wanted = f"outbound|{match['cluster']['portNumber']}||{match['cluster']['service']}"
        (found,) = (each for each in config["static_resources"]["clusters"] if each["name"] == wanted)
        # A message in a map is replaced where another has its key.
        for key in set(value.get("typed_extension_protocol_options", {})):
            found.get("typed_extension_protocol_options", {}).pop(key, None)
        merge(found, value)
    else:
        raise AssertionError(f"an operation that isn't rebuilt here: {operation}")


# --- Envoy Gateway ----------------------------------------------------------------------------------------------------


def envoy_gateway(overlay: Overlay, places: Places) -> Document:
    """The listener, routes and clusters of Envoy Gateway, with its policies translated, then the EnvoyPatchPolicy."""
    (gateway,) = overlay.of("Gateway")
    (listener,) = gateway["spec"]["listeners"]
    namespace = gateway["metadata"]["namespace"]
    (extension,) = overlay.of("EnvoyExtensionPolicy")
    (traffic,) = overlay.of("BackendTrafficPolicy")
    (edge,) = overlay.of("ClientTrafficPolicy")
    (ext_proc,) = extension["spec"]["extProc"]
    filter_name = f"{EXT_PROC}/envoyextensionpolicy/{namespace}/{extension['metadata']['name']}/extproc/0"
    clusters, routes = [_eg_router(ext_proc, places)], []
    for route in overlay.of("HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        made: Document = {
            "name": f"httproute/{namespace}/{route['metadata']['name']}/rule/0/match/0/*",
            "match": {"path_separated_prefix": rule["matches"][0]["path"]["value"]},
            "route": {"cluster": f"httproute/{namespace}/{route['metadata']['name']}/rule/0", "timeout": "0s"},
        }
        target = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": route["metadata"]["name"]}
        clusters.append(cluster(made["route"]["cluster"], places.of(backend["name"])))
        if target in extension["spec"]["targetRefs"]:
            made["typed_per_filter_config"] = {filter_name: typed("config.route.v3.FilterConfig", config={})}
        if target in traffic["spec"]["targetRefs"]:
            clusters[-1]["load_balancing_policy"] = _eg_override(traffic["spec"]["loadBalancer"])
            retry = traffic["spec"]["retry"]
            made["route"]["retry_policy"] = {
                "retry_on": ",".join(retry["retryOn"]["triggers"]),
                "retriable_status_codes": retry["retryOn"]["httpStatusCodes"],
                "num_retries": retry["numRetries"],
            }
        for each in rule.get("filters", []):
            made["request_headers_to_remove"] = each["requestHeaderModifier"]["remove"]
        routes.append(made)
    early = edge["spec"]["headers"]["earlyRequestHeaders"]
    mutations: list[Document] = [{"remove": name} for name in early["remove"]]
    mutations += [{"remove_on_match": {"key_matcher": {"prefix": each["value"]}}} for each in early["removeOnMatch"]]
    log = typed("extensions.access_loggers.file.v3.FileAccessLog", path="/dev/null")
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="http-10080",
        use_remote_address=True,
        early_header_mutation_extensions=[
            named(
                "envoy.http.early_header_mutation.header_mutation",
                typed("extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation", mutations=mutations),
            )
        ],
        route_config={"name": "http-10080", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        http_filters=[
            {**named(filter_name, _eg_ext_proc(ext_proc)), "disabled": True},
            named("envoy.filters.http.router", typed("extensions.filters.http.router.v3.Router")),
        ],
        access_log=[named("envoy.access_loggers.file", log)],
    )
    limit = int(edge["spec"]["connection"]["bufferLimit"].removesuffix("Mi")) << 20
    config = {
        "node": {"id": "gateway", "cluster": "gateway"},
        "static_resources": {
            "listeners": [
                {
                    "name": f"tcp-{listener['port']}",  # by XDSNameSchemeV2
                    "per_connection_buffer_limit_bytes": limit,
                    "default_filter_chain": {"filters": [named(HCM, manager)]},
                }
            ],
            "clusters": clusters,
        },
    }
    for document in overlay.of("EnvoyPatchPolicy"):
        for patch in document["spec"]["jsonPatches"]:
            json_patch(patch, config["static_resources"])
    return placed(config, places)


def _eg_router(ext_proc: Document, places: Places) -> Document:
    settings = ext_proc["backendSettings"]
    passive = settings["healthCheck"]["passive"]
    return cluster(
        "extproc",
        places.of(ext_proc["backendRefs"][0]["name"]),
        typed_extension_protocol_options=http2(connection_keepalive=settings["http2"]["connectionKeepalive"]),
        lb_policy="LEAST_REQUEST",
        common_lb_config={"healthy_panic_threshold": {"value": settings["healthCheck"]["panicThreshold"]}},
        outlier_detection={
            "split_external_local_origin_errors": passive["splitExternalLocalOriginErrors"],
            "consecutive_local_origin_failure": passive["consecutiveLocalOriginFailures"],
            "interval": passive["interval"],
            "base_ejection_time": passive["baseEjectionTime"],
            "max_ejection_percent": passive["maxEjectionPercent"],
        },
    )


def _eg_ext_proc(ext_proc: Document) -> Document:
    """Bodies as the policy says, response headers only where it has a `response`, no trailers."""
    modes = ext_proc["processingMode"]
    response = modes.get("response")
    return typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "extproc"}, "timeout": "10s"},
        failure_mode_allow=ext_proc["failOpen"],
        message_timeout=ext_proc["messageTimeout"],
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": modes["request"]["body"].upper(),
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP" if response is None else "SEND",
            "response_body_mode": "NONE" if response is None else response["body"].upper(),
            "response_trailer_mode": "SKIP",
        },
        request_attributes=modes["request"].get("attributes", []),
        metadata_options={
            "receiving_namespaces": {"untyped": ext_proc["metadata"]["writableNamespaces"]},
            "forwarding_namespaces": {"untyped": ext_proc["metadata"]["accessibleNamespaces"]},
        },
    )


def _eg_override(balancer: Document) -> Document:
    (source,) = balancer["endpointOverride"]["extractFrom"]
    return policies(
        typed(
            "extensions.load_balancing_policies.override_host.v3.OverrideHost",
            override_host_sources=[source],
            fallback_policy=policies(typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")),
        )
    )


def json_patch(patch: Document, resources: Document) -> None:
    """One `add` of RFC 6902 on the resource that it names, or a whole resource."""
    operation = patch["operation"]
    assert operation["op"] == "add", operation["op"]
    kind = re.fullmatch(r"type\.googleapis\.com/envoy\.config\.(listener|cluster)\.v3\.\w+", patch["type"])
    assert kind is not None, patch["type"]
    group: list[Document] = resources[f"{kind[1]}s"]
    if operation["path"] == "":
        assert operation["value"]["name"] == patch["name"]
        group.append(copy.deepcopy(operation["value"]))
        return
    (target,) = (each for each in group if each["name"] == patch["name"])
    *steps, last = operation["path"].removeprefix("/").split("/")
    place: Any = target
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if isinstance(place, list):
        place.insert(len(place) if last == "-" else int(last), copy.deepcopy(operation["value"]))
    else:
        place[last] = copy.deepcopy(operation["value"])
