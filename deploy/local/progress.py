"""How far a long command is, on stderr: a bar where that is a terminal, else a line now and then.

stdout stays for what was asked for. Edge: writes to a terminal.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_S: Final = 10.0


@dataclass(slots=True)
class Told:
    """Where progress goes. `at`: what is done at the moment, and which share of it; `line`: a step that ended."""

    at: Callable[[str, float], None]
    line: Callable[[str], None]


@dataclass(slots=True)
class _Lines:
    """A line where nothing was written for so long."""

    write: Callable[[str], None]
    now_s: Callable[[], float]
    last_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_s = self.now_s()

    def at(self, what: str, share: float) -> None:
        if self.now_s() - self.last_s >= LINE_EVERY_S:
            self.line(f"{what}: {share:.0%}")

    def line(self, text: str) -> None:
        self.last_s = self.now_s()
        self.write(text)


@contextlib.contextmanager
def progress(console: Console, now_s: Callable[[], float] = time.monotonic) -> Iterator[Told]:
    """Tell of it on `console` until the context ends; a bar leaves nothing behind."""

    def write(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if not console.is_terminal:
        lines = _Lines(write, now_s)
        yield Told(lines.at, lines.line)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def at(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield Told(at, write)
