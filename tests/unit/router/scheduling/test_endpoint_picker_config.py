"""EndpointPickerConfig documents: loaded where every plugin is known, else refused naming each that isn't."""

import pytest

from services.router.scheduling.endpoint_picker_config import GROUPS, NAME, parse_endpoint_picker_config
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.profile_file import load_profile_file
from services.router.scheduling.registry import Registry
from shared.errors import ConfigurationError

REGISTRY = Registry()

SLO_AWARE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
metadata: {name: slo}
plugins:
- type: approx-prefix-cache-producer
  parameters: {maxPrefixTokensToMatch: 262144}
- type: predicted-latency-producer
  parameters: {streamingMode: true}
- type: latency-slo-admitter
- type: prefix-cache-affinity-filter
  name: strict
  parameters: {affinityThreshold: 0.99, maxTTFTPenaltyMs: 5000, ttftSource: latencyPredictor}
- type: slo-headroom-tier-filter
- type: prefix-cache-affinity-filter
  name: loose
  parameters: {affinityThreshold: 0.80, explorationProbability: 0.01, maxTTFTPenaltyMs: 0}
- type: latency-scorer
  parameters: {headroomSelectionStrategy: most}
- type: weighted-random-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: strict
  - pluginRef: slo-headroom-tier-filter
  - pluginRef: loose
  - pluginRef: latency-scorer
  - pluginRef: weighted-random-picker
"""

WEIGHTS = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
featureGates: [dataLayer]
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
  parameters: {lruCapacityPerServer: 31250}
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 2}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
    weight: 2.0
  - pluginRef: prefix-cache-scorer
    weight: 3
  - pluginRef: max-score-picker
"""


def adopt(text):
    return parse_endpoint_picker_config(text, "file", REGISTRY)


def faults(text):
    with pytest.raises(ConfigurationError) as caught:
        adopt(text)
    return str(caught.value).splitlines()


def names(choices):
    return [choice.plugin.name for choice in choices]


def test_the_slo_aware_composition_becomes_a_profile_in_its_order():
    profile = adopt(SLO_AWARE).profile
    assert profile.name == NAME
    assert profile.producer.config.streaming_mode is True
    assert names(profile.admitters) == ["latency-slo-admitter"]
    assert names(profile.filters) == [
        "prefix-cache-affinity-filter", "slo-headroom-tier-filter", "prefix-cache-affinity-filter",
    ]  # fmt: skip
    strict, _, loose = (choice.config for choice in profile.filters)
    assert (strict.affinity_threshold, strict.max_ttft_penalty_ms, strict.ttft_source) == (0.99, 5000.0, "prediction")
    assert strict.exploration_probability == 0.0, "their default, not ours"
    assert (loose.affinity_threshold, loose.max_ttft_penalty_ms) == (0.8, None), "0 there means: always stick"
    assert profile.scorers[0].config.strategy == "most"
    assert profile.picker.plugin.name == "weighted-random-picker"
    assert profile.fallback == "composite"
    Profiles([*load_presets(REGISTRY), profile]).pipeline(NAME)


def test_what_the_document_leaves_out_is_the_incumbent_s_default():
    document = SLO_AWARE.replace("parameters: {streamingMode: true}", "").replace(
        "{affinityThreshold: 0.80, explorationProbability: 0.01, maxTTFTPenaltyMs: 0}", "{}"
    )
    profile = adopt(document).profile
    assert profile.producer.config.streaming_mode is False
    loose = profile.filters[2].config
    assert (loose.affinity_threshold, loose.exploration_probability) == (0.8, 0.0)
    assert (loose.max_ttft_penalty_ms, loose.ttft_source) == (18_000.0, "prefill-throughput")


def test_hand_tuned_weights_load_from_the_older_group_and_say_what_was_read_over():
    adopted = adopt(WEIGHTS)
    assert {choice.plugin.name: choice.weight for choice in adopted.profile.scorers} == {
        "queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3,
    }  # fmt: skip
    assert adopted.profile.fallback is None
    assert any("featureGates" in remark for remark in adopted.remarks)
    assert any("lruCapacityPerServer: read over" in remark for remark in adopted.remarks)


def test_without_profiles_all_plugins_count_and_without_a_picker_the_best_score_does():
    head, _, _ = WEIGHTS.replace("- type: max-score-picker\n  parameters: {maxNumOfEndpoints: 2}\n", "").partition(
        "schedulingProfiles"
    )
    profile = adopt(head).profile
    assert {choice.weight for choice in profile.scorers} == {1.0}
    assert profile.picker.plugin.name == "max-score-picker"


def test_a_weight_of_nothing_leaves_a_scorer_out():
    profile = adopt(WEIGHTS.replace("weight: 3", "weight: 0")).profile
    assert "prefix-cache-scorer" not in names(profile.scorers)


def test_every_unknown_plugin_is_named_in_one_error():
    document = SLO_AWARE.replace(
        "- type: single-profile-handler", "- type: pd-profile-handler\n- type: lora-affinity-scorer"
    )
    found = faults(document.replace("type: latency-slo-admitter", "type: probabilistic-admitter"))
    for name in ("pd-profile-handler", "lora-affinity-scorer", "probabilistic-admitter"):
        assert sum(f"plugin type '{name}' isn't known" in line for line in found) == 1
    assert len(found) == 3
    assert all(line.startswith("file: ") for line in found)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("llm-d.ai/v1alpha1", "llm-d.ai/v2", f"apiVersion: found 'llm-d.ai/v2'; allowed: {', '.join(GROUPS)}"),
        ("kind: EndpointPickerConfig", "kind: Other", "kind: found 'Other'; allowed: EndpointPickerConfig"),
        ("metadata:", "specs:", "'specs': no such key"),
        ("affinityThreshold: 0.99", "affinityThreshold: 7", r"affinityThreshold: found 7.0; allowed: a number from 0"),
        ("affinityThreshold: 0.99", "affinity: 1", "'affinity': no such parameter; allowed: affinityThreshold"),
        ("latencyPredictor", "guess", "ttftSource: found 'guess'; allowed: one of latencyPredictor"),
        ("streamingMode: true", "endpointRoleLabel: role", "endpointRoleLabel: found 'role'; allowed: ''"),
        ("Strategy: most", "Strategy: best", "headroomSelectionStrategy: found 'best'; allowed: one of least, most"),
        ("pluginRef: strict", "pluginRef: stricter", "pluginRef 'stricter': allowed: a name under plugins"),
        ("name: loose", "name: strict", "name 'strict': allowed: text that no other plugin bears"),
        ("- name: default", "- name: prefill\n  plugins: []\n- name: default", "found 2 profiles; allowed: one"),
        ("- pluginRef: latency-scorer", "- {pluginRef: latency-scorer, weight: -1}", "weight: found -1; allowed"),
        ("- pluginRef: strict", "- strict", "found 'strict'; allowed: a mapping of pluginRef and weight"),
        ("- type: weighted-random-picker", "- type: weighted-random-picker\n  config: {}", "'config': no such key"),
        ("parameters: {headroom", "parameters: [1]\n  x: {headroom", "parameters: found [1]; allowed: a mapping"),
    ],
)  # fmt: skip
def test_a_fault_names_where_what_and_what_is_allowed(old, new, fault):
    assert old in SLO_AWARE
    found = faults(SLO_AWARE.replace(old, new, 1))
    assert any(fault in line for line in found), found


def test_two_pickers_are_one_too_many():
    document = WEIGHTS.replace("- type: queue-scorer\n", "- type: queue-scorer\n- type: random-picker\n", 1)
    assert any("several pickers" in line for line in faults(document + "  - pluginRef: random-picker\n"))


def test_a_profile_file_may_be_either_form(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(WEIGHTS)
    assert load_profile_file(path, REGISTRY).profile.name == NAME
    path.write_text("name: mine\npicker: {plugin: random-picker}\n")
    assert load_profile_file(path, REGISTRY).profile.name == "mine"
    path.write_text("a: [")
    with pytest.raises(ConfigurationError, match="not YAML"):
        load_profile_file(path, REGISTRY)
