"""Rows per second and core of one predictor process over HTTP, in both encodings, with latency percentiles.

A real `python -m services.predictor` gets a bundle of the trainer's making through a real Redis-protocol server and
answers a closed loop of keep-alive connections on loopback, 100 rows a call, all rows different. CPU is the server
process's own user and system time, so a busy neighbour moves the latencies but hardly the rows per core-second. The
load generator reports its own CPU share: near 1 it was the limit and the latencies are its own.

    python -m bench.predictor [--quick] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import orjson
import psutil
import redis
import uvloop
from prometheus_client import CollectorRegistry

from bench import bundles as bundle_builder
from deploy.local.binaries import find_binaries
from deploy.local.output_file import output_file
from deploy.local.processes import tied
from services.router.predict.client import PredictorClient
from services.router.predict.ladder import Ladder
from services.router.predict.metrics import PredictMetrics
from shared.bundle import Bundle, pack, seal
from shared.clock import SystemClock
from shared.features import SCHEMA, SCHEMA_HASH, FloatMatrix
from shared.names import (
    BUNDLES_CHANNEL,
    HEADER_POOL,
    HEADER_SCHEMA,
    PREDICT_PATH,
    ROWS_CONTENT_TYPE,
    bundle_key,
    bundle_pointer_key,
)

POOL: Final = "default"
ROWS: Final = 100
CONNECTIONS: Final = 8
BLOCKS: Final = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the generator saw."""

    latencies_ms: npt.NDArray[np.float64]
    wall_s: float
    failed: int
    client_cpu_s: float


class _Connection(asyncio.Protocol):
    """One keep-alive connection that sends its next request when an answer is whole. Answers carry content-length."""

    def __init__(self, requests: Sequence[bytes], start: int, deadline_s: float) -> None:
        self._requests = requests
        self._next = start
        self._deadline_s = deadline_s
        self._received = bytearray()
        self._due: int | None = None
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()
        self.latencies_ms: list[float] = []
        self.failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, no asyncio.Transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        if not self.done.done():
            self.failed += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._due is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            self._due = end + 4 + int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            self.failed += not head.startswith(b"http/1.1 200")
        if len(self._received) < self._due:
            return
        now_s = time.perf_counter()
        self.latencies_ms.append((now_s - self._sent_s) * 1e3)
        self._received.clear()
        self._due = None
        if now_s < self._deadline_s:
            self._send()
        else:
            self.done.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_s = time.perf_counter()
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _same(protocol: _Connection) -> _Connection:
    return protocol


async def drive(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> Load:
    """Closed loop of `connections` for `seconds`."""
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    cpu_s = time.process_time()
    protocols = [_Connection(requests, i * 7, started_s + seconds) for i in range(connections)]
    for protocol in protocols:
        await loop.create_connection(partial(_same, protocol), "127.0.0.1", port)
    async with asyncio.timeout(seconds + 10):
        await asyncio.gather(*(protocol.done for protocol in protocols))
    wall_s = time.perf_counter() - started_s
    cpu_s = time.process_time() - cpu_s
    for protocol in protocols:
        protocol.close()
    latencies = np.concatenate([np.asarray(protocol.latencies_ms) for protocol in protocols])
    return Load(latencies, wall_s, sum(protocol.failed for protocol in protocols), cpu_s)


def raw_request(rows: npt.NDArray[np.float32]) -> bytes:
    body = rows.astype("<f4").tobytes()
    return (
        f"POST {PREDICT_PATH} HTTP/1.1\r\nhost: predictor\r\ncontent-type: {ROWS_CONTENT_TYPE}\r\n"
        f"{HEADER_POOL}: {POOL}\r\n{HEADER_SCHEMA}: {SCHEMA_HASH}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def json_request(rows: npt.NDArray[np.float32]) -> bytes:
    body = orjson.dumps({"pool": POOL, "schema": SCHEMA_HASH, "rows": rows}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (
        f"POST {PREDICT_PATH} HTTP/1.1\r\nhost: predictor\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


@dataclass(frozen=True, slots=True)
class Running:
    """A predictor process, and the store through which it gets bundles."""

    port: int
    process: psutil.Process
    store: redis.Redis

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def publish(store: redis.Redis, bundle: Bundle) -> None:
    version = bundle.manifest.version
    store.set(bundle_key(POOL, SCHEMA_HASH, version), seal(pack(bundle), None))
    store.set(bundle_pointer_key(POOL, SCHEMA_HASH), version)
    store.publish(BUNDLES_CHANNEL, version)


@contextlib.asynccontextmanager
async def predictor(bundle: Bundle, directory: Path, extra: dict[str, str]) -> AsyncIterator["Running"]:
    """A Redis-protocol server with the bundle in it and one predictor that has taken it."""
    socket = directory / "redis.sock"
    store = await asyncio.create_subprocess_exec(
        *tied([find_binaries().redis_server, "--port", "0", "--unixsocket", socket, "--save", "", "--dir", directory]),
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    server: asyncio.subprocess.Process | None = None
    logging: asyncio.Task[None] | None = None
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        await _until(client.ping)
        publish(client, bundle)
        server = await asyncio.create_subprocess_exec(
            *tied([sys.executable, "-m", "services.predictor"]),
            env={**os.environ, "LEADTIME_REDIS_URL": f"unix://{socket}", "ORT_DISABLE_TELEMETRY": "1", **extra},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        port = 0
        ready = False
        assert server.stdout is not None
        while not (port and ready):
            event = json.loads(await asyncio.wait_for(server.stdout.readline(), 30))
            port = event.get("port", port)
            ready = ready or event["event"] == "bundle in use"
        logging = asyncio.create_task(_drain(server.stdout))
        yield Running(port, psutil.Process(server.pid), client)
    finally:
        if server is not None and server.returncode is None:
            server.send_signal(signal.SIGTERM)
            await server.wait()
        if logging is not None:
            await logging
        store.terminate()
        await store.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    """Read a log on, so that its writer doesn't wait for a reader."""
    while await stream.read(65_536):
        pass


async def _until(call: Any) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            call()
        except redis.RedisError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.02)
        else:
            return


async def measure(
    running: Running, requests: Sequence[bytes], rows: int, connections: int, seconds: float
) -> dict[str, Any]:
    """One figure set. Rows per core-second = rows / the server's own CPU seconds."""
    before_s = running.cpu_s()
    load = await drive(running.port, requests, connections, seconds)
    cpu_s = running.cpu_s() - before_s
    calls = len(load.latencies_ms)
    p50, p90, p99 = np.percentile(load.latencies_ms, [50, 90, 99])
    return {
        "rows_per_call": rows,
        "connections": connections,
        "calls": calls,
        "failed": load.failed,
        "rows_per_s": round(calls * rows / load.wall_s),
        "rows_per_s_per_core": round(calls * rows / cpu_s),
        "server_cpu_us_per_call": round(cpu_s / calls * 1e6, 1),
        "server_core_share": round(cpu_s / load.wall_s, 3),
        "client_core_share": round(load.client_cpu_s / load.wall_s, 3),
        "p50_ms": round(float(p50), 3),
        "p90_ms": round(float(p90), 3),
        "p99_ms": round(float(p99), 3),
    }


def again(bundle: Bundle, number: int) -> Bundle:
    """The same graphs under another version."""
    created_unix_ms = bundle.manifest.created_unix_ms + number
    version = f"{int(created_unix_ms):013d}-{bundle.manifest.version[-8:]}"
    named = bundle.manifest.model_copy(update={"version": version, "created_unix_ms": created_unix_ms})
    return Bundle(named, bundle.graphs)


async def swaps(running: Running, bundle: Bundle, requests: Sequence[bytes], seconds: float) -> dict[str, Any]:
    """The same graph published again and again under load: what a swap costs those who ask meanwhile."""
    published = 0

    async def republish() -> None:
        nonlocal published
        while True:
            await asyncio.sleep(0.5)
            published += 1
            publish(running.store, again(bundle, published))

    republishing = asyncio.create_task(republish())
    load = await drive(running.port, requests, CONNECTIONS // 2, seconds)
    republishing.cancel()
    p50, p99 = np.percentile(load.latencies_ms, [50, 99])
    return {
        "published": published,
        "calls": len(load.latencies_ms),
        "failed": load.failed,
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(float(load.latencies_ms.max()), 3),
    }


async def router_client(running: Running, blocks: Sequence[FloatMatrix], seconds: float) -> dict[str, Any]:
    """CPU of this process per prediction through the router's ladder, by candidates and decisions at once."""
    clock = SystemClock()
    metrics = PredictMetrics(CollectorRegistry(), clock)
    results: dict[str, Any] = {}
    async with PredictorClient([f"http://127.0.0.1:{running.port}"], POOL, metrics, clock) as client:
        ladder = Ladder(client, None, metrics, clock)
        while not client.describe():  # noqa: ASYNC110 - resolved in the background; there is no event of it
            await asyncio.sleep(0.01)
        for candidates in (4, 100):
            for decisions in (1, 8):
                rows = [np.ascontiguousarray(block[:candidates]) for block in blocks]
                addresses = [f"10.0.0.{i}:8000" for i in range(candidates)]
                backlog = np.zeros(candidates, np.float32)
                end_s = time.perf_counter() + seconds / 4
                done = failed = 0

                async def decide(
                    rows: list[FloatMatrix], addresses: list[str], backlog: FloatMatrix, end_s: float
                ) -> None:
                    nonlocal done, failed
                    while time.perf_counter() < end_s:
                        prediction = await ladder.predict(rows[done % len(rows)], addresses, backlog, 1_000.0)
                        done += 1
                        failed += prediction is None

                cpu_s = time.process_time()
                await asyncio.gather(*(decide(rows, addresses, backlog, end_s) for _ in range(decisions)))
                cpu_s = time.process_time() - cpu_s
                results[f"{candidates}_candidates_{decisions}_at_once"] = {
                    "cpu_us": round(cpu_s / done * 1e6, 1),
                    "predictions": done,
                    "failed": failed,
                }
    return results


async def bench(seconds: float, extra: dict[str, str]) -> dict[str, Any]:
    bundle, described = bundle_builder.build(POOL)
    blocks = bundle_builder.rows(BLOCKS, ROWS)
    single = [raw_request(block[:1]) for block in blocks]
    raw = [raw_request(block) for block in blocks]
    text = [json_request(block) for block in blocks]
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as directory:
        async with predictor(bundle, Path(directory), extra) as running:
            for requests in (raw, text):
                await drive(running.port, requests, CONNECTIONS, min(1.0, seconds))
            results = {
                "raw": await measure(running, raw, ROWS, CONNECTIONS, seconds),
                "json": await measure(running, text, ROWS, CONNECTIONS, seconds),
                "raw_one_connection": await measure(running, raw, ROWS, 1, seconds / 2),
                "raw_one_row": await measure(running, single, 1, CONNECTIONS, seconds / 2),
                "hot_swap": await swaps(running, bundle, raw, seconds),
                "router_client": await router_client(running, blocks, seconds),
            }
    return {
        "bench": "predictor",
        "rows_per_s_per_core": results["raw"]["rows_per_s_per_core"],
        "p50_ms": results["raw"]["p50_ms"],
        "p99_ms": results["raw"]["p99_ms"],
        **results,
        "bundle": described,
        "model_us_per_100_rows": bundle_builder.model_us(bundle, blocks),
        "features": len(SCHEMA),
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.predictor", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="short runs; ends within 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the object here too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a predictor setting to try")
    options = parser.parse_args(arguments)
    extra = {f"LEADTIME_PREDICTOR_{k.upper()}": v for k, _, v in (item.partition("=") for item in options.set)}
    report = json.dumps(uvloop.run(bench(3.0 if options.quick else 15.0, extra)), indent=1)
    print(report)
    if options.json:
        options.json.write_text(report + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
