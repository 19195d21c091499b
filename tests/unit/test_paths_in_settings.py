"""A path that can't be used stops the start of its service with the setting's name, of every setting that is a path."""

import os
import random
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from services.collector.settings import CollectorSettings
from services.collector.spool import open_spool
from services.predictor.settings import PredictorSettings
from services.router.discovery.build import sources
from services.router.main import _credentials
from services.router.offpolicy.log_file import DecisionLogFile
from services.router.policies import Policies, PolicySettings
from services.router.settings import RouterSettings
from services.trainer.settings import TrainerSettings
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.settings import NatsSettings, RedisSettings, ServiceSettings, load
from tests.certificates import Authority

SERVICES = (RouterSettings, CollectorSettings, TrainerSettings, PredictorSettings)


def _sources(found: Any) -> object:
    return sources(found, SystemClock(), CollectorRegistry(), random.Random(1))


# What a service does with a path only while it is built.
OPENED: dict[str, Callable[[Any], object]] = {
    "LEADTIME_ROUTER_DECISION_LOG": lambda found: DecisionLogFile(found.decision_log, 10**6, CollectorRegistry()),
    "LEADTIME_ROUTER_PROFILE_FILE": lambda found: Policies(
        PolicySettings(profile_file=found.profile_file), CollectorRegistry(), SystemClock()
    ),
    "LEADTIME_ROUTER_KUBERNETES_TOKEN_FILE": _sources,
    "LEADTIME_ROUTER_KUBERNETES_CA_FILE": _sources,
    "LEADTIME_ROUTER_TLS_CERT_FILE": _credentials,
    "LEADTIME_ROUTER_TLS_KEY_FILE": _credentials,
    "LEADTIME_ROUTER_TLS_CLIENT_CA_FILE": _credentials,
    "LEADTIME_COLLECTOR_SPOOL_DIR": lambda found: open_spool(found.spool_dir, 1, max_bytes=10**6),
}
# Paths that are made where they aren't, so that only their folder can be wrong.
MADE = {"LEADTIME_ROUTER_DECISION_LOG", "LEADTIME_COLLECTOR_SPOOL_DIR"}
WRONG = ("below a file", "no folder", "folder", "junk", "pipe", "endless", "too long")


def paths_of(settings: type[BaseSettings]) -> list[str]:
    """Variables of the settings, and of the blocks in them, that are paths."""
    found = []
    for name, field in settings.model_fields.items():
        parts = list(_parts(field.annotation))
        if Path in parts:
            found.append(f"{settings.model_config['env_prefix']}{name}".upper())
        for block in parts:
            if isinstance(block, type) and issubclass(block, BaseSettings):
                found += paths_of(block)
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    """The annotation and all that it is made of: `Annotated[Path, …] | None` has a Path in it."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _parts(part)


CASES = [
    (service, variable, wrong)
    for service in SERVICES
    for variable in paths_of(service)
    for wrong in WRONG
    if not (variable in MADE and wrong in {"no folder", "junk"})
    and not (variable == "LEADTIME_ROUTER_DECISION_LOG" and wrong == "endless")  # /dev/stdout is one, too
    and (wrong == "junk" or not variable.startswith(("LEADTIME_NATS", "LEADTIME_REDIS")) or service is RouterSettings)
]


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What has to be set for each path to be used at all, all of it right."""
    key, certificate = Authority.make().issue("localhost")
    for name, text in (("key", key), ("certificate", certificate), ("token", b"t"), ("junk", b"junk \xe9\n")):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, value in {
        "ROUTER_TLS": "files",
        "ROUTER_TLS_CERT_FILE": str(tmp_path / "certificate"),
        "ROUTER_TLS_KEY_FILE": str(tmp_path / "key"),
        "ROUTER_KUBERNETES_POOL": "llm",
        "ROUTER_KUBERNETES_NAMESPACE": "ns",
        "ROUTER_KUBERNETES_TOKEN_FILE": str(tmp_path / "token"),
        "ROUTER_KUBERNETES_CA_FILE": str(tmp_path / "certificate"),
        "NATS_TLS_CERT_FILE": str(tmp_path / "certificate"),
        "NATS_TLS_KEY_FILE": str(tmp_path / "key"),
        "REDIS_TLS_CERT_FILE": str(tmp_path / "certificate"),
        "REDIS_TLS_KEY_FILE": str(tmp_path / "key"),
    }.items():
        monkeypatch.setenv(f"LEADTIME_{name}", value)
    return tmp_path


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_around_the_wrong_path_is_right(service: type[ServiceSettings], around: Path) -> None:
    found = load(service)
    if isinstance(found, RouterSettings):
        _credentials(found)
        _sources(found)


@pytest.mark.parametrize(("service", "variable", "wrong"), CASES)
def test_a_path_that_can_t_be_used_stops_the_start(
    service: type[ServiceSettings], variable: str, wrong: str, around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "below a file": around / "junk" / "x",
        "no folder": around / "no" / "x",
        "folder": around / ("junk" if variable.endswith("_DIR") else "folder"),
        "junk": around / "junk",
        "pipe": around / "pipe",
        "endless": Path("/dev/zero"),
        "too long": around / ("x" * 300),
    }
    monkeypatch.setenv(variable, str(places[wrong]))
    with pytest.raises(ConfigurationError) as refused:
        OPENED.get(variable, lambda _: None)(load(service))
    said = str(refused.value)
    prefix = service.model_config.get("env_prefix", "")
    field = variable.removeprefix("LEADTIME_NATS_").removeprefix("LEADTIME_REDIS_").removeprefix(prefix)
    assert field.lower() in said.lower().replace("profile file", "profile_file")
    if field != "PROFILE_FILE" or wrong != "junk":
        assert "found" in said
        assert "allowed: " in said
    assert "junk \xe9" not in said, "the content isn't told"


def test_the_table_holds_every_path() -> None:
    found = {variable for _, variable, _ in CASES}
    own = {paths for service in SERVICES for paths in paths_of(service)}
    assert found == own
    assert {"LEADTIME_ROUTER_ENDPOINTS_FILE", "LEADTIME_NATS_CREDENTIALS_FILE", *MADE, *OPENED} <= found
    assert {*paths_of(NatsSettings), *paths_of(RedisSettings)} <= found


def test_a_folder_that_others_keep_closed_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch, around: Path) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("LEADTIME_ROUTER_TLS_CERT_FILE", str(around / "certificate"))
    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(ConfigurationError, match=r"TLS_CERT_FILE: found a path .*Permission denied.*; allowed: a file"):
        load(RouterSettings)


def test_a_kubernetes_token_of_no_letters_is_refused(monkeypatch: pytest.MonkeyPatch, around: Path) -> None:
    (around / "token").write_bytes(b"\n")
    with pytest.raises(ConfigurationError, match="an empty file"):
        _sources(load(RouterSettings))
