"""The compose file agrees with itself, with the settings, with what the images are, and with the code's metrics."""

import importlib.util
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.compose import setup
from deploy.images import rootfs, self_test
from deploy.images.without import without
from services.collector.settings import CollectorSettings
from services.predictor.settings import PredictorSettings
from services.router.discovery.endpoints import parse_endpoints
from services.router.settings import RouterSettings
from services.trainer.settings import TrainerSettings
from shared.settings import _nested_blocks, load
from sim.spec import ProcessSpec

REPOSITORY = Path(__file__).resolve().parents[3]
COMPOSE = REPOSITORY / "deploy/compose"
SETTINGS = {
    "router": RouterSettings,
    "collector": CollectorSettings,
    "trainer": TrainerSettings,
    "predictor": PredictorSettings,
}
SERVICES = [*SETTINGS, "setup", "envoy", "nats", "redis", "sim", "prometheus", "grafana"]
ROOT = "/run/leadtime/secrets"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def filled(text: str) -> str:
    """With every `${NAME:-default}` at its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture
def secrets(tmp_path) -> Path:
    directory = tmp_path / "secrets"
    directory.mkdir()
    return directory


def words(compose: dict[str, Any]) -> list[str]:
    """The setup's arguments with their defaults."""
    return [filled(word) for word in compose["services"]["setup"]["command"][3:]]


def run_setup(compose: dict[str, Any], directory: Path, **environment: str) -> dict[str, Any]:
    """Envoy's config as the setup writes it with the compose file's own arguments."""
    arguments = [
        word.replace(ROOT, str(directory)).replace("/run/leadtime/envoy", str(directory.parent))
        for word in words(compose)
    ]
    assert setup.main(arguments, environment) == 0
    return json.loads((directory.parent / "envoy.json").read_text())


# The file


def test_every_container_is_confined(compose):
    for name in SERVICES:
        service = compose["services"][name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "ulimits" not in service, name
        assert "privileged" not in service, name
        assert service["logging"]["options"]["max-size"], name
    assert set(compose["services"]) == set(SERVICES)


def test_ports_are_published_on_loopback_only_and_never_of_a_store(compose):
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(filled(port).startswith("127.0.0.1:") for port in published)
    for store in ("nats", "redis"):
        assert compose["services"][store]["networks"] == ["stores"]
    assert compose["networks"]["stores"] == {"internal": True}


def test_a_service_that_can_be_scaled_has_no_fixed_port_and_no_name_of_its_own(compose):
    for name in ("router", "predictor", "collector", "trainer"):
        service = compose["services"][name]
        assert "container_name" not in service
        assert all("::" in port for port in service["ports"])


def test_images_have_the_version_of_the_project(compose):
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for name in (*SETTINGS, "sim"):
        assert filled(compose["services"][name]["image"]) == f"leadtime/{name}:{version}"
        assert compose["services"][name]["build"]["target"] == name


def test_no_secret_stands_in_the_file(compose):
    for name in SERVICES:
        for variable, value in (compose["services"][name].get("environment") or {}).items():
            if re.search(r"TOKEN|PASSWORD|SECRET_|KEY|SALT", variable):
                assert filled(value) == "", f"{name}: {variable}"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_starts_with_its_environment_and_the_secrets_of_the_setup(
    compose, service, secrets, monkeypatch, tmp_path
):
    for variable in [name for name in os.environ if name.startswith("LEADTIME_")]:
        monkeypatch.delenv(variable)
    run_setup(compose, secrets)
    for variable, value in compose["services"][service]["environment"].items():
        monkeypatch.setenv(variable, filled(value).replace(ROOT, str(secrets)))
    for variable, value in image_environment(service).items():
        monkeypatch.setenv(variable, value)
    settings = load(SETTINGS[service])
    assert settings.http_token is not None
    assert settings.http_host == "0.0.0.0"
    # Compose kills what hasn't ended by itself: a drain and what comes after it have to fit.
    drain_s = {
        "router": lambda: settings.lame_duck_s + settings.drain_s,
        "collector": lambda: settings.drain_timeout_ms / 1e3,
    }.get(service, lambda: 0.0)()
    grace = compose["services"][service]["stop_grace_period"]
    assert grace.endswith("s")
    assert float(grace.removesuffix("s")) > drain_s + 5.0


def test_every_variable_of_the_services_is_a_setting(compose):
    known = {
        f"{block.model_config['env_prefix']}{name}".upper()
        for settings in SETTINGS.values()
        for block in (settings, *_nested_blocks(settings).values())
        for name in block.model_fields
    }
    given = {name for service in SETTINGS for name in compose["services"][service]["environment"]}
    assert given - known == {"LEADTIME_SECRETS_DIR"}


def image_environment(service: str) -> dict[str, str]:
    """What the Dockerfile gives a target of its own."""
    text = (REPOSITORY / "deploy/images/Dockerfile").read_text().replace("\\\n", " ")
    return dict(re.findall(rf"(LEADTIME_{service.upper()}_\w+)=(\S+)", text))


# The setup


def test_envoy_knows_the_routers_collectors_and_endpoints_by_the_names_of_the_file(compose, secrets):
    envoy = run_setup(compose, secrets)
    clusters = {cluster["name"]: cluster for cluster in envoy["static_resources"]["clusters"]}

    def addresses(name: str) -> list[tuple[str, int]]:
        members = clusters[name]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        found = [member["endpoint"]["address"]["socket_address"] for member in members]
        return [(entry["address"], entry["port_value"]) for entry in found]

    assert addresses("picker") == [("router", 9002)]
    assert addresses("collector") == [("collector", 9001)]
    # All addresses of a name are members, so that more replicas get requests.
    assert all(
        clusters[name]["cluster_type"]["name"] == "envoy.clusters.dns" for name in ("picker", "collector", "pool")
    )
    routed = parse_endpoints(filled(compose["services"]["router"]["environment"]["LEADTIME_ROUTER_ENDPOINTS"]))
    assert addresses("pool") == [(spec.host, spec.port) for spec in routed]
    listener = envoy["static_resources"]["listeners"][0]["address"]["socket_address"]
    assert filled(compose["services"]["envoy"]["ports"][0]).endswith(f":{listener['port_value']}")
    health = clusters["picker"]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert health["health_check_config"]["port_value"] == RouterSettings.model_fields["health_port"].default


def test_simulated_servers_listen_where_the_endpoints_say(compose):
    spec = ProcessSpec.model_validate_json((COMPOSE / "sim.json").read_bytes())
    routed = parse_endpoints(filled(compose["services"]["router"]["environment"]["LEADTIME_ROUTER_ENDPOINTS"]))
    assert [("sim", server.port) for server in spec.servers] == [(entry.host, entry.port) for entry in routed]
    assert {server.host for server in spec.servers} == {"0.0.0.0"}


def test_envoy_and_the_services_are_given_the_same_tokens(compose, secrets):
    text = json.dumps(run_setup(compose, secrets))
    for variable in ("LEADTIME_ROUTER_EXTPROC_TOKEN", "LEADTIME_COLLECTOR_ALS_TOKEN"):
        assert f"Bearer {(secrets / variable).read_text()}" in text
    predictors = (secrets / "LEADTIME_PREDICTOR_HTTP_TOKEN").read_text()
    assert (secrets / "LEADTIME_ROUTER_PREDICTOR_TOKEN").read_text() == predictors


def test_secrets_are_random_kept_and_for_nobody_else(compose, secrets, tmp_path):
    run_setup(compose, secrets)
    first = {file.name: file.read_text() for file in secrets.iterdir()}
    assert len(set(first.values())) == len(setup.SECRETS)
    assert min(map(len, first.values())) >= 32
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets.iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "envoy.json").stat().st_mode) & 0o007 == 0
    run_setup(compose, secrets)
    assert {file.name: file.read_text() for file in secrets.iterdir()} == first


def test_secrets_of_the_environment_are_taken_and_the_operators_token_is_shown(compose, secrets, capsys):
    run_setup(compose, secrets, LEADTIME_HTTP_TOKEN="mine", LEADTIME_COLLECTOR_ALS_TOKEN="theirs")
    assert (secrets / "LEADTIME_ROUTER_HTTP_TOKEN").read_text() == "mine"
    assert (secrets / "LEADTIME_COLLECTOR_ALS_TOKEN").read_text() == "theirs"
    assert setup.main(["--secrets", str(secrets), "--show-token"], {}) == 0
    assert capsys.readouterr().out == "mine\n"


def test_what_follows_from_the_routers_settings_comes_from_the_same_environment(compose, secrets):
    envoy = run_setup(compose, secrets, LEADTIME_ROUTER_MAX_BODY_BYTES="5000")
    assert envoy["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] == 5000


@pytest.mark.parametrize("word", ["--endpoints=10.0.0.7:8000", "--endpoints=", "--api=ftp://a", "--router=router"])
def test_what_envoy_cant_reach_stops_the_setup_with_its_reason(compose, secrets, capsys, word):
    arguments = [entry.replace(ROOT, str(secrets)) for entry in words(compose)]
    arguments = [entry for entry in arguments if not entry.startswith(word.split("=")[0])]
    assert setup.main([*arguments, f"--envoy={secrets.parent / 'envoy.json'}", word], {}) == 1
    assert "allowed:" in capsys.readouterr().err


# The Dockerfile


def test_the_dockerfile_pulls_no_frontend_and_pins_through_arguments():
    text = (REPOSITORY / "deploy/images/Dockerfile").read_text()
    assert "syntax=" not in text
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) >= {"${PYTHON_IMAGE}", "${CUDA_IMAGE}", "scratch"}
    targets = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    assert {*SETTINGS, "trainer-tensor", "predictor-gpu", "sim"} <= set(targets)
    assert "ORT_DISABLE_TELEMETRY=1" in text


# What Grafana shows


def metrics_of_the_code() -> tuple[set[str], list[re.Pattern[str]]]:
    """Names in the services' sources, and patterns of those that are put together there."""
    source = "\n".join(file.read_text() for file in (REPOSITORY / "services").rglob("*.py"))
    found = re.findall(r'f?"(leadtime_(?:router|collector|trainer|predictor)_[a-z0-9_{}]+)"', source)
    whole = {name for name in found if "{" not in name}
    return whole, [re.compile(re.sub(r"\{\w+\}", "[a-z0-9_]+", name)) for name in found if "{" in name]


def expressions() -> list[str]:
    dashboard = json.loads((COMPOSE / "observability/leadtime.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(found) > 30
    return found


def test_the_dashboard_asks_for_metrics_that_the_services_have():
    names, patterns = metrics_of_the_code()
    asked = {name for expression in expressions() for name in re.findall(r"\bleadtime_\w+", expression)}
    unknown = {
        name
        for name in asked
        if not {name, re.sub(r"_(?:total|bucket)$", "", name)} & names
        and not any(pattern.fullmatch(re.sub(r"_(?:total|bucket)$", "", name)) for pattern in patterns)
    }
    assert unknown == set()


def test_the_dashboard_covers_each_service_and_its_panels_have_their_own_places():
    text = " ".join(expressions())
    assert all(f"leadtime_{service}_" in text for service in SETTINGS)
    panels = json.loads((COMPOSE / "observability/leadtime.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)


def test_prometheus_scrapes_every_replica_of_every_service_at_its_images_port():
    scrape = yaml.safe_load((COMPOSE / "observability/prometheus.yml").read_text())["scrape_configs"][0]
    asked = {name: entry["port"] for entry in scrape["dns_sd_configs"] for name in entry["names"]}
    ports = {name: int(image_environment(name)[f"LEADTIME_{name.upper()}_HTTP_PORT"]) for name in SETTINGS}
    assert asked == ports


# Images


def test_a_package_is_taken_out_of_a_lock_with_its_hashes():
    entries = [f"{name}==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n" for name in ("a", "b", "bb")]
    lock = "".join(entries)
    assert without(lock, "b") == entries[0] + entries[2]
    with pytest.raises(ValueError, match="0 entries of c"):
        without(lock, "c")
    assert "onnxruntime" in without((REPOSITORY / "requirements/router.lock").read_text(), "aiohttp")


def test_the_predictors_lock_has_the_library_that_the_gpu_image_replaces():
    rest = without((REPOSITORY / "requirements/predictor.lock").read_text(), "onnxruntime")
    assert "onnxruntime==" not in rest
    assert "numpy==" in rest
    assert re.search(
        r"^onnxruntime-gpu==\S+ --hash=sha256:[0-9a-f]{64}$",
        (REPOSITORY / "requirements/predictor-gpu.txt").read_text(),
        re.MULTILINE,
    )


def test_the_self_test_runs_its_graph():
    assert self_test.main([]) == 0


def test_every_message_of_envoys_that_the_code_speaks_stays_in_the_images():
    site = Path(importlib.util.find_spec("xds").submodule_search_locations[0]).parent
    kept, to_read = set(rootfs.SPOKEN), list(rootfs.SPOKEN)
    while to_read:
        found = rootfs.imports_of(site, to_read.pop()) - kept
        kept |= found
        to_read += found
    source = "\n".join(
        file.read_text() for room in ("services", "shared", "sim") for file in (REPOSITORY / room).rglob("*.py")
    )
    spoken = {
        f"{package}.{name.split(' as ')[0].strip()}"
        for package, names in re.findall(r"^from (envoy\.[\w.]+) import (.+)$", source, re.MULTILINE)
        for name in names.split(",")
    }
    assert spoken
    assert spoken - kept == set()
