"""What is packaged agrees with itself: pins and locks, the rooms of the house, READMEs and code."""

import importlib
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from shared.settings import NatsSettings, RedisSettings, ServiceSettings, TelemetrySettings

REPOSITORY = Path(__file__).resolve().parents[3]
SERVICES = ("router", "collector", "trainer", "predictor")
LOCKS = (*SERVICES, "local", "dev")
TOP_LEVEL = (
    *(f"services/{service}" for service in SERVICES), "shared", "sim", "bench", "tests",
    "deploy/local", "README.md", "DECISIONS.md", "CHANGELOG.md",
    "LICENSE", "pyproject.toml", "Makefile", ".ci/run",
)  # fmt: skip
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\]+)", re.MULTILINE)


@cache
def project() -> dict[str, object]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@cache
def lock(name: str) -> str:
    return (REPOSITORY / "requirements" / f"{name}.lock").read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(extra: str) -> list[str]:
    """Requirements of an extra with those it includes, and the common ones."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    found: list[str] = list(project()["dependencies"])  # type: ignore[call-overload]
    for requirement in extras[extra]:
        if included := re.fullmatch(r"leadtime\[([a-z,]+)\]", requirement):
            for name in included[1].split(","):
                found += wanted(name)
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_every_requirement_of_its_extra_at_its_pin(name: str) -> None:
    locked = {normal(match[1]): match[2] for match in _PIN.finditer(lock(name))}
    for requirement in wanted(name):
        package = normal(re.split(r"[\[=<>!~ ]", requirement, maxsplit=1)[0])
        assert package in locked, f"{requirement} isn't in {name}.lock: make lock"
        if pinned := _PIN.match(requirement):
            assert locked[package] == pinned[2], f"{requirement} differs from {name}.lock: make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_registry_and_hashes_everything(name: str) -> None:
    text = lock(name)
    assert "://" not in text
    assert "--index-url" not in text
    assert "--find-links" not in text
    packages = [block for block in re.split(r"\n(?=\S)", text.strip()) if block]
    assert all("--hash=sha256:" in block for block in packages)


def test_locks_agree_on_every_version() -> None:
    versions: dict[str, set[str]] = {}
    for name in LOCKS:
        for match in re.finditer(r"^(\S+?)==(\S+)(?: ; (.+?))? \\$", lock(name), re.MULTILINE):
            versions.setdefault(f"{normal(match[1])} ; {match[3]}", set()).add(match[2])
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", TOP_LEVEL)
def test_the_house_has_its_rooms(path: str) -> None:
    assert (REPOSITORY / path).exists()


def readme_of(room: str) -> str:
    """All READMEs of a room, as one text."""
    return "\n".join(file.read_text() for file in sorted((REPOSITORY / room).rglob("README.md")))


def is_block(kind: object) -> bool:
    """Whether a field is a block of common settings, which the README of shared describes."""
    return isinstance(kind, type) and issubclass(kind, BaseSettings)


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_of_a_service_is_in_its_readme(service: str) -> None:
    module = importlib.import_module(f"services.{service}.settings")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ServiceSettings) and kind is not ServiceSettings
    ]
    assert len(kinds) == 1
    own = {
        name
        for name, described in kinds[0].model_fields.items()
        if name not in ServiceSettings.model_fields and not is_block(described.annotation)
    }
    text = readme_of(f"services/{service}")
    assert {name for name in own if not re.search(rf"\b{name.upper()}\b", text)} == set()


@pytest.mark.parametrize("block", [ServiceSettings, NatsSettings, RedisSettings, TelemetrySettings])
def test_every_common_setting_is_in_the_readme_of_shared(block: type[ServiceSettings]) -> None:
    text = readme_of("shared")
    assert {name for name in block.model_fields if not re.search(rf"\b{name.upper()}\b", text)} == set()


@pytest.mark.parametrize("service", SERVICES)
def test_every_metric_of_a_service_is_in_its_readme(service: str) -> None:
    source = "\n".join(file.read_text() for file in (REPOSITORY / "services" / service).rglob("*.py"))
    metrics = set(re.findall(rf'"(leadtime_{service}_[a-z0-9_]+)"', source))
    assert metrics, f"no metric found in services/{service}"
    text = readme_of(f"services/{service}")
    assert {metric for metric in metrics if metric not in text} == set()


def test_every_plugin_and_preset_is_in_a_readme_of_the_router() -> None:
    scheduling = REPOSITORY / "services/router/scheduling"
    presets = {file.stem for file in (scheduling / "presets").glob("*.yaml")}
    plugins = {
        name
        for file in [*scheduling.rglob("*.py")]
        for name in re.findall(r'"([a-z]+(?:-[a-z]+)*-(?:filter|scorer|picker|admitter))"', file.read_text())
    }
    assert plugins, "no plugin found"
    text = readme_of("services/router")
    assert {name for name in plugins | presets if name not in text} == set()


def test_links_between_documents_lead_somewhere() -> None:
    documents = [file for file in REPOSITORY.rglob("*.md") if not {".venv", ".run"} & set(file.parts)]
    dead = [
        f"{file.relative_to(REPOSITORY)}: {target}"
        for file in documents
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
        if not (file.parent / target).exists()
    ]
    assert dead == []


def test_the_makefile_has_the_targets_that_the_readme_names() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in ("setup", "demo", "up", "test", "check", "lock", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_ci_runs_the_same_targets_as_people_do() -> None:
    script = (REPOSITORY / ".ci/run").read_text()
    assert "make test" in script
    assert "make check" in script
