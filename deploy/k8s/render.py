"""Writes what these manifests take from the one Envoy config (`deploy/local/envoy`): `python -m deploy.k8s.render`.

- `overlays/plain-envoy/envoy.json`: the whole bootstrap; tokens come from Envoy's own environment.
- `overlays/istio-envoyfilter/envoy-filter.yaml`, `overlays/istio/edge.yaml`: its parts as an EnvoyFilter's patches of
  the gateway that istiod configures.
- `overlays/envoy-gateway/envoy-patch.yaml`: the parts for which Envoy Gateway has no field of its own.

The body limit and whatever else follows from the router's settings comes from `base/settings/router.env`. A test
compares the files with what this renders. Pure but for `main`.

Limits: routes with restored model names and upgrades (WebSocket) are rendered for plain Envoy alone: for Istio they
would need routes that istiod doesn't make.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, of_router, render

HERE: Final = Path(__file__).parent
NAMESPACE: Final = "inference"
"""Part of names in Istio and Envoy Gateway; kustomize puts the overlay's own in its place."""
GATEWAY: Final = "inference-gateway"
GATEWAY_PORT: Final = 80
MODELS: Final = Address("leadtime-models", 8000)
ROUTER: Final = RouterAddress(Address("leadtime-router-pods", 9002), 9003)
COLLECTOR: Final = Address("leadtime-collector", 9001)
API: Final = Address("api", 8080)
_COLLECTOR_CLUSTER: Final = "leadtime-collector"
_HCM: Final = "envoy.filters.network.http_connection_manager"
_HTTP_ROUTER: Final = "envoy.filters.http.router"


def router_environment(file: Path = HERE / "base" / "settings" / "router.env") -> dict[str, str]:
    """The router's variables as its ConfigMap will have them."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def config(environment: Mapping[str, str]) -> EnvoyConfig:
    """Plain Envoy's surroundings in the cluster."""
    return EnvoyConfig(
        endpoints=(MODELS,),
        routers=(ROUTER,),
        collectors=(COLLECTOR,),
        api=(API,),
        listen=Address("0.0.0.0", 8080),
        admin=Address("127.0.0.1", 9901),
        router_tls=True,
        router_token_variable="LEADTIME_ROUTER_EXTPROC_TOKEN",  # noqa: S106 - a variable's name
        collector_token_variable="LEADTIME_COLLECTOR_ALS_TOKEN",  # noqa: S106 - a variable's name
        **of_router(environment),
    )


class _Parts:
    """The config without tokens, taken apart."""

    def __init__(self, environment: Mapping[str, str], shape: Shape = "buffered") -> None:
        bootstrap = render(
            EnvoyConfig(
                endpoints=(MODELS,),
                routers=(ROUTER,),
                collectors=(Address(f"{COLLECTOR.host}.{NAMESPACE}.svc.cluster.local", COLLECTOR.port),),
                api=(API,),
                shape=shape,
                **of_router(environment),
            )
        )
        (listener,) = bootstrap["static_resources"]["listeners"]
        self.body_limit_bytes: int = listener["per_connection_buffer_limit_bytes"]
        self.manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
        self.filters: list[dict[str, Any]] = self.manager["http_filters"][:-1]
        self.routes: dict[str, dict[str, Any]] = {
            route["name"]: route for route in self.manager["route_config"]["virtual_hosts"][0]["routes"]
        }
        self.clusters: dict[str, dict[str, Any]] = {
            cluster["name"]: cluster for cluster in bootstrap["static_resources"]["clusters"]
        }


def envoy_filter(environment: Mapping[str, str]) -> dict[str, Any]:
    """All of it, on a gateway that knows nothing of routers."""
    parts = _Parts(environment)
    (ext_proc, *labels) = parts.filters
    ext_proc["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = _istio_cluster("leadtime-router", 9002)
    (log,) = parts.manager["access_log"]
    log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = _istio_cluster(
        COLLECTOR.host, COLLECTOR.port
    )
    to_models = {key: value for key, value in parts.routes["pool"].items() if key not in {"name", "match"}}
    to_models["route"] = {key: value for key, value in to_models["route"].items() if key != "cluster"}
    patches = [
        _patch(
            "LISTENER",
            "MERGE",
            {"per_connection_buffer_limit_bytes": parts.body_limit_bytes},
            listener={"portNumber": GATEWAY_PORT},
        ),
        _edge_patch(
            parts, access_log=parts.manager["access_log"], stream_idle_timeout=parts.manager["stream_idle_timeout"]
        ),
        # Each goes right before the router filter, so they stand in this order.
        *(
            _patch("HTTP_FILTER", "INSERT_BEFORE", each, listener=_http_filter(_HTTP_ROUTER))
            for each in (ext_proc, *labels)
        ),
        _patch("HTTP_ROUTE", "MERGE", to_models, routeConfiguration=_route("leadtime-models")),
        _patch(
            "HTTP_ROUTE",
            "MERGE",
            {"typed_per_filter_config": parts.routes["api"]["typed_per_filter_config"]},
            routeConfiguration=_route("leadtime-api"),
        ),
        _patch(
            "CLUSTER",
            "MERGE",
            {"load_balancing_policy": parts.clusters["pool"]["load_balancing_policy"]},
            cluster={"service": f"{MODELS.host}.{NAMESPACE}.svc.cluster.local", "portNumber": MODELS.port},
        ),
        _pings(parts),
    ]
    return _filter("leadtime", patches)


def edge_filter(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a gateway with an InferencePool lacks: clients' steering headers are removed before anybody sees them, and a
    frozen router is noticed, for which Envoy would wait without end.
    """
    parts = _Parts(environment, "full_duplex")
    return _filter("leadtime-edge", [_edge_patch(parts), _pings(parts)])


def envoy_patch(environment: Mapping[str, str]) -> dict[str, Any]:
    """For Envoy Gateway: the access log to the collector, and the filters by which it has labels."""
    parts = _Parts(environment)
    cluster = {**parts.clusters["collector"], "name": _COLLECTOR_CLUSTER}
    cluster["load_assignment"] = {**cluster["load_assignment"], "cluster_name": _COLLECTOR_CLUSTER}
    (log,) = parts.manager["access_log"]
    log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = _COLLECTOR_CLUSTER
    manager = "/default_filter_chain/filters/0/typed_config"

    def patch(kind: str, name: str, path: str, value: Any) -> dict[str, Any]:
        operation = {"op": "add", "path": path, "value": value}
        return {"type": f"type.googleapis.com/envoy.config.{kind}", "name": name, "operation": operation}

    listener = ("listener.v3.Listener", f"tcp-{GATEWAY_PORT}")
    patches = [
        patch("cluster.v3.Cluster", _COLLECTOR_CLUSTER, "", cluster),
        patch(*listener, f"{manager}/access_log/-", log),
        # Responses meet them last. Put in one before the other, so they are listed backwards.
        *(patch(*listener, f"{manager}/http_filters/0", each) for each in reversed(parts.filters[1:])),
    ]
    return {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "EnvoyPatchPolicy",
        "metadata": {"name": "leadtime-access-log"},
        "spec": {
            "targetRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": GATEWAY},
            "type": "JSONPatch",
            "jsonPatches": patches,
        },
    }


def _filter(name: str, patches: list[dict[str, Any]]) -> dict[str, Any]:
    selector = {"labels": {"gateway.networking.k8s.io/gateway-name": GATEWAY}}
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": name},
        "spec": {"workloadSelector": selector, "configPatches": patches},
    }


def _edge_patch(parts: _Parts, **more: Any) -> dict[str, Any]:
    headers = {"early_header_mutation_extensions": parts.manager["early_header_mutation_extensions"]}
    typed = {"@type": parts.manager["@type"], **headers, **more}
    value = {"name": _HCM, "typed_config": typed}
    return _patch("NETWORK_FILTER", "MERGE", value, listener={"filterChain": {"filter": {"name": _HCM}}})


def _pings(parts: _Parts) -> dict[str, Any]:
    """HTTP/2 pings on the connections to routers, which a DestinationRule has no words for."""
    options = {"typed_extension_protocol_options": parts.clusters["picker"]["typed_extension_protocol_options"]}
    service = f"leadtime-router.{NAMESPACE}.svc.cluster.local"
    return _patch("CLUSTER", "MERGE", options, cluster={"service": service, "portNumber": ROUTER.address.port})


def _patch(apply_to: str, operation: str, value: dict[str, Any], **match: Any) -> dict[str, Any]:
    return {
        "applyTo": apply_to,
        "match": {"context": "GATEWAY", **match},
        "patch": {"operation": operation, "value": value},
    }


def _http_filter(name: str) -> dict[str, Any]:
    return {"filterChain": {"filter": {"name": _HCM, "subFilter": {"name": name}}}}


def _route(rule: str) -> dict[str, Any]:
    """Istiod names a route as the HTTPRoute's rule is named."""
    return {"vhost": {"route": {"name": rule, "action": "ROUTE"}}}


def _istio_cluster(service: str, port: int) -> str:
    return f"outbound|{port}||{service}.{NAMESPACE}.svc.cluster.local"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such; no aliases, since every reader of the file is a person or istiod."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _document(manifest: dict[str, Any]) -> str:
    note = "# Rendered by `python -m deploy.k8s.render` from deploy/local/envoy: change that.\n"
    return note + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def files(environment: Mapping[str, str]) -> dict[Path, str]:
    """Each rendered file's place under this folder, and its text."""
    overlays = Path("overlays")
    return {
        overlays / "plain-envoy" / "envoy.json": json.dumps(render(config(environment)), indent=1) + "\n",
        overlays / "istio-envoyfilter" / "envoy-filter.yaml": _document(envoy_filter(environment)),
        overlays / "istio" / "edge.yaml": _document(edge_filter(environment)),
        overlays / "envoy-gateway" / "envoy-patch.yaml": _document(envoy_patch(environment)),
    }


def main() -> None:
    """Write all of them; there is nothing to choose."""
    argparse.ArgumentParser(description="Writes Envoy's part of every overlay anew.").parse_args()
    for place, text in files(router_environment()).items():
        (HERE / place).write_text(text, encoding="utf-8")
        print(HERE / place)


if __name__ == "__main__":
    main()
