"""What the READMEs tell a reader to type exists: commands and their options, make's targets, modules, links."""

import importlib.util
import re
from pathlib import Path

import pytest
import typer

from deploy.local.cli import app

ROOT = Path(__file__).parents[3]
ROOMS = ("shared", "services", "sim", "bench", "deploy", "tests")
READMES = [ROOT / "README.md", *sorted(readme for room in ROOMS for readme in (ROOT / room).rglob("README.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LEADTIME = re.compile(r"(?<![\w.@/-])(?:\.venv/bin/)?leadtime ([a-z]+)\b([^#]*)", re.DOTALL)


def typed(readme: Path) -> list[str]:
    """What stands in code: the lines of blocks, and what is between backticks, each with its line breaks undone."""
    text = readme.read_text()
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", prose)
    return [*(line for block in blocks for line in block.splitlines()), *(" ".join(span.split()) for span in spans)]


def name(readme: Path) -> str:
    return str(readme.relative_to(ROOT))


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_every_command_has_the_options_that_are_shown(readme: Path) -> None:
    for code in typed(readme):
        for command, rest in LEADTIME.findall(code):
            assert command in COMMANDS, code
            known = {flag for option in COMMANDS[command].params for flag in (*option.opts, *option.secondary_opts)}
            assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest)) <= known, code


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_every_target_module_and_link_is_there(readme: Path) -> None:
    for code in typed(readme):
        for target in re.findall(r"(?:^|[\s`])make ([a-z][a-z-]*)", code):
            assert target in TARGETS, code
        for module in re.findall(r"python(?: -P)? -m ((?:services|shared|sim|bench|deploy)[\w.]*\w)(?![\w.<])", code):
            assert importlib.util.find_spec(module) is not None, code
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", readme.read_text()):
        assert (readme.parent / link).exists(), link


def test_the_commands_are_seen_at_all() -> None:
    seen = {command for readme in READMES for code in typed(readme) for command, _ in LEADTIME.findall(code)}
    assert seen == set(COMMANDS)
