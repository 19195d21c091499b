"""The room's README names every setting, fault, profile and control call."""

from pathlib import Path

import sim
from sim.hardware import PROFILES
from sim.replay.pool import short_name
from sim.spec import Faults, ProcessSpec, ServerSpec

README = (Path(sim.__file__).parent / "README.md").read_text()


def test_every_field_of_the_spec_is_described():
    for model in (ServerSpec, Faults, ProcessSpec):
        for name in model.model_fields:
            assert f"`{name}`" in README, f"{model.__name__}.{name}"


def test_every_profile_and_module_is_named():
    for name in PROFILES:
        assert f"`{name}`" in README, name
    for module in Path(sim.__file__).parent.glob("*.py"):
        assert module.name == "__init__.py" or f"`{module.name}`" in README, module.name


def test_every_hardware_of_a_replay_is_named():
    for profile in PROFILES.values():
        assert f"`{short_name(profile)}`" in README


def test_every_control_call_is_described():
    for call in ("reset-caches", "faults/{name}", "stop/{name}", "start/{name}", "stats", "stats/reset"):
        assert f"/control/{call}`" in README
