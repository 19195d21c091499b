"""The command line: help, and arguments that can't work are refused before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from deploy.local.up import owned
from shared.errors import ConfigurationError


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_both_commands() -> None:
    output = run("--help").output
    assert "demo" in output
    assert "up" in output


@pytest.mark.parametrize("command", ["demo", "up"])
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Options:" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--seconds", "1"), "--seconds"),
        (("demo", "--rate", "61"), "--rate"),
        (("demo", "--json", "/nowhere/at/all.json"), "no directory"),
        (("demo", "--json", "/"), "can't be written"),
        (("up",), "--endpoint"),
        (("up", "--endpoint", "https://127.0.0.1:1"), "http://host:port"),
        (("up", "--endpoint", "127.0.0.1:1"), "no http:// in front"),
        (("up", "--endpoint", "http://127.0.0.1:1;hardware_class=h1000"), "found 'h1000'; allowed: unknown, a100"),
        (("up", "--endpoint", "http://127.0.0.1:1;hw=h100"), "hardware_class=NAME"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--endpoint", "http://two"), "--endpoint 'http://two'"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--host", "localhost"), "an IP address"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--port", "70000"), "--port"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--api", "ftp://x"), "http://host:port"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_misspelt_variable_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADTIME_ROUTR_PROFILE", "leadtime")
    for arguments in (("demo",), ("up", "--endpoint", "http://127.0.0.1:1")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "LEADTIME_ROUTR_PROFILE: no such setting" in result.output


def test_a_state_directory_that_can_t_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match=r"--state .*/file/state: can't be written to"),
        owned(tmp_path / "file" / "state"),
    ):
        raise AssertionError("there is no such directory")
