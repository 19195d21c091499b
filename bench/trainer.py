"""What a training cycle costs and what its model is worth, on synthetic requests that queue.

`training`: CPU of whole cycles (fit, gate, export, parity, warm-up of the calibration) by rows in the window, and how
long the event loop was held up meanwhile. `queueing`: TTFT error on later requests of the same pool, ours against raw
XGBoost on the incumbent's six features with the incumbent's hyperparameters, same samples. `extrapolation`: trained on
TTFT = 20 + 0.1 × tokens up to 1024 tokens. `intake`: CPU of taking one sample.

Limits: `bench.queueing` is a simulation with an exact ledger; its errors compare models and foretell no cluster.

    python -m bench.trainer [--quick] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

# As the service does before NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from bench.queueing import A100_70B, H100_70B, Observations, Scenario, as_samples, observe
from deploy.local.output_file import output_file
from services.trainer.calibrate import CalibrationOptions, Calibrator
from services.trainer.champion import Champion
from services.trainer.cycle import CycleOptions, CycleReport, observe_rows, run_cycle
from services.trainer.intake import Intake, Taken
from services.trainer.train import FitOptions, fit
from services.trainer.window import SampleWindow, Snapshot
from shared.features import SCHEMA, FloatMatrix
from shared.samples import encode_sample

SCENARIOS: Final = {
    "budget-2048": Scenario(),
    "budget-8192": Scenario(prefill_budget_tokens=8192),
    "mixed": Scenario(pods=(H100_70B, H100_70B, A100_70B, A100_70B), requests_per_s=12.0),
}
TRAIN_SHARE: Final = 0.7
# llm-d's training server: 200 trees of depth 6 on raw milliseconds.
INCUMBENT: Final = {
    "objective": "reg:squarederror", "tree_method": "hist", "max_depth": 6, "eta": 0.05, "subsample": 0.8,
    "colsample_bytree": 0.8, "min_child_weight": 5, "gamma": 0.2, "alpha": 0.01, "lambda": 0.1, "seed": 42,
    "nthread": 1,
}  # fmt: skip


def window_of(observations: Observations, count: int, bin_rows: int = 500) -> SampleWindow:
    """A window that took the first `count` observations."""
    window = SampleWindow(bin_rows=bin_rows)
    for i in range(count):
        targets = {"ttft": float(observations.ttft_ms[i]), "e2e": float(observations.e2e_ms[i])}
        if np.isfinite(observations.tpot_ms[i]):
            targets["tpot"] = float(observations.tpot_ms[i])
        window.add(observations.rows[i], targets, str(observations.pod[i]))
    return window


def training(rows: int, repeats: int) -> dict[str, Any]:
    """Medians over cycles that judge a challenger against a champion of the same window, all rows kept."""
    snapshot = window_of(observe(rows, seed=1), rows, bin_rows=rows).snapshot()
    options = CycleOptions("default")
    first = run_cycle(snapshot, None, options, 1.8e12)
    reports, lags = [], []
    for _ in range(repeats):
        report, lag_ms = asyncio.run(_cycle_beside_a_loop(snapshot, first.champion, options))
        reports.append(report)
        lags.append(lag_ms)
    last = reports[-1]
    if last.parity is None or last.champion is None:
        raise SystemExit(f"a cycle of {rows} rows was refused: {last.verdict}")
    return {
        "rows": len(snapshot),
        "cpu_ms": float(np.median([report.cpu_ms for report in reports])),
        "wall_ms": float(np.median([report.wall_ms for report in reports])),
        "loop_lag_p99_ms": float(np.percentile(np.concatenate(lags), 99)),
        "loop_lag_max_ms": float(np.concatenate(lags).max()),
        "parity_max_rel": last.parity.max_relative_error,
        "parity_rows": last.parity.rows,
        "graph_bytes": last.champion.bundle.manifest.renderings[0].size_bytes,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _cycle_beside_a_loop(
    snapshot: Snapshot, champion: Champion | None, options: CycleOptions
) -> tuple[CycleReport, npt.NDArray[np.float64]]:
    """One cycle in a thread, while the loop measures by how much its own 1 ms sleeps are late."""
    with ThreadPoolExecutor(1) as worker:
        running = asyncio.get_running_loop().run_in_executor(worker, run_cycle, snapshot, champion, options, 1.8e12 + 1)
        late_ms = []
        while not running.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            late_ms.append((time.perf_counter() - began) * 1e3 - 1.0)
        return await running, np.array(late_ms)


def six_features(rows: FloatMatrix, inflight_input_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The documents' six: KV use, input length, queue depth, running, prefix hit, input tokens in flight."""

    def column(name: str) -> npt.NDArray[np.float32]:
        return rows[:, SCHEMA.index[name]]

    hit = 1.0 - column("uncached_tokens") / np.maximum(1.0, column("input_tokens"))
    names = ("kv_cache_utilization", "input_tokens", "waiting_requests", "running_requests")
    return np.column_stack([*(column(name) for name in names), hit, inflight_input_tokens]).astype(np.float32)


def queueing(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """TTFT, TPOT and e2e of the last 30 % of a run by a model of the first 70 %."""
    observations = observe(count, seed=seed, scenario=SCENARIOS[name])
    cut = int(count * TRAIN_SHARE)
    snapshot = window_of(observations, cut).snapshot()
    report = run_cycle(snapshot, None, CycleOptions("default"), 1.8e12)
    if report.champion is None:
        raise SystemExit(f"{name}: the model was refused: {report.verdict}")
    rows = observations.rows[cut:]
    raw = report.champion.model.predict(rows)
    outputs = report.champion.model.outputs
    found = [
        _errors(
            {"scenario": name, "seed": seed, "method": "leadtime", "target": target},
            raw[:, outputs.index(f"{target}_p50")],
            getattr(observations, f"{target}_ms")[cut:],
            raw[:, outputs.index(f"{target}_p90")],
        )
        for target in ("ttft", "tpot", "e2e")
    ]
    six = six_features(observations.rows, observations.inflight_input_tokens)
    booster = xgb.train(INCUMBENT, xgb.DMatrix(six[:cut], label=observations.ttft_ms[:cut]), 200)
    predicted = np.maximum(0.0, booster.inplace_predict(six[cut:]))
    key = {"scenario": name, "seed": seed, "method": "incumbent-six", "target": "ttft"}
    return [*found, _errors(key, predicted, observations.ttft_ms[cut:], None)]


def _errors(
    key: dict[str, Any],
    predicted: npt.NDArray[Any],
    actual: npt.NDArray[np.float64],
    p90: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    known = np.isfinite(actual)
    relative = predicted[known] / actual[known] - 1.0
    return {
        **key,
        "rows": int(known.sum()),
        "mape": float(np.abs(relative).mean()),
        "p90_ape": float(np.quantile(np.abs(relative), 0.9)),
        "bias": float(np.median(relative)),
        "p90_coverage": None if p90 is None else float((actual[known] <= p90[known]).mean()),
    }


def extrapolation(count: int, noise: float, seed: int) -> dict[str, Any]:
    """Relative error at 2048 and 8192 tokens of models of up to 1024 tokens: ours and XGBoost alone."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 1025, count)
    ttft_ms = (20 + 0.1 * tokens) * np.exp(rng.normal(0, noise, count))
    rows = SCHEMA.rows(count, {"input_tokens": tokens, "uncached_tokens": tokens})
    window = SampleWindow(bin_rows=count)
    for row, value in zip(rows, ttft_ms.tolist(), strict=True):
        window.add(row, {"ttft": value}, "a")
    model = fit(window.snapshot(), FitOptions())
    if model is None:
        raise SystemExit("no model")
    asked = np.array([2048.0, 8192.0])
    ours = model.predict(SCHEMA.rows(2, {"input_tokens": asked, "uncached_tokens": asked}))[:, 0]
    booster = xgb.train(INCUMBENT, xgb.DMatrix(tokens[:, None], label=ttft_ms), 200)
    trees = booster.inplace_predict(asked[:, None].astype(np.float32))
    truth = 20 + 0.1 * asked
    return {
        "rows": count,
        "noise": noise,
        "leadtime": (ours / truth - 1).tolist(),
        "xgboost": (trees / truth - 1).tolist(),
    }


def intake(count: int) -> dict[str, float]:
    """CPU µs a sample: decode and check, window, prediction and calibration in batches of 256."""
    observations = observe(count, seed=5)
    messages = [encode_sample(sample) for sample in as_samples(observations)]
    report = run_cycle(window_of(observations, count).snapshot(), None, CycleOptions("default"), 1.8e12)
    if report.champion is None:
        raise SystemExit(f"the model was refused: {report.verdict}")
    check, window = Intake("default", remembered=count), SampleWindow()
    now_unix_ms = time.time() * 1e3
    began = time.process_time()
    taken = [outcome for message in messages if isinstance(outcome := check.examine(message, now_unix_ms), Taken)]
    checked = time.process_time()
    for one in taken:
        window.add(one.row, one.targets, one.sample.endpoint)
    added = time.process_time()
    calibrator = Calibrator(CalibrationOptions(), report.champion.version, report.champion.model.outputs)
    snapshot = window.snapshot()
    calibrating = time.process_time()
    for start in range(0, len(snapshot), 256):
        observe_rows(calibrator, report.champion, snapshot, start, start + 256)
    done = time.process_time()
    per = 1e6 / count
    return {
        "check_us": (checked - began) * per,
        "window_us": (added - checked) * per,
        "calibrate_us": (done - calibrating) * 1e6 / len(snapshot),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.trainer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed and one scenario, under 50 s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result there as well")
    options = parser.parse_args(arguments)
    names = ["budget-2048"] if options.quick else list(SCENARIOS)
    seeds = [1] if options.quick else [1, 2, 3, 4, 5]
    found = [row for name in names for seed in seeds for row in queueing(name, 14_000, seed)]

    def mean(method: str) -> float:
        return float(np.mean([row["mape"] for row in found if row["method"] == method and row["target"] == "ttft"]))

    result = {
        "training": [
            training(rows, 3 if options.quick else 7)
            for rows in ((1_000, 10_000) if options.quick else (1_000, 10_000, 50_000))
        ],
        "queueing": found,
        "ttft_mape": {"leadtime": mean("leadtime"), "incumbent-six": mean("incumbent-six")},
        "ttft_mape_ratio": mean("leadtime") / mean("incumbent-six"),
        "extrapolation": [extrapolation(count, noise, 1) for count in (100, 2_000) for noise in (0.0, 0.1)],
        "intake": intake(5_000),
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.machine()},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
