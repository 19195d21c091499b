"""The router's own settings: what the general ones don't check."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.router.settings import RouterSettings
from shared.errors import ConfigurationError
from shared.settings import load


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ("http://llm:8000;hardware_class=h1000", "found 'h1000'; allowed: unknown, a100"),
        ("http://llm:8000,llm", "entry 2: found 'llm'; allowed: host:port"),
    ],
)
def test_endpoints_that_can_t_be_read_are_a_fault_of_their_variable(monkeypatch, endpoints, said):
    monkeypatch.setenv("LEADTIME_ROUTER_ENDPOINTS", endpoints)
    with pytest.raises(ConfigurationError, match=rf"LEADTIME_ROUTER_ENDPOINTS: .*{said}"):
        load(RouterSettings)


@pytest.mark.parametrize(
    "predictors", ["ftp://x", "http://", "http://a:b", "http://a:8080/path", "http://a:8080,nonsense", "http://[::1"]
)
def test_predictors_that_can_t_be_called_are_a_fault_of_their_variable(monkeypatch, predictors):
    monkeypatch.setenv("LEADTIME_ROUTER_PREDICTORS", predictors)
    with pytest.raises(ConfigurationError, match="LEADTIME_ROUTER_PREDICTORS: "):
        load(RouterSettings)


@pytest.mark.parametrize("given", [("CERT",), ("KEY",), ("CLIENT_CA",), ("CERT", "CLIENT_CA")])
def test_half_of_tls_is_refused_instead_of_being_none(monkeypatch, tmp_path, given):
    file = tmp_path / "file.pem"
    file.write_text("-")
    for part in given:
        monkeypatch.setenv(f"LEADTIME_ROUTER_TLS_{part}_FILE", str(file))
    with pytest.raises(ConfigurationError, match="tls_cert_file"):
        load(RouterSettings)


def test_a_certificate_that_is_not_there_is_a_fault_of_its_variable(monkeypatch, tmp_path):
    for part in ("CERT", "KEY"):
        monkeypatch.setenv(f"LEADTIME_ROUTER_TLS_{part}_FILE", str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigurationError, match="LEADTIME_ROUTER_TLS_CERT_FILE"):
        load(RouterSettings)


def test_endpoints_are_kept_as_written(monkeypatch):
    monkeypatch.setenv("LEADTIME_ROUTER_ENDPOINTS", "http://llm:8000;hardware_class=h100, [::1]:8000")
    assert load(RouterSettings).endpoints == "http://llm:8000;hardware_class=h100, [::1]:8000"


def test_tables_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADTIME_ROUTER_MODEL_ALIASES", '{"chat": {"a": 9, "b": 1}, "best": "b"}')
    monkeypatch.setenv("LEADTIME_ROUTER_OBJECTIVES", '{"batch": -1}')
    settings = load(RouterSettings)
    assert settings.model_aliases == {"chat": {"a": 9, "b": 1}, "best": "b"}
    assert settings.objectives == {"batch": -1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLLECTORS", "collector:8090"),
        ("MAX_SET_ASIDE_SHARE", "0.6"),
        ("MAX_SET_ASIDE_S", "1"),
        ("MODEL_ALIASES", "chat=a"),
        ("MODEL_ALIASES", '{"chat": {"a": -1}}'),
        ("OBJECTIVES", '{"batch": "low"}'),
        ("OBJECTIVES", '{"batch": {"ttft_slo_ms": 0}}'),
        ("MODEL_OBJECTIVES", '{"m": {"priority": 1.5}}'),
        ("OBJECTIVES_FILE", "/nowhere.yaml"),
        ("MODEL_ALIASES_FILE", "/nowhere.yaml"),
    ],
)
def test_what_can_not_work_stops_the_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LEADTIME_ROUTER_{name}", value)
    with pytest.raises(ConfigurationError, match="LEADTIME_ROUTER_"):
        load(RouterSettings)


def test_every_setting_of_the_router_stands_in_its_readme() -> None:
    readme = (Path(__file__).parents[3] / "services" / "router" / "README.md").read_text()
    common = set(RouterSettings.__mro__[1].model_fields) - {"nats", "redis"}
    missing = [name for name in RouterSettings.model_fields if name not in common and f"`{name.upper()}`" not in readme]
    assert missing == []


@pytest.mark.parametrize("tls", ["off", "self-signed"])
def test_tls_without_files_needs_none(monkeypatch, tls):
    monkeypatch.setenv("LEADTIME_ROUTER_TLS", tls)
    assert load(RouterSettings).tls == tls


def test_tls_from_files_takes_them(monkeypatch, tmp_path):
    monkeypatch.setenv("LEADTIME_ROUTER_TLS", "files")
    for part in ("CERT", "KEY", "CLIENT_CA"):
        (tmp_path / part).write_text("-")
        monkeypatch.setenv(f"LEADTIME_ROUTER_TLS_{part}_FILE", str(tmp_path / part))
    assert load(RouterSettings).tls_client_ca_file == tmp_path / "CLIENT_CA"


@pytest.mark.parametrize(
    ("tls", "given"),
    [("files", ()), ("files", ("CERT",)), ("off", ("CERT", "KEY")), ("self-signed", ("CLIENT_CA",)), ("on", ())],
)
def test_tls_settings_that_contradict_each_other_are_refused(monkeypatch, tmp_path, tls, given):
    monkeypatch.setenv("LEADTIME_ROUTER_TLS", tls)
    for part in given:
        (tmp_path / part).write_text("-")
        monkeypatch.setenv(f"LEADTIME_ROUTER_TLS_{part}_FILE", str(tmp_path / part))
    with pytest.raises(ConfigurationError, match=r"(?i)tls"):
        load(RouterSettings)


@pytest.mark.parametrize(
    "guard", [{"extproc_token": "t" * 20}, {"extproc_open": True}], ids=["token", "guarded by others"]
)
def test_beyond_loopback_the_ext_proc_port_needs_a_guard(guard: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="extproc_token"):
        RouterSettings(extproc_host="0.0.0.0")
    assert RouterSettings(extproc_host="0.0.0.0", **guard).extproc_host == "0.0.0.0"
