"""`leadtime up` in front of somebody's servers, as its user meets it: what it says, what it serves, how it ends."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from deploy.local.probes import tcp_probe
from deploy.local.processes import ChildSpec, Supervisor
from sim.spec import ProcessSpec, ServerSpec
from tests.servers import free_port, until

SERVERS = ProcessSpec(
    servers=(ServerSpec(name="one", models=("m",), speed=50), ServerSpec(name="two", models=("m",), speed=50))
)


@pytest.fixture
async def urls(tmp_path: Path) -> AsyncIterator[list[str]]:
    (tmp_path / "spec.json").write_text(SERVERS.model_dump_json())
    command = (sys.executable, "-P", "-m", "sim.server", "--spec", str(tmp_path / "spec.json"))
    found: list[str] = []

    async def listening() -> str | None:
        for line in (tmp_path / "sim.log").read_text().splitlines():
            found[:] = [server["url"] for server in json.loads(line)["servers"]]
        return None if found else "no ready line yet"

    async with Supervisor(tmp_path, {}) as supervisor:
        await supervisor.start([(ChildSpec(name="sim", command=command), listening)])
        yield found


class Up:
    """A `leadtime up` with what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    @classmethod
    async def start(cls, directory: Path, urls: list[str], port: str = "0", *options: str) -> "Up":
        endpoints = [part for url in urls for part in ("--endpoint", f"{url};hardware_class=h100")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.local.cli", "up", *endpoints, "--port", port, "--state", "state", *options),
            cwd=directory,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return cls(process)

    async def says(self, text: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            while text not in self.said:
                line = await self.process.stdout.readline()
                assert line, self.said
                self.said += line.decode()

    async def end(self) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        rest, _ = await asyncio.wait_for(self.process.communicate(), 30)
        self.said += rest.decode()
        return int(self.process.returncode or 0)


async def test_up_says_what_lacks_serves_restarts_what_ends_and_leaves_nothing(tmp_path: Path, urls: list[str]) -> None:
    up = await Up.start(tmp_path, urls)
    try:
        await up.says("Ctrl-C stops everything.")
        assert "--enable-force-include-usage" in up.said
        gateway = re.search(r"send requests to (http://\S+)/v1", up.said)
        assert gateway is not None
        async with aiohttp.ClientSession() as http:
            await answers(http, gateway[1])
            await a_second_is_refused(tmp_path, urls, "0", "another `leadtime up` keeps its samples and bundles there")
            taken = gateway[1].rpartition(":")[2]
            await a_second_is_refused(tmp_path, urls, taken, f"--port {taken}: can't listen there")
            (collector,) = pids_of(tmp_path, "collector")
            os.kill(collector, signal.SIGKILL)
            await answers(http, gateway[1])
            await up.says("collector: started again")
            await answers(http, gateway[1])
    finally:
        status = await up.end()
    assert "collector: ended by itself, by signal SIGKILL" in up.said
    assert status == 143, up.said
    await until(lambda: not pids_of(tmp_path, ""), "no process is left")
    assert (tmp_path / "state" / "nats").is_dir()


async def test_up_starts_a_part_again_while_another_one_waits_for_it(tmp_path: Path, urls: list[str]) -> None:
    """The trainer is ready only with Redis, and both end."""
    up = await Up.start(tmp_path, urls)
    try:
        await up.says("Ctrl-C stops everything.")
        (trainer,), (redis,) = pids_of(tmp_path, "trainer"), pids_of(tmp_path, "redis")
        os.kill(trainer, signal.SIGKILL)
        await up.says("trainer: ended by itself")
        os.kill(redis, signal.SIGKILL)
        await up.says("redis: started again")
        await up.says("trainer: started again")
    finally:
        await up.end()
    assert "not ready within" not in up.said


@pytest.mark.parametrize(("drain", "whole"), [("30", True), ("2", False)])
async def test_a_stream_under_way_at_the_stop_has_its_grace(
    tmp_path: Path, urls: list[str], drain: str, whole: bool
) -> None:
    up = await Up.start(tmp_path, urls, "0", "--drain", drain)
    try:
        await up.says("Ctrl-C stops everything.")
        gateway = re.search(r"send requests to (http://\S+)/v1", up.said)
        assert gateway is not None
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True}
        got = b""
        async with aiohttp.ClientSession() as http:
            await answers(http, gateway[1])
            try:
                async with http.post(
                    f"{gateway[1]}/v1/chat/completions", json={**body, "max_tokens": 4_000 if whole else 30_000}
                ) as response:
                    assert response.status == 200
                    async for part in response.content.iter_any():
                        if not got:
                            up.process.send_signal(signal.SIGTERM)
                            await up.says("may go on for")
                            # Refused, or reset where it was in the listener's queue as that closed.
                            with pytest.raises(aiohttp.ClientOSError):
                                async with aiohttp.ClientSession() as later:
                                    await answers(later, gateway[1])
                        got += part
            except aiohttp.ClientPayloadError:
                assert not whole
        assert got.endswith(b"data: [DONE]\n\n") is whole
    finally:
        status = await up.end()
    assert status == 143, up.said
    await until(lambda: not pids_of(tmp_path, ""), "no process is left")


async def test_up_may_be_started_before_any_server_is_up(tmp_path: Path) -> None:
    port = free_port()
    up = await Up.start(tmp_path, [f"http://127.0.0.1:{port}"])
    try:
        await up.says("Ctrl-C stops everything.")
        assert "no server answers yet: requests get a 503 until one does" in up.said
        gateway = re.search(r"send requests to (http://\S+)/v1", up.said)
        assert gateway is not None
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{gateway[1]}/v1/chat/completions", json=body) as refused:
                assert refused.status == 503
            spec = ProcessSpec(servers=(ServerSpec(name="late", models=("m",), port=port, speed=50),))
            (tmp_path / "late.json").write_text(spec.model_dump_json())
            command = (sys.executable, "-P", "-m", "sim.server", "--spec", str(tmp_path / "late.json"))
            async with Supervisor(tmp_path, {}) as supervisor:
                await supervisor.start([(ChildSpec(name="sim", command=command), tcp_probe(port))])
                await until_answered(http, gateway[1], body)
    finally:
        await up.end()


async def until_answered(http: aiohttp.ClientSession, gateway_url: str, body: dict[str, object]) -> None:
    async with asyncio.timeout(30):
        while True:
            async with http.post(f"{gateway_url}/v1/chat/completions", json=body) as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.2)


async def a_second_is_refused(directory: Path, urls: list[str], port: str, reason: str) -> None:
    """A second one on the same state, or on the same port, is refused with the reason."""
    second = await Up.start(directory, urls, port)
    rest, _ = await asyncio.wait_for(second.process.communicate(), 30)
    assert second.process.returncode == 1
    assert reason in rest.decode()


async def answers(http: aiohttp.ClientSession, gateway_url: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    async with http.post(f"{gateway_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()


def pids_of(directory: Path, name: str) -> list[int]:
    """Living processes of a stack run under the directory, by the log they write."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            log = str((process / "fd" / "1").readlink())
        except OSError:
            continue
        if process.name.isdigit() and log.startswith(f"{directory}/.run/") and f"/{name}" in log.rsplit("-", 1)[-1]:
            found.append(int(process.name))
    return found


async def test_a_start_that_fails_says_why_in_a_line_and_leaves_nothing(
    tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEADTIME_ROUTER_LISTED_ENDPOINTS", "99")
    up = await Up.start(tmp_path, urls)
    said, _ = await asyncio.wait_for(up.process.communicate(), 60)
    assert up.process.returncode == 1
    assert b"LISTED_ENDPOINTS: found 99; allowed:" in said
    assert b"KeyError" not in said
    assert said.count(b"Traceback") == 0, said.decode()
    await until(lambda: not pids_of(tmp_path, ""), "no process is left")
