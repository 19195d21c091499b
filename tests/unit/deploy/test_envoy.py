"""The rendered Envoy config says what the contracts ask for, and Envoy itself accepts it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.local.binaries import find_binaries
from deploy.local.envoy import (
    MESSAGE_TIMEOUT_S,
    Address,
    EnvoyConfig,
    RouterAddress,
    first_content_source,
    of_router,
    parse_endpoint,
    render,
)
from services.router.settings import RouterSettings
from shared import names
from shared.errors import FieldError

ROUTER = RouterAddress(Address("127.0.0.1", 9100), 9101)


def config(**changes: Any) -> EnvoyConfig:
    values: dict[str, Any] = {
        "endpoints": (Address("127.0.0.1", 9001), Address("::1", 9002)),
        "routers": (ROUTER, RouterAddress(Address("127.0.0.1", 9110), 9111)),
        "collectors": (Address("127.0.0.1", 9200), Address("127.0.0.1", 9201)),
        "api": (Address("127.0.0.1", 9300),),
    }
    return EnvoyConfig(**{**values, **changes})


def manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
        "typed_config"
    ]
    return found


def cluster(bootstrap: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in bootstrap["static_resources"]["clusters"] if found["name"] == name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"api": ()},
        {"endpoints": (Address("model.example", 80),)},
        {"collector_token": "secret"},
        {"collector_token_variable": "ALS_TOKEN", "router_token_variable": "EXTPROC_TOKEN"},
        {"shape": "full_duplex"},
        {"router_tls": True},
        {"restored_routes": ("/v1/chat/", "/team/")},
        {"shape": "full_duplex", "completions": "response_stream", "collectors": ()},
    ],
    ids=[
        "addresses",
        "no api",
        "names",
        "token",
        "tokens of the environment",
        "full duplex",
        "TLS to routers",
        "restored routes",
        "no log",
    ],
)
def test_envoy_accepts_the_config(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(render(config(**changes))))
    done = subprocess.run(
        [find_binaries().envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_steering_header_is_removed_before_any_filter() -> None:
    mutations = manager(render(config()))["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    removed = {mutation["remove"] for mutation in mutations if "remove" in mutation}
    prefixes = {
        mutation["remove_on_match"]["key_matcher"]["prefix"] for mutation in mutations if "remove_on_match" in mutation
    }
    assert removed == set(names.STRIPPED_FROM_CLIENTS)
    assert prefixes == {*names.STRIPPED_PREFIXES, "x-envoy-"}


def test_the_picker_sees_no_credential_and_no_response() -> None:
    ext_proc = manager(render(config()))["http_filters"][0]["typed_config"]
    assert ext_proc["failure_mode_allow"] is True
    assert ext_proc["message_timeout"] == "1s"
    assert ext_proc["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert ext_proc["processing_mode"]["response_header_mode"] == "SKIP"
    assert ext_proc["processing_mode"]["response_body_mode"] == "NONE"
    assert ext_proc["processing_mode"]["response_trailer_mode"] == "SEND"
    assert ext_proc["request_attributes"] == ["xds.route_name"]
    hidden = {pattern["exact"] for pattern in ext_proc["forward_rules"]["disallowed_headers"]["patterns"]}
    assert {"authorization", "cookie"} <= hidden
    assert ext_proc["metadata_options"]["receiving_namespaces"]["untyped"] == ["envoy.lb", "leadtime"]
    assert ext_proc["metadata_options"]["forwarding_namespaces"]["untyped"] == ["envoy.lb"]


def test_in_full_duplex_everything_is_shown_and_the_mode_is_fixed() -> None:
    ext_proc = manager(render(config(shape="full_duplex")))["http_filters"][0]["typed_config"]
    modes = ext_proc["processing_mode"]
    assert {modes["request_body_mode"], modes["response_body_mode"]} == {"FULL_DUPLEX_STREAMED"}
    shown = {name: mode for name, mode in modes.items() if "body" not in name}
    assert shown == dict.fromkeys(shown, "SEND")
    assert "request_trailer_mode" in shown
    assert "response_trailer_mode" in shown
    assert "allow_mode_override" not in ext_proc


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
def test_one_filter_of_its_kind_sits_on_a_route(shape: str) -> None:
    """Two in full duplex truncate bodies, an Envoy defect."""
    filters = manager(render(config(shape=shape)))["http_filters"]
    kinds = [found["typed_config"]["@type"] for found in filters]
    assert sum(kind.endswith("ExternalProcessor") for kind in kinds) == 1


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
def test_a_router_that_is_gone_is_left_out_at_once(shape: str) -> None:
    picker = cluster(render(config(shape=shape)), "picker")
    assert picker["common_lb_config"] == {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"}
    assert picker["outlier_detection"]["max_ejection_percent"] == 100
    failures = picker["outlier_detection"]["consecutive_local_origin_failure"]
    assert failures == (1 if shape == "full_duplex" else 3)
    (protocol,) = picker["typed_extension_protocol_options"].values()
    alive = protocol["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert alive["interval"] == ("1s" if shape == "full_duplex" else "5s")


def test_retries_go_to_the_next_listed_endpoint_and_leave_the_message_timeout_above_the_budget() -> None:
    route = manager(render(config()))["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
    policy = route["retry_policy"]
    assert set(policy["retry_on"].split(",")) >= {"connect-failure", "reset-before-request"}
    assert policy["retry_host_predicate"][0]["name"] == "envoy.retry_host_predicates.previous_hosts"
    assert policy["num_retries"] == 2
    budget_ms = RouterSettings.model_fields["decision_budget_ms"].default
    assert 2 * budget_ms <= MESSAGE_TIMEOUT_S * 1e3 / 2


def test_the_router_s_body_cap_is_envoy_s() -> None:
    listener = render(config())["static_resources"]["listeners"][0]
    assert listener["per_connection_buffer_limit_bytes"] == RouterSettings.model_fields["max_body_bytes"].default


def test_the_script_writes_under_the_names_of_the_contract() -> None:
    source = first_content_source()
    for name in (names.LUA_NAMESPACE, names.LUA_FIRST_CONTENT, names.LUA_SKIP):
        assert f'"{name}"' in source


def test_every_other_path_than_api_goes_through_the_picker() -> None:
    host = manager(render(config()))["route_config"]["virtual_hosts"][0]
    api, upgrade, pool = host["routes"]
    assert upgrade["match"]["headers"] == [{"name": "upgrade", "present_match": True}]
    assert api["match"] == {"path_separated_prefix": "/api"}
    assert all(setting["disabled"] for setting in api["typed_per_filter_config"].values())
    assert pool["match"] == {"prefix": "/"}
    assert "typed_per_filter_config" not in pool
    assert pool["request_headers_to_remove"] == ["accept-encoding"]
    only_pool = manager(render(config(api=())))["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["name"] for route in only_pool] == ["upgrade", "pool"]


def modes_of(route: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = route["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"][
        "processing_mode"
    ]
    return found


def test_responses_are_shown_where_a_name_is_to_be_restored_and_nowhere_else() -> None:
    """In full duplex every response is shown."""
    rendered = render(config(restored_routes=("/a/", "/b/"), api=()))
    _, first, second, pool = manager(rendered)["route_config"]["virtual_hosts"][0]["routes"]
    assert [first["match"], second["match"]] == [{"prefix": "/a/"}, {"prefix": "/b/"}]
    assert modes_of(first) == {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SEND",
    }
    assert first["route"] == pool["route"]
    assert "typed_per_filter_config" not in pool
    full_duplex = render(config(restored_routes=("/a/",), api=(), shape="full_duplex"))
    assert len(manager(full_duplex)["route_config"]["virtual_hosts"][0]["routes"]) == 2


def test_an_envoy_that_lacks_the_filters_of_labels_is_asked_for_none() -> None:
    rendered = render(config(shape="full_duplex", completions="response_stream", collectors=()))
    text = json.dumps(rendered)
    for part in ("json_to_metadata", "lua", "access_loggers.grpc", "US_RX_BODY_BEG"):
        assert part not in text
    assert [found["name"] for found in manager(rendered)["http_filters"]] == [
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.router",
    ]


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
def test_an_upgrade_shows_no_body(shape: str) -> None:
    upgrade = manager(render(config(shape=shape, api=())))["route_config"]["virtual_hosts"][0]["routes"][0]
    modes = modes_of(upgrade)
    assert (modes["request_body_mode"], modes["response_body_mode"]) == ("NONE", "NONE")
    assert modes["response_trailer_mode"] == "SEND"


def test_what_envoy_and_router_must_agree_on_is_the_router_s_setting() -> None:
    assert of_router({}) == {}
    fields = of_router({"LEADTIME_ROUTER_MAX_BODY_BYTES": "5000", "LEADTIME_ROUTER_RESTORED_ROUTES": "/a/, /b/"})
    rendered = config(**fields)
    assert (rendered.body_limit_bytes, rendered.restored_routes) == (5_000, ("/a/", "/b/"))


@pytest.mark.parametrize(
    ("variable", "text"), [("MAX_BODY_BYTES", "32 MiB"), ("MAX_BODY_BYTES", "-1"), ("RESTORED_ROUTES", "v1/chat")]
)
def test_a_router_s_setting_that_cannot_work_is_named(variable: str, text: str) -> None:
    with pytest.raises(FieldError) as caught:
        of_router({f"LEADTIME_ROUTER_{variable}": text})
    assert variable in caught.value.field.upper()


def test_a_name_among_the_addresses_makes_a_dns_cluster_of_the_addresses_that_the_router_lists() -> None:
    assert cluster(render(config()), "pool")["type"] == "STATIC"
    named = config(endpoints=(Address("127.0.0.1", 1), Address("model.example", 80)))
    kind = cluster(render(named), "pool")["cluster_type"]
    assert kind["name"] == "envoy.clusters.dns"
    assert kind["typed_config"]["dns_lookup_family"] == "V4_PREFERRED"


def test_routers_are_checked_on_their_health_port_for_the_ext_proc_service() -> None:
    picker = cluster(render(config()), "picker")
    members = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [member["endpoint"]["health_check_config"]["port_value"] for member in members] == [9101, 9111]
    check = picker["health_checks"][0]["grpc_health_check"]
    assert check == {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"}


def test_the_access_log_carries_the_tags_the_collector_reads() -> None:
    log = manager(render(config()))["access_log"][0]["typed_config"]["common_config"]
    assert {tag["tag"] for tag in log["custom_tags"]} == {names.TAG_FIRST_BODY_BYTE_US, names.TAG_LAST_BYTE_US}
    assert "initial_metadata" not in log["grpc_service"]
    secured = manager(render(config(collector_token="t")))["access_log"][0]["typed_config"]["common_config"]
    assert secured["grpc_service"]["initial_metadata"] == [{"key": "authorization", "value": "Bearer t"}]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"endpoints": ()}, "endpoints"),
        ({"routers": ()}, "routers"),
        ({"collectors": ()}, "collectors"),
        ({"admin": Address("0.0.0.0", 9901)}, "admin"),
        ({"body_limit_bytes": 0}, "body_limit_bytes"),
        ({"completions": "response_stream", "collectors": ()}, "completions"),
        ({"completions": "response_stream", "shape": "full_duplex"}, "completions"),
    ],
)
def test_a_config_that_cannot_work_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        config(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://model.example:80/", "model.example:80"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_endpoint_url_becomes_host_and_port(url: str, text: str) -> None:
    assert str(parse_endpoint(url)) == text


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "https://a:1",
        "http://a",
        "http://a:0",
        "http://a:99999",
        "http://a:1/v1",
        "http://u:p@a:1",
        "",
    ],
)
def test_a_url_that_envoy_would_not_reach_as_written_is_refused(url: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_endpoint(url)
    assert "http://host:port" in str(caught.value)


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
def test_what_is_done_to_one_rendered_config_is_in_no_other(shape: str) -> None:
    before = json.dumps(render(config(shape=shape)))
    _spoil(render(config(shape=shape)))
    assert json.dumps(render(config(shape=shape))) == before


def _spoil(node: Any) -> None:
    """Change every list and mapping in place."""
    children = list(node.values()) if isinstance(node, dict) else list(node)
    for child in children:
        if isinstance(child, dict | list):
            _spoil(child)
    if isinstance(node, dict):
        node["spoilt"] = True
    else:
        node.append("spoilt")


def test_a_token_can_stay_in_envoy_s_own_environment() -> None:
    """The access log's own metadata would be sent as written, so there the cluster puts it on."""
    rendered = render(config(collector_token_variable="ALS_TOKEN", router_token_variable="EXTPROC_TOKEN"))
    ext_proc = manager(rendered)["http_filters"][0]["typed_config"]["grpc_service"]
    assert ext_proc["initial_metadata"] == [{"key": "authorization", "value": "Bearer %ENVIRONMENT(EXTPROC_TOKEN)%"}]
    log = manager(rendered)["access_log"][0]["typed_config"]["common_config"]["grpc_service"]
    assert "initial_metadata" not in log
    (options,) = cluster(rendered, "collector")["typed_extension_protocol_options"].values()
    (mutation,) = options["http_filters"][0]["typed_config"]["mutations"]["request_mutations"]
    assert mutation["append"]["header"] == {"key": "authorization", "value": "Bearer %ENVIRONMENT(ALS_TOKEN)%"}
    assert options["http_filters"][-1]["name"] == "envoy.filters.http.upstream_codec"


@pytest.mark.parametrize("service", ["router", "collector"])
def test_a_token_comes_from_one_place(service: str) -> None:
    with pytest.raises(FieldError, match=f"{service}_token_variable"):
        config(**{f"{service}_token": "t", f"{service}_token_variable": "TOKEN"})
    with pytest.raises(FieldError, match=f"{service}_token_variable"):
        config(**{f"{service}_token_variable": "not a name"})
