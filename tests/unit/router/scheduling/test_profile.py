"""Profiles and the table of plugins: everything wrong stops the start and says where, what and what is allowed."""

from importlib import resources

import pytest
import yaml

from services.router.policies import DEFAULT_PROFILE
from services.router.scheduling.profile import (
    Profiles,
    load_presets,
    parse_profile,
)
from services.router.scheduling.profile_file import load_profile_file
from services.router.scheduling.registry import PLUGINS, Kind, Registry
from shared.errors import ConfigurationError

REGISTRY = Registry()
PRESETS = (
    "composite",
    "leadtime",
    "least-request",
    "lmetric",
    "load-prefix",
    "predicted-latency",
    "predicted-latency-slo",
    "random",
    "round-robin",
    "token-load",
)

WHOLE = """
name: mine
description: text
filters:
  - plugin: prefix-cache-affinity-filter
    config: {affinity_threshold: 0.5, max_ttft_penalty_ms: null}
scorers:
  - plugin: latency-scorer
    weight: 2.5
    config: {strategy: most}
  - plugin: queue-scorer
picker: {plugin: max-score-picker, config: {tie_tolerance: 0}}
fallback: load-prefix
"""


def parse(text):
    return parse_profile(text, "file.yaml", REGISTRY)


def fault_of(text):
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    return str(caught.value)


def test_the_presets_load_under_their_names():
    assert tuple(profile.name for profile in load_presets(REGISTRY)) == PRESETS
    assert DEFAULT_PROFILE in PRESETS


def test_a_preset_s_file_bears_its_name():
    folder = resources.files("services.router.scheduling") / "presets"
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.yaml" for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_a_pipeline_of_its_own_each_time(name):
    profiles = Profiles(load_presets(REGISTRY))
    first, second = profiles.pipeline(name), profiles.pipeline(name)
    assert first.profile == name
    assert first is not second


def test_load_prefix_weighs_prefix_queue_and_kv_cache_3_2_2():
    profile = Profiles(load_presets(REGISTRY)).get("load-prefix")
    weights = {choice.plugin.name: choice.weight for choice in profile.scorers}
    assert weights == {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}


def test_a_whole_profile_is_read():
    profile = parse(WHOLE)
    assert profile.name == "mine"
    assert profile.filters[0].config.max_ttft_penalty_ms is None
    assert [choice.weight for choice in profile.scorers] == [2.5, 1.0]
    assert profile.fallback == "load-prefix"
    assert Profiles([*load_presets(REGISTRY), profile]).pipeline("mine").profile == "mine"


def replaced(old, new):
    assert old in WHOLE
    return WHOLE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: [", ["file.yaml", "not YAML", 'in "the document", line 1, column 8']),
        ("- 1", ["file.yaml", "found", "allowed: a mapping of", "scorers"]),
        ("", ["file.yaml", "found None", "allowed: a mapping of"]),
        ("name: mine", ["file.yaml", "picker", "missing", "allowed: a mapping of config, plugin"]),
        (replaced("name: mine", "name: Mine!"), ["file.yaml", "name", "found 'Mine!'", "text matching ^[a-z0-9]"]),
        (replaced("name: mine", "name: 7"), ["name", "found 7", "allowed: text"]),
        (replaced("description", "descripton"), ["descripton", "no such key", "description"]),
        (replaced("scorers:", "filters:"), ["not YAML", "'filters' is written twice"]),
        (replaced("weight: 2.5", "weight: 0"), ["scorers.0.weight", "found 0", "a number above 0 to 1000000"]),
        (
            replaced("plugin: prefix-cache-affinity-filter", "plugin: rediscovery-filter").replace(
                "affinity_threshold: 0.5", "forgotten_share: 1"
            ),
            ["rediscovery-filter: forgotten_share: found 1; allowed: a number above 0 and below 1"],
        ),
        (replaced("weight: 2.5", "weigth: 2.5"), ["scorers.0.weigth", "no such key", "config, plugin, weight"]),
        (replaced("latency-scorer", "latency"), ["profile mine", "no scorer is called 'latency'", "latency-scorer"]),
        (
            replaced("max-score-picker", "queue-scorer"),
            ["profile mine", "no picker is called 'queue-scorer'", "max-score-picker", "random-picker"],
        ),
        (
            replaced("affinity_threshold: 0.5", "affinity_threshold: 1.5"),
            [
                "profile mine: prefix-cache-affinity-filter",
                "affinity_threshold",
                "found 1.5",
                "a number from 0 to 1",
            ],
        ),
        (
            replaced("affinity_threshold: 0.5", "affinity_threshold: '0.5'"),
            ["affinity_threshold", "found '0.5'", "a number from 0 to 1"],
        ),
        (replaced("affinity_threshold: 0.5", "affinity_threshold: .nan"), ["affinity_threshold", "found nan"]),
        (
            replaced("max_ttft_penalty_ms: null", "max_ttft_penalty_ms: -1"),
            ["max_ttft_penalty_ms", "found -1", "a number from 0 to 3600000 (or null)"],
        ),
        (
            replaced("strategy: most", "strategy: best"),
            ["profile mine: latency-scorer", "strategy", "found 'best'", "one of least, most"],
        ),
        (
            replaced("strategy: most", "stategy: most"),
            ["stategy", "no such key", "strategy, tpot_weight, ttft_weight"],
        ),
        (
            replaced("- plugin: queue-scorer", "- plugin: queue-scorer\n    config: {weight: 3}"),
            ["queue-scorer", "weight", "no such key", "no keys at all"],
        ),
        (replaced("config: {tie_tolerance: 0}", "config: 3"), ["picker.config", "found 3", "allowed: a mapping"]),
        (replaced("{tie_tolerance: 0}", "{tie_tolerance: true}"), ["tie_tolerance", "found True"]),
        (replaced("fallback: load-prefix", "fallback: [1]"), ["fallback", "found [1]", "text (or null)"]),
    ],
)
def test_a_fault_names_place_key_value_and_what_is_allowed(text, parts):
    fault = fault_of(text)
    for part in parts:
        assert part in fault


def test_every_fault_of_a_plugin_is_told_at_once():
    fault = fault_of(replaced("{affinity_threshold: 0.5,", "{affinity_threshold: 2, exploration_probability: -1,"))
    assert len(fault.splitlines()) == 2


def test_yaml_cannot_build_objects():
    assert "not YAML" in fault_of("!!python/object/apply:os.system ['true']")


@pytest.mark.parametrize("fallback", ["nowhere", "leadtime", "mine"])
def test_a_fallback_must_exist_and_have_none_itself(fallback):
    own = parse(replaced("fallback: load-prefix", f"fallback: {fallback}"))
    with pytest.raises(ConfigurationError, match=f"profile mine: fallback: found '{fallback}'; allowed: .*load-prefix"):
        Profiles([*load_presets(REGISTRY), own])


def test_a_name_is_defined_once():
    with pytest.raises(ConfigurationError, match="profile mine: defined twice"):
        Profiles([parse(WHOLE.replace("fallback: load-prefix", ""))] * 2)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ConfigurationError, match="found 'no-such'; allowed: composite, leadtime, "):
        Profiles(load_presets(REGISTRY)).pipeline("no-such")


def test_a_profile_file_is_read_and_a_missing_one_is_a_configuration_error(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(WHOLE, "utf-8")
    assert load_profile_file(path, REGISTRY).profile.name == "mine"
    with pytest.raises(ConfigurationError, match="can't be read"):
        load_profile_file(tmp_path / "other.yaml", REGISTRY)


def test_a_plugin_stands_in_the_table_once():
    with pytest.raises(ConfigurationError, match="plugin queue-scorer: stands in the table twice"):
        Registry([*PLUGINS, next(plugin for plugin in PLUGINS if plugin.name == "queue-scorer")])


def test_the_table_can_be_walked():
    assert [plugin.name for plugin in REGISTRY] == [plugin.name for plugin in PLUGINS]
    assert REGISTRY.find(Kind.SCORER, "queue-scorer", "here").kind is Kind.SCORER


def test_a_profile_tells_all_its_values_and_they_make_the_same_profile_again():
    profile = parse(WHOLE)
    told = profile.as_dict()
    assert told["filters"][0]["config"]["exploration_probability"] == 0.01
    assert told["scorers"][0] == {
        "plugin": "latency-scorer",
        "weight": 2.5,
        "config": {"ttft_weight": 0.8, "tpot_weight": 0.2, "strategy": "most", "quantile": "p50"},
    }
    assert parse(yaml.safe_dump(told)) == profile
