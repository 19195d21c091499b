"""`leadtime demo` stopped at every stage of its start and of its run: nothing that it started is left."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.servers import until

STAGES = {
    "before its first child": "sim.json",
    "as the stores start": "nats.log",
    "as the services start": "router.log",
    "as Envoy starts": "envoy.log",
}


async def started(directory: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.local.cli", "demo", "--seconds", "5"),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


def processes_of(directory: Path) -> list[int]:
    """Living processes with a log of the run directory as their output."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(directory) in str((process / "fd" / "1").readlink()):
                found.append(int(process.name))
        except OSError:
            continue
    return found


async def reached(demo: asyncio.subprocess.Process, directory: Path, file: str) -> None:
    """The demo has come so far that the file exists in its run directory."""

    def there() -> bool:
        assert demo.returncode is None, "the demo has ended"
        return any(directory.glob(f".run/demo-*/{file}"))

    await until(there, f"{file} is there", timeout_s=60)


@pytest.mark.parametrize("stage", STAGES)
async def test_an_interrupt_leaves_nothing(tmp_path: Path, stage: str) -> None:
    demo = await started(tmp_path)
    await reached(demo, tmp_path, STAGES[stage])
    demo.send_signal(signal.SIGINT)
    output, _ = await asyncio.wait_for(demo.communicate(), 30)
    assert demo.returncode == 130, output.decode()
    assert processes_of(tmp_path) == []
    assert b"Traceback" not in output


async def test_sigterm_under_load_leaves_nothing(tmp_path: Path) -> None:
    demo = await started(tmp_path)
    assert demo.stdout is not None
    async with asyncio.timeout(60):
        while b"/api beside /v1 answers" not in await demo.stdout.readline():
            assert demo.returncode is None
    demo.send_signal(signal.SIGTERM)
    output, _ = await asyncio.wait_for(demo.communicate(), 30)
    assert demo.returncode == 143, output.decode()
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_second_interrupt_or_a_kill_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    demo = await started(tmp_path)
    await reached(demo, tmp_path, "router.log")
    demo.send_signal(signal.SIGINT)
    demo.send_signal(number)
    await asyncio.wait_for(demo.communicate(), 30)
    await until(lambda: processes_of(tmp_path) == [], "no process is left")
