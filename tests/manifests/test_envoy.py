"""Each overlay's Envoy config, put together as its control plane would, is one that the real Envoy takes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.local.binaries import find_binaries
from tests.manifests.gateways import SOMEWHERE, bootstrap
from tests.manifests.overlays import OVERLAYS, Document, Overlay, overlay


def refusal(config: Document, directory: Path) -> str:
    """What Envoy has against it; empty where it takes it."""
    file = directory / "envoy.json"
    file.write_text(json.dumps(config))
    done = subprocess.run(
        [find_binaries().envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr[-4000:]


@pytest.mark.parametrize("name", OVERLAYS)
def test_envoy_takes_it(name: str, tmp_path: Path) -> None:
    assert refusal(bootstrap(overlay(name), SOMEWHERE), tmp_path) == ""


def misspelt_in_a_filter(whole: Overlay) -> None:
    patches = whole.get("EnvoyFilter", "leadtime")["spec"]["configPatches"]
    ext_proc = next(each for each in patches if each["applyTo"] == "HTTP_FILTER")["patch"]["value"]["typed_config"]
    ext_proc["mesage_timeout"] = ext_proc.pop("message_timeout")


def no_policy_of_that_type(whole: Overlay) -> None:
    patches = whole.get("EnvoyFilter", "leadtime")["spec"]["configPatches"]
    policy = next(each for each in patches if each["applyTo"] == "CLUSTER")["patch"]["value"]["load_balancing_policy"]
    policy["policies"][0]["typed_extension_config"]["typed_config"]["@type"] += "Policy"


def script_cut_off(whole: Overlay) -> None:
    name = next(
        m["metadata"]["name"] for m in whole.of("ConfigMap") if m["metadata"]["name"].startswith("leadtime-envoy")
    )
    whole.config_map(name)["envoy.json"] = whole.config_map(name)["envoy.json"].replace(
        "function envoy_on_response", "funktion"
    )


PLANTED: dict[str, tuple[str, Callable[[Overlay], Any], str]] = {
    "a field that Envoy doesn't know": ("istio-envoyfilter", misspelt_in_a_filter, "mesage_timeout"),
    "a policy of no type": ("istio-envoyfilter", no_policy_of_that_type, "OverrideHostPolicy"),
    "a script that isn't one": ("plain-envoy", script_cut_off, "script load error"),
}


@pytest.mark.parametrize(("name", "plant", "words"), PLANTED.values(), ids=PLANTED)
def test_envoy_refuses_what_was_planted(name: str, plant: Callable[[Overlay], Any], words: str, tmp_path: Path) -> None:
    whole = overlay(name).changed()
    plant(whole)
    assert words in refusal(bootstrap(whole, SOMEWHERE), tmp_path)
