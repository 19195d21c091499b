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


def test_endpoints_are_kept_as_written(monkeypatch):
    monkeypatch.setenv("LEADTIME_ROUTER_ENDPOINTS", "http://llm:8000;hardware_class=h100, [::1]:8000")
    assert load(RouterSettings).endpoints == "http://llm:8000;hardware_class=h100, [::1]:8000"
