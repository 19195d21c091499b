"""What it costs that routers share one ledger, and how far behind each other they are.

One router alone, two and four that share, and four that don't (pools on one NATS, real router processes, 8 KB bodies,
4 endpoints) are driven in turn, slice by slice, so that a busy machine meets all alike, with as many requests under way
per router. CPU per decision is that of all routers of a pool together, from the kernel, less what they use idle; no
model is asked, so that sharing is set against the least. `cpu_ratio` is against the one alone; `cpu_ratio_apart`
(not with --quick) against four that don't share, since processes that take turns on few cores cost more already. On a
machine that is busy with others the rate falls, batches hold less, and sharing costs more per decision.

The delay from a dispatch to its counting in at another router is the routers' own (of a batch its oldest), beyond the
quickest message's time under way: at full speed, where routers and load generator fight for the cores, and at a paced
load. `disagreements` counts routers whose ledger isn't empty a second after the load.

    python -m bench.sharing [--quick] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import uvloop

from bench.router import PATH, body, pool, used_s
from deploy.local.binaries import find_binaries
from deploy.local.ports import LOOPBACK, Ports
from deploy.local.processes import ChildSpec, Supervisor
from deploy.local.stack import RouterPorts, http_url, place_simulated, service, simulated_endpoints, tcp_probe
from sim.extproc_client import ExtProcClient

# Name → routers, and whether they share.
POOLS: Final = {"1": (1, True), "2": (2, True), "4": (4, True), "4-apart": (4, False)}
_CONCURRENCY: Final = 8
_BODY_BYTES: Final = 8_192
_SETTLE_S: Final = 1.0


@dataclass
class Pool:
    """The routers of one pool, and what was measured of them."""

    name: str
    shares: bool
    routers: list[RouterPorts]
    processes: list[psutil.Process] = field(default_factory=list)
    idle_share: float = 0.0
    cpu_us: list[float] = field(default_factory=list)
    decisions: int = 0

    def used_s(self) -> float:
        return sum(used_s(process) for process in self.processes)


@contextlib.asynccontextmanager
async def running(http: aiohttp.ClientSession, names: list[str]) -> AsyncIterator[list[Pool]]:
    """NATS, four simulated servers, and the three pools of routers."""
    ports = Ports(random.Random())
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as directory:
        run_dir = Path(directory)
        nats_port, control, nowhere = ports.reserve(), ports.reserve(), ports.reserve()
        spec = place_simulated(pool(4), control, ports)
        pools = [
            Pool(name, shares, [RouterPorts(*(ports.reserve() for _ in range(3))) for _ in range(size)])
            for name, (size, shares) in POOLS.items()
            if name in names
        ]
        (run_dir / "sim.json").write_text(spec.model_dump_json())
        common = {
            **os.environ,
            "LEADTIME_NATS_SERVERS": f"nats://{LOOPBACK}:{nats_port}",
            "LEADTIME_REDIS_URL": f"redis://{LOOPBACK}:{nowhere}/0",
            "LEADTIME_LOG_LEVEL": "warning",
            "ORT_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }
        nats = ChildSpec(
            name="nats",
            command=(str(find_binaries().nats_server), "--addr", LOOPBACK, "--port", str(nats_port)),
            stop_tier=1,
        )
        sim = ChildSpec(
            name="sim",
            command=(sys.executable, "-P", "-m", "sim.server", "--spec", str(run_dir / "sim.json")),
            stop_tier=1,
        )
        settings = {
            "ENDPOINTS": ",".join(simulated_endpoints(spec, {})),
            "PREDICTORS": "",
            "PREFIX_SALT": "of the benchmark",
        }
        try:
            for port in (nats_port, control, *(server.port for server in spec.servers)):
                ports.release(port)
            async with Supervisor(run_dir, common) as supervisor:
                await supervisor.start([(nats, tcp_probe(nats_port)), (sim, tcp_probe(control))])
                for one in pools:
                    children = []
                    for number, at in enumerate(one.routers):
                        for port in (at.extproc, at.health, at.http):
                            ports.release(port)
                        own = {"EXTPROC_PORT": at.extproc, "HEALTH_PORT": at.health, "HTTP_PORT": at.http}
                        child = service(
                            "router",
                            {**settings, **own, "POOL": one.name, "SHARE_LEDGER": one.shares},
                            instance=f"-{one.name}-{number}",
                        )
                        children.append((child, tcp_probe(at.extproc)))
                    await supervisor.start(children)
                    one.processes = [psutil.Process(supervisor[child.name].pid or 0) for child, _ in children]
                    await together(http, one)
                yield pools
        finally:
            ports.close()


async def together(http: aiohttp.ClientSession, one: Pool) -> None:
    """Wait until every router of the pool follows all others, and has its endpoints."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        answers = [await get(http, at, "/v1/peers") for at in one.routers] if one.shares else []
        ready = [await get(http, at, "/readyz") for at in one.routers]
        if all(
            sum(peer["live"] and not peer["behind"] for peer in answer["peers"]) == len(one.routers) - 1
            for answer in answers
        ) and all(answer["ready"] for answer in ready):
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{one.name}: the routers don't know each other within 20 s")


async def get(http: aiohttp.ClientSession, at: RouterPorts, path: str) -> Any:
    async with http.get(http_url(at.http) + path) as response:
        return await response.json()


async def drive(one: Pool, clients: list[ExtProcClient], seconds: float, per_s: float | None) -> int:
    """Picks at all routers of a pool in turn: as fast as they go, or so many a second. Returns how many."""
    numbers = itertools.count()
    until = time.monotonic() + seconds
    concurrency = _CONCURRENCY * len(clients)
    gap_s = None if per_s is None else concurrency / per_s
    done = 0

    async def sender(place: int) -> None:
        nonlocal done
        due = time.monotonic() + (gap_s or 0.0) * place / concurrency
        while (now := time.monotonic()) < until:
            if gap_s is not None:
                await asyncio.sleep(max(0.0, due - now))
                due = max(due + gap_s, time.monotonic() - gap_s)
            number = next(numbers)
            answer = await clients[number % len(clients)].pick(PATH, body(_BODY_BYTES, number))
            if not answer.destinations:
                raise RuntimeError(f"{one.name}: a router answered {answer.status}")
            done += 1

    await asyncio.gather(*(sender(place) for place in range(concurrency)))
    return done


async def delays(http: aiohttp.ClientSession, one: Pool) -> dict[float, float]:
    """The pool's histogram of delays so far: upper bound in ms → how many at most that."""
    total: dict[float, float] = {}
    for at in one.routers:
        async with http.get(http_url(at.http) + "/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith("leadtime_router_ledger_delay_seconds_bucket"):
                    bound = float(line.split('le="')[1].split('"')[0]) * 1e3
                    total[bound] = total.get(bound, 0.0) + float(line.rsplit(" ", 1)[1])
    return total


def quantile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """Between two readings of a histogram, within its bucket by proportion; None of nothing."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted = share * max(counts.values(), default=0.0)
    if wanted <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


async def measure(*, quick: bool) -> dict[str, Any]:
    """The benchmark's one JSON object."""
    slice_s, rounds, paced_s, idle_s = (0.5, 6, 2.5, 1.5) if quick else (2.0, 12, 15.0, 6.0)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
        running(http, list(POOLS)[: 3 if quick else 4]) as pools,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = {
            one.name: [await stack.enter_async_context(ExtProcClient(f"{LOOPBACK}:{at.extproc}")) for at in one.routers]
            for one in pools
        }
        for one in pools:
            await drive(one, clients[one.name], 0.3, None)
        await asyncio.sleep(_SETTLE_S)
        before = {one.name: one.used_s() for one in pools}
        await asyncio.sleep(idle_s)
        for one in pools:
            one.idle_share = (one.used_s() - before[one.name]) / idle_s
        at_start = {one.name: await delays(http, one) for one in pools}
        for _ in range(rounds):
            for one in pools:
                used, began = one.used_s(), time.monotonic()
                count = await drive(one, clients[one.name], slice_s, None)
                await asyncio.sleep(0.05)  # what is still told belongs to it
                spent = one.used_s() - used - one.idle_share * (time.monotonic() - began)
                one.cpu_us.append(spent / count * 1e6)
                one.decisions += count
        at_speed = {one.name: await delays(http, one) for one in pools}
        rate = 0.4 * pools[0].decisions / (rounds * slice_s)
        paced: dict[str, int] = {}
        for one in pools:
            paced[one.name] = await drive(one, clients[one.name], paced_s, rate)
        await asyncio.sleep(_SETTLE_S)
        at_end = {one.name: await delays(http, one) for one in pools}
        left = {
            one.name: [(await get(http, at, "/v1/stats"))["inflight_requests"] for at in one.routers] for one in pools
        }
    alone = pools[0]
    result: dict[str, Any] = {
        "benchmark": "sharing",
        "note": "all routers of a pool together, 8 KB, 4 endpoints, no model; ratios are medians over rounds",
        "paced_decisions_per_s": round(rate, 1),
        "disagreements": sum(count != 0 for counts in left.values() for count in counts),
        "routers": {},
    }
    for one in pools:
        result["routers"][one.name] = {
            "cpu_us_per_decision": round(statistics.median(one.cpu_us), 1),
            "cpu_ratio": ratio(one, alone),
            **({"cpu_ratio_apart": ratio(one, pools[3])} if one.name == "4" and not quick else {}),
            "decisions": one.decisions,
            "idle_cpu_share": round(one.idle_share, 4),
            "paced_decisions": paced[one.name],
            **{
                f"delay_{label}_ms": None if value is None else round(value, 1)
                for label, value in {
                    "full_speed_p50": quantile_ms(at_start[one.name], at_speed[one.name], 0.5),
                    "full_speed_p99": quantile_ms(at_start[one.name], at_speed[one.name], 0.99),
                    "p50": quantile_ms(at_speed[one.name], at_end[one.name], 0.5),
                    "p99": quantile_ms(at_speed[one.name], at_end[one.name], 0.99),
                }.items()
            },
        }
    return result


def ratio(one: Pool, other: Pool) -> float:
    """Of CPU per decision: the median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(one.cpu_us, other.cpu_us, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the same object there")
    arguments = parser.parse_args()
    text = json.dumps(uvloop.run(measure(quick=arguments.quick)), indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
