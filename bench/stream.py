"""What a request costs at the edge: CPU of one decision in each shape of ext-proc, Python per streamed token in both
ways of a completion, and the first-content script in Envoy per stream.

A real router process with a predictor and a bundle is driven straight with ext-proc streams, as Envoy sends them:
`buffered` (the body as one message) and `full_duplex` (the body in chunks of 64 KB, and back). Its own CPU time is
read from the kernel, less what it uses when idle. `response_stream_cost.py` has the parts about responses.

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
import uvloop

from bench.response_stream_cost import (
    lua_us_per_stream,
    observer_us_per_token,
    restoring_us_per_token,
    router_us_per_token,
)
from bench.router import MODEL, PATH, body, idling_router, used_s
from deploy.local.stack import Stack
from sim.extproc_client import ExtProcClient, Shape

SIZES_KB: Final = (1, 8, 64)
MIDDLE_KB: Final = 1_024
LARGE_KB: Final = 5_120
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


async def decision_us(seconds: float) -> dict[tuple[Shape, int], float]:
    """CPU µs of the router per decision, by shape and body size in KB."""
    async with idling_router(_CANDIDATES, seconds) as (stack, _, router, idle_share):
        address = f"127.0.0.1:{stack.addresses.router_extproc}"
        spent: dict[tuple[Shape, int], float] = {}
        count: dict[tuple[Shape, int], int] = {}
        for _ in range(3):  # turn about, so that a busy moment hits both shapes
            for size in (*SIZES_KB, MIDDLE_KB, LARGE_KB):
                for shape in get_args(Shape):
                    await drive(address, shape, size, 0.1)
                    before, wall = used_s(router), time.monotonic()
                    done = await drive(address, shape, size, seconds / 3)
                    used = used_s(router) - before - idle_share * (time.monotonic() - wall)
                    key = (shape, size)
                    spent[key] = spent.get(key, 0.0) + used
                    count[key] = count.get(key, 0) + done
    return {key: spent[key] / count[key] * 1e6 for key in spent}


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
    it, which says whether that stays flat.
    """
    cost = await decision_us(1.0 if quick else 6.0)
    shapes = get_args(Shape)
    per_kb = {shape: (cost[shape, LARGE_KB] - cost[shape, 64]) / (LARGE_KB - 64) for shape in shapes}
    halves = {
        f"{low}-{high}": {shape: round((cost[shape, high] - cost[shape, low]) / (high - low), 2) for shape in shapes}
        for low, high in ((64, MIDDLE_KB), (MIDDLE_KB, LARGE_KB))
    }
    seen, messages = await responses(quick=quick)
    script = await lua_us_per_stream(rounds=5 if quick else 12)
    return {
        "benchmark": "stream",
        "access_log": {
            "python_us_per_token": round(messages * seen["python_us_per_token"], 3),
            "messages_per_token": messages,
            "lua_us_per_stream": script["lua_us_per_stream"],
            "lua": script,
        },
        "response_stream": {
            **seen,
            "observer_us_per_token": round(observer_us_per_token(), 3),
            "restoring_us_per_token": round(restoring_us_per_token(), 3),
        },
        "decision_us": {shape: {str(size): round(cost[shape, size], 1) for size in SIZES_KB} for shape in shapes},
        "body_us_per_kb": {shape: round(value, 2) for shape, value in per_kb.items()},
        "body_us_per_kb_by_range": halves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    text = json.dumps(uvloop.run(measure(quick=arguments.quick)), indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
