"""What the README tells people to type is what these manifests need."""

import os
import re
from pathlib import Path

import yaml

from deploy.k8s.render import HERE
from tests.manifests.overlays import COMPONENTS, OVERLAYS, STACKS, Overlay, kustomize, stack
from tests.manifests.references import OWN_IMAGES

README = (HERE / "README.md").read_text(encoding="utf-8")


def test_the_kustomization_of_one_s_own_renders(tmp_path: Path) -> None:
    """As it is printed, in a folder beside deploy/, with images from one's own registry."""
    (text,) = re.findall(r"# mine/kustomization.yaml\n(.*?)```", README, re.DOTALL)
    beside = os.path.relpath(HERE.parent.parent, tmp_path.resolve())
    written = yaml.safe_load(text.replace("../deploy/", f"{beside}/deploy/"))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(written))
    mine = Overlay("istio", kustomize(tmp_path))
    ours = [workload.container["image"] for workload in mine.workloads if "leadtime/" in workload.container["image"]]
    assert len(ours) == 4
    assert all(image.startswith("registry.example/leadtime/") for image in ours)
    router = mine.workload("leadtime-router")
    assert mine.environment(router)["LEADTIME_ROUTER_PROFILE"] == "leadtime"
    assert mine.environment(router)["LEADTIME_ROUTER_KUBERNETES_POOL"] == "models"


def test_every_credential_that_is_made_is_used() -> None:
    made = set(re.findall(r"--from-literal=([a-z-]+)=", README))
    used = {key for names in STACKS for workload in stack(*names).workloads for _, key in workload.secrets.values()}
    assert made == used


def test_overlays_components_and_images_are_named() -> None:
    assert [name for name in (*OVERLAYS, *COMPONENTS) if f"`{name}`" not in README] == []
    assert [name for name in ("router", "collector", "predictor", "trainer", "sim") if name not in OWN_IMAGES] == []


def test_files_that_it_names_are_there() -> None:
    root = HERE.parent.parent
    named = set(re.findall(r"`((?:components|overlays|base|tests)/[\w/.-]+)`", README))
    assert [name for name in sorted(named) if not (HERE / name).exists() and not (root / name).exists()] == []


def test_the_scaling_table_follows_from_the_figures_above_it() -> None:
    """60 % of a core each; the least of 2, 4, 8, 16 that suffices."""

    def figure(pattern: str) -> float:
        (found,) = re.findall(pattern, README)
        return float(found.replace(",", ""))

    buffered, duplex = figure(r"([\d,]+) µs in\nBUFFERED"), figure(r"([\d,]+) µs in full duplex")
    peer, token = figure(r"ledger (\d+) µs"), figure(r"([\d.]+) µs a token where")
    rows, entries = figure(r"([\d,]+) rows/s in calls"), figure(r"([\d,]+) entries/s")

    def carried(routers: int, decision_us: float) -> float:
        return routers * 0.6e6 / (decision_us + peer * (routers - 1))

    lines = re.findall(r"^\| ([\d,]+) \| (\d+) \| ([^|]+) \| (\d+) \| (\d+) \|", README, re.MULTILINE)
    assert len(lines) == 7
    for rate_text, routers, in_istio, predictors, collectors in lines:
        rate = float(rate_text.replace(",", ""))
        for said, decision_us in ((routers, buffered), (in_istio, duplex + 200 * token)):
            sizes = [size for size in (2, 4, 8, 16) if carried(size, decision_us) >= rate]
            assert said.strip() == (str(sizes[0]) if sizes else said.strip())
            assert bool(sizes) == said.strip().isdigit()
        assert float(predictors) * 0.6 * rows >= rate * 32
        assert float(collectors) * 0.6 * entries >= rate
