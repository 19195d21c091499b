"""What the stack tells its children, before any of them is started."""

import random
from pathlib import Path

import pytest

from deploy.local.children import common_environment, envoy_config, overridden, service, unknown_variables
from deploy.local.envoy import Address
from deploy.local.layout import (
    Addresses,
    StackConfig,
    endpoint_address,
    place_simulated,
    reserve_addresses,
    simulated_endpoints,
)
from deploy.local.ports import Ports
from shared.errors import ConfigurationError, FieldError
from sim.spec import ProcessSpec, ServerSpec

SPEC = ProcessSpec(servers=(ServerSpec(name="a"), ServerSpec(name="b", port=4_321)))


@pytest.fixture
def ports():
    ports = Ports(random.Random(1))
    yield ports
    ports.close()


def addresses(ports: Ports, **fields: object) -> Addresses:
    return reserve_addresses(StackConfig(run_dir=Path(), simulated=SPEC, **fields), ports)  # type: ignore[arg-type]


def test_every_listener_has_a_port_of_its_own(ports: Ports) -> None:
    at = addresses(ports, predictors=3, routers=2)
    numbers = [
        at.gateway.port, at.envoy_admin, at.nats, at.nats_monitor, at.redis,
        *(port for router in at.routers for port in (router.extproc, router.health, router.http)),
        at.collector_als, at.collector_http, at.trainer_http, *at.predictors_http, at.sim_control,
    ]  # fmt: skip
    assert len(set(numbers)) == len(numbers) == 18
    assert all(numbers)


def test_a_chosen_gateway_port_is_kept(ports: Ports) -> None:
    at = addresses(ports, listen=Address("0.0.0.0", 8_080))
    assert at.gateway == Address("0.0.0.0", 8_080)
    assert at.gateway_url == "http://127.0.0.1:8080"


def test_a_port_that_the_user_sets_for_a_service_s_http_is_kept(ports: Ports) -> None:
    chosen = {
        f"LEADTIME_{name}_HTTP_PORT": str(at) for at, name in enumerate(("ROUTER", "TRAINER", "PREDICTOR"), 9_001)
    }
    at = addresses(ports, environment=chosen)
    assert (at.routers[0].http, at.trainer_http, at.predictors_http) == (9_001, 9_002, (9_003,))
    several = addresses(ports, environment=chosen, predictors=2, routers=2)
    assert 9_003 not in several.predictors_http
    assert 9_001 not in [router.http for router in several.routers]
    with pytest.raises(ConfigurationError, match="LEADTIME_ROUTER_HTTP_PORT: found '-1'; allowed: 0 to 65535"):
        addresses(ports, environment={"LEADTIME_ROUTER_HTTP_PORT": "-1"})


def test_simulated_servers_get_ports_and_keep_those_they_have(ports: Ports) -> None:
    placed = place_simulated(SPEC, 99, ports)
    assert placed.control_port == 99
    assert placed.servers[0].port
    assert placed.servers[1].port == 4_321


def test_endpoints_carry_their_hardware_class(ports: Ports) -> None:
    placed = place_simulated(SPEC, 99, ports)
    first, second = simulated_endpoints(placed, {"b": "h100"})
    assert first == f"http://127.0.0.1:{placed.servers[0].port}"
    assert second == "http://127.0.0.1:4321;hardware_class=h100"


def test_envoy_gets_the_addresses_without_the_attributes(ports: Ports) -> None:
    config = envoy_config(addresses(ports), ("http://127.0.0.1:1;hardware_class=h100", "http://[::1]:2"), None)
    assert config.endpoints == (Address("127.0.0.1", 1), Address("::1", 2))
    assert config.api == ()


def test_every_router_is_an_endpoint_of_envoys_picker(ports: Ports) -> None:
    at = addresses(ports, routers=4)
    config = envoy_config(at, ("http://127.0.0.1:1",), None)
    assert [(router.address.port, router.health_port) for router in config.routers] == [
        (router.extproc, router.health) for router in at.routers
    ]
    assert len(set(at.router_urls)) == 4


def test_an_endpoint_that_envoy_would_not_reach_is_refused() -> None:
    with pytest.raises(FieldError, match="endpoint"):
        endpoint_address("https://127.0.0.1:1;hardware_class=h100")


def test_a_service_is_told_its_settings_by_its_own_prefix() -> None:
    spec = service("router", {"HTTP_PORT": 1, "PROFILE": "leadtime"}, nice=3)
    assert spec.environment == {"LEADTIME_ROUTER_HTTP_PORT": "1", "LEADTIME_ROUTER_PROFILE": "leadtime"}
    assert spec.command[1:] == ("-P", "-m", "services.router")
    assert spec.nice == 3


def test_a_variable_of_no_service_is_a_fault_and_those_of_the_services_are_left_to_them() -> None:
    given = {"LEADTIME_TRAINR_POOL": "x", "LEADTIME_TRAINER_POOL": "x", "leadtime_router_x": "x", "PATH": "x"}
    (fault,) = unknown_variables(given)
    assert fault.startswith("LEADTIME_TRAINR_POOL: no such setting; allowed: LEADTIME_ROUTER_…, ")


def test_variables_of_benchmarks_and_checks_are_no_typo() -> None:
    """A machine that says where the public data lies may run a stack."""
    for name in ("DATA", "CRDS", "FUZZ_CASES", "STANDIN_IMAGES", "SECRETS_DIR"):
        assert unknown_variables({f"LEADTIME_{name}": "x"}) == []


def test_a_user_s_setting_that_the_stack_replaces_is_named() -> None:
    given = {"LEADTIME_REDIS_URL": "redis://mine", "LEADTIME_ROUTER_PROFILE": "leadtime", "OMP_NUM_THREADS": "8"}
    common = {"LEADTIME_REDIS_URL": "redis://127.0.0.1:1", "OMP_NUM_THREADS": "1"}
    assert overridden(given, common, {"LEADTIME_ROUTER_PROFILE": "leadtime"}) == ["LEADTIME_REDIS_URL"]


def test_no_child_may_start_threads_or_telemetry_of_its_own_accord(ports: Ports) -> None:
    environment = common_environment(addresses(ports), "default")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["ORT_DISABLE_TELEMETRY"] == "1"
    assert environment["LEADTIME_ROUTER_POOL"] == "default"


@pytest.mark.parametrize("fields", [{}, {"simulated": SPEC, "endpoints": ("http://127.0.0.1:1",)}])
def test_either_endpoints_or_simulated_servers(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either endpoints or simulated"):
        StackConfig(run_dir=Path(), **fields)  # type: ignore[arg-type]
