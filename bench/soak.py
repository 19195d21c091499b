"""Many requests through a router and a collector at full speed: does anything grow, and do all counters agree?

Ext-proc streams are driven straight at a real router of a whole local stack, some under way at a time; each decision
comes back with its metadata, as from Envoy, in an access-log entry to the real collector, and from there over JetStream
to the trainer and the router again. One request in fifty is reset by its client, one in a hundred by its endpoint.
Prompts repeat (4,096 of them), so that bounded memories are full when the warm-up, the first fifth, is over. The stream
drops its oldest at its own limit, so what is counted there is what was ever stored.

`growth_ratio` is the resident memory at the end against the one after the warm-up (medians of a tenth of the run each),
`descriptors_growth` that of open descriptors; both are only told of runs of 50,000 requests and more. `balance` holds
every count beside the number of requests that it must be.

    python -m bench.soak [--quick] [--requests N] [--json FILE]
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
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import psutil
import uvloop
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2

from bench.collector import METHOD, entry_message
from bench.router import PATH, body, pool
from deploy.local.layout import StackConfig
from deploy.local.output_file import output_file
from deploy.local.ports import LOOPBACK
from deploy.local.stack import Stack
from shared import names
from sim.extproc_client import ExtProcClient

_CONCURRENCY: Final = 16
_PROMPTS: Final = 4_096
_RESET_EVERY: Final = 50
_RESET_UPSTREAM_EVERY: Final = 100
_ENTRIES_WAITING: Final = 256
_JUDGED_FROM: Final = 50_000
_SETTLE_S: Final = 60.0


class Entries:
    """One access-log stream to the collector, with at most `_ENTRIES_WAITING` entries waiting to be sent."""

    def __init__(self) -> None:
        self._template = entry_message(0)
        self._waiting: asyncio.Queue[accesslog_pb2.HTTPAccessLogEntry | None] = asyncio.Queue(_ENTRIES_WAITING)

    async def offer(self, decision: str, destinations: tuple[str, ...], *, aborted: bool, reset: bool) -> None:
        """A finished request's entry; waits while too many wait."""
        entry = accesslog_pb2.HTTPAccessLogEntry()
        entry.CopyFrom(self._template)
        common = entry.common_properties
        started_us = time.time_ns() // 1_000 - 2_500_000
        common.start_time.FromMicroseconds(started_us)
        host, _, port = destinations[0].rpartition(":")
        common.upstream_remote_address.socket_address.address = host
        common.upstream_remote_address.socket_address.port_value = int(port)
        common.response_flags.downstream_connection_termination = aborted
        common.response_flags.upstream_remote_reset = reset
        spaces = common.metadata.filter_metadata
        spaces[names.METADATA_NAMESPACE].update({names.METADATA_KEY: decision})
        spaces[names.LUA_NAMESPACE].update({names.LUA_FIRST_CONTENT: str(started_us + 404_000)})
        served = {names.DESTINATION: ",".join(destinations), names.DESTINATION_SERVED: destinations[0]}
        spaces[names.LB_NAMESPACE].update(served)
        await self._waiting.put(entry)

    async def end(self) -> None:
        await self._waiting.put(None)

    async def messages(self) -> AsyncIterator[Any]:
        """What waits, together, until the end."""
        while (entry := await self._waiting.get()) is not None:
            message = als_pb2.StreamAccessLogsMessage()
            message.http_logs.log_entry.append(entry)
            ended = False
            while not self._waiting.empty() and not ended:
                more = self._waiting.get_nowait()
                if more is None:
                    ended = True
                else:
                    message.http_logs.log_entry.append(more)
            yield message.SerializeToString()
            if ended:
                return


class Watched:
    """A process, with its memory and descriptors over the course of the run."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._seen: list[tuple[int, int, int]] = []

    def look(self, done: int) -> None:
        self._seen.append((done, self._process.memory_info().rss, self._process.num_fds()))

    def report(self, total: int) -> dict[str, Any]:
        """After the warm-up and at the end: medians over a tenth of the run each."""
        spans = {"warm": (0.2, 0.3), "end": (0.9, 1.01)}
        rss: dict[str, float] = {}
        descriptors: dict[str, float] = {}
        for name, (first, last) in spans.items():
            inside = [look for look in self._seen if first * total <= look[0] < last * total] or self._seen[-1:]
            rss[name] = statistics.median(look[1] for look in inside)
            descriptors[name] = statistics.median(look[2] for look in inside)
        judged = total >= _JUDGED_FROM
        return {
            "rss_warm_mb": round(rss["warm"] / 2**20, 1),
            "rss_end_mb": round(rss["end"] / 2**20, 1),
            "growth_ratio": round(rss["end"] / rss["warm"], 4) if judged else None,
            "descriptors_growth": round(descriptors["end"] - descriptors["warm"]) if judged else None,
        }


async def drive(stack: Stack, total: int, watched: list[Watched]) -> tuple[int, float]:
    """All requests; how many were decided and how long it took."""
    bodies = [body(1_024, number) for number in range(_PROMPTS)]
    numbers = itertools.count()
    decided = 0
    entries = Entries()
    async with (
        ExtProcClient(f"{LOOPBACK}:{stack.addresses.router_extproc}") as client,
        grpc.aio.insecure_channel(f"{LOOPBACK}:{stack.addresses.collector_als}") as channel,
    ):
        log = channel.stream_unary(METHOD)(entries.messages())

        async def sender() -> None:
            nonlocal decided
            while (number := next(numbers)) < total:
                stream = client.stream()
                answer = await stream.request(PATH, bodies[number % _PROMPTS])
                if not answer.destinations or answer.metadata is None:
                    raise RuntimeError(f"request {number}: the router answered {answer.status} {answer.body[:200]!r}")
                decided += 1
                aborted = number % _RESET_EVERY == 0
                if aborted:
                    stream.reset()
                else:
                    await stream.end()
                reset = number % _RESET_UPSTREAM_EVERY == 1
                await entries.offer(answer.metadata, answer.destinations, aborted=aborted, reset=reset)

        async def look() -> None:
            while True:
                for one in watched:
                    one.look(decided)
                await asyncio.sleep(0.5)

        began_s = time.monotonic()
        looking = asyncio.create_task(look())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_CONCURRENCY):
                    group.create_task(sender())
        finally:
            looking.cancel()
        took_s = time.monotonic() - began_s
        for one in watched:
            one.look(decided)
        await entries.end()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await log
    return decided, took_s


async def counts(http: aiohttp.ClientSession, stack: Stack) -> dict[str, int]:
    """What every part says of the requests so far."""
    at = stack.addresses

    async def page(url: str) -> dict[str, float]:
        async with http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    router, collector = await page(at.router_url), await page(at.collector_url)
    async with http.get(f"http://{LOOPBACK}:{at.nats_monitor}/jsz?streams=1") as response:
        account = ((await response.json()).get("account_details") or [{}])[0]
    streams = {stream["name"]: stream["state"]["last_seq"] for stream in account.get("stream_detail", [])}

    def total(values: dict[str, float], begins: str) -> int:
        return int(sum(value for name, value in values.items() if name.startswith(begins)))

    return {
        "router_decisions": total(router, "leadtime_router_decisions_total{"),
        "ledger_added": total(router, 'leadtime_router_ledger_events_total{event="added"}'),
        "ledger_removed": total(router, 'leadtime_router_ledger_events_total{event="removed"}'),
        "router_outcomes": total(router, 'leadtime_router_outcomes_total{result="ok"}'),
        "collector_entries_accepted": total(collector, 'leadtime_collector_entries_total{reason="accepted"'),
        "collector_samples": total(collector, "leadtime_collector_samples_total{"),
        "collector_published": total(collector, 'leadtime_collector_published_total{fate="acknowledged"}'),
        "stream_stored": int(streams.get(names.SAMPLES_STREAM, 0)),
    }


async def measure(requests: int) -> dict[str, Any]:
    """The benchmark's one JSON object."""
    with tempfile.TemporaryDirectory(prefix="leadtime-soak-") as directory:
        config = StackConfig(
            run_dir=Path(directory),
            simulated=pool(4),
            predictors=0,
            environment={
                **os.environ,
                "LEADTIME_TRAINER_MIN_SAMPLES": "100000",
                # One access-log stream for all: entries under way when a stream ends are nobody's, as with Envoy.
                "LEADTIME_COLLECTOR_ALS_STREAM_AGE_S": "86400",
                "LEADTIME_LOG_LEVEL": "warning",
                "LEADTIME_ROUTER_LEDGER_CHECKS": "true",
            },
        )
        async with (
            Stack(config, rng=random.Random()) as stack,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
        ):
            watched = {name: Watched(stack.supervisor[name].pid or 0) for name in ("router", "collector")}
            decided, took_s = await drive(stack, requests, list(watched.values()))
            until_s = time.monotonic() + _SETTLE_S
            while True:
                balance = await counts(http, stack)
                if set(balance.values()) == {decided} or time.monotonic() > until_s:
                    break
                await asyncio.sleep(0.5)
            async with http.get(f"{stack.addresses.router_url}/v1/stats") as response:
                left = (await response.json())["inflight_requests"]
            async with http.get(f"{stack.addresses.router_url}/metrics") as response:
                faults = [
                    float(line.rsplit(" ", 1)[1])
                    for line in (await response.text()).splitlines()
                    if line.startswith("leadtime_router_ledger_faults_total ")
                ]
            return {
                "benchmark": "soak",
                "requests": decided,
                "requests_per_s": round(decided / took_s, 1),
                "balance": balance,
                "balanced": set(balance.values()) == {decided} and left == 0,
                "left_in_ledger": left,
                "ledger_faults": sum(faults),
                **{name: one.report(requests) for name, one in watched.items()},
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 requests")
    parser.add_argument("--requests", type=int, default=200_000, help="how many")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    result = uvloop.run(measure(2_000 if arguments.quick else arguments.requests))
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if result["balanced"] else 1


if __name__ == "__main__":
    sys.exit(main())
