"""Golden names: what is spelt on the wire. A rename breaks rolling deploys, so it takes a new version and this file."""

import inspect

import pytest

from shared import names
from shared.errors import FieldError

CONSTANTS = {
    "METADATA_NAMESPACE": "leadtime",
    "METADATA_KEY": "d",
    "LB_NAMESPACE": "envoy.lb",
    "ATTRIBUTES_FILTER": "envoy.filters.http.ext_proc",
    "ROUTE_ATTRIBUTE": "xds.route_name",
    "SUBSET_NAMESPACE": "envoy.lb.subset_hint",
    "LUA_NAMESPACE": "leadtime_lua",
    "LUA_FIRST_CONTENT": "first_us",
    "LUA_SKIP": "skip",
    "USAGE_NAMESPACE": "leadtime_usage",
    "USAGE_INPUT": "prompt_tokens",
    "USAGE_OUTPUT": "completion_tokens",
    "USAGE_CACHED": "cached_tokens",
    "TAG_FIRST_BODY_BYTE_US": "first_body_us",
    "TAG_LAST_BYTE_US": "last_us",
    "DESTINATION": "x-gateway-destination-endpoint",
    "DESTINATION_SERVED": "x-gateway-destination-endpoint-served",
    "DESTINATION_SUBSET": "x-gateway-destination-endpoint-subset",
    "DECISION_ID": "x-leadtime-decision-id",
    "REASON": "x-leadtime-reason",
    "DROPPED_REASON": "x-llm-d-request-dropped-reason",
    "PROBE": "x-leadtime-probe",
    "STRIPPED_FROM_CLIENTS": (
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-leadtime-decision-id",
    ),
    "STRIPPED_PREFIXES": ("x-data-parallel-", "x-kv-cache-source-"),
    "PREDICT_PATH": "/v1/predict",
    "HEADER_POOL": "leadtime-pool",
    "HEADER_SCHEMA": "leadtime-schema",
    "HEADER_BUNDLE": "leadtime-bundle",
    "HEADER_OUTPUTS": "leadtime-outputs",
    "ROWS_CONTENT_TYPE": "application/octet-stream",
    "REASON_NO_BUNDLE": "no_bundle",
    "BUNDLE_CONDITION_PREFIX": "bundle:",
    "SAMPLES_STREAM": "LEADTIME_SAMPLES",
    "SAMPLES_SUBJECTS": "leadtime.samples.v1.>",
    "DEDUP_HEADER": "Nats-Msg-Id",
    "DEAD_STREAM": "LEADTIME_DEAD",
    "DEAD_SUBJECTS": "leadtime.dead.v1.>",
    "DEAD_REASON_HEADER": "Leadtime-Reason",
    "DEAD_SOURCE_HEADER": "Leadtime-Source",
    "BUNDLES_CHANNEL": "leadtime:bundles",
    "CALIBRATIONS_CHANNEL": "leadtime:calibrations",
}

BUILT = {
    "length_key": (("llama", "chat"), "llama @ chat"),
    "samples_subject": (("chat",), "leadtime.samples.v1.chat"),
    "dead_subject": (("chat",), "leadtime.dead.v1.chat"),
    "unsampled_subject": (("chat",), "leadtime.unsampled.v1.chat"),
    "ledger_subject": (("chat",), "leadtime.ledger.v1.chat"),
    "ledger_inbox": (("chat", "0a1b"), "leadtime.ledger.v1.chat.to.0a1b"),
    "trainer_durable": (("chat",), "leadtime-trainer-chat"),
    "bundle_key": (
        ("chat", "0123456789abcdef", "1796025524000-0a1b2c3d"),
        "leadtime:bundle:{chat}:0123456789abcdef:1796025524000-0a1b2c3d",
    ),
    "bundle_pointer_key": (("chat", "0123456789abcdef"), "leadtime:bundle:{chat}:0123456789abcdef:current"),
    "succession_key": (("chat", "0123456789abcdef"), "leadtime:succession:{chat}:0123456789abcdef"),
    "calibration_key": (("chat",), "leadtime:calibration:{chat}"),
    "trainer_lease_key": (("chat",), "leadtime:lease:trainer:{chat}"),
}


def test_every_constant_is_spelt_as_agreed():
    spelt = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str | tuple)}
    assert spelt == CONSTANTS


@pytest.mark.parametrize("name", BUILT)
def test_every_built_name_is_spelt_as_agreed(name):
    arguments, expected = BUILT[name]
    assert getattr(names, name)(*arguments) == expected


def test_every_function_of_the_module_has_a_golden_name():
    functions = {name for name, _ in inspect.getmembers(names, inspect.isfunction) if name != "validate_pool"}
    assert functions == set(BUILT)


def test_headers_are_lower_case_as_http2_wants_them():
    headers = [*names.STRIPPED_FROM_CLIENTS, *names.STRIPPED_PREFIXES, names.REASON, names.PROBE, names.HEADER_POOL]
    assert all(header == header.lower() for header in headers)


@pytest.mark.parametrize("pool", ["a", "default", "llama-3-8b", "0", "a" * 63, "a-b"])
def test_a_pool_is_a_dns_label(pool):
    assert names.validate_pool(pool) == pool


@pytest.mark.parametrize(
    "pool", ["", "A", "a.b", "a*", "a>", "a b", "a:b", "-a", "a-", "a" * 64, "ä", "a\n", "a/b", "$a", "a_b"]
)
def test_what_could_break_a_subject_or_a_key_is_no_pool(pool):
    with pytest.raises(FieldError, match="pool: found text of"):
        names.validate_pool(pool)
