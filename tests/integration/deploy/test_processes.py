"""Child processes: readiness, faults, stopping, and that nothing is left behind."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.local.processes import ChildError, ChildSpec, Supervisor
from tests.servers import until

WAIT = "import signal\nprint('up', flush=True)\nsignal.pause()"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\nsignal.pause()"


def python(name: str, code: str, **options: object) -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-c", code), **options)  # type: ignore[arg-type]


def says_up(run_dir: Path, name: str):
    async def probe() -> str | None:
        return None if b"up" in (run_dir / f"{name}.log").read_bytes() else "it hasn't said 'up'"

    return probe


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    async with Supervisor(tmp_path, os.environ) as supervisor:
        yield supervisor


async def test_children_start_in_groups_of_their_own_and_end_by_sigterm(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start([(python(name, WAIT), says_up(tmp_path, name)) for name in ("a", "b")])
    pids = [supervisor[name].pid for name in ("a", "b")]
    assert [os.getpgid(pid) for pid in pids] == pids
    await supervisor.stop()
    assert [child.exit_status for child in supervisor.children] == [-signal.SIGTERM, -signal.SIGTERM]
    assert not any(alive(pid) for pid in pids)


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start([(python("stubborn", STUBBORN, grace_s=0.2), says_up(tmp_path, "stubborn"))])
    await supervisor.stop()
    assert supervisor["stubborn"].exit_status == -signal.SIGKILL


async def test_tiers_stop_one_after_the_other(supervisor: Supervisor, tmp_path: Path) -> None:
    tell = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1]); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nsignal.pause()"
    )
    specs = [
        ChildSpec(name=name, command=(sys.executable, "-c", tell, name), stop_tier=tier)
        for name, tier in (("c", 2), ("a", 0), ("b", 1))
    ]
    await supervisor.start([(spec, says_up(tmp_path, spec.name)) for spec in specs])
    await supervisor.stop()
    assert (tmp_path / "order").read_text() == "abc"


async def test_a_child_that_ends_while_starting_is_named_with_its_last_lines(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = "import sys\nprint('the port is taken')\nsys.exit(3)"
    with pytest.raises(ChildError, match=r"broken: ended while starting, with status 3\n.*\nthe port is taken"):
        await supervisor.start([(python("broken", code), says_up(tmp_path, "broken"))])


async def test_a_child_that_is_not_ready_in_time_is_named_with_the_reason(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    with pytest.raises(ChildError, match=r"slow: not ready within 0\.2 s: it hasn't said 'up'"):
        await supervisor.start(
            [(python("slow", "import signal\nsignal.pause()"), says_up(tmp_path, "slow"))], deadline_s=0.2
        )


async def test_a_program_that_does_not_exist_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="absent: can't be started"):
        await supervisor.start(
            [(ChildSpec(name="absent", command=(str(tmp_path / "none"),)), says_up(tmp_path, "absent"))]
        )


async def test_an_unasked_end_is_told_and_an_asked_one_is_not(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start([(python(name, WAIT), says_up(tmp_path, name)) for name in ("stays", "crashes", "stopped")])
    watching = asyncio.ensure_future(supervisor.ended())
    await supervisor["stopped"].stop()
    os.kill(supervisor["crashes"].pid or 0, signal.SIGSEGV)
    ended = await asyncio.wait_for(watching, 10)
    assert ended.name == "crashes"
    assert "crashes: ended by itself, by signal SIGSEGV" in str(supervisor.fault(ended))


async def test_a_restart_brings_a_new_process(supervisor: Supervisor, tmp_path: Path) -> None:
    probe = says_up(tmp_path, "one")
    await supervisor.start([(python("one", WAIT), probe)])
    first = supervisor["one"].pid
    await supervisor.restart("one", probe)
    assert supervisor["one"].running
    assert supervisor["one"].pid != first


async def test_cancelling_a_start_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []

    async def start_and_note() -> None:
        async with Supervisor(tmp_path, os.environ) as supervisor:
            starting = asyncio.ensure_future(supervisor.start([(python("never", WAIT), never)]))
            await until(lambda: supervisor.children and supervisor["never"].pid, "it was started")
            pids.append(supervisor["never"].pid or 0)
            await starting

    async def never() -> str | None:
        return "never"

    task = asyncio.ensure_future(start_and_note())
    await until(lambda: pids, "it was started")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids[0])


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancellation_at_any_turn_of_a_start_leaves_no_process(tmp_path: Path, turns: int) -> None:
    async def run() -> None:
        async with Supervisor(tmp_path, os.environ) as supervisor:
            await supervisor.start([(python(f"cancelled-{turns}", WAIT), says_up(tmp_path, f"cancelled-{turns}"))])

    task = asyncio.ensure_future(run())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children_of(os.getpid()) == []


async def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    """The kernel ends the child of a parent that had no chance to."""
    parent_code = f"""
import asyncio, os, sys
from pathlib import Path
from deploy.local.processes import ChildSpec, Supervisor
async def main():
    supervisor = Supervisor(Path({str(tmp_path)!r}), os.environ)
    async def probe(): return None
    await supervisor.start([(ChildSpec(name="child", command=(sys.executable, "-c", {WAIT!r})), probe)])
    print(supervisor["child"].pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", parent_code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert alive(child)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(child), "the kernel ended the child")


def children_of(pid: int) -> list[int]:
    """Living children of a process, those of other threads too."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split() if alive(int(child))]
    return found
