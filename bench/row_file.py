"""A benchmark's runs as lines of a file: what has been made is read, left out of what is to be made, and added to.

A cell is a frozen dataclass that names a run; the row of its run holds the cell's fields beside what came of it. A
grid of hours is interrupted and shared: each row is written as its run ends, a line that an interruption cut off is
left out, and of two rows of a cell the later counts. What a row holds, and whether an old one will do, is its
benchmark's to say.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.local.output_file import output_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Cell = TypeVar("Cell", bound="DataclassInstance")
Row = Mapping[str, Any]
CellKey = tuple[Any, ...]


def key_of(row: Row, cell: "type[DataclassInstance]") -> CellKey:
    """The fields of the cell that the row is of; None for one that it hasn't got."""
    return tuple(row.get(field.name) for field in fields(cell))


def read_rows(path: Path, cell: "type[DataclassInstance]") -> list[dict[str, Any]]:
    """Rows of a file, of each cell the last; a line that was cut off by an interruption is left out."""
    if not path.is_file():
        return []
    rows: dict[CellKey, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[key_of(row, cell)] = row
    return list(rows.values())


def append(path: Path, row: Row) -> None:
    """Add a row; one that an interruption cut off is left standing on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.is_file() or not (text := path.read_text()) or text.endswith("\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def cells_left(
    path: Path, cells: Sequence[Cell], will_do: Callable[[Row], bool] = lambda _: True
) -> Iterator[tuple[str, Cell]]:
    """Cells that the file has no row of that will do, each with its place ("3/40"), in their order. The file is read
    again before each: another process may have made it meanwhile.
    """
    if not cells:
        return
    kind = type(cells[0])

    def made() -> set[CellKey]:
        return {key_of(row, kind) for row in read_rows(path, kind) if will_do(row)}

    done = made()
    left = [cell for cell in cells if astuple(cell) not in done]
    for place, cell in enumerate(left, 1):
        if astuple(cell) not in made():
            yield f"{place}/{len(left)}", cell


def parse(parser: argparse.ArgumentParser, results: Path, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of such a benchmark, beside the parser's own. Ends the process where none says what to do."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a small named subset, under 50 s")
    parser.add_argument("--full", action="store_true", help="every run; goes on where it stopped")
    parser.add_argument("--summary", action="store_true", help="only read what the results file holds")
    parser.add_argument("--results", type=Path, default=results, help="the file of rows")
    parser.add_argument("--json", type=output_file, help="also write the object here")
    options = parser.parse_args(arguments)
    if not (options.quick or options.full or options.summary):
        parser.error("one of --quick, --full and --summary is needed")
    return options


def show(summary: object, rows: Sequence[Row], path: Path | None) -> None:
    """Print the benchmark's object, and write it where that was asked for."""
    text = json.dumps({"summary": summary, "runs": rows}, indent=1)
    print(text)
    if path:
        path.write_text(text + "\n")
