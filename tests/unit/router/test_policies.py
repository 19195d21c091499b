"""The policy in force follows its files; a bad file changes nothing, and is counted and shown."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.router.policies import Policies, PolicySettings
from services.router.request.inference_request import Slo
from shared.errors import ConfigurationError
from tests.fakes.manual_clock import ManualClock

MINE = "name: mine\npicker: {plugin: random-picker}\n"


def write(path: Path, text: str) -> None:
    """As a ConfigMap does: another file in its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def make(registry: CollectorRegistry | None = None, **settings: object) -> Policies:
    return Policies(PolicySettings(**settings), registry or CollectorRegistry(), ManualClock(1.0))


def test_without_a_file_the_default_or_the_named_preset_is_in_force() -> None:
    assert make().profile == "leadtime"
    assert make(profile="token-load").pipeline().profile == "token-load"
    with pytest.raises(ConfigurationError, match="found 'no-such'"):
        make(profile="no-such")


def test_a_file_s_profile_is_in_force_unless_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(MINE)
    assert make(profile_file=path).profile == "mine"
    assert make(profile_file=path, profile="token-load").profile == "token-load"
    assert make(profile_file=path).describe()["source"] == "profile file"


async def test_a_changed_file_is_exchanged_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(MINE)
    policies = make(profile_file=path)
    seen: list[str] = []
    policies.on_pipeline = lambda pipeline: seen.append(pipeline.profile)
    await policies.look()
    assert seen == []
    write(path, "name: other\npicker: {plugin: round-robin-picker}\n")
    await policies.look()
    assert seen == ["other"]
    assert policies.describe()["effective"]["picker"]["plugin"] == "round-robin-picker"
    assert "mine" not in policies.describe()["known"]


@pytest.mark.parametrize(
    "text", ["name: mine\npicker: {plugin: no-such}\n", "a: [", "name: leadtime\npicker: {plugin: random-picker}\n"]
)
async def test_a_bad_file_keeps_the_old_one_and_says_so(text: str, tmp_path: Path) -> None:
    path, registry = tmp_path / "p.yaml", CollectorRegistry()
    path.write_text(MINE)
    policies = make(registry, profile_file=path)
    policies.on_pipeline = lambda _: pytest.fail("nothing may change")
    write(path, text)
    await policies.look()
    await policies.look()
    assert policies.describe()["name"] == "mine"
    assert policies.describe()["files"]["profile"]["error"]
    labels = {"file": "profile", "result": "error"}
    assert registry.get_sample_value("leadtime_router_policy_reads_total", labels) == 1.0
    assert registry.get_sample_value("leadtime_router_policy_current", {"file": "profile"}) == 0.0
    policies.on_pipeline = None
    write(path, MINE + "description: mended\n")
    await policies.look()
    assert policies.describe()["files"]["profile"]["error"] is None
    assert registry.get_sample_value("leadtime_router_policy_current", {"file": "profile"}) == 1.0


async def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(MINE)
    policies = make(profile_file=path)
    path.unlink()
    await policies.look()
    assert policies.profile == "mine"
    assert "can't be read" in policies.describe()["files"]["profile"]["error"]


async def test_what_was_chosen_by_hand_stays_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(MINE)
    policies = make(profile_file=path)
    policies.choose("token-load")
    write(path, MINE + "description: new\n")
    await policies.look()
    assert policies.profile == "token-load"
    policies.choose("mine")
    assert policies.describe()["effective"]["description"] == "new"


async def test_objectives_follow_their_file(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("objectives: {a: -1}\n")
    policies = make(objectives_file=path, objectives={"b": 2})
    seen = []
    policies.on_objectives = seen.append
    write(path, "objectives: {a: {priority: 3, ttft_slo_ms: 9}}\n")
    await policies.look()
    assert seen[0].by_name["a"].slo == Slo(9.0)
    assert policies.describe()["objectives"]["by_name"]["b"]["priority"] == 2
    write(path, "objectives: {a: low}\n")
    await policies.look()
    assert len(seen) == 1
    assert "objectives.a" in policies.describe()["files"]["objectives"]["error"]
