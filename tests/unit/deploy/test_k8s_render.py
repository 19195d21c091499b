"""What the Kubernetes manifests take from the one Envoy config is what that renders."""

import pytest

from deploy.k8s.render import HERE, config, files, router_environment
from deploy.local.envoy import render
from services.router.settings import RouterSettings
from shared.settings import load


@pytest.mark.parametrize("place", files(router_environment()), ids=lambda place: place.name)
def test_the_committed_file_is_what_is_rendered(place) -> None:
    """`python -m deploy.k8s.render` writes it anew."""
    assert (HERE / place).read_text(encoding="utf-8") == files(router_environment())[place]


def test_the_body_limit_is_the_router_s() -> None:
    environment = {**router_environment(), "LEADTIME_ROUTER_MAX_BODY_BYTES": "1048576"}
    (listener,) = render(config(environment))["static_resources"]["listeners"]
    assert listener["per_connection_buffer_limit_bytes"] == 1_048_576
    assert all(
        "1048576" in text
        for place, text in files(environment).items()
        if place.name in {"envoy.json", "envoy-filter.yaml"}
    )


def test_the_rendered_files_hold_no_token() -> None:
    for text in files(router_environment()).values():
        assert text.count("Bearer ") == text.count("Bearer %ENVIRONMENT(")


def test_the_router_s_variables_are_settings_that_need_only_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**router_environment(), "LEADTIME_ROUTER_EXTPROC_TOKEN": "t" * 20}.items():
        monkeypatch.setenv(name, value)
    assert load(RouterSettings).tls == "self-signed"
