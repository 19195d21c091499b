"""The README names every plugin, key, default and preset."""

from pathlib import Path

import services.router.scheduling as package
from services.router.scheduling.profile import load_presets
from services.router.scheduling.registry import PLUGINS, Registry

README = (Path(package.__file__).parent / "README.md").read_text("utf-8")


def shown(value):
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`" if isinstance(value, str) else f"{value:.6f}".rstrip("0").rstrip(".")


def rows_of(plugin):
    """The lines of the plugin's rows in its table of keys."""
    lines = iter(README.splitlines())
    start = next(line for line in lines if line.startswith(f"| `{plugin.name}` |"))
    rows = [start]
    for line in lines:
        if not line.startswith("| | "):
            break
        rows.append(line)
    return rows


def test_every_plugin_and_key_stands_there_with_its_default():
    for plugin in PLUGINS:
        rows = rows_of(plugin)
        for key, field in plugin.config.model_fields.items():
            assert any(f"`{key}`" in row and shown(field.default) in row for row in rows), f"{plugin.name}.{key}"


def test_every_preset_stands_there_with_its_fallback():
    for profile in load_presets(Registry()):
        row = next(line for line in README.splitlines() if line.startswith("|") and f"`{profile.name}`" in line)
        assert profile.fallback is None or row.endswith(f"| `{profile.fallback}` |")
