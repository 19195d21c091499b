"""A file for results that can't be written is refused before the work begins, by every program that takes one."""

import argparse
import importlib
import inspect
from pathlib import Path

import pytest

from deploy.local.output_file import fault_of, output_file

ROOT = Path(__file__).parents[3]
PROGRAMS = [
    *(f"bench.{file.stem}" for file in sorted((ROOT / "bench").glob("*.py")) if "__main__" in file.read_text()),
    "deploy.local.chaos.__main__",
]


def test_a_place_that_can_be_written_is_taken(tmp_path: Path) -> None:
    assert fault_of(tmp_path / "new.json") is None
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"


def test_a_directory_and_a_missing_one_are_told(tmp_path: Path) -> None:
    assert fault_of(tmp_path) == f"{tmp_path} can't be written"
    with pytest.raises(argparse.ArgumentTypeError, match="there is no directory"):
        output_file(str(tmp_path / "no" / "new.json"))


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "bench.gpu"])
def test_every_program_refuses_it_at_once(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--json", "/nowhere/at/all.json"]
    monkeypatch.setattr("sys.argv", [program, *arguments])
    main = importlib.import_module(program).main
    with pytest.raises(SystemExit) as ended:
        main(*([arguments] if inspect.signature(main).parameters else []))
    assert ended.value.code == 2
    assert "there is no directory /nowhere/at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--only", "no such fault"), "--only: found 'no such fault'; allowed: "), (("--storm", "0"), "--storm: found 0")],
)
def test_chaos_refuses_what_it_cannot_play(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("deploy.local.chaos.__main__").main(list(arguments))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
