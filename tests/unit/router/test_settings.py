"""The router's own settings: what the general ones don't check."""

import pytest

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
