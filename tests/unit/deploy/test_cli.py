"""The command line: help, and arguments that can't work are refused before anything starts."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deploy.local.cli import app
from deploy.local.replay import DEFAULT_POLICIES
from deploy.local.up import owned
from shared.errors import ConfigurationError
from sim.hardware import PROFILES
from sim.replay.pool import short_name
from tests.decision_log import decision_log


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_both_commands() -> None:
    output = run("--help").output
    assert "demo" in output
    assert "up" in output


def test_no_command_is_described_by_half_a_sentence() -> None:
    assert "..." not in run("--help").output.partition("Commands:")[2]


def test_a_replay_says_what_it_takes_without_a_policy_and_what_hardware_it_knows() -> None:
    options = {option.name: option.help for option in typer.main.get_command(app).commands["replay"].params}
    *others, last = DEFAULT_POLICIES
    assert f"Without it {', '.join(others)} and {last}." in options["policy"]
    for profile in PROFILES.values():
        assert short_name(profile).partition("-")[0] in options["hardware"]


def test_the_version_is_told() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"leadtime {importlib.metadata.version('leadtime')}\n")
    assert "Usage" in run().output


def test_no_number_of_any_command_is_refused_in_typers_words() -> None:
    """Each option that has bounds, found by walking over the commands."""
    refused = 0
    for name, command in typer.main.get_command(app).commands.items():
        for option in command.params:
            if getattr(option, "min", None) is None:
                continue
            result = run(name, option.opts[0], "-1e9")
            assert f"'{option.opts[0]}': found -1e9; allowed: " in result.output
            assert f"{option.min}" in result.output
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("command", ["demo", "up", "replay", "evaluate", "samples"])
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Options:" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--seconds", "1"), "'--seconds': found 1; allowed: 5 to 600"),
        (("demo", "--seconds", "a while"), "'--seconds': found a while; allowed: a number, 5 to 600"),
        (("demo", "--rate", "61"), "'--rate': found 61; allowed: 1 to 60"),
        (("demo", "--seed", "1.5"), "'--seed': found 1.5; allowed: an integer, 0 to 1000000"),
        (("replay", "A", "--slo-ttft-ms", "0"), "'--slo-ttft-ms': found 0; allowed: 1 or more"),
        (("demo", "--json", "/nowhere/at/all.json"), "no directory"),
        (("demo", "--json", "/"), "can't be written"),
        (("samples", "/nowhere/at/all.jsonl"), "no directory"),
        (("samples", "samples.jsonl", "--nats", "http://127.0.0.1"), "nats://host:port"),
        (("samples", "samples.jsonl", "--pool", "a.*"), "DNS label"),
        (("replay", "A", "--load", "0.5,none"), "found 'none'"),
        (("replay", "A", "--requests", "10"), "--requests"),
        (("replay", "A", "--svg", "/nowhere/at/all.svg"), "no directory"),
        (("evaluate", "/nowhere.jsonl", "--profile", "random"), "No such file"),
        (("evaluate", "/dev/null", "--profile", "random"), "no decisions"),
        (("evaluate", "/dev/null", "--profile", "no-such"), "found 'no-such'"),
        (("up",), "--endpoint"),
        (("up", "--endpoint", "https://127.0.0.1:1"), "http://host:port"),
        (("up", "--endpoint", "127.0.0.1:1"), "no http:// in front"),
        (("up", "--endpoint", "http://127.0.0.1:1;hardware_class=h1000"), "found 'h1000'; allowed: unknown, a100"),
        (("up", "--endpoint", "http://127.0.0.1:1;hw=h100"), "hardware_class=NAME"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--endpoint", "http://two"), "--endpoint 'http://two'"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--host", "localhost"), "an IP address"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--port", "70000"), "--port"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--profile", "best"), "found 'best'; allowed: composite, leadtime"),
        (("up", "--endpoint", "http://127.0.0.1:1", "--api", "ftp://x"), "http://host:port"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_replay_ends_with_a_table_json_and_a_picture(tmp_path: Path) -> None:
    json_file, svg_file = tmp_path / "r.json", tmp_path / "r.svg"
    arguments = ("--policy", "token-load", "--policy", "round-robin", "--load", "0.5,0.8", "--hardware", "a100-8b:2")
    files = ("--json", str(json_file), "--svg", str(svg_file))
    result = run("replay", "D", *arguments, "--requests", "100", "--capacity", "1", *files)
    assert result.exit_code == 0
    assert result.output.count("token-load") >= 2
    report = json.loads(json_file.read_text())
    assert [(row["policy"], row["load"]) for row in report["runs"]] == [
        ("token-load", 0.5),
        ("round-robin", 0.5),
        ("token-load", 0.8),
        ("round-robin", 0.8),
    ]
    assert svg_file.read_text().startswith("<svg")
    assert "50%: 0.5 requests/s, over after" in result.output
    assert "token-load at 80%: done" in result.stderr
    assert "done" not in result.stdout
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_replay_of_a_burst_says_that_it_is_no_load(tmp_path: Path) -> None:
    trace, json_file = tmp_path / "burst.jsonl", tmp_path / "r.json"
    rows = [{"arrival_ms": 40 * place, "input_tokens": 200, "output_tokens": 400} for place in range(100)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--policy", "token-load", "--hardware", "a100-8b:2", "--json", str(json_file))
    burst = run("replay", str(trace), "--load", "0.7", "--capacity", "36", *arguments)
    assert burst.exit_code == 0
    assert "warning: not settled: token-load at 70%." in burst.output
    assert max(map(len, burst.stdout.splitlines())) <= 80
    found = json.loads(json_file.read_text())["runs"][0]
    assert (found["settled"], found["rate_per_s"]) == (False, pytest.approx(25.2))
    assert found["virtual_s"] > 3.9
    lasting = run("replay", str(trace), "--load", "0.7", "--capacity", "1", *arguments)
    assert "not settled" not in lasting.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "trace 'nothing'"),
        (("A", "--policy", "best"), "found 'best'; allowed: composite, leadtime"),
        (("A", "--policy", "random", "--policy", "best+oracle"), "found 'best+oracle'; allowed: composite"),
        (("A", "--policy", "best"), "a profile file (.yaml), oracle, or any with +oracle"),
        (("A", "--hardware", "h900"), "found 'h900'"),
    ],
)
def test_a_replay_that_can_t_run_says_why(arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture) -> None:
    result = run("replay", *arguments, "--capacity", "1")
    assert result.exit_code == 2
    assert said in result.output + capfd.readouterr().err


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


def test_a_decision_log_is_evaluated(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    log.write_bytes(b"".join(decision_log(300)))
    own = tmp_path / "own.yaml"
    own.write_text("name: own\npicker: {plugin: round-robin-picker}\n")
    result = run("evaluate", str(log), "--profile", "leadtime", "--profile", str(own), "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "leadtime: 300 decisions" in " ".join(result.output.split())
    # No terminal: 80 columns. Nothing is cut, and nothing needs more.
    assert "…" not in result.output
    assert max(map(len, result.output.split("warning:")[0].splitlines())) <= 80
    assert "  ttft_ms: 300 rows" in result.output
    assert "    estimate (DR)" in result.output
    ours, other = json.loads(out.read_text())
    assert (ours["profile"], other["profile"]) == ("leadtime", "own")
    assert ours["metrics"]["ttft_ms"]["difference"]["high"] < 0
    assert other["metrics"]["ttft_ms"]["difference"]["low"] < 0 < other["metrics"]["ttft_ms"]["difference"]["high"]


def test_logs_of_several_routers_count_each_outcome_once_and_warnings_name_their_metrics(tmp_path: Path) -> None:
    """Every router writes its own decisions, and all outcomes."""
    lines = decision_log(40)
    decisions, outcomes = lines[::2], lines[1::2]
    logs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for place, log in enumerate(logs):
        log.write_bytes(b"".join([*decisions[place::2], *outcomes]))
    together, alone = tmp_path / "together.json", tmp_path / "alone.json"
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(b"".join(lines))
    result = run("evaluate", *map(str, logs), "--profile", "leadtime", "--json", str(together))
    assert result.exit_code == 0
    assert "leadtime: 40 decisions" in result.output
    assert "warning: ttft_ms: the overlap is too thin" in result.output
    run("evaluate", str(whole), "--profile", "leadtime", "--json", str(alone))
    assert together.read_text() == alone.read_text()


def test_one_decision_is_one(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join([*decision_log(2)[:3]]))
    result = run("evaluate", str(log), "--profile", "random")
    assert "2 decisions" in result.output
    assert "ttft_ms: 1 row," in result.output
    assert "1 decision has no outcome in these files" in result.output
