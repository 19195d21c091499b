"""CPU of the collector per finished request, from Envoy's access log to JetStream's acknowledgement.

A real `python -m services.collector` with a real nats-server takes access-log messages of a real size (a decision with
three endpoints, all tags, usage) over gRPC from one sender, as fast as flow control lets it, and is done when JetStream
has acknowledged every sample. CPU is the collector process's own user and system time over all entries. The stages of
the pure part are timed apart, in this process; what is left of the total is gRPC, NATS and the loop.

    python -m bench.collector [--quick] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from prometheus_client import CollectorRegistry

from deploy.local.binaries import find_binaries
from deploy.local.output_file import output_file
from deploy.local.ports import Ports
from deploy.local.processes import tied
from services.collector.envoy_log import plain_entry
from services.collector.metrics import CollectorMetrics
from services.collector.validate import Probes, judge
from shared import names
from shared.features import SCHEMA
from shared.samples import (
    DECISION_VERSION,
    DecisionMetadata,
    ListedEndpoint,
    Rung,
    encode_decision,
    encode_row,
    encode_sample,
)

ENTRIES_PER_MESSAGE: Final = 16
ENDPOINTS: Final = ("10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.9:8000")
METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
START_UNIX_US: Final = 1_796_000_000_000_000


def entry_message(number: int) -> accesslog_pb2.HTTPAccessLogEntry:
    """A streamed answer of 200 tokens with everything that the rendered config logs; `number` makes its decision id."""
    row = encode_row(SCHEMA.rows(1, {"input_tokens": 900.0 + number % 7, "uncached_tokens": 300.0})[0])
    prediction = {f"{target}_{level}": 100.0 for target in ("ttft", "tpot") for level in ("p50", "p90", "p99")}
    decision = DecisionMetadata(
        version=DECISION_VERSION,
        decision_id=f"0192f0c1-0000-7000-8000-{number:012d}",
        pool="default",
        model="llama-3.1-8b",
        received_unix_ms=START_UNIX_US / 1e3,
        queue_ms=0.0,
        decision_ms=2.5,
        ttft_slo_ms=500.0,
        tpot_slo_ms=None,
        priority=0,
        rung=Rung.PREDICTOR,
        bundle_version="01J0",
        schema_hash=SCHEMA.hash,
        propensity=1.0,
        streamed=True,
        endpoints=tuple(ListedEndpoint(address, row, prediction) for address in ENDPOINTS),
    )
    message = accesslog_pb2.HTTPAccessLogEntry()
    common = message.common_properties
    common.start_time.FromMicroseconds(START_UNIX_US)
    common.duration.FromMicroseconds(2_404_100)
    common.time_to_last_upstream_tx_byte.FromMicroseconds(4_000)
    common.time_to_first_upstream_rx_byte.FromMicroseconds(5_000)
    common.time_to_last_upstream_rx_byte.FromMicroseconds(2_404_000)
    common.time_to_last_downstream_tx_byte.FromMicroseconds(2_404_050)
    common.custom_tags[names.TAG_FIRST_BODY_BYTE_US] = "100000"
    common.custom_tags[names.TAG_LAST_BYTE_US] = "2400000"
    common.upstream_remote_address.socket_address.address = "10.0.0.7"
    common.upstream_remote_address.socket_address.port_value = 8000
    common.upstream_request_attempt_count = 1
    common.access_log_type = accesslog_pb2.AccessLogType.DownstreamEnd
    spaces = common.metadata.filter_metadata
    spaces[names.METADATA_NAMESPACE].update({names.METADATA_KEY: encode_decision(decision)})
    spaces[names.LUA_NAMESPACE].update({names.LUA_FIRST_CONTENT: str(START_UNIX_US + 404_000)})
    spaces[names.LB_NAMESPACE].update({names.DESTINATION: ",".join(ENDPOINTS), names.DESTINATION_SERVED: ENDPOINTS[0]})
    usage = {names.USAGE_INPUT: 900, names.USAGE_OUTPUT: 200, names.USAGE_CACHED: 600}
    spaces[names.USAGE_NAMESPACE].update(usage)
    message.request.request_method = 3  # POST
    message.request.path = "/v1/chat/completions"
    message.request.user_agent = "OpenAI/Python 2.0"
    message.response.response_code.value = 200
    message.response.response_code_details = "via_upstream"
    message.response.response_body_bytes = 45_000
    message.response.response_headers["content-type"] = "text/event-stream; charset=utf-8"
    return message


def packed(count: int, offset: int = 0) -> list[bytes]:
    """Access-log messages on the wire, together `count` entries with decision ids from `offset` on."""
    messages = []
    for first in range(offset, offset + count, ENTRIES_PER_MESSAGE):
        message = als_pb2.StreamAccessLogsMessage()
        last = min(first + ENTRIES_PER_MESSAGE, offset + count)
        message.http_logs.log_entry.extend(entry_message(number) for number in range(first, last))
        messages.append(message.SerializeToString())
    return messages


def stages_us(count: int) -> dict[str, float]:
    """CPU microseconds per entry of each pure stage, in this process."""
    wire = packed(count)
    registry = CollectorRegistry()
    metrics = CollectorMetrics(registry, "default")
    probes = Probes()
    spent: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        done = work()
        spent[stage] = (time.process_time() - begin) * 1e6 / count
        return done

    parsed = timed("parse", lambda: [als_pb2.StreamAccessLogsMessage.FromString(data) for data in wire])
    messages = [entry for message in parsed for entry in message.http_logs.log_entry]
    entries = timed("plain", lambda: [plain_entry(message) for message in messages])
    verdicts = timed("judge", lambda: [judge(entry, "default", probes) for entry in entries])
    samples = [verdict.sample for verdict in verdicts if verdict.sample is not None]
    if len(samples) != count:
        raise RuntimeError(f"{count - len(samples)} of {count} entries made no sample: {verdicts[0].reason}")
    timed("metrics", lambda: deque(map(metrics.observe, samples), maxlen=0))
    timed("encode", lambda: [encode_sample(sample) for sample in samples])
    return spent


async def send(port: int, messages: Sequence[bytes]) -> None:
    """One stream, as one Envoy worker opens it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.stream_unary(METHOD)(iter(messages))


async def acknowledged(http_port: int) -> int:
    """Samples that JetStream has, by the collector's own count."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    page = await asyncio.to_thread(read)
    prefix = 'leadtime_collector_published_total{fate="acknowledged"} '
    return next((int(float(line.removeprefix(prefix))) for line in page.splitlines() if line.startswith(prefix)), 0)


@contextlib.contextmanager
def running(command: Sequence[str | Path], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that is ended with the block."""
    child = subprocess.Popen(tied(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.asynccontextmanager
async def collector(queue_samples: int) -> AsyncIterator[tuple[psutil.Process, int, int]]:
    """A connected collector process; yields (process, access-log port, HTTP port)."""
    ports = Ports(random.Random())
    nats_port, als_port, http_port = (ports.release(ports.reserve()) for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as store:
        env = {
            **os.environ,
            "LEADTIME_NATS_SERVERS": f"nats://127.0.0.1:{nats_port}",
            "LEADTIME_COLLECTOR_ALS_PORT": str(als_port),
            "LEADTIME_COLLECTOR_HTTP_PORT": str(http_port),
            "LEADTIME_COLLECTOR_QUEUE_SAMPLES": str(queue_samples),
            # Past the bench's end: its one stream must not be ended in the middle.
            "LEADTIME_COLLECTOR_ALS_STREAM_AGE_S": "3600",
        }
        nats_command: list[str | Path] = [
            find_binaries().nats_server,
            "-a",
            "127.0.0.1",
            "-p",
            str(nats_port),
            "-js",
            "-sd",
            store,
        ]
        with running(nats_command), running([sys.executable, "-m", "services.collector"], env) as child:
            await ready(http_port)
            yield psutil.Process(child.pid), als_port, http_port


async def ready(http_port: int) -> None:
    """Wait until the collector can store samples."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{http_port}/readyz", timeout=2)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def through_the_service(count: int) -> dict[str, float]:
    """CPU and throughput of the whole way, from a warm process."""
    warm = packed(2_000)
    messages = packed(count, offset=1_000_000)
    async with collector(queue_samples=count + 2_000) as (process, als_port, http_port):

        async def stored(wanted: int) -> None:
            # Polled from outside: the collector is another process.
            while await acknowledged(http_port) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

        async with asyncio.timeout(120):
            await send(als_port, warm)
            await stored(2_000)
            before = process.cpu_times()
            begin = time.monotonic()
            await send(als_port, messages)
            taken_s = time.monotonic() - begin
            await stored(2_000 + count)
            wall_s = time.monotonic() - begin
            after = process.cpu_times()
            resident = process.memory_info().rss
    cpu_s = after.user + after.system - before.user - before.system
    return {
        "total": cpu_s * 1e6 / count,
        "taken_per_s": count / taken_s,
        "acknowledged_per_s": count / wall_s,
        "rss_mib": resident / 2**20,
    }


def measure(*, quick: bool) -> dict[str, Any]:
    """The whole benchmark."""
    count = 10_000 if quick else 50_000
    stages = stages_us(2_000 if quick else 10_000)
    whole = asyncio.run(through_the_service(count))
    cpu_us = {stage: round(value, 1) for stage, value in stages.items()}
    cpu_us["transport"] = round(whole["total"] - sum(stages.values()), 1)
    cpu_us["total"] = round(whole["total"], 1)
    return {
        "benchmark": "collector",
        "python": platform.python_version(),
        "entries": count,
        "entry_bytes": len(packed(ENTRIES_PER_MESSAGE)[0]) // ENTRIES_PER_MESSAGE,
        "entry_cpu_us": cpu_us,
        "entries_per_s_per_core": round(1e6 / whole["total"]),
        "taken_per_s": round(whole["taken_per_s"]),
        "acknowledged_per_s": round(whole["acknowledged_per_s"]),
        "rss_mib": round(whole["rss_mib"], 1),
    }


def main() -> int:
    """Parse the options, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", type=output_file, help="also write the result to this file")
    options = parser.parse_args()
    result = json.dumps(measure(quick=options.quick), indent=2)
    print(result)
    if options.json:
        options.json.write_text(result + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
