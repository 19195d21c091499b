"""What it costs that routers share one ledger, and how far behind each other they are.

One router alone, two and four that share, and four that don't (pools on one NATS, real router processes, 8 KB bodies,
4 endpoints) are driven in turn, slice by slice, so that a busy machine meets all alike; no model is asked, so that
sharing is set against the least. CPU per decision is that of all routers of a pool together, from the kernel, less what
they use idle. It is taken twice:

- `same_load`: each router gets as many requests a second as the one alone, as where more routers serve more clients;
- `full_speed`: as fast as they go, with as many requests under way per router. On few cores the pools get much the same
  number of requests in all, so each of four routers a quarter of it: fewer to a wake-up, and colder caches, whether
  they share or not. `cpu_ratio_apart` is set against four that don't share (not with --quick), and shows it.

The delay from a dispatch to its counting in at another router is the routers' own (of a batch its oldest), beyond the
quickest message's time under way. `disagreements` counts routers whose ledger isn't empty a second after the load.

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
from deploy.local.children import service
from deploy.local.layout import RouterPorts, http_url, place_simulated, simulated_endpoints
from deploy.local.output_file import output_file
from deploy.local.ports import LOOPBACK, Ports
from deploy.local.probes import tcp_probe
from deploy.local.processes import ChildSpec, Supervisor
from sim.extproc_client import ExtProcClient

# Name → routers, and whether they share.
POOLS: Final = {"1": (1, True), "2": (2, True), "4": (4, True), "4-apart": (4, False)}
FULL_SPEED: Final = "full_speed"
SAME_LOAD: Final = "same_load"
LOADS: Final = (FULL_SPEED, SAME_LOAD)
# Of what one router alone can do: four with as much each leave two cores room.
_PACED_SHARE: Final = 0.12
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
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {load: [] for load in LOADS})
    decisions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOADS, 0))

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


async def slices(
    pools: list[Pool],
    clients: dict[str, list[ExtProcClient]],
    load: str,
    rounds: int,
    slice_s: float,
    rate: float | None,
) -> None:
    """Drive all pools in turn; `rate`: decisions a second of each router, None for as fast as they go."""
    for _ in range(rounds):
        for one in pools:
            used, began = one.used_s(), time.monotonic()
            count = await drive(one, clients[one.name], slice_s, None if rate is None else rate * len(one.routers))
            await asyncio.sleep(0.05)  # what is still told belongs to it
            spent = one.used_s() - used - one.idle_share * (time.monotonic() - began)
            one.cpu_us[load].append(spent / count * 1e6)
            one.decisions[load] += count


async def measure(*, quick: bool) -> dict[str, Any]:
    """The benchmark's one JSON object."""
    slice_s, rounds, paced_s, paced_rounds, idle_s = (0.5, 4, 1.0, 3, 1.5) if quick else (2.0, 12, 3.0, 12, 6.0)
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
        delays_of = [{one.name: await delays(http, one) for one in pools}]
        await slices(pools, clients, FULL_SPEED, rounds, slice_s, None)
        delays_of.append({one.name: await delays(http, one) for one in pools})
        rate = _PACED_SHARE * pools[0].decisions[FULL_SPEED] / (rounds * slice_s)
        await slices(pools, clients, SAME_LOAD, paced_rounds, paced_s, rate)
        await asyncio.sleep(_SETTLE_S)
        delays_of.append({one.name: await delays(http, one) for one in pools})
        left = {
            one.name: [(await get(http, at, "/v1/stats"))["inflight_requests"] for at in one.routers] for one in pools
        }
    result: dict[str, Any] = {
        "benchmark": "sharing",
        "note": "all routers of a pool together, 8 KB, 4 endpoints, no model; ratios are medians over rounds",
        "same_load_decisions_per_s_of_each": round(rate, 1),
        "disagreements": sum(count != 0 for counts in left.values() for count in counts),
        "routers": {},
    }
    apart = None if quick else pools[3]
    for one in pools:
        result["routers"][one.name] = {"idle_cpu_share": round(one.idle_share, 4)} | {
            load: {
                "cpu_us_per_decision": round(statistics.median(one.cpu_us[load]), 1),
                "cpu_ratio": ratio(one, pools[0], load),
                **({"cpu_ratio_apart": ratio(one, apart, load)} if apart and one.name == "4" else {}),
                "decisions": one.decisions[load],
                **{
                    f"delay_{label}_ms": rounded(
                        quantile_ms(delays_of[place][one.name], delays_of[place + 1][one.name], share)
                    )
                    for label, share in (("p50", 0.5), ("p99", 0.99))
                },
            }
            for place, load in enumerate(LOADS)
        }
    return result


def ratio(one: Pool, other: Pool, load: str) -> float:
    """Of CPU per decision: the median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(one.cpu_us[load], other.cpu_us[load], strict=True)), 3)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    text = json.dumps(uvloop.run(measure(quick=arguments.quick)), indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
