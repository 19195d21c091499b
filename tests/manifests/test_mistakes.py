"""Mistakes that were planted: each is caught, and the fault's words say which it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.manifests.overlays import Document, Overlay, overlay, stack
from tests.manifests.references import faults
from tests.manifests.schemas import Crds, builtin_faults

ROUTER, PREDICTOR, TRAINER = "leadtime-router", "leadtime-predictor", "leadtime-trainer"


@dataclass(frozen=True)
class Mistake:
    """Where, what, and a part of the fault's words."""

    stack: tuple[str, ...]
    kind: str
    name: str
    plant: Callable[[Document], Any]
    caught: str

    def planted(self) -> tuple[Overlay, Document]:
        whole = stack(*self.stack).changed()
        document = whole.get(self.kind, self.name)
        self.plant(document["spec"])
        return whole, document


def container(spec: Document) -> Document:
    found: Document = spec["template"]["spec"]["containers"][0]
    return found


def environment(spec: Document, name: str) -> Document:
    found: Document = next(each for each in container(spec)["env"] if each["name"] == name)
    return found


BY_SCHEMA = {
    "a misspelt field of a pod": Mistake(
        ("istio",), "Deployment", ROUTER, lambda s: container(s).update(imagePulPolicy="Always"), "imagePulPolicy"
    ),
    "a number that is a text": Mistake(
        ("istio",), "Deployment", TRAINER, lambda s: s.update(replicas="two"), "replicas"
    ),
    "a probe in the wrong place": Mistake(
        ("istio",), "Deployment", PREDICTOR, lambda s: s["template"]["spec"].update(livenessProbe={}), "livenessProbe"
    ),
    "a policy type that isn't one": Mistake(
        ("istio",), "NetworkPolicy", ROUTER, lambda s: s.update(policyTypes="Ingress"), "policyTypes"
    ),
}
BY_CRD = {
    "a pool of the old API": Mistake(
        ("istio",), "InferencePool", "models", lambda s: s.update(targetPortNumber=8000), "targetPortNumber"
    ),
    "a picker without a port": Mistake(
        ("istio",), "InferencePool", "models", lambda s: s["endpointPickerRef"].pop("port"), "port"
    ),
    "a failure mode that isn't one": Mistake(
        ("istio",),
        "InferencePool",
        "models",
        lambda s: s["endpointPickerRef"].update(failureMode="Open"),
        "failureMode",
    ),
    "a path without a slash": Mistake(
        ("istio",), "HTTPRoute", "inference", lambda s: s["rules"][1]["matches"][0]["path"].update(value="v1"), "'/'"
    ),
    "a TLS mode in lower case": Mistake(
        ("istio",),
        "DestinationRule",
        ROUTER,
        lambda s: s["trafficPolicy"]["portLevelSettings"][0]["tls"].update(mode="simple"),
        "simple",
    ),
    "an EnvoyFilter that is applied to nothing": Mistake(
        ("istio-envoyfilter",), "EnvoyFilter", "leadtime", lambda s: s["configPatches"][0].update(applyTo="HCM"), "HCM"
    ),
    "fail open in full duplex": Mistake(
        ("envoy-gateway",),
        "EnvoyExtensionPolicy",
        ROUTER,
        lambda s: s["extProc"][0]["processingMode"]["request"].update(body="FullDuplexStreamed"),
        "FullDuplexStreamed",
    ),
    "a trigger without a type": Mistake(
        ("plain-envoy", "keda"), "ScaledObject", PREDICTOR, lambda s: s["triggers"][0].pop("type"), "type"
    ),
    "an interval in words": Mistake(
        ("plain-envoy", "pod-monitors"),
        "PodMonitor",
        ROUTER,
        lambda s: s["podMetricsEndpoints"][0].update(interval="ten"),
        "ten",
    ),
}
BY_REFERENCE = {
    "a picker on the health port": Mistake(
        ("istio",),
        "InferencePool",
        "models",
        lambda s: s["endpointPickerRef"]["port"].update(number=9003),
        "its picker isn't the router's ext-proc port",
    ),
    "a pool that isn't the router's": Mistake(
        ("istio",),
        "InferencePool",
        "models",
        lambda s: s["selector"]["matchLabels"].clear(),
        "told of no model servers",
    ),
    "a Service that selects nobody": Mistake(
        ("istio",),
        "Service",
        PREDICTOR,
        lambda s: s["selector"].update({"app.kubernetes.io/name": "predictor"}),
        "leads to no workload",
    ),
    "gRPC that a mesh would take for HTTP/1": Mistake(
        ("istio",), "Service", ROUTER, lambda s: s["ports"][0].update(appProtocol="http"), "appProtocol http"
    ),
    "a setting that doesn't exist": Mistake(
        ("plain-envoy",),
        "Deployment",
        ROUTER,
        lambda s: environment(s, "LEADTIME_ROUTER_PREFIX_SALT").update(name="LEADTIME_ROUTER_PREFIX_SALZ"),
        "LEADTIME_ROUTER_PREFIX_SALZ: no such setting",
    ),
    "a token that is missing": Mistake(
        ("plain-envoy",),
        "Deployment",
        ROUTER,
        lambda s: container(s)["env"].remove(environment(s, "LEADTIME_ROUTER_EXTPROC_TOKEN")),
        "extproc_token, tls_client_ca_file or extproc_open is needed",
    ),
    "a key that nobody makes": Mistake(
        ("plain-envoy",),
        "Deployment",
        PREDICTOR,
        lambda s: environment(s, "LEADTIME_REDIS_PASSWORD")["valueFrom"]["secretKeyRef"].update(key="redis-pass"),
        "key redis-pass of Secret leadtime-secrets, which the README doesn't make",
    ),
    "a password in the manifest": Mistake(
        ("plain-envoy",),
        "Deployment",
        TRAINER,
        lambda s: container(s)["env"].append({"name": "LEADTIME_STORE_PASSWORD", "value": "hunter2"}),
        "LEADTIME_STORE_PASSWORD has its value in the manifest",
    ),
    "a probe of a path that isn't served": Mistake(
        ("plain-envoy",),
        "Deployment",
        PREDICTOR,
        lambda s: container(s)["readinessProbe"]["httpGet"].update(path="/ready"),
        "no such path: /ready",
    ),
    "a liveness probe that asks for readiness": Mistake(
        ("plain-envoy",),
        "Deployment",
        TRAINER,
        lambda s: container(s)["livenessProbe"]["httpGet"].update(path="/readyz"),
        "would restart a service that only waits",
    ),
    "a root file system that is written to": Mistake(
        ("plain-envoy",),
        "Deployment",
        "leadtime-envoy",
        lambda s: container(s)["securityContext"].pop("readOnlyRootFilesystem"),
        "leadtime-envoy: readOnlyRootFilesystem",
    ),
    "variables made of Services": Mistake(
        ("plain-envoy",),
        "Deployment",
        ROUTER,
        lambda s: s["template"]["spec"].pop("enableServiceLinks"),
        "enableServiceLinks",
    ),
    "a stop that is shorter than an answer": Mistake(
        ("plain-envoy",),
        "Deployment",
        ROUTER,
        lambda s: s["template"]["spec"].update(terminationGracePeriodSeconds=60),
        "terminationGracePeriodSeconds 60",
    ),
    "an image of another release": Mistake(
        ("plain-envoy",),
        "Deployment",
        ROUTER,
        lambda s: container(s).update(image="leadtime/router:latest"),
        "router:latest",
    ),
    "a trainer that is scaled": Mistake(
        ("plain-envoy",),
        "HorizontalPodAutoscaler",
        PREDICTOR,
        lambda s: s["scaleTargetRef"].update(name=TRAINER),
        "the trainer is scaled",
    ),
    "replicas beside an autoscaler": Mistake(
        ("plain-envoy",), "Deployment", ROUTER, lambda s: s.update(replicas=3), "`replicas` beside an autoscaler"
    ),
    "a policy that forgets a caller": Mistake(
        ("plain-envoy",), "NetworkPolicy", PREDICTOR, lambda s: s["ingress"][0]["from"].pop(0), "no NetworkPolicy lets"
    ),
    "a policy for another gateway": Mistake(
        ("istio",),
        "NetworkPolicy",
        "leadtime-gateway-to-router",
        lambda s: s["ingress"][0]["from"][0]["podSelector"]["matchLabels"].update(
            {"gateway.networking.k8s.io/gateway-name": "other"}
        ),
        "aren't let in to grpc-ext-proc",
    ),
    "TLS on one side": Mistake(
        ("istio",),
        "DestinationRule",
        ROUTER,
        lambda s: s["trafficPolicy"]["portLevelSettings"][0].pop("tls"),
        "TLS None, the router's is on",
    ),
    "routers that are put aside by halves": Mistake(
        ("istio",),
        "DestinationRule",
        ROUTER,
        lambda s: s["trafficPolicy"]["portLevelSettings"][0]["outlierDetection"].update(maxEjectionPercent=50),
        "fail_open_is_real",
    ),
    "a rule that was renamed": Mistake(
        ("istio-envoyfilter",),
        "HTTPRoute",
        "inference",
        lambda s: s["rules"][0].update(name="api"),
        "no rule leadtime-api",
    ),
    "a cluster of another namespace": Mistake(
        ("istio-envoyfilter",),
        "EnvoyFilter",
        "leadtime",
        lambda s: s["configPatches"][2]["patch"]["value"]["typed_config"]["grpc_service"]["envoy_grpc"].update(
            cluster_name="outbound|9002||leadtime-router.default.svc.cluster.local"
        ),
        "leadtime-router.default.svc.cluster.local is no Service of ours",
    ),
    "a client's own header that picks": Mistake(
        ("envoy-gateway",),
        "ClientTrafficPolicy",
        "leadtime-edge",
        lambda s: s["headers"]["earlyRequestHeaders"]["remove"].pop(0),
        "other headers than shared/names.py has",
    ),
    "a policy for a route that isn't there": Mistake(
        ("envoy-gateway",),
        "EnvoyExtensionPolicy",
        ROUTER,
        lambda s: s["targetRefs"][0].update(name="models"),
        "no HTTPRoute models",
    ),
    "an access log to a cluster that isn't there": Mistake(
        ("envoy-gateway",),
        "EnvoyPatchPolicy",
        "leadtime-access-log",
        lambda s: s["jsonPatches"][0].update(name="collector"),
        "no cluster leadtime-collector",
    ),
    "a fallback that KEDA's webhook refuses": Mistake(
        ("plain-envoy", "keda"),
        "ScaledObject",
        PREDICTOR,
        lambda s: s["triggers"].append({"type": "cpu", "metricType": "Utilization", "metadata": {"value": "75"}}),
        "KEDA refuses a fallback beside cpu",
    ),
    "a query for a metric that isn't there": Mistake(
        ("plain-envoy", "keda"),
        "ScaledObject",
        PREDICTOR,
        lambda s: s["triggers"][0]["metadata"].update(query="sum(leadtime_predictor_queue_depth)"),
        "no metric leadtime_predictor_queue_depth",
    ),
    "a setting and a Service with other ports": Mistake(
        ("plain-envoy",),
        "Service",
        "leadtime-models",
        lambda s: s["ports"][0].update(targetPort=8001),
        "Service leadtime-models has ports (8001,), the router 8000",
    ),
}


@pytest.mark.parametrize("mistake", BY_SCHEMA.values(), ids=BY_SCHEMA)
def test_kubernetes_own_schemas_catch(mistake: Mistake) -> None:
    _, document = mistake.planted()
    assert mistake.caught in " ".join(builtin_faults(document))


@pytest.mark.crds
@pytest.mark.parametrize("mistake", BY_CRD.values(), ids=BY_CRD)
def test_definitions_of_other_kinds_catch(mistake: Mistake, crds: Crds) -> None:
    _, document = mistake.planted()
    assert mistake.caught in " ".join(crds.faults(document))


@pytest.mark.parametrize("mistake", BY_REFERENCE.values(), ids=BY_REFERENCE)
def test_cross_references_catch(mistake: Mistake) -> None:
    whole, _ = mistake.planted()
    found = " ".join(faults(whole))
    assert mistake.caught in found


def test_a_config_map_with_a_wrong_value_stops_before_the_cluster() -> None:
    whole = overlay("plain-envoy").changed()
    name = next(
        m["metadata"]["name"] for m in whole.of("ConfigMap") if m["metadata"]["name"].startswith("leadtime-router-")
    )
    whole.config_map(name)["LEADTIME_ROUTER_TLS"] = "on"
    assert "LEADTIME_ROUTER_TLS" in " ".join(faults(whole))


def test_nothing_else_was_changed_by_planting() -> None:
    """The mistakes are in copies."""
    BY_REFERENCE["TLS on one side"].planted()
    assert faults(overlay("istio")) == []
