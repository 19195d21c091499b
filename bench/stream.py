"""What a request costs at the edge: CPU of one decision in each shape of ext-proc, Python per streamed token in both
ways of a completion, and the label script in Envoy per stream and token.

A real router process with a predictor and a bundle is driven straight with ext-proc streams, as Envoy sends them:
`buffered` (the body as one message) and `full_duplex` (the body in chunks of 64 KB, and back). Its own CPU time is
read from the kernel, less what it uses when idle. A bare server beside it, which only receives and sends
(`bare_extproc.py`), says how much of a KB of body is gRPC's and the kernel's. `response_stream_cost.py` has the parts
about responses.

    python -m bench.stream [--quick] [--json FILE]
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, get_args

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import httpx
import psutil
import uvloop

from bench.bare_extproc import bare_server
from bench.response_stream_cost import (
    lua_us_per_stream,
    observer_us_per_token,
    restoring_us_per_token,
    router_us_per_token,
)
from bench.router import MODEL, PATH, body, idling_router, used_s
from deploy.local.output_file import output_file
from deploy.local.stack import Stack
from sim.extproc_client import ExtProcClient, Shape

SIZES_KB: Final = (1, 8, 64)
LARGER_KB: Final = (1_024, 5_120)
_RANGE_ENDS_KB: Final = (64, *LARGER_KB)
_CANDIDATES: Final = 4
_IN_FLIGHT: Final = 8


async def drive(address: str, shape: Shape, size_kb: int, seconds: float) -> int:
    """Whole request phases for some seconds, several at a time; returns their number."""
    counter = itertools.count()
    until = time.monotonic() + seconds
    bodies = [body(size_kb * 1_024, number) for number in range(1 if size_kb > 1_000 else 64)]
    done = 0

    async with ExtProcClient(address, shape=shape) as client:

        async def sender() -> None:
            nonlocal done
            while time.monotonic() < until:
                answer = await client.pick(PATH, bodies[next(counter) % len(bodies)])
                if not answer.destinations:
                    raise RuntimeError(f"the router answered {answer.status}")
                done += 1

        await asyncio.gather(*(sender() for _ in range(2 if size_kb > 1_000 else _IN_FLIGHT)))
    return done


Costs = dict[tuple[Shape, int], float]
"""CPU µs per decision, by shape and body size in KB."""


async def decision_us(seconds: float) -> tuple[Costs, Costs]:
    """Of the router, and, for the larger bodies, of a server that only receives and sends."""
    async with idling_router(_CANDIDATES, seconds) as (stack, _, router, idle_share), bare_server() as (bare, process):
        address = f"127.0.0.1:{stack.addresses.router_extproc}"
        decided, transported = _Meter(address, router, idle_share), _Meter(bare, process, 0.0)
        for _ in range(3):  # turn about, so that a busy moment hits all alike
            for size in (*SIZES_KB, *LARGER_KB):
                for shape in get_args(Shape):
                    await decided.drive(shape, size, seconds / 3)
                    if size in _RANGE_ENDS_KB:
                        await transported.drive(shape, size, seconds / 3)
    return decided.costs(), transported.costs()


class _Meter:
    """Drives one server, and sums up what its process spends."""

    def __init__(self, address: str, process: psutil.Process, idle_share: float) -> None:
        self._address = address
        self._process = process
        self._idle_share = idle_share
        self._spent: Costs = {}
        self._count: dict[tuple[Shape, int], int] = {}

    async def drive(self, shape: Shape, size_kb: int, seconds: float) -> None:
        await drive(self._address, shape, size_kb, 0.1)
        before, wall = used_s(self._process), time.monotonic()
        done = await drive(self._address, shape, size_kb, seconds)
        used = used_s(self._process) - before - self._idle_share * (time.monotonic() - wall)
        key = (shape, size_kb)
        self._spent[key] = self._spent.get(key, 0.0) + used
        self._count[key] = self._count.get(key, 0) + done

    def costs(self) -> Costs:
        return {key: self._spent[key] / self._count[key] * 1e6 for key in self._spent}


def per_kb(cost: Costs, low: int, high: int) -> dict[Shape, float]:
    """µs that a KB more costs, between two sizes."""
    return {shape: (cost[shape, high] - cost[shape, low]) / (high - low) for shape in get_args(Shape)}


async def messages_per_token(stack: Stack, http: httpx.AsyncClient) -> float:
    """ext-proc messages for one more token of an answer, by Envoy's count, where completions come by access log."""
    sent = []
    for tokens in (10, 210):
        before = await _messages_sent(stack, http)
        for number in range(5):
            document = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"tell me {number}"}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            answer = await http.post(stack.addresses.gateway_url + PATH, json=document)
            if answer.content.count(b"\n\n") < tokens:
                raise RuntimeError(f"an answer of {tokens} tokens came in fewer events")
        sent.append(await _messages_sent(stack, http) - before)
    return (sent[1] - sent[0]) / (5 * 200)


async def _messages_sent(stack: Stack, http: httpx.AsyncClient) -> int:
    url = f"{stack.addresses.envoy_admin_url}/stats?format=json&filter=ext_proc.stream_msgs_sent$"
    return sum(int(stat["value"]) for stat in (await http.get(url)).json()["stats"])


async def responses(*, quick: bool) -> tuple[dict[str, float], float]:
    """The response stream's cost in a router that looks at responses, and `messages_per_token` without it."""
    nobody = {"LEADTIME_ROUTER_COLLECTORS": "http://127.0.0.1:9"}  # samples are made, and kept
    async with idling_router(_CANDIDATES, 1.0, nobody) as (stack, http, router, idle_share):
        messages = await messages_per_token(stack, http)
        cost = await router_us_per_token(
            f"127.0.0.1:{stack.addresses.router_extproc}",
            router,
            PATH,
            body(1_024, 1),
            tokens=200 if quick else 1_000,
            idle_share=idle_share,
        )
    return cost, messages


async def measure(*, quick: bool) -> dict[str, Any]:
    """The benchmark's one JSON object. `body_us_per_kb`: what a KB more costs, between 64 KB and 5 MB; by halves beside
    it, which says whether that stays flat, with the part that a server pays which only receives and sends.
    """
    cost, bare = await decision_us(0.6 if quick else 6.0)
    shapes = get_args(Shape)
    halves = {}
    for low, high in itertools.pairwise(_RANGE_ENDS_KB):
        total, transport = per_kb(cost, low, high), per_kb(bare, low, high)
        halves[f"{low}-{high}"] = {
            shape: {
                "total": round(total[shape], 2),
                "transport": round(transport[shape], 2),
                "own": round(total[shape] - transport[shape], 2),
            }
            for shape in shapes
        }
    seen, messages = await responses(quick=quick)
    script = await lua_us_per_stream(rounds=4 if quick else 12)
    return {
        "benchmark": "stream",
        "access_log": {
            "python_us_per_token": round(messages * seen["python_us_per_token"], 3),
            "messages_per_token": messages,
            "lua_us_per_stream": script["lua_us_per_stream"],
            "lua_us_per_token": script["lua_us_per_token"],
            "lua": script,
        },
        "response_stream": {
            **seen,
            "observer_us_per_token": round(observer_us_per_token(), 3),
            "restoring_us_per_token": round(restoring_us_per_token(), 3),
        },
        "decision_us": {shape: {str(size): round(cost[shape, size], 1) for size in SIZES_KB} for shape in shapes},
        "body_us_per_kb": {
            shape: round(value, 2) for shape, value in per_kb(cost, _RANGE_ENDS_KB[0], _RANGE_ENDS_KB[-1]).items()
        },
        "body_us_per_kb_by_range": halves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    text = json.dumps(uvloop.run(measure(quick=arguments.quick)), indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
