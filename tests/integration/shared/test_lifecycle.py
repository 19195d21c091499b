"""A service's life with real signals and sockets: start, serve, stop."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from deploy.local.processes import tied
from shared.errors import ConfigurationError
from shared.lifecycle import background, serve_http

REPOSITORY = Path(__file__).parents[3]

SERVICE = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from pydantic_settings import SettingsConfigDict
from shared.lifecycle import Readiness, probe_app, run, serve_http
from shared.settings import ServiceSettings

class Example(ServiceSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_EXAMPLE_")

async def build(settings, stop):
    app = probe_app("example", Readiness(), CollectorRegistry())
    async with serve_http(app, settings.http_host, settings.http_port) as (host, port):
        print(f"bound {port}", flush=True)
        await stop.wait()
        {after_stop}

sys.exit(run("example", Example, build))
"""


async def started(after_stop: str = "pass") -> tuple[asyncio.subprocess.Process, int]:
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-c", SERVICE.replace("{after_stop}", after_stop)]),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while not (line := await process.stdout.readline()).startswith(b"bound "):
            assert line, "the service ended before it served"
    return process, int(line.split()[1])


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
async def test_a_signal_stops_a_service_cleanly_and_frees_its_port(signal_name):
    process, port = await started()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
    process.send_signal(getattr(signal, signal_name))
    async with asyncio.timeout(10):
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert b'"event":"service stopped"' in out
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_a_second_signal_ends_a_service_that_hangs():
    process, _ = await started("print('stopping', flush=True); await asyncio.sleep(600)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    async with asyncio.timeout(10):
        while await process.stdout.readline() != b"stopping\n":
            pass
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


async def test_background_work_runs_while_its_context_is_open_and_has_ended_after_it():
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    stop = asyncio.Event()
    async with background(stop, work()):
        await began.wait()
    assert ended.is_set()
    assert not stop.is_set()


async def test_background_work_that_fails_stops_the_service_and_is_raised():
    async def faulty() -> None:
        raise LookupError("a fault of ours")

    stop, other_ended = asyncio.Event(), asyncio.Event()

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            other_ended.set()

    with pytest.raises(LookupError, match="a fault of ours"):
        async with background(stop, other(), faulty()):
            await stop.wait()
    assert other_ended.is_set()


async def test_an_address_where_nobody_can_listen_stops_the_start_as_a_fault_of_the_configuration():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"HTTP_PORT: can't listen on 127\.0\.0\.1, port {port}: Address al"
        ):
            async with serve_http(FastAPI(), "127.0.0.1", port):
                pass
    with pytest.raises(ConfigurationError, match=r"can't listen on no\.such\.host\.invalid"):
        async with serve_http(FastAPI(), "no.such.host.invalid", 0):
            pass


async def test_a_request_under_way_is_answered_while_the_server_stops():
    app, entered, release = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        entered.set()
        await release.wait()
        return "done"

    async with httpx.AsyncClient() as client:
        async with serve_http(app, "127.0.0.1", 0) as (host, port):
            answer = asyncio.create_task(client.get(f"http://{host}:{port}/slow"))
            await entered.wait()
            asyncio.get_running_loop().call_later(0.05, release.set)
        assert (await answer).json() == "done"
