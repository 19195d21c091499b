"""Rows of a benchmark that is interrupted and shared: what is made is kept, what isn't is left to make."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import late_binding, many_routers, replay
from bench.row_file import append, cells_left, key_of, read_rows


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    seed: int


def test_a_row_that_was_cut_off_is_left_out_and_what_is_added_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.jsonl"
    append(path, {"trace": "A", "seed": 1, "goodput": 0.5})
    with path.open("a") as file:
        file.write('{"trace": "A", "se')
    append(path, {"trace": "A", "seed": 2, "goodput": 0.6})
    append(path, {"trace": "A", "seed": 1, "goodput": 0.7})
    assert [row["goodput"] for row in read_rows(path, Cell)] == [0.7, 0.6]


def test_no_file_holds_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "rows.jsonl", Cell) == []


def test_what_another_process_made_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, {"trace": "A", "seed": 1})
    made = []
    for place, cell in cells_left(path, [Cell("A", seed) for seed in (1, 2, 3, 4)]):
        made.append((place, cell.seed))
        for seed in (cell.seed, 3):
            append(path, {"trace": "A", "seed": seed})
    assert made == [("1/3", 2), ("3/3", 4)]


def test_a_row_that_will_not_do_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, {"trace": "A", "seed": 1, "revision": "old"})
    left = cells_left(path, [Cell("A", 1)], lambda row: row["revision"] == "new")
    assert [cell for _, cell in left] == [Cell("A", 1)]


@pytest.mark.parametrize("bench", [replay, late_binding, many_routers])
def test_each_committed_row_is_of_a_cell_of_its_own(bench: Any) -> None:
    lines = [json.loads(line) for line in bench.RESULTS.read_text().splitlines()]
    rows = read_rows(bench.RESULTS, bench.Cell)
    assert len({key_of(row, bench.Cell) for row in rows}) == len(rows)
    assert all(None not in key_of(row, bench.Cell) for row in lines if "capacity_per_s" not in row)


def test_a_run_that_nothing_was_asked_of_ends_with_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replay.main([])
    assert "one of --quick, --full and --summary is needed" in capsys.readouterr().err
