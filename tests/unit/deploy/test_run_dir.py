"""Run directories: made anew, the newest kept, those of living runs never touched."""

import os
from pathlib import Path

from deploy.local.run_dir import FOLDER, KEPT, came_up, new_run_dir

DEAD = 2**22 + 1  # above the kernel's largest pid


def test_a_run_directory_is_made_under_the_base(tmp_path: Path) -> None:
    made = new_run_dir(tmp_path, "demo", "20261130-101500", 123)
    assert made == tmp_path / FOLDER / "demo-20261130-101500-123"
    assert made.is_dir()


def test_only_the_newest_ended_runs_are_kept(tmp_path: Path) -> None:
    for second in range(10):
        new_run_dir(tmp_path, "demo", f"20261130-10150{second}", DEAD)
    left = sorted(folder.name for folder in (tmp_path / FOLDER).iterdir())
    assert left == [f"demo-20261130-10150{second}-{DEAD}" for second in range(10 - KEPT, 10)]


def test_starts_that_failed_do_not_push_out_runs_that_came_up(tmp_path: Path) -> None:
    good = new_run_dir(tmp_path, "up", "20261130-090000", DEAD)
    came_up(good)
    failed = [new_run_dir(tmp_path, "up", f"20261130-10150{second}", DEAD) for second in range(10)]
    assert good.is_dir()
    assert [run.is_dir() for run in failed] == [False] * (10 - KEPT) + [True] * KEPT
    for second in range(10):
        came_up(new_run_dir(tmp_path, "up", f"20261130-11150{second}", DEAD))
    assert not good.is_dir()
    assert failed[-1].is_dir()


def test_a_living_run_and_foreign_folders_stay(tmp_path: Path) -> None:
    living = new_run_dir(tmp_path, "up", "20200101-000000", os.getpid())
    foreign = tmp_path / FOLDER / "state"
    foreign.mkdir()
    for second in range(8):
        new_run_dir(tmp_path, "demo", f"20261130-10150{second}", DEAD)
    assert living.is_dir()
    assert foreign.is_dir()


def test_where_the_base_cannot_be_written_the_temporary_directory_serves(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in the way")
    made = new_run_dir(tmp_path, "demo", "20261130-101500", 123)
    try:
        assert made.is_dir()
        assert tmp_path not in made.parents
    finally:
        made.rmdir()
