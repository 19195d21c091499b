"""Names, ports, labels, variables and paths agree across manifests, settings and code, in every overlay."""

import re

import pytest
import yaml

from tests.manifests.overlays import K8S, OVERLAYS, STACKS, stack
from tests.manifests.references import FOREIGN_IMAGES, OWN_IMAGES, faults


def test_the_overlays_are_those_that_are_promised() -> None:
    assert OVERLAYS == ("envoy-gateway", "istio", "istio-envoyfilter", "plain-envoy")


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_everything_refers_to_what_is_there(names: tuple[str, ...]) -> None:
    assert faults(stack(*names)) == []


def test_images_are_those_of_compose() -> None:
    """By the defaults of its variables; what only watches it, the cluster has already."""
    text = (K8S.parent / "compose" / "compose.yaml").read_text(encoding="utf-8")
    text += (K8S.parent / "compose" / "gpu.yaml").read_text(encoding="utf-8").replace("services:", "gpu_services:", 1)
    plain = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    composed = {
        service["image"]
        for kind in ("services", "gpu_services")
        for service in plain[kind].values()
        if "image" in service
    }
    own = {f"leadtime/{name}:" for name in OWN_IMAGES}
    assert {image[: image.index(":") + 1] for image in composed if image.startswith("leadtime/")} == own
    watching = {image for image in composed if image.startswith(("prom/", "grafana/"))}
    assert {image for image in composed if not image.startswith("leadtime/")} - watching == FOREIGN_IMAGES
