"""Run directories: one per started stack under `.run/`, with its logs; the newest few are kept.

A start that fails leaves logs too, and is tried again and again: those are counted by themselves, so that they don't
push out the logs of runs that came up.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

FOLDER: Final = ".run"
KEPT: Final = 5
_STARTED: Final = "started"


def new_run_dir(base: Path, command: str, stamp: str, pid: int) -> Path:
    """Make `BASE/.run/COMMAND-STAMP-PID`; in the temporary directory where `base` can't be written.

    `stamp` sorts by time, as 20261130-101500. Older ones are removed but for those of living processes, the newest that
    came up and the newest that didn't.
    """
    parent = base / FOLDER
    try:
        parent.mkdir(exist_ok=True)
        made = parent / f"{command}-{stamp}-{pid}"
        made.mkdir()
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"leadtime-{command}-"))
    ended = ended_runs(parent)
    for started in (True, False):
        alike = [run for run in ended if (run / _STARTED).exists() is started]
        for old in alike[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return made


def came_up(run_dir: Path) -> None:
    """Note that everything of this run is up."""
    (run_dir / _STARTED).touch()


def ended_runs(parent: Path) -> list[Path]:
    """Run directories whose process is gone, oldest first."""
    runs = []
    for folder in parent.iterdir():
        parts = folder.name.rsplit("-", 3)
        if len(parts) == 4 and all(part.isdigit() for part in parts[1:]) and not _alive(int(parts[3])):
            runs.append((f"{parts[1]}-{parts[2]}", folder))
    return [folder for _, folder in sorted(runs)]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
