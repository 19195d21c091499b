"""How far the ledger without seen first tokens is from the exact one, and what that costs the model.

One simulated server takes one bursty stream of requests, 2 % of them aborted; several ledgers watch it. `exact` sees
every first token, `timer` moves entries at the predicted median TTFT, `timer_scrape` is corrected 4 times a second by
the server's count of first tokens as well; the others see less: once a second, prompt tokens, or the waiting count
alone. All but `exact` predict with a model fitted on another run's exact ledger, from what they themselves believe.
Errors are taken at dispatch, when features are read; `ttft_mape_percent` is a model's that learned from that ledger.

`--quick` shortens the run (20 s), `--json FILE` writes the object that is printed.
"""

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost

from deploy.local.output_file import output_file
from services.router.state.ledger import Ledger
from services.router.state.table import EndpointTable
from services.router.state.vllm_metrics import Engine as EngineKind
from services.router.state.vllm_metrics import EngineMetrics
from sim.engine import Engine, EngineLimits, EngineRequest, RequestState
from sim.hardware import PROFILES

SCRAPE_MS = 250.0
SCRAPE_DELAY_MS = 3.0
TO_SERVER_MS = 0.5
ABORTED_SHARE = 0.02
ADDRESS = "10.0.0.1:8000"
TRAIN_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load. `abort_after_ms`: inf for those that run to their end."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    abort_after_ms: float


def arrivals(seed: int, count: int, load: float, ms_per_token: float) -> list[Arrival]:
    """Bursty Poisson arrivals whose prefill work is `load` of the server's capacity on average."""
    rng = random.Random(seed)
    mean_tokens = 1_100.0
    mean_gap_ms = mean_tokens * ms_per_token / load
    out, now_ms = [], 0.0
    for _ in range(count):
        burst = 1.8 if math.sin(now_ms / 4_000.0) > 0 else 0.4
        now_ms += rng.expovariate(burst / mean_gap_ms)
        prompt = min(max(int(rng.lognormvariate(math.log(mean_tokens) - 0.5, 1.0)), 16), 12_000)
        output = min(max(int(rng.lognormvariate(4.2, 0.8)), 1), 1_000)
        aborted = rng.random() < ABORTED_SHARE
        out.append(Arrival(now_ms, prompt, output, rng.expovariate(1 / 800.0) if aborted else math.inf))
    return out


# What each ledger makes of a scrape.
VIEWS: dict[str, Callable[[EngineMetrics], EngineMetrics]] = {
    "timer_scrape": lambda seen: seen,
    "timer_scrape_1hz": lambda seen: seen,
    "timer_scrape_prompt_tokens": lambda seen: replace(seen, first_tokens=None),
    "timer_scrape_waiting_only": lambda seen: replace(seen, first_tokens=None, prompt_tokens=None),
}
LOADS = {"light": 0.35, "heavy": 0.6}


class Watcher:
    """One ledger with its table, its features at each dispatch and its error against the exact one."""

    def __init__(self, name: str, every: int = 1) -> None:
        """`every`: it sees every n-th scrape."""
        self.name = name
        self.every = every
        self.table = EndpointTable()
        self.endpoint = self.table.add(ADDRESS, hardware_class=0, now_ms=0.0)
        self.ledger = Ledger(self.table)
        self.rows: list[list[float]] = []
        self.errors: list[tuple[float, float]] = []

    def features(self, arrival: Arrival) -> list[float]:
        view = self.table.view(self.endpoint.slot, arrival.at_ms)
        return [
            float(arrival.prompt_tokens),
            float(view.pending_uncached_tokens[0]),
            float(view.pending_requests[0]),
            float(view.oldest_pending_age_ms[0]),
            float(view.decoding_requests[0]),
            float(view.decode_context_tokens[0]),
        ]


def run(
    load: list[Arrival], watchers: list[Watcher], model: xgboost.Booster | None, scrape_ms: float, seed: int
) -> npt.NDArray[np.float64]:
    """Drive one server with the load; returns each request's TTFT in ms, NaN for those without a first token."""
    profile = PROFILES["llama-8b-a100"]
    limits = EngineLimits(num_blocks=profile.kv_capacity_tokens // 16, max_model_tokens=16_384)
    engine = Engine(profile, limits, random.Random(seed), noise=0.04)
    exact = watchers[0]
    first_tokens = prompt_tokens = scrapes = 0
    ttft = np.full(len(load), np.nan)
    states: dict[str, RequestState] = {}
    events: list[tuple[float, int, str, Any]] = []
    order = 0

    def schedule(at_ms: float, kind: str, what: Any = None) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (at_ms, order, kind, what))

    for index, arrival in enumerate(load):
        schedule(arrival.at_ms, "dispatch", index)
    schedule(scrape_ms, "scrape")
    left = len(load)
    while left and events:
        now_ms, _, kind, what = heapq.heappop(events)
        if kind == "dispatch":
            arrival = load[what]
            for watcher in watchers:
                watcher.ledger.advance(now_ms)
            truth = exact.ledger.pending(exact.endpoint.slot)
            for watcher in watchers:
                count, tokens = watcher.ledger.pending(watcher.endpoint.slot)
                watcher.errors.append((count - truth[0], tokens - truth[1]))
                row = watcher.features(arrival)
                watcher.rows.append(row)
                predicted = None
                if watcher is exact:
                    predicted = math.inf
                elif model is not None:
                    predicted = math.exp(float(model.inplace_predict(np.array([row], np.float32))[0]))
                watcher.ledger.add(
                    str(what),
                    watcher.endpoint.slot,
                    input_tokens=arrival.prompt_tokens,
                    uncached_tokens=arrival.prompt_tokens,
                    expected_output_tokens=None,
                    predicted_ttft_ms=predicted,
                    now_ms=now_ms,
                )
            schedule(now_ms + TO_SERVER_MS, "arrive", what)
            if arrival.abort_after_ms < math.inf:
                schedule(now_ms + arrival.abort_after_ms, "abort", what)
        elif kind == "arrive":
            arrival = load[what]
            states[str(what)] = engine.submit(
                EngineRequest(str(what), arrival.prompt_tokens, arrival.output_tokens), now_ms
            )
            if engine.current_step is None:
                schedule(now_ms, "step")
        elif kind == "abort":
            if engine.abort(str(what), now_ms) is not None:
                left -= 1
                for watcher in watchers:
                    watcher.ledger.remove(str(what), now_ms, completed=False)
        elif kind == "step":
            if engine.current_step is None and (step := engine.start_step(max(now_ms, engine.now_ms))) is not None:
                schedule(step.end_ms, "end")
        elif kind == "end":
            result = engine.finish_step()
            for state in result.emitted:
                if state.generated_tokens == 1:
                    first_tokens += 1
                    prompt_tokens += state.request.prompt_tokens
                    index = int(state.request.request_id)
                    ttft[index] = now_ms - load[index].at_ms
                    exact.ledger.observe_first_token(state.request.request_id, now_ms)
            for state in result.finished:
                left -= 1
                for watcher in watchers:
                    watcher.ledger.remove(state.request.request_id, now_ms)
            schedule(now_ms, "step")
        elif kind == "scrape":
            inner = engine.metrics()
            seen = EngineMetrics(
                engine=EngineKind.VLLM,
                waiting_requests=float(inner.waiting_requests),
                running_requests=float(inner.running_requests),
                kv_cache_utilization=inner.kv_used_ratio,
                prompt_tokens=float(prompt_tokens),
                first_tokens=float(first_tokens),
            )
            schedule(now_ms + SCRAPE_DELAY_MS, "scraped", seen)
            schedule(now_ms + scrape_ms, "scrape")
        elif kind == "scraped":
            scrapes += 1
            for watcher in watchers:
                watcher.ledger.advance(now_ms)
                if watcher.name in VIEWS and scrapes % watcher.every == 0:
                    watcher.ledger.correct(watcher.endpoint.slot, VIEWS[watcher.name](what), now_ms)
    return ttft


def fit(rows: npt.NDArray[np.float32], ttft: npt.NDArray[np.float64]) -> xgboost.Booster:
    """Log TTFT from the ledger's features."""
    known = np.isfinite(ttft)
    data = xgboost.DMatrix(rows[known], np.log(np.maximum(ttft[known], 0.1)))
    options = {"max_depth": 4, "eta": 0.1, "min_child_weight": 8, "nthread": 1, "seed": 0, "tree_method": "hist"}
    return xgboost.train(options, data, num_boost_round=100)


def mape(rows: npt.NDArray[np.float32], ttft: npt.NDArray[np.float64]) -> float:
    """Held-out error, in percent, of a model trained on the first part of these rows."""
    cut = int(len(rows) * TRAIN_SHARE)
    model = fit(rows[:cut], ttft[:cut])
    known = np.isfinite(ttft[cut:])
    predicted = np.exp(model.inplace_predict(rows[cut:][known]))
    return float(np.mean(np.abs(predicted / ttft[cut:][known] - 1.0)) * 100.0)


def measure(count: int, load: float) -> dict[str, dict[str, float]]:
    """One load: what it was like, and each ledger's errors."""
    ms_per_token = 0.065  # of the profile at 2,048 tokens a step, decodes beside them
    before = Watcher("exact")
    ttft = run(arrivals(1, count, load, ms_per_token), [before], None, SCRAPE_MS, 1)
    model = fit(np.asarray(before.rows, np.float32), ttft)
    watchers = [Watcher("exact"), Watcher("timer"), *(Watcher(name, 4 if "1hz" in name else 1) for name in VIEWS)]
    ttft = run(arrivals(2, count, load, ms_per_token), watchers, model, SCRAPE_MS, 2)
    exact_rows = np.asarray(watchers[0].rows, np.float32)
    report: dict[str, dict[str, float]] = {
        "load": {
            "requests": count,
            "ttft_p50_ms": float(np.nanmedian(ttft)),
            "ttft_p90_ms": float(np.nanpercentile(ttft, 90)),
            "pending_requests_mean": float(exact_rows[:, 2].mean()),
            "pending_uncached_tokens_mean": float(exact_rows[:, 1].mean()),
        }
    }
    for watcher in watchers:
        errors = np.asarray(watcher.errors)
        report[watcher.name] = {
            "pending_requests_mae": float(np.abs(errors[:, 0]).mean()),
            "pending_requests_bias": float(errors[:, 0].mean()),
            "pending_uncached_tokens_mae": float(np.abs(errors[:, 1]).mean()),
            "ttft_mape_percent": mape(np.asarray(watcher.rows, np.float32), ttft),
        }
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a shorter run, under 50 s")
    parser.add_argument("--json", type=output_file, help="also write the object here")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    loads = {name: measure(3_000 if options.quick else 12_000, load) for name, load in LOADS.items()}
    report: dict[str, Any] = {
        ledger: {load: loads[load][ledger] for load in loads} for ledger in next(iter(loads.values()))
    }
    report["seconds"] = time.perf_counter() - started
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
