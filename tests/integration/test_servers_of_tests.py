"""The servers that tests start end with the tests' process, however that ends."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.servers import until

PARENT = """
import asyncio, sys
from pathlib import Path
from tests.servers import NatsServer, RedisServer
async def main():
    nats, redis = NatsServer(Path(sys.argv[1])), RedisServer(Path(sys.argv[1]))
    await nats.start()
    await redis.start()
    print(nats.pid, redis.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_test_run_that_a_signal_ends_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path),
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    servers = [int(pid) for pid in (await asyncio.wait_for(parent.stdout.readline(), 60)).split()]
    assert len(servers) == 2
    assert all(map(alive, servers))
    parent.send_signal(number)
    await parent.wait()
    await until(lambda: not any(map(alive, servers)), "the servers are gone")
