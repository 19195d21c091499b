"""The four real processes: they start in any order, say what they wait for, and stop as asked."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sim.extproc_client import ExtProcClient
from sim.model_server import ModelServer
from sim.spec import ServerSpec
from tests.servers import ServerProcess, fetch, free_port, nats_server, redis_server, until

NAMES = ("router", "collector", "trainer", "predictor")
STOP_S = 5.0
PATH = "/v1/chat/completions"


class Service(ServerProcess):
    """`python -m services.NAME` with every port chosen; `start` waits until it is alive, not until it is ready."""

    def __init__(self, name: str, directory: Path, **environment: str) -> None:
        prefix = f"LEADTIME_{name.upper()}_"
        self.port, self.extproc = free_port(), free_port()
        ports = {f"{prefix}HTTP_PORT": str(self.port)}
        if name == "router":
            ports |= {f"{prefix}EXTPROC_PORT": str(self.extproc), f"{prefix}HEALTH_PORT": str(free_port())}
        if name == "collector":
            ports |= {f"{prefix}ALS_PORT": str(free_port())}
        super().__init__(name, directory / f"{name}.log", {**ports, **environment})

    async def start(self) -> None:
        self.spawn([sys.executable, "-m", f"services.{self.name}"])
        await self.ready(self.alive)

    async def alive(self) -> bool:
        return (await fetch(f"http://127.0.0.1:{self.port}/healthz"))[0] == 200

    async def readyz(self) -> tuple[int, dict]:
        status, body = await fetch(f"http://127.0.0.1:{self.port}/readyz")
        return status, json.loads(body) if body else {}

    async def is_ready(self) -> bool:
        return (await self.readyz())[0] == 200

    async def ends(self) -> float:
        """SIGTERM; seconds until it has ended, with status 0."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        status = await self.stop(signal.SIGTERM, grace_s=30.0)
        assert status == 0, self.log()[-2000:]
        return loop.time() - began_s


@contextlib.asynccontextmanager
async def services(directory: Path, **environment: str) -> AsyncIterator[dict[str, Service]]:
    """All four, started at once with nothing that they need."""
    found = {name: Service(name, directory, **environment) for name in NAMES}
    try:
        await asyncio.gather(*(each.start() for each in found.values()))
        yield found
    finally:
        for each in found.values():
            await each.kill()


async def test_services_start_before_all_they_need_say_so_and_take_it_as_it_comes(tmp_path: Path) -> None:
    spec = ServerSpec(name="s", models=("m",))
    server = ModelServer(spec, asyncio.get_running_loop())
    async with nats_server(tmp_path / "nats") as nats, redis_server(tmp_path / "redis") as redis:
        await nats.stop()
        await redis.stop()
        await server.start()
        await server.stop()
        environment = {
            "LEADTIME_NATS_SERVERS": nats.url,
            "LEADTIME_REDIS_URL": redis.url,
            "LEADTIME_ROUTER_ENDPOINTS": f"127.0.0.1:{server.port}",
        }
        async with services(tmp_path, **environment) as running:
            waited_for = {"router": "endpoint", "collector": "nats", "trainer": "redis", "predictor": "bundle:default"}
            for name, condition in waited_for.items():
                status, report = await running[name].readyz()
                assert (status, condition in report["waiting_for"]) == (503, True), (name, report)
            assert "redis" in (await running["predictor"].readyz())[1]["waiting_for"]["bundle:default"]
            await server.start()
            await until(running["router"].is_ready, "the router has its endpoint, without any of the others")

            async def told() -> bool:
                return {"nats", "redis"} <= (await running["router"].readyz())[1].get("degraded", {}).keys()

            await until(told, "the router says what is away")
            await redis.start()
            await nats.start()
            for name in ("collector", "trainer"):
                await until(running[name].is_ready, f"the {name} is ready")

            async def whole() -> bool:
                return "degraded" not in (await running["router"].readyz())[1]

            await until(whole, "the router has found the others")
            for name, service in running.items():
                assert await service.ends() < STOP_S, name
    server.close()


async def test_services_stop_in_time_while_all_they_need_is_away(tmp_path: Path) -> None:
    gone = {
        "LEADTIME_NATS_SERVERS": f"nats://127.0.0.1:{free_port()}",
        "LEADTIME_REDIS_URL": f"redis://127.0.0.1:{free_port()}",
    }
    async with services(tmp_path, **gone) as running:
        for name, service in running.items():
            assert await service.ends() < STOP_S, name


async def test_a_stopping_router_takes_new_requests_until_envoy_can_know_and_lets_running_ones_end(
    tmp_path: Path,
) -> None:
    server = ModelServer(ServerSpec(name="s", models=("m",)), asyncio.get_running_loop())
    await server.start()
    router = Service(
        "router",
        tmp_path,
        LEADTIME_ROUTER_ENDPOINTS=f"127.0.0.1:{server.port}",
        LEADTIME_ROUTER_PREDICTORS="",
        LEADTIME_ROUTER_LAME_DUCK_S="1",
        LEADTIME_ROUTER_DRAIN_S="20",
    )
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    try:
        await router.start()
        await until(router.is_ready, "ready")
        loop = asyncio.get_running_loop()
        async with ExtProcClient(f"127.0.0.1:{router.extproc}") as client:
            assert (await client.pick(PATH, body)).destinations
            held = client.stream()
            assert (await held.request(PATH, body)).destinations
            router.send(signal.SIGTERM)

            async def unready() -> bool:
                return not await router.is_ready()

            await until(unready, "readiness is off")
            assert (await client.pick(PATH, body)).destinations
            assert await router.alive()
            await asyncio.sleep(2.5)
            assert router.running
            await held.end()
            ended_s = loop.time()
        status = await router.stop(0)
        assert status == 0, router.log()[-2000:]
        assert loop.time() - ended_s < STOP_S
    finally:
        await router.kill()
        server.close()


FROZEN = """
import asyncio, sys, threading
from prometheus_client import CollectorRegistry
from pydantic_settings import SettingsConfigDict
from shared.lifecycle import run
from shared.settings import ServiceSettings

class Example(ServiceSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_EXAMPLE_")

def stand_still():
    print("frozen", flush=True)
    threading.Event().wait()

async def build(settings, stop):
    if "freeze" in sys.argv:
        stand_still()
    print("running", flush=True)
    await stop.wait()

sys.exit(run("example", Example, build))
"""


async def process_of(argument: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, argument,
        env={"LEADTIME_EXAMPLE_WATCHDOG_S": "1", "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_process_whose_loop_is_frozen_is_ended_with_its_stack() -> None:
    process = await process_of("freeze")
    out, error = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, b"frozen" in out) == (70, True)
    assert b"the event loop has been frozen for 1 s" in error
    assert b"stand_still" in error


STANDING_STILL = """
import runpy, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


async def test_a_frozen_loop_ends_each_of_the_services(tmp_path: Path) -> None:
    gone = {
        "LEADTIME_NATS_SERVERS": f"nats://127.0.0.1:{free_port()}",
        "LEADTIME_REDIS_URL": f"redis://127.0.0.1:{free_port()}",
    }
    found = [Service(name, tmp_path, **gone, **{f"LEADTIME_{name.upper()}_WATCHDOG_S": "2"}) for name in NAMES]
    try:
        for service in found:
            service.spawn([sys.executable, "-c", STANDING_STILL, f"services.{service.name}"])
        for service in found:
            await service.ready(service.alive)
            service.send(signal.SIGUSR1)
        for service in found:
            await until(lambda service=service: not service.running, f"the {service.name} has ended")
            assert await service.stop(0) == 70
            assert "the event loop has been frozen for 2 s" in service.log()
    finally:
        for service in found:
            await service.kill()


async def test_a_process_that_was_stopped_for_a_while_is_no_frozen_one() -> None:
    process = await process_of("run")
    assert process.stdout is not None
    while b"running" not in await process.stdout.readline():
        pass
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    await asyncio.sleep(1.5)
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("name", NAMES)
async def test_a_second_signal_ends_a_service_at_once(name: str, tmp_path: Path) -> None:
    service = Service(
        name, tmp_path, LEADTIME_NATS_SERVERS=f"nats://127.0.0.1:{free_port()}",
        LEADTIME_REDIS_URL=f"redis://127.0.0.1:{free_port()}",
    )  # fmt: skip
    try:
        await service.start()

        def has_ended() -> bool:
            if service.running:
                service.send(signal.SIGTERM)  # two at once may reach it as one
            return not service.running

        await until(has_ended, "it has ended", poll_s=0.1)
        assert await service.stop(0) in {0, 128 + signal.SIGTERM}
    finally:
        await service.kill()
