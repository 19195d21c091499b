"""What no schema sees: names, ports, labels, variables and paths by which manifests, settings and code must agree.

Each check gives its faults in words, none where all is well; `CHECKS` is the list of all.
"""

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from deploy.local.envoy import of_router
from services.collector.settings import CollectorSettings
from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import PredictorSettings
from services.router.discovery.endpoints import parse_ports
from services.router.extproc.server import HEALTH_SERVICES
from services.router.settings import RouterSettings
from services.trainer.settings import TrainerSettings
from shared import names
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.lifecycle import Readiness, probe_app
from shared.settings import load
from tests.manifests.overlays import K8S, USERS_OWN, Overlay, Workload, walk

SETTINGS: Mapping[str, type[BaseSettings]] = {
    "router": RouterSettings,
    "collector": CollectorSettings,
    "predictor": PredictorSettings,
    "trainer": TrainerSettings,
}
SERVED = {
    route.path for route in probe_app("any", Readiness(), CollectorRegistry()).routes if isinstance(route, APIRoute)
}
"""Paths that every service serves to anyone."""
FOREIGN_IMAGES = {"nats:2", "redis:7", "envoyproxy/envoy:v1.40-latest"}
OWN_IMAGES = ("router", "collector", "predictor", "trainer", "predictor-gpu", "trainer-tensor", "sim")
LONGEST_STREAM_S = 130
PROTOCOLS = {"grpc": "kubernetes.io/h2c", "http": "http", "nats": "tcp", "redis": "tcp"}
"""What a port's name begins with, and its appProtocol."""

Faults = Iterator[str]


def own(overlay: Overlay) -> list[Workload]:
    return [found for found in overlay.workloads if found.service in SETTINGS]


def settings_of(overlay: Overlay, workload: Workload) -> Any:
    """The service's settings in that pod's environment; raises ConfigurationError as its start would."""
    return _settings(workload.service, tuple(sorted(overlay.environment(workload).items())))


@functools.cache
def _settings(service: str, environment: tuple[tuple[str, str], ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment:
            patch.setenv(name, value)
        return load(SETTINGS[service])


# --- the pods' environment --------------------------------------------------------------------------------------------


def settings_load(overlay: Overlay) -> Faults:
    """Every service would start: each variable is a setting, each value allowed, each needed one there."""
    for workload in own(overlay):
        try:
            settings_of(overlay, workload)
        except ConfigurationError as error:
            yield f"{workload.name}: {error}"


def ports_are_the_settings(overlay: Overlay) -> Faults:
    for workload in own(overlay):
        settings = settings_of(overlay, workload)
        wanted = {"http": settings.http_port}
        if workload.service == "router":
            wanted |= {"grpc-ext-proc": settings.extproc_port, "grpc-health": settings.health_port}
        if workload.service == "collector":
            wanted["grpc-als"] = settings.als_port
        if workload.ports != wanted:
            yield f"{workload.name}: containerPorts {workload.ports}, but the settings say {wanted}"


def secrets_are_documented(overlay: Overlay) -> Faults:
    """Every key is made by the command in the README."""
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    for workload in overlay.workloads:
        for variable, (secret, key) in workload.secrets.items():
            if secret != "leadtime-secrets" or f"--from-literal={key}=" not in readme:
                yield f"{workload.name}: {variable} is key {key} of Secret {secret}, which the README doesn't make"
    if overlay.of("Secret"):
        yield "a Secret is among the manifests"


def no_secret_is_written_down(overlay: Overlay) -> Faults:
    secret = re.compile(r"(TOKEN|PASSWORD|KEY|SALT|SECRET|CREDENTIAL)S?$")
    for document in overlay.of("ConfigMap"):
        for name in document.get("data", {}):
            if secret.search(name):
                yield f"ConfigMap {document['metadata']['name']}: {name}"
    for workload in overlay.workloads:
        for each in workload.container.get("env", []):
            if secret.search(each["name"]) and "value" in each:
                yield f"{workload.name}: {each['name']} has its value in the manifest"


def service_links_are_off(overlay: Overlay) -> Faults:
    """Kubernetes' own variables (LEADTIME_ROUTER_PORT) would be settings that don't exist, and stop every start."""
    for workload in overlay.workloads:
        if workload.pod.get("enableServiceLinks") is not False:
            yield f"{workload.name}: enableServiceLinks isn't false"


# --- pods -------------------------------------------------------------------------------------------------------------


def pods_are_confined(overlay: Overlay) -> Faults:
    for workload in overlay.workloads:
        pod, container = workload.pod.get("securityContext", {}), workload.container.get("securityContext", {})
        wanted = {
            "runAsNonRoot": pod.get("runAsNonRoot") is True,
            "runAsUser": pod.get("runAsUser", 0) > 0,
            "seccompProfile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "readOnlyRootFilesystem": container.get("readOnlyRootFilesystem") is True,
            "allowPrivilegeEscalation": container.get("allowPrivilegeEscalation") is False,
            "capabilities": container.get("capabilities") == {"drop": ["ALL"]},
            "no privilege": not container.get("privileged") and not workload.pod.get("hostNetwork"),
            "own user": workload.service not in SETTINGS or pod.get("runAsUser") == 65532,
        }
        yield from (f"{workload.name}: {name}" for name, holds in wanted.items() if not holds)
        needs_token = workload.service == "router"
        if workload.pod.get("automountServiceAccountToken") is not needs_token:
            yield f"{workload.name}: automountServiceAccountToken isn't {needs_token}"
        if overlay.find("ServiceAccount", workload.pod.get("serviceAccountName", "default")) is None:
            yield f"{workload.name}: no such ServiceAccount: {workload.pod.get('serviceAccountName')}"


def resources_are_bounded(overlay: Overlay) -> Faults:
    for workload in overlay.workloads:
        resources = workload.container.get("resources", {})
        if "memory" not in resources.get("limits", {}) or "memory" not in resources.get("requests", {}):
            yield f"{workload.name}: memory isn't bounded"
        if "cpu" not in resources.get("requests", {}) and "nvidia.com/gpu" not in resources.get("limits", {}):
            yield f"{workload.name}: no CPU is asked for, which its autoscaler divides by"
        for volume in workload.pod.get("volumes", []):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{workload.name}: volume {volume['name']} is unbounded"


def volumes_are_there(overlay: Overlay) -> Faults:
    for workload in overlay.workloads:
        volumes = {volume["name"]: volume for volume in workload.pod.get("volumes", [])}
        claims = {claim["metadata"]["name"] for claim in workload.document["spec"].get("volumeClaimTemplates", [])}
        for mount in workload.container.get("volumeMounts", []):
            if mount["name"] not in volumes and mount["name"] not in claims:
                yield f"{workload.name}: no volume {mount['name']}"
        for volume in volumes.values():
            if "configMap" in volume and overlay.find("ConfigMap", volume["configMap"]["name"]) is None:
                yield f"{workload.name}: no ConfigMap {volume['configMap']['name']}"
        if workload.service == "collector":
            spool = settings_of(overlay, workload).spool_dir
            mounts = {mount["mountPath"]: mount["name"] for mount in workload.container["volumeMounts"]}
            size = volumes.get(mounts.get(str(spool), ""), {}).get("emptyDir", {}).get("sizeLimit", "0Mi")
            if int(size.removesuffix("Mi")) << 20 < settings_of(overlay, workload).spool_max_bytes:
                yield f"{workload.name}: the spool {spool} is no volume, or larger than its volume"


def probes_ask_for_what_is_there(overlay: Overlay) -> Faults:
    for workload in overlay.workloads:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = workload.container.get(kind)
            if probe is None:
                if kind != "startupProbe":
                    yield f"{workload.name}: no {kind}"
                continue
            where = f"{workload.name}: {kind}"
            if (http := probe.get("httpGet")) is not None:
                if http["port"] not in workload.ports:
                    yield f"{where}: no port {http['port']}"
                if workload.service in SETTINGS and http["path"] not in SERVED:
                    yield f"{where}: no such path: {http['path']}"
                if workload.service in SETTINGS and kind == "livenessProbe" and http["path"] != "/healthz":
                    yield f"{where}: {http['path']} would restart a service that only waits"
            if (grpc := probe.get("grpc")) is not None:
                if grpc["port"] not in workload.ports.values():
                    yield f"{where}: no port {grpc['port']}"
                if grpc.get("service", "") not in HEALTH_SERVICES:
                    yield f"{where}: no health service '{grpc.get('service')}'"
            if (tcp := probe.get("tcpSocket")) is not None and tcp["port"] not in workload.ports:
                yield f"{where}: no port {tcp['port']}"


def stops_are_long_enough(overlay: Overlay) -> Faults:
    """preStop and the service's own drain end before Kubernetes kills; what carries answers outlasts the longest."""
    for workload in overlay.workloads:
        grace = workload.pod.get("terminationGracePeriodSeconds", 30)
        hook = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = hook + 5
        if workload.service == "router":
            settings = settings_of(overlay, workload)
            needed += settings.lame_duck_s + settings.drain_s
            if settings.drain_s < LONGEST_STREAM_S:
                yield f"{workload.name}: drain_s {settings.drain_s:g} is shorter than an answer"
        if workload.service == "collector":
            needed += settings_of(overlay, workload).drain_timeout_ms / 1e3
        if workload.service == "envoy" and hook < LONGEST_STREAM_S:
            yield f"{workload.name}: preStop {hook} is shorter than an answer"
        if grace < needed:
            yield f"{workload.name}: terminationGracePeriodSeconds {grace}, but it takes {needed:g}"


def images_are_ours_or_named(overlay: Overlay) -> Faults:
    version = importlib.metadata.version("leadtime")
    ours = {f"leadtime/{name}:{version}" for name in OWN_IMAGES}
    for workload in overlay.workloads:
        image = workload.container["image"]
        if image not in ours and image not in FOREIGN_IMAGES:
            yield f"{workload.name}: image {image}"
        if workload.service in SETTINGS and not image.startswith(f"leadtime/{workload.service}"):
            yield f"{workload.name}: another service's image: {image}"


# --- who finds whom ---------------------------------------------------------------------------------------------------


def selectors_match(overlay: Overlay) -> Faults:
    for workload in overlay.workloads:
        chosen = workload.document["spec"]["selector"]["matchLabels"]
        if not chosen.items() <= workload.labels.items():
            yield f"{workload.name}: its own selector misses its pods"
        for spread in workload.pod.get("topologySpreadConstraints", []):
            if workload not in overlay.selected(spread["labelSelector"]["matchLabels"]):
                yield f"{workload.name}: a topology spread of other pods"
    for kind in ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for document in overlay.of(kind):
            spec = document["spec"]
            chosen = (spec.get("selector") or spec.get("podSelector"))["matchLabels"]
            if len(overlay.selected(chosen)) != 1:
                yield f"{kind} {document['metadata']['name']} selects no workload, or several: {chosen}"


def services_lead_to_pods(overlay: Overlay) -> Faults:
    pool = router_selector(overlay)
    for document in overlay.of("Service"):
        where = f"Service {document['metadata']['name']}"
        selector = document["spec"]["selector"]
        for port in document["spec"]["ports"]:
            protocol = next((value for name, value in PROTOCOLS.items() if port["name"].split("-")[0] == name), None)
            if protocol is None or port.get("appProtocol") != protocol:
                yield f"{where}: port {port['name']} with appProtocol {port.get('appProtocol')}"
        if selector == pool:
            continue
        found = overlay.selected(selector)
        if len(found) != 1:
            yield f"{where} leads to no workload, or several"
            continue
        for port in document["spec"]["ports"]:
            number = found[0].ports.get(port["targetPort"])
            if number is None or port["name"] != port["targetPort"]:
                yield f"{where}: {found[0].name} has no port {port['targetPort']}"
            elif document["spec"].get("clusterIP") == "None" and port["port"] != number:
                yield f"{where} is headless, so its port {port['port']} has to be the pods' {number}"


def router_selector(overlay: Overlay) -> dict[str, str]:
    """Labels of the model servers' pods, as the router is told."""
    settings = settings_of(overlay, overlay.workload("leadtime-router"))
    if settings.kubernetes_pool:
        pool = overlay.find("InferencePool", settings.kubernetes_pool)
        return dict(pool["spec"]["selector"]["matchLabels"]) if pool else {}
    return dict(pair.split("=", 1) for pair in settings.kubernetes_selector.split(",") if pair)


def models_are_the_same_for_all(overlay: Overlay) -> Faults:
    """Envoy and the router must mean the same pods and ports, or a pick isn't heeded."""
    settings = settings_of(overlay, overlay.workload("leadtime-router"))
    pool = router_selector(overlay)
    if not pool:
        yield "the router is told of no model servers, or of an InferencePool that isn't there"
    if settings.kubernetes_pool:
        return
    service = overlay.find("Service", "leadtime-models")
    if service is None or service["spec"]["selector"] != pool:
        yield f"Service leadtime-models doesn't select {pool}"
        return
    ports = tuple(port["targetPort"] for port in service["spec"]["ports"])
    if ports != parse_ports(settings.kubernetes_ports):
        yield f"Service leadtime-models has ports {ports}, the router {settings.kubernetes_ports}"


def addresses_of(overlay: Overlay, workload: Workload) -> Iterator[tuple[str, str, int]]:
    """Variable, host and port of every Service of ours that a pod's environment names."""
    unread = tuple(
        f"LEADTIME_{block}_"
        for block in ("NATS", "REDIS")
        if block.lower() not in SETTINGS[workload.service].model_fields
    )
    for name, value in overlay.environment(workload).items():
        if "://" not in value or name.startswith(unread):
            continue
        for part in value.split(","):
            url = urlsplit(part.strip())
            if url.hostname and url.hostname.startswith("leadtime-"):
                yield name, url.hostname, url.port or 0


def addresses_lead_somewhere_and_are_let_in(overlay: Overlay) -> Faults:
    for workload in own(overlay):
        for variable, host, port in addresses_of(overlay, workload):
            yield from reached(overlay, workload.labels, host, port, f"{workload.name}: {variable}")


def reached(overlay: Overlay, caller: Mapping[str, str], host: str, port: int, where: str) -> Faults:
    """A Service of that name has the port, and a NetworkPolicy lets the caller's pods in there."""
    service = overlay.service(host)
    ports = {each["port"]: each["targetPort"] for each in service["spec"]["ports"]} if service else {}
    if port not in ports:
        yield f"{where}: no Service {host} with port {port}"
        return
    assert service is not None
    for called in overlay.selected(service["spec"]["selector"]):
        if not lets_in(overlay, called, ports[port], caller):
            yield f"{where}: no NetworkPolicy lets {dict(caller)} in to {called.name}, {ports[port]}"


def lets_in(overlay: Overlay, called: Workload, port: str, caller: Mapping[str, str]) -> bool:
    policies = [
        found
        for found in overlay.of("NetworkPolicy")
        if called in overlay.selected(found["spec"]["podSelector"]["matchLabels"])
    ]
    for rule in (rule for policy in policies for rule in policy["spec"]["ingress"]):
        peers = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in rule["from"] if "podSelector" in peer]
        if any(peer.items() <= caller.items() for peer in peers) and port in {each["port"] for each in rule["ports"]}:
            return True
    return not policies


def network_policies_guard_everything(overlay: Overlay) -> Faults:
    """Every pod has a policy, no policy is open to all, and ports in them exist."""
    for workload in overlay.workloads:
        policies = [
            found
            for found in overlay.of("NetworkPolicy")
            if workload in overlay.selected(found["spec"]["podSelector"]["matchLabels"])
        ]
        if not policies and workload.service not in {"envoy", "demo"}:
            yield f"{workload.name}: no NetworkPolicy"
        for policy in policies:
            for rule in policy["spec"]["ingress"]:
                if not rule.get("from") or any(not peer for peer in rule["from"]):
                    yield f"NetworkPolicy {policy['metadata']['name']} is open to everybody"
                for port in rule.get("ports", []):
                    if port["port"] not in workload.ports:
                        yield f"NetworkPolicy {policy['metadata']['name']}: {workload.name} has no port {port['port']}"


# --- scaling and watching ---------------------------------------------------------------------------------------------


def scaling_is_sound(overlay: Overlay) -> Faults:
    scaled: list[str] = []
    for document in overlay.of("HorizontalPodAutoscaler", "ScaledObject"):
        spec = document["spec"]
        target = spec["scaleTargetRef"]
        scaled.append(target["name"])
        found = overlay.find(target["kind"], target["name"])
        if found is None:
            yield f"{document['kind']} {document['metadata']['name']}: no {target['kind']} {target['name']}"
            continue
        if "replicas" in found["spec"]:
            yield f"{target['name']}: `replicas` beside an autoscaler: every upgrade would undo it"
        least = spec.get("minReplicas", spec.get("minReplicaCount", 0))
        if least < 2:
            yield f"{target['name']}: at least {least}, which is no redundancy"
    yield from (f"{name}: two autoscalers" for name in set(scaled) if scaled.count(name) > 1)
    if "leadtime-trainer" in scaled:
        yield "the trainer is scaled: a second one would only wait"
    if overlay.get("Deployment", "leadtime-trainer")["spec"].get("replicas") != 2:
        yield "leadtime-trainer: not one that learns and one that stands by"
    for name in ("leadtime-router", "leadtime-collector", "leadtime-predictor"):
        if name not in scaled:
            yield f"{name}: nothing scales it"


def budgets_are_there(overlay: Overlay) -> Faults:
    covered = [
        workload.name
        for document in overlay.of("PodDisruptionBudget")
        for workload in overlay.selected(document["spec"]["selector"]["matchLabels"])
    ]
    for workload in own(overlay):
        if covered.count(workload.name) != 1:
            yield f"{workload.name}: {covered.count(workload.name)} PodDisruptionBudgets"


def monitors_find_metrics(overlay: Overlay) -> Faults:
    for document in overlay.of("PodMonitor"):
        for workload in overlay.selected(document["spec"]["selector"]["matchLabels"]):
            for each in document["spec"]["podMetricsEndpoints"]:
                if each.get("path") not in SERVED or each.get("port") != "http" or "http" not in workload.ports:
                    yield f"PodMonitor {document['metadata']['name']}: {each} of {workload.name}"
            if workload.service in SETTINGS and not any(
                peer.get("namespaceSelector") and "http" in {port["port"] for port in rule["ports"]}
                for policy in overlay.of("NetworkPolicy")
                if workload in overlay.selected(policy["spec"]["podSelector"]["matchLabels"])
                for rule in policy["spec"]["ingress"]
                for peer in rule["from"]
            ):
                yield f"{workload.name}: Prometheus isn't let in"


def queries_name_metrics(overlay: Overlay) -> Faults:
    registry = CollectorRegistry()
    PredictorMetrics(registry, SystemClock()).watch_pool("default", lambda: 0)
    known = {metric.name for metric in registry.collect()}
    for document in overlay.of("ScaledObject"):
        for trigger in document["spec"]["triggers"]:
            if "fallback" in document["spec"] and trigger.get("metricType") != "AverageValue":
                yield f"ScaledObject {document['metadata']['name']}: KEDA refuses a fallback beside {trigger['type']}"
            for name in re.findall(r"leadtime_\w+", trigger["metadata"].get("query", "")):
                if name not in known:
                    yield f"ScaledObject {document['metadata']['name']}: no metric {name}"


# --- gateways ---------------------------------------------------------------------------------------------------------


def routes_lead_to_backends(overlay: Overlay) -> Faults:
    for document in overlay.of("HTTPRoute"):
        where = f"HTTPRoute {document['metadata']['name']}"
        for parent in document["spec"]["parentRefs"]:
            if overlay.find("Gateway", parent["name"]) is None:
                yield f"{where}: no Gateway {parent['name']}"
        for backend in (backend for rule in document["spec"]["rules"] for backend in rule["backendRefs"]):
            kind = backend.get("kind", "Service")
            if kind == "Service" and backend["name"] in USERS_OWN:
                continue
            found = overlay.find(kind, backend["name"])
            if found is None:
                yield f"{where}: no {kind} {backend['name']}"
            elif kind == "Service" and backend["port"] not in {port["port"] for port in found["spec"]["ports"]}:
                yield f"{where}: Service {backend['name']} has no port {backend['port']}"
    paths = {
        match["path"]["value"]: {backend.get("kind", "Service") for backend in rule["backendRefs"]}
        for document in overlay.of("HTTPRoute")
        for rule in document["spec"]["rules"]
        for match in rule["matches"]
    }
    if paths and (set(paths) != {"/v1", "/api"} or paths["/api"] != {"Service"}):
        yield f"routes: {paths}, not /v1 to the models and /api to an ordinary Service"


def pickers_are_our_routers(overlay: Overlay) -> Faults:
    settings = settings_of(overlay, overlay.workload("leadtime-router"))
    for document in overlay.of("InferencePool"):
        picker = document["spec"]["endpointPickerRef"]
        where = f"InferencePool {document['metadata']['name']}"
        service = overlay.find("Service", picker["name"])
        port = (
            next((p for p in service["spec"]["ports"] if p["port"] == picker["port"]["number"]), None)
            if service
            else None
        )
        if port is None or port["targetPort"] != "grpc-ext-proc":
            yield f"{where}: its picker isn't the router's ext-proc port"
        if picker.get("failureMode") != "FailOpen":
            yield f"{where}: without a router no request would be served"
        if settings.kubernetes_pool != document["metadata"]["name"]:
            yield f"{where}: the router follows '{settings.kubernetes_pool}'"
        if not settings.collectors:
            yield f"{where}: no access log there, and LEADTIME_ROUTER_COLLECTORS names nobody"
    if settings.kubernetes_pool and overlay.find("InferencePool", settings.kubernetes_pool) is None:
        yield f"the router follows InferencePool {settings.kubernetes_pool}, which isn't there"


def tls_is_the_same_on_both_sides(overlay: Overlay) -> Faults:
    """Otherwise every status is green and every request a 500."""
    tls = settings_of(overlay, overlay.workload("leadtime-router")).tls != "off"
    for document in overlay.of("DestinationRule"):
        host = document["spec"]["host"]
        where = f"DestinationRule {document['metadata']['name']}"
        service = overlay.service(host)
        if service is None:
            yield f"{where}: no Service {host}"
            continue
        ports = {port["port"] for port in service["spec"]["ports"]}
        for each in document["spec"]["trafficPolicy"].get("portLevelSettings", []):
            if each["port"]["number"] not in ports:
                yield f"{where}: Service {host} has no port {each['port']['number']}"
            if host == "leadtime-router" and (each.get("tls", {}).get("mode") == "SIMPLE") is not tls:
                yield f"{where}: TLS {each.get('tls')}, the router's is {'on' if tls else 'off'}"
    if overlay.of("InferencePool") and overlay.find("DestinationRule", "leadtime-router") is None:
        yield "no DestinationRule: istiod would speak plain text to the router, and never put one aside"
    if overlay.of("EnvoyExtensionPolicy") and tls:
        yield "Envoy Gateway speaks plain text to a Service, the router TLS"


def fail_open_is_real(overlay: Overlay) -> Faults:
    """In full duplex Envoy fails open only where no router is left: all may be put aside, at the first failure."""
    if not overlay.of("InferencePool"):
        return
    policy = overlay.get("DestinationRule", "leadtime-router")["spec"]["trafficPolicy"]["portLevelSettings"][0]
    outliers = policy.get("outlierDetection", {})
    wanted = {
        "consecutiveGatewayErrors": 1,
        "consecutive5xxErrors": 1,
        "maxEjectionPercent": 100,
        "minHealthPercent": 0,
    }
    if "connection_keepalive" not in repr(overlay.of("EnvoyFilter")):
        yield "no EnvoyFilter pings the routers: Envoy would wait for a frozen one without end"
    if not wanted.items() <= outliers.items() or policy["connectionPool"]["tcp"]["connectTimeout"] != "1s":
        yield f"DestinationRule leadtime-router: {outliers}"


def gateways_are_let_in(overlay: Overlay) -> Faults:
    """The pods that call router and collector are those of the Gateway that is here."""
    router, collector = overlay.workload("leadtime-router"), overlay.workload("leadtime-collector")
    wanted = [(router, "grpc-ext-proc")]
    if not settings_of(overlay, router).collectors:
        wanted.append((collector, "grpc-als"))
    if overlay.of("Gateway"):
        (gateway,) = overlay.of("Gateway")
        names_of = {
            "istio": {"gateway.networking.k8s.io/gateway-name": gateway["metadata"]["name"]},
            "eg": {"gateway.envoyproxy.io/owning-gateway-name": gateway["metadata"]["name"]},
        }
        caller = names_of[gateway["spec"]["gatewayClassName"]]
    else:
        caller = overlay.workload("leadtime-envoy").labels
        wanted.append((router, "grpc-health"))
    for called, port in wanted:
        if not lets_in(overlay, called, port, caller):
            yield f"{called.name}: the gateway's pods {caller} aren't let in to {port}"


def policies_attach(overlay: Overlay) -> Faults:
    kinds = ("EnvoyExtensionPolicy", "BackendTrafficPolicy", "ClientTrafficPolicy", "EnvoyPatchPolicy")
    for document in overlay.of(*kinds):
        spec = document["spec"]
        for target in spec.get("targetRefs") or [spec["targetRef"]]:
            if overlay.find(target["kind"], target["name"]) is None:
                yield f"{document['kind']} {document['metadata']['name']}: no {target['kind']} {target['name']}"
    for document in overlay.of("EnvoyFilter"):
        labels = document["spec"]["workloadSelector"]["labels"]
        if overlay.find("Gateway", labels["gateway.networking.k8s.io/gateway-name"]) is None:
            yield f"EnvoyFilter {document['metadata']['name']}: no Gateway of {labels}"


def clusters_exist(overlay: Overlay) -> Faults:
    """Clusters in Envoy's patches are Services here, by the name that the control plane gives them."""
    for document in overlay.of("EnvoyFilter", "EnvoyPatchPolicy"):
        where = f"{document['kind']} {document['metadata']['name']}"
        namespace = document["metadata"]["namespace"]
        made = {
            patch["name"]
            for patch in document["spec"].get("jsonPatches", [])
            if patch["type"].endswith("cluster.v3.Cluster")
        }
        for path, value in walk(document["spec"]):
            if path.endswith("cluster_name") and document["kind"] == "EnvoyFilter":
                match = re.fullmatch(r"outbound\|(\d+)\|\|([a-z-]+)\.([a-z0-9-]+)\.svc\.cluster\.local", value)
                yield from named_service(
                    overlay, where, match and (match[2], int(match[1]), match[3]), value, namespace
                )
            elif path.endswith("envoy_grpc.cluster_name") and value not in made:
                yield f"{where}: no cluster {value}"
            elif path.endswith("match.cluster"):
                host, _, rest = value["service"].partition(".")
                found = (host, value["portNumber"], rest.removesuffix(".svc.cluster.local"))
                yield from named_service(overlay, where, found, value["service"], namespace)
            elif path.endswith("socket_address"):
                host, _, rest = value["address"].partition(".")
                found = (host, value["port_value"], rest.removesuffix(".svc.cluster.local"))
                yield from named_service(overlay, where, found, value["address"], namespace)
        (gateway,) = overlay.of("Gateway")
        listeners = {f"tcp-{listener['port']}" for listener in gateway["spec"]["listeners"]}
        for patch in document["spec"].get("jsonPatches", []):
            if patch["type"].endswith("Listener") and patch["name"] not in listeners:
                yield f"{where}: no listener {patch['name']}"


def named_service(
    overlay: Overlay, where: str, found: tuple[str, int, str] | None, text: str, namespace: str
) -> Faults:
    service = overlay.find("Service", found[0]) if found else None
    ports = {port["port"] for port in service["spec"]["ports"]} if service else set()
    if found is None or found[1] not in ports or found[2] != namespace:
        yield f"{where}: {text} is no Service of ours with that port in {namespace}"


def patched_routes_exist(overlay: Overlay) -> Faults:
    rules = {rule.get("name") for document in overlay.of("HTTPRoute") for rule in document["spec"]["rules"]}
    ports = {listener["port"] for document in overlay.of("Gateway") for listener in document["spec"]["listeners"]}
    for document in overlay.of("EnvoyFilter"):
        for patch in document["spec"]["configPatches"]:
            route = patch["match"].get("routeConfiguration", {}).get("vhost", {}).get("route", {}).get("name")
            if route is not None and route not in rules:
                yield f"EnvoyFilter {document['metadata']['name']}: no rule {route}"
            port = patch["match"].get("listener", {}).get("portNumber")
            if port is not None and port not in ports:
                yield f"EnvoyFilter {document['metadata']['name']}: no listener on port {port}"


def edges_are_guarded(overlay: Overlay) -> Faults:
    """Clients' steering headers are removed, and bodies have the router's own limit."""
    environment = overlay.environment(overlay.workload("leadtime-router"))
    limit = of_router(environment).get("body_limit_bytes", RouterSettings.model_fields["max_body_bytes"].default)
    for document in overlay.of("ClientTrafficPolicy"):
        early = document["spec"]["headers"]["earlyRequestHeaders"]
        prefixes = {each["value"] for each in early["removeOnMatch"] if each["type"] == "Prefix"}
        if set(early["remove"]) != set(names.STRIPPED_FROM_CLIENTS) or prefixes != {
            *names.STRIPPED_PREFIXES,
            "x-envoy-",
        }:
            yield f"ClientTrafficPolicy {document['metadata']['name']}: other headers than shared/names.py has"
        if int(document["spec"]["connection"]["bufferLimit"].removesuffix("Mi")) << 20 != limit:
            yield f"ClientTrafficPolicy {document['metadata']['name']}: bufferLimit isn't the router's {limit}"
    if overlay.of("EnvoyExtensionPolicy") and not overlay.of("ClientTrafficPolicy"):
        yield "no ClientTrafficPolicy: a client's own header would pick its endpoint"
    if overlay.of("DestinationRule") and "early_header_mutation" not in repr(overlay.of("EnvoyFilter")):
        yield "no EnvoyFilter removes clients' steering headers"


def extension_policies_are_whole(overlay: Overlay) -> Faults:
    for document in overlay.of("EnvoyExtensionPolicy"):
        for each in document["spec"]["extProc"]:
            if not {names.LB_NAMESPACE, names.METADATA_NAMESPACE} <= set(each["metadata"]["writableNamespaces"]):
                yield "EnvoyExtensionPolicy: the router's metadata would be dropped"
            backend = each["backendRefs"][0]
            service = overlay.find("Service", backend["name"])
            if service is None or {"grpc-ext-proc"} != {
                p["name"] for p in service["spec"]["ports"] if p["port"] == backend["port"]
            }:
                yield "EnvoyExtensionPolicy: its backend isn't the router's ext-proc port"
    for document in overlay.of("BackendTrafficPolicy"):
        sources = document["spec"]["loadBalancer"]["endpointOverride"]["extractFrom"]
        if sources != [{"header": names.DESTINATION}]:
            yield f"BackendTrafficPolicy: the pick is read from {sources}"


CHECKS: tuple[Callable[[Overlay], Faults], ...] = (
    settings_load,
    ports_are_the_settings,
    secrets_are_documented,
    no_secret_is_written_down,
    service_links_are_off,
    pods_are_confined,
    resources_are_bounded,
    volumes_are_there,
    probes_ask_for_what_is_there,
    stops_are_long_enough,
    images_are_ours_or_named,
    selectors_match,
    services_lead_to_pods,
    models_are_the_same_for_all,
    addresses_lead_somewhere_and_are_let_in,
    network_policies_guard_everything,
    scaling_is_sound,
    budgets_are_there,
    monitors_find_metrics,
    queries_name_metrics,
    routes_lead_to_backends,
    pickers_are_our_routers,
    tls_is_the_same_on_both_sides,
    fail_open_is_real,
    gateways_are_let_in,
    policies_attach,
    clusters_exist,
    patched_routes_exist,
    edges_are_guarded,
    extension_policies_are_whole,
)


def faults(overlay: Overlay) -> list[str]:
    """Everything that any check has against it; where a service wouldn't even start, that alone."""
    fatal = [f"settings_load: {fault}" for fault in settings_load(overlay)]
    return fatal or [f"{check.__name__}: {fault}" for check in CHECKS for fault in check(overlay)]
