"""A router whose policy can't work doesn't start, and says everything that is wrong with it at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNKNOWN = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: lora-affinity-scorer
- type: pd-profile-handler
- type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 3}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
"""


def start(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LEADTIME_")}
    environment |= {f"LEADTIME_ROUTER_{name}": value for name, value in settings.items()}
    environment |= {f"LEADTIME_ROUTER_{name}": "0" for name in ("EXTPROC_PORT", "HEALTH_PORT", "HTTP_PORT")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.router"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_every_unknown_plugin_of_an_endpoint_picker_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(UNKNOWN)
    result = start(tmp_path, PROFILE_FILE=str(path))
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "plugin type 'lora-affinity-scorer' isn't known" in said
    assert "plugin type 'pd-profile-handler' isn't known" in said
    assert "affinityThreshold: found 3" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"PROFILE": "no-such"}, "profile: found 'no-such'"),
        ({"PROFILE_FILE": "/nowhere.yaml"}, "PROFILE_FILE: found a path that does not point to a file"),
        ({"DECISION_LOG": f"{__file__}/log.jsonl"}, "DECISION_LOG: found a path that can't be written (Not a dir"),
        ({"OBJECTIVES": '{"a": {"ttft_slo_ms": -1}}'}, "objectives.a.ttft_slo_ms"),
        ({"KV_EVENTS": "tcp://0.0.0.0:5557"}, "kv_events_open"),
        ({"KV_EVENTS": "udp://127.0.0.1:1"}, "tcp://HOST:PORT"),
        ({"TLS": "files", "TLS_CERT_FILE": __file__, "TLS_KEY_FILE": __file__}, "bytes that aren't PEM"),
    ],
)
def test_each_fault_of_a_policy_s_settings_stops_the_start(
    settings: dict[str, str], fault: str, tmp_path: Path
) -> None:
    result = start(tmp_path, **settings)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert fault.lower() in said.lower()
    assert "Traceback" not in said
