"""A bundle as the trainer makes it, for benchmarks: its own cycle on simulated queueing, judged, exported and checked.

Limits: what the model predicts here is of no account, only what it costs. `rows` are other simulated requests than
those it was fitted on, in random order, all different: repeated rows would train the branch predictor and flatter the
trees.
"""

import os
import time
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np

from bench.queueing import H100_70B, Scenario, observe
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.export import BoosterToGraph
from services.trainer.window import SampleWindow, Snapshot
from shared.bundle import Bundle
from shared.features import FloatMatrix
from shared.inference import BundleModel

FITTED_REQUESTS: Final = 3_000
_SEED: Final = 7
_SCENARIO: Final = Scenario(pods=(H100_70B,) * 4, requests_per_s=20.0)


def snapshot(requests: int) -> Snapshot:
    """A window of so many simulated requests, all kept."""
    observations = observe(requests, seed=_SEED, scenario=_SCENARIO)
    window = SampleWindow(bin_rows=requests)
    for i, row in enumerate(observations.rows):
        targets = {"ttft": observations.ttft_ms[i], "tpot": observations.tpot_ms[i], "e2e": observations.e2e_ms[i]}
        known = {name: float(value) for name, value in targets.items() if np.isfinite(value)}
        window.add(row, known, f"10.0.0.{observations.pod[i] + 1}:8000")
    return window.snapshot()


def build(
    pool: str, *, requests: int = FITTED_REQUESTS, tensor: BoosterToGraph | None = None
) -> tuple[Bundle, dict[str, Any]]:
    """The bundle of so many requests and what to say of it; `tensor` makes the tensor rendering as well."""
    report = run_cycle(snapshot(requests), None, CycleOptions(pool, tensor=tensor), time.time() * 1e3)
    if report.champion is None:
        raise RuntimeError(f"the trainer made no bundle: {report.verdict}")
    bundle = report.champion.bundle
    manifest = bundle.manifest
    described = {
        "outputs": manifest.outputs,
        "bytes": len(bundle.graphs["tree_ensemble"]),
        "window_samples": manifest.window_samples,
        "fit_cpu_ms": round(report.cpu_ms, 1),
    }
    return bundle, described


def rows(blocks: int, count: int) -> list[FloatMatrix]:
    """`blocks` arrays float32 (count, F) of requests the model never saw."""
    observed = observe(blocks * count, seed=_SEED + 1, scenario=_SCENARIO).rows
    shuffled = np.random.default_rng(_SEED).permutation(observed)
    return [np.ascontiguousarray(shuffled[i * count : (i + 1) * count]) for i in range(blocks)]


def model_us(bundle: Bundle, blocks: list[FloatMatrix], calls: int = 2_000) -> float:
    """CPU microseconds of one model run on one block, without HTTP."""
    model = BundleModel(bundle)
    started_s = time.process_time()
    for i in range(calls):
        model.predict(blocks[i % len(blocks)])
    return round((time.process_time() - started_s) / calls * 1e6, 1)
