"""CPU of one router decision, split into its stages, and the latency that the router adds to a request.

Total and transport come from a real router process in a real stack (Envoy, simulated model servers, a predictor with a
bundle): ext-proc streams are driven straight at it and its own CPU time is read from the kernel, less what it uses when
idle (scraping). The stages are the router's own functions, timed in this process on the same bodies; transport is the
rest. Added p50 compares one connection through Envoy and the router with the same requests through Envoy alone (a
route without ext-proc) and straight to the server.

    python -m bench.router [--quick] [--json FILE]
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import httpx
import numpy as np
import orjson
import psutil
import redis.asyncio
import uvloop

from bench.bundles import build
from deploy.local.layout import StackConfig
from deploy.local.output_file import output_file
from deploy.local.stack import Stack
from services.router.predict.types import Prediction
from services.router.request.parse import parse
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.interfaces import Context
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.vllm_metrics import Engine, EngineMetrics
from shared.bundle import pack, seal
from shared.features import SCHEMA, SCHEMA_HASH
from shared.inference import BundleModel, as_columns
from shared.names import BUNDLES_CHANNEL, bundle_key, bundle_pointer_key
from shared.samples import DecisionMetadata, ListedEndpoint, Rung, encode_decision, encode_row
from sim.extproc_client import ExtProcClient
from sim.spec import ProcessSpec, ServerSpec

MODEL: Final = "bench-model"
PATH: Final = "/v1/chat/completions"
SIZES: Final = {"1KB": 1_024, "8KB": 8_192, "64KB": 65_536}
DEFAULT_SIZE: Final = "8KB"
DEFAULT_CANDIDATES: Final = 4
_POOL: Final = "default"


def body(size: int, number: int) -> bytes:
    """A chat body of about `size` bytes: two thirds of it a system prompt that 8 requests share, the rest its own."""
    shared_text = f"assistant {number % 8} " + "shared words of the system prompt " * (size // 50)
    own = f"question {number} " + "own words of the question " * (size // 78)
    document = {
        "model": MODEL,
        "messages": [{"role": "system", "content": shared_text}, {"role": "user", "content": own}],
        "max_tokens": 64,
        "stream": True,
    }
    return orjson.dumps(document)


def cpu_us(call: Callable[[int], object], repeats: int) -> float:
    """Median over 5 rounds of the CPU microseconds of one call; `call` gets the number of the repetition."""
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for i in range(repeats):
            call(i)
        rounds.append((time.process_time() - started) / repeats * 1e6)
    return statistics.median(rounds)


def stages(candidates: int, size: int, repeats: int) -> dict[str, float]:
    """CPU µs of each stage of the decision, called as the director calls it."""
    state = PoolState(PoolConfig(), salt=b"bench" * 8, tokens=TokenEstimator())
    for i in range(candidates):
        address = f"127.0.0.1:{10_000 + i}"
        state.add_endpoint(address, hardware_class=1 + i % 3, now_ms=0.0)
        state.set_models(address, frozenset({MODEL}))
        state.set_ready(address, True)
        state.observe_scrape(address, scraped(), 1.0)
    bodies = [body(size, i) for i in range(64)]
    headers = {":method": "POST", ":path": PATH}
    requests = [parse(PATH, headers, data, state.tokens) for data in bodies]
    model = BundleModel(build(_POOL)[0])
    pipeline = Profiles(load_presets(Registry())).pipeline("leadtime")
    rng = np.random.default_rng(1)
    counter = itertools.count()

    def features(i: int) -> Any:
        request = requests[i % 64]
        view, match = state.snapshot(request, None, 2.0)
        rows = SCHEMA.rows(
            len(view),
            {**view.columns(), "input_tokens": request.input_tokens, "expected_output_tokens": 64.0,
             "expected_output_tokens_known": 1.0},
        )  # fmt: skip
        decision_id = str(next(counter))
        state.dispatch(decision_id, view.addresses[0], request, match, predicted_ttft_ms=50.0, now_ms=2.0)
        state.finish(decision_id, 3.0)
        return view, rows

    for i in range(64):
        features(i)
    view, rows = features(0)
    prediction = Prediction(as_columns(model.predict(rows), model.outputs), model.bundle_version, Rung.IN_PROCESS)

    def policy(i: int) -> Any:
        decision = pipeline.run(Context(requests[i % 64], view, prediction, rng, 1.0, 64.0), 3)
        return encode_decision(
            DecisionMetadata(
                1, "0" * 36, _POOL, MODEL, 0.0, 0.0, 1.0, None, None, 0, Rung.PREDICTOR, "v", SCHEMA_HASH, 1.0, True,
                tuple(ListedEndpoint(view.addresses[c], encode_row(rows[c]), prediction.of(c)) for c in decision.order),
            )
        )  # fmt: skip

    return {
        "parse": cpu_us(lambda i: parse(PATH, headers, bodies[i % 64], state.tokens), repeats),
        "features": cpu_us(features, repeats),
        "policy": cpu_us(policy, repeats),
        "model": cpu_us(lambda _: model.predict(rows), repeats),
    }


def scraped() -> EngineMetrics:
    """What a busy server might say."""
    return EngineMetrics(
        engine=Engine.VLLM,
        waiting_requests=1.0,
        running_requests=12.0,
        kv_cache_utilization=0.4,
    )


def pool(count: int) -> ProcessSpec:
    """Servers that answer at once."""
    return ProcessSpec(
        servers=tuple(ServerSpec(name=f"s{i}", models=(MODEL,), speed=1000.0, noise=0.0) for i in range(count))
    )


async def publish_bundle(url: str) -> None:
    """Put a bundle of a usual size where the trainer would, and say so."""
    bundle, _ = build(_POOL)
    version = bundle.manifest.version
    client = redis.asyncio.from_url(url, protocol=2)
    await client.set(bundle_key(_POOL, SCHEMA_HASH, version), seal(pack(bundle), None))
    await client.set(bundle_pointer_key(_POOL, SCHEMA_HASH), version)
    notice = orjson.dumps({"pool": _POOL, "schema": SCHEMA_HASH, "version": version})
    await client.publish(BUNDLES_CHANNEL, notice)
    await client.aclose()


async def drive(address: str, size: int, seconds: float, concurrency: int) -> tuple[int, list[float]]:
    """Picks for some seconds; returns their number and each one's milliseconds."""
    latencies: list[float] = []
    counter = itertools.count()
    until = time.monotonic() + seconds

    async with ExtProcClient(address) as client:

        async def sender() -> None:
            while time.monotonic() < until:
                data = body(size, next(counter))
                started = time.perf_counter()
                answer = await client.pick(PATH, data)
                latencies.append((time.perf_counter() - started) * 1e3)
                if not answer.destinations:
                    raise RuntimeError(f"the router answered {answer.status}")

        await asyncio.gather(*(sender() for _ in range(concurrency)))
    return len(latencies), latencies


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def idling_router(
    candidates: int, seconds: float, settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Stack, httpx.AsyncClient, psutil.Process, float]]:
    """A stack with a published bundle, its router's process, and the share of a core that this takes when idle.

    `settings`: more of the services', by environment variable.
    """
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as directory:
        config = StackConfig(
            run_dir=Path(directory),
            simulated=pool(candidates),
            environment={
                **os.environ,
                "LEADTIME_TRAINER_MIN_SAMPLES": "100000",
                "LEADTIME_LOG_LEVEL": "warning",
                **(settings or {}),
            },
        )
        async with Stack(config, rng=random.Random()) as stack, httpx.AsyncClient(timeout=30) as http:
            await publish_bundle(stack.addresses.redis_url)
            await until_predicted(stack, http, f"127.0.0.1:{stack.addresses.router_extproc}")
            router = psutil.Process(stack.supervisor["router"].pid or 0)
            started = used_s(router)
            await asyncio.sleep(seconds)
            yield stack, http, router, (used_s(router) - started) / seconds


async def whole(candidates: int, sizes: dict[str, int], seconds: float, *, through_envoy: bool) -> dict[str, Any]:
    """Total CPU per decision of a real router by body size, rungs that answered, added latency."""
    async with idling_router(candidates, seconds) as (stack, http, router, idle_share):
        address = f"127.0.0.1:{stack.addresses.router_extproc}"
        totals: dict[str, Any] = {}
        await http.post(f"{stack.addresses.router_url}/v1/stats/reset")
        for name, size in sizes.items():
            await drive(address, size, 0.3, 8)
            before, wall = used_s(router), time.monotonic()
            count, _ = await drive(address, size, seconds, 8)
            spent = used_s(router) - before - idle_share * (time.monotonic() - wall)
            _, alone = await drive(address, size, seconds / 2, 1)
            totals[name] = {
                "total_us": round(spent / count * 1e6, 1),
                "decisions_per_s": round(count / seconds),
                "p50_ms_alone": round(statistics.median(alone), 3),
            }
        stats = (await http.get(f"{stack.addresses.router_url}/v1/stats")).json()
        result: dict[str, Any] = {
            "idle_cpu_share": round(idle_share, 4), "sizes": totals, "served_by": stats["served_by"],
        }  # fmt: skip
        if through_envoy:
            result["latency"] = await added_latency(stack, seconds)
            result["abort_to_ledger_ms"] = await abort_latency(stack)
        return result


async def until_predicted(stack: Stack, http: httpx.AsyncClient, address: str) -> None:
    """Wait for the predictor to serve decisions."""
    for _ in range(200):
        await drive(address, 1_024, 0.02, 1)
        stats = (await http.get(f"{stack.addresses.router_url}/v1/stats")).json()
        if stats["served_by"]["predictor"]:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("no decision came from the predictor within 10 s")


async def added_latency(stack: Stack, seconds: float) -> dict[str, float]:
    """p50 of small answers at one connection: through everything, through Envoy without ext-proc, and straight."""
    direct = stack.endpoints[0].split(";")[0]
    gateway = stack.addresses.gateway_url
    samples: dict[str, list[float]] = {"gateway": [], "direct": []}
    document = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 300}], "max_tokens": 1}
    async with httpx.AsyncClient(timeout=30) as client:
        until = time.monotonic() + 2 * seconds
        while time.monotonic() < until:  # turn about, so that a busy moment hits both
            for name, base in (("direct", direct), ("gateway", gateway)):
                started = time.perf_counter()
                response = await client.post(base + PATH, json=document)
                samples[name].append((time.perf_counter() - started) * 1e3)
                response.raise_for_status()
    p50 = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "direct_p50_ms": round(p50["direct"], 3),
        "gateway_p50_ms": round(p50["gateway"], 3),
        "added_p50_ms": round(p50["gateway"] - p50["direct"], 3),
        "requests": len(samples["gateway"]),
    }


async def abort_latency(stack: Stack, repeats: int = 15) -> dict[str, float]:
    """From a client's abort in decode, through Envoy, to an empty ledger: milliseconds, the router's stats polled."""
    stats_url = f"{stack.addresses.router_url}/v1/stats"
    document = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a long story"}],
        "max_tokens": 30_000,
        "ignore_eos": True,
        "stream": True,
    }
    measured = []
    async with httpx.AsyncClient(timeout=30) as http:

        async def inflight() -> int:
            return int((await http.get(stats_url)).json()["inflight_requests"])

        for _ in range(repeats):
            async with httpx.AsyncClient(timeout=30) as client:
                request = client.build_request("POST", stack.addresses.gateway_url + PATH, json=document)
                response = await client.send(request, stream=True)
                await anext(response.aiter_raw())
                started = time.perf_counter()
                await response.aclose()
                while await inflight():
                    pass
                measured.append((time.perf_counter() - started) * 1e3)
    return {"p50": round(statistics.median(measured), 2), "max": round(max(measured), 2), "repeats": repeats}


async def measure(*, quick: bool) -> dict[str, Any]:
    """The benchmark's one JSON object."""
    seconds, repeats = (1.0, 300) if quick else (5.0, 2_000)
    default_only = {DEFAULT_SIZE: SIZES[DEFAULT_SIZE]}
    real = {
        DEFAULT_CANDIDATES: await whole(DEFAULT_CANDIDATES, SIZES, seconds, through_envoy=True),
        100: await whole(100, default_only if quick else SIZES, seconds, through_envoy=False),
    }
    split = {
        count: {name: stages(count, size, repeats) for name, size in SIZES.items()}
        for count in (DEFAULT_CANDIDATES, 100)
    }
    at = real[DEFAULT_CANDIDATES]["sizes"][DEFAULT_SIZE]
    parts = split[DEFAULT_CANDIDATES][DEFAULT_SIZE]
    total = at["total_us"]
    decision = {name: round(value, 1) for name, value in parts.items()}
    decision["transport"] = round(total - sum(parts.values()), 1)
    decision["total"] = total
    return {
        "benchmark": "router",
        "decision_cpu_us": decision,
        "note": "4 candidates, 8 KB, first rung; 'model' is the in-process run, the HTTP call counts as transport",
        "marks_us": {"fastapi_aiohttp_router": 1670, "rust_cache_aware_router": 406},
        "without_transport_and_model_us": round(sum(v for k, v in parts.items() if k != "model"), 1),
        "router": {str(count): value for count, value in real.items()},
        "stages_us": {
            str(count): {size: {k: round(v, 1) for k, v in values.items()} for size, values in by_size.items()}
            for count, by_size in split.items()
        },
    }


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    text = "\n".join(lines)
    sys.stdout.write(text + "\n")
    if path:
        path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    with _output(arguments.json) as lines:
        lines.append(json.dumps(uvloop.run(measure(quick=arguments.quick)), indent=2))


if __name__ == "__main__":
    main()
