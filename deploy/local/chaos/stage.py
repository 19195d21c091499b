"""What the chaos suite plays on: model servers of a process each, a relay, a clock, the stack; up, played, down."""

import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from deploy.local.chaos.harm import Clock, Link
from deploy.local.chaos.suite import ENDPOINTS, MODEL, Fault, Pace, Suite
from deploy.local.layout import StackConfig, http_url
from deploy.local.ports import LOOPBACK, Ports
from deploy.local.probes import tcp_probe
from deploy.local.processes import ChildSpec, Supervisor
from deploy.local.stack import Stack
from sim.spec import ProcessSpec, ServerSpec

ROUTERS: Final = 3


@contextlib.asynccontextmanager
async def endpoints(run_dir: Path, ports: Ports) -> AsyncIterator[tuple[Supervisor, tuple[str, ...], dict[str, str]]]:
    """Model servers, a process each, so that one can die alone; where they listen, and are told to fail."""
    children, urls, controls = [], [], {}
    for number in range(1, ENDPOINTS + 1):
        name, port, control_port = f"endpoint-{number}", ports.reserve(), ports.reserve()
        server = ServerSpec(name=name, port=port, models=(MODEL,), speed=1.0, seed=number, force_usage=True)
        file = run_dir / f"{name}.json"
        file.write_text(ProcessSpec(servers=(server,), control_port=control_port).model_dump_json())
        ports.release(port)
        ports.release(control_port)
        command = (sys.executable, "-P", "-m", "sim.server", "--spec", str(file))
        children.append((ChildSpec(name=name, command=command), tcp_probe(port)))
        urls.append(http_url(port))
        controls[name] = http_url(control_port)
    async with Supervisor(run_dir, dict(os.environ)) as supervisor:
        await supervisor.start(children)
        yield supervisor, tuple(urls), controls


async def run_chaos(
    run_dir: Path,
    faults: Sequence[Fault],
    pace: Pace,
    *,
    say: Callable[[str], None],
    rng: random.Random,
    routers: int = ROUTERS,
    quiet: Callable[[Suite], Awaitable[list[str]]] | None = None,
) -> dict[str, Any]:
    """Start everything, play the faults, stop everything. `quiet`: asked after each what has stuck."""
    clock = Clock(run_dir / "clock")
    started_s = time.monotonic()
    stack: Stack | None = None
    link = Link(lambda: stack.addresses.nats if stack else 0)
    async with contextlib.AsyncExitStack() as open_until_end:
        servers, urls, controls = await open_until_end.enter_async_context(endpoints(run_dir, Ports(rng)))
        await open_until_end.enter_async_context(link.open())
        shifted = clock.environment
        services = [
            *(f"router-{n}" for n in range(1, routers + 1)),
            "collector",
            "trainer",
            "predictor-1",
            "predictor-2",
        ]
        overrides: dict[str, dict[str, str]] = {name: dict(shifted) for name in services}
        overrides["router-3"]["LEADTIME_NATS_SERVERS"] = f"nats://{LOOPBACK}:{link.port}"
        stack = Stack(
            StackConfig(
                run_dir=run_dir,
                endpoints=urls,
                routers=routers,
                predictors=2,
                environment={
                    **os.environ,
                    "LEADTIME_ROUTER_LEDGER_CHECKS": "true",
                    "LEADTIME_TRAINER_RETRAIN_INTERVAL_MS": "3000",
                },
                overrides=overrides,
                state_dir=run_dir / "state",
            ),
            rng=rng,
            report=say,
        )
        await open_until_end.enter_async_context(stack)
        http = await open_until_end.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())
        )
        suite = Suite(stack, servers, link, clock, replace(pace), http, quiet, controls)
        await suite.answers("router")
        await suite.answers("endpoint")
        result = await suite.run(faults, say)
    return {**result, "seconds": round(time.monotonic() - started_s, 1)}
