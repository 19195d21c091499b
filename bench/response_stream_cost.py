"""What it costs to see a response, for `bench/stream.py`: Python per token, and Envoy's script per stream.

By access log Python sees no token (`stream.py` counts the messages): the script in Envoy looks at each chunk, and its
cost is Envoy's CPU with it less that without it, turn about. By response stream every chunk is a
message to the router and back: `router_us_per_token` drives a real router's ext-proc port as Envoy does in full duplex
and reads the process's CPU from the kernel; `observer_us_per_token` and `restoring_us_per_token` are parts of it: the
look for labels, and for a model's name that is put back.

Limits: paced streams on a shared machine; a figure says its factor, not its last digit.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from deploy.local.binaries import find_binaries
from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, render
from deploy.local.processes import tied
from services.router.completion import CompletionObserver
from services.router.restored_name import EventRestorer
from shared.features import SCHEMA
from shared.samples import DECISION_VERSION, DecisionMetadata, ListedEndpoint, Rung, encode_row
from sim.extproc_client import ExtProcClient, body_message, headers_message

_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1796000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_ROLE: Final = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
_USAGE: Final = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":100}}\n\ndata: [DONE]\n\n'
_SSE: Final = {"content-type": "text/event-stream; charset=utf-8"}
_FULL_DUPLEX: Final = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
_LUA: Final = "envoy.filters.http.lua"
_SHORT_TOKENS: Final = 8
_LONG_TOKENS: Final = 58
_EXT_PROC: Final = "envoy.filters.http.ext_proc"


def observer_us_per_token(tokens: int = 20_000) -> float:
    """CPU µs that the observer itself takes for one chunk of one token: median of 5 streams."""
    address = "10.0.0.1:8000"
    row = encode_row(SCHEMA.rows(1, {})[0])
    decision = DecisionMetadata(
        DECISION_VERSION, "id", "default", "m", 0.0, 0.0, 1.0, None, None, 0, Rung.HEURISTIC, None, SCHEMA.hash, 1.0,
        True, (ListedEndpoint(address, row),),
    )  # fmt: skip
    rounds = []
    for _ in range(5):
        observer = CompletionObserver(decision, sent_ms=0.0, done=lambda _: None)
        observer.headers(200, _SSE, address, 1.0)
        observer.body(_ROLE, 2.0)
        started = time.process_time()
        for _ in range(tokens):
            observer.body(_EVENT, 3.0)
        rounds.append((time.process_time() - started) / tokens * 1e6)
        observer.body(_USAGE, 4.0)
        observer.end(5.0)
    return statistics.median(rounds)


def restoring_us_per_token(tokens: int = 20_000) -> float:
    """CPU µs for the model's name of one event, where it is put back: median of 5 streams."""
    rounds = []
    for _ in range(5):
        restorer = EventRestorer("m", "an alias")
        started = time.process_time()
        for _ in range(tokens):
            restorer.feed(_EVENT)
        rounds.append((time.process_time() - started) / tokens * 1e6)
    return statistics.median(rounds)


def _response_headers(headers: dict[str, str]) -> Any:
    values = [base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return ep.ProcessingRequest(response_headers=ep.HttpHeaders(headers=base_pb2.HeaderMap(headers=values)))


def _chunk(body: bytes, *, end: bool = False) -> Any:
    return ep.ProcessingRequest(response_body=ep.HttpBody(body=body, end_of_stream=end))


async def router_us_per_token(
    address: str,
    router: psutil.Process,
    path: str,
    request_body: bytes,
    *,
    streams: int = 20,
    tokens: int = 200,
    gap_s: float = 0.01,
    idle_share: float = 0.0,
) -> dict[str, float]:
    """CPU µs of the router's process per streamed token, and what one chunk's way there and back takes.

    `streams` responses at once, one token every `gap_s` each, all picked before the clock starts. The router must speak
    full duplex towards responses and have a collector set, so that it looks at them. `idle_share`: of a core, which it
    takes without any request.
    """
    waits: list[float] = []
    counter = itertools.count()

    async with ExtProcClient(address) as client:

        async def begin() -> Any:
            call = client.stream().call
            head = headers_message({":method": "POST", ":path": path, "x-request-id": str(next(counter))})
            head.protocol_config.response_body_mode = _FULL_DUPLEX
            for message in (head, body_message(request_body), _response_headers({":status": "200", **_SSE})):
                await call.write(message)
                await call.read()
            return call

        async def respond(call: Any) -> None:
            due = time.monotonic()
            for number in range(tokens):
                due += gap_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                sent = time.perf_counter()
                await call.write(_chunk(_ROLE if number == 0 else _EVENT))
                await call.read()
                waits.append((time.perf_counter() - sent) * 1e3)

        calls = [await begin() for _ in range(streams)]
        before, wall = _used_s(router), time.monotonic()
        await asyncio.gather(*map(respond, calls))
        spent = _used_s(router) - before - idle_share * (time.monotonic() - wall)
        for call in calls:
            await call.write(_chunk(_USAGE, end=True))
            await call.read()
            await call.done_writing()
    return {
        "python_us_per_token": round(spent / (streams * tokens) * 1e6, 1),
        "chunk_p50_ms": round(statistics.median(waits), 3),
        "streams": streams,
        "tokens_per_s": round(streams / gap_s),
    }


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class _Envoy:
    port: int
    pid: int

    def used_us(self) -> float:
        """CPU of all threads so far, from the scheduler's own clock (µs)."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


@contextlib.asynccontextmanager
async def _envoy(bootstrap: dict[str, Any]) -> AsyncIterator[_Envoy]:
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as name:
        directory = Path(name)
        config, admin = directory / "envoy.json", directory / "admin.txt"
        config.write_text(json.dumps(bootstrap))
        process = await asyncio.create_subprocess_exec(
            *tied([find_binaries().envoy, "-c", config, "--admin-address-path", admin, "--concurrency", "1",
                   "--disable-hot-restart", "--log-level", "error"]), stdout=sys.stderr, stderr=sys.stderr,
        )  # fmt: skip
        try:
            yield _Envoy(await _listener_port(admin), process.pid)
        finally:
            process.terminate()
            await process.wait()


async def _listener_port(admin: Path) -> int:
    for _ in range(500):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            host, _, port = admin.read_text().strip().rpartition(":")  # noqa: ASYNC240 - a few bytes, at the start
            listeners = json.loads(await _get(host, int(port), "/listeners?format=json"))
            return int(listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])
        await asyncio.sleep(0.02)
    raise RuntimeError("Envoy didn't come up within 10 s")


async def _get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = body.partition(b"\r\n")[2].rpartition(b"\r\n0\r\n")[0]
    return body


@contextlib.asynccontextmanager
async def _streaming_server(tokens: int, gap_s: float) -> AsyncIterator[int]:
    """Answers every request with a stream of events, one write each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                due = loop.time()
                for event in (_ROLE, *[_EVENT] * tokens, _USAGE):
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    due += gap_s
                    await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _stream(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n\r\n")
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        part = await reader.read(65_536)
        if not part:
            raise RuntimeError("Envoy closed a stream before its end")
        received = received[-16:] + part
    writer.close()


def _bootstrap(server_port: int, *, lua: bool) -> dict[str, Any]:
    """The rendered config without picker and access log, which cost the same both ways; with the script or without."""
    nobody = Address("127.0.0.1", 9)
    bootstrap = render(
        EnvoyConfig(
            endpoints=(Address("127.0.0.1", server_port),),
            routers=(RouterAddress(nobody, nobody.port),),
            collectors=(nobody,),
        )
    )
    resources = bootstrap["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    left_out = {_EXT_PROC} if lua else {_EXT_PROC, _LUA}
    manager["http_filters"] = [item for item in manager["http_filters"] if item["name"] not in left_out]
    del manager["access_log"]
    resources["clusters"] = [cluster for cluster in resources["clusters"] if cluster["name"] == "pool"]
    return bootstrap


async def lua_us_per_stream(*, rounds: int = 8, streams: int = 100, gap_s: float = 0.01) -> dict[str, Any]:
    """Envoy's CPU µs per stream of 8 tokens with and without the label script, medians over rounds, turn about; and
    what each token more costs.
    """
    short = await _with_and_without(_SHORT_TOKENS, rounds, streams, gap_s)
    long = await _with_and_without(_LONG_TOKENS, max(rounds // 2, 2), streams // 4, gap_s)
    more = (long[True] - long[False]) - (short[True] - short[False])
    return {
        "with_us": round(short[True], 1),
        "without_us": round(short[False], 1),
        "lua_us_per_stream": round(short[True] - short[False], 1),
        "lua_us_per_token": round(more / (_LONG_TOKENS - _SHORT_TOKENS), 2),
        "tokens_per_stream": _SHORT_TOKENS,
        "streams": rounds * streams,
    }


async def _with_and_without(tokens: int, rounds: int, streams: int, gap_s: float) -> dict[bool, float]:
    used: dict[bool, list[float]] = {True: [], False: []}
    async with (
        _streaming_server(tokens, gap_s) as server_port,
        _envoy(_bootstrap(server_port, lua=True)) as scripted,
        _envoy(_bootstrap(server_port, lua=False)) as plain,
    ):
        for number in range(2 * rounds + 2):
            lua = number % 4 in {0, 3}  # ABBA: a drift of the machine hits both alike
            proxy = scripted if lua else plain
            before = proxy.used_us()
            await asyncio.gather(*(_stream(proxy.port) for _ in range(streams)))
            if number >= 2:  # the first of each opens connections and compiles the script
                used[lua].append((proxy.used_us() - before) / streams)
    return {lua: statistics.median(values) for lua, values in used.items()}
