"""The fit beyond what it was trained on, what its choices rest on, and what a training cycle costs: three sections.

`extrapolation`: prefill and decode steps of real machines (`bench/kernels.py`) with 3 % of noise. Trained on prompts
of up to 1,024 or 2,048 new tokens (half of them after a cached prefix), or on batches of up to 64; asked in range, up
to twice the range and beyond. `leadtime` is the trainer's own fit (`services.trainer.train.fit`, default options) on a
window of 10,000 rows; `xgboost` has the same rows and a log target; `linear` is least squares on the new and the cached
tokens, or on the batch and its context. `bias` is the median of predicted/actual − 1, `mape` the mean of its absolute
value.

`training`: one whole cycle (fit, gate against a champion, export, parity, warming of the calibration) in a process of
its own: CPU of the process, its largest resident memory, and what it had before the cycle.

Hyperparameters (hinges, their growth, trees, leaves) were chosen on prompts of up to 768, 896, 1,280, 1,536, 1,792,
2,560 and 3,072 tokens and batches of up to 48, 96 and 128 of the same machines, and on recordings of the queueing
simulation (seeds 11 to 18): on none of the splits here. But the machines are the same. So `selection` asks for growth
and reach anew on `SELECTION_EDGES`, each machine left out once: a cost is the mean |bias| in units of the mark (5 % up
to twice the range, 8 % beyond), here of the other machines of its generation, with the pair in use and with their best.
`left_out_cost` is what that pair costs the machine that had no say in it, `left_out_cost_alike` what it is with the
growth of unknown hardware.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from bench.kernels import MACHINES, Kernels
from bench.queueing import observe
from services.trainer.basis import GROWTH, growth_of
from services.trainer.train import FitOptions, fit
from services.trainer.window import Snapshot
from shared.features import SCHEMA, FloatMatrix, hardware_code
from shared.prediction import TARGETS

Floats = npt.NDArray[np.float64]

NOISE: Final = 0.03
TRAIN_ROWS: Final = 10_000
TEST_ROWS: Final = 1_000
LONGEST_PROMPT: Final = 8192
LARGEST_BATCH: Final = 256
SPLITS: Final = (("prefill", 1024), ("prefill", 2048), ("decode", 64))
QUICK_MACHINES: Final = ("h100-8b", "a100-70b-tp4")
SELECTION_EDGES: Final = (768, 1280, 1792, 2560, 3072)
SELECTION_SEED: Final = 21
QUICK_SELECTION: Final = ("h100-8b", "h100-70b-tp4")
GENERATIONS: Final[Mapping[str, str]] = MappingProxyType({"a100": "ampere", "h100": "hopper", "h200": "hopper"})
GROWTHS: Final = (0.0, 0.01, 0.02, 0.03, 0.04)
REACH_FACTORS: Final = (1.2, 1.4, 2.0)
MARKS: Final = {"1-2x": 0.05, ">2x": 0.08}
XGBOOST: Final = {
    "objective": "reg:squarederror", "tree_method": "hist", "max_depth": 4, "eta": 0.1, "max_bin": 64,
    "min_child_weight": 5, "seed": 1, "nthread": 1,
}  # fmt: skip
XGBOOST_ROUNDS: Final = 100
_MEASURE: Final = "import sys; from bench.model_extrapolation import measure_cycle; measure_cycle(sys.argv[1])"


def data_folder() -> Path:
    """Where the public data lies: `LEADTIME_DATA`, by default beside the checkout."""
    return Path(os.environ.get("LEADTIME_DATA") or "../shared/data")


def extrapolation(quick: bool, folder: Path | None = None) -> list[dict[str, Any]]:
    """Rows {machine, split, beyond, method, bias, mape}; empty without the public data."""
    kernels_folder = (folder or data_folder()) / "kernels"
    if not kernels_folder.is_dir():
        return []
    kernels = Kernels(kernels_folder)
    seeds = (1,) if quick else (1, 2, 3, 4, 5)
    found = []
    for machine in QUICK_MACHINES if quick else tuple(MACHINES):
        for kind, edge in SPLITS:
            runs = [_cell(kernels, machine, kind, edge, seed) for seed in seeds]
            found += [
                {
                    "machine": machine,
                    "split": f"{kind}<={edge}",
                    "beyond": beyond,
                    "method": method,
                    "bias": float(np.mean([run[beyond, method][0] for run in runs])),
                    "mape": float(np.mean([run[beyond, method][1] for run in runs])),
                }
                for beyond, method in runs[0]
            ]
    return found


def selection(quick: bool, folder: Path | None = None) -> list[dict[str, Any]]:
    """Rows {left_out, cost_in_use, best_growth, best_reach_factor, best_cost, left_out_cost, left_out_cost_alike}.

    Empty without the public data.
    """
    kernels_folder = (folder or data_folder()) / "kernels"
    if not kernels_folder.is_dir():
        return []
    kernels = Kernels(kernels_folder)
    reach_in_use = FitOptions().reach_factor
    machines = QUICK_SELECTION if quick else tuple(MACHINES)
    edges = SELECTION_EDGES[1:2] if quick else SELECTION_EDGES
    pairs = [(growth, reach) for growth in GROWTHS for reach in ((reach_in_use,) if quick else REACH_FACTORS)]
    costs = {
        pair: {
            machine: _cost(kernels, machine, edges, FitOptions(growth=pair[0], reach_factor=pair[1]))
            for machine in machines
        }
        for pair in pairs
    }
    found = []
    for left_out in machines:
        akin = [other for other in machines if other != left_out and _generation(other) == _generation(left_out)]

        def without(pair: tuple[float, float], akin: Sequence[str] = akin) -> float:
            return float(np.mean([costs[pair][machine] for machine in akin]))

        best = min(pairs, key=without)
        found.append(
            {
                "left_out": left_out,
                "cost_in_use": without((growth_of(_class_of(left_out)), reach_in_use)),
                "best_growth": best[0],
                "best_reach_factor": best[1],
                "best_cost": without(best),
                "left_out_cost": costs[best][left_out],
                "left_out_cost_alike": costs[GROWTH, reach_in_use][left_out],
            }
        )
    return found


def _generation(machine: str) -> str:
    return GENERATIONS[MACHINES[machine][0]]


def _cost(kernels: Kernels, machine: str, edges: Sequence[int], options: FitOptions) -> float:
    """Mean |bias| beyond the trained range in units of its mark, over splits at these edges."""
    cells = [_cell(kernels, machine, "prefill", edge, SELECTION_SEED, options) for edge in edges]
    return float(
        np.mean(
            [abs(bias) / MARKS[beyond] for cell in cells for (beyond, _), (bias, _) in cell.items() if beyond in MARKS]
        )
    )


def _cell(
    kernels: Kernels, machine: str, kind: str, edge: int, seed: int, ours_alone: FitOptions | None = None
) -> dict[tuple[str, str], tuple[float, float]]:
    """(beyond, method) → bias, mape of one machine, split and seed; with options of ours, of that alone."""
    rng = np.random.default_rng((seed, edge, list(MACHINES).index(machine)))
    draw = _prefills if kind == "prefill" else _decodes
    most = LONGEST_PROMPT if kind == "prefill" else LARGEST_BATCH
    rows, size, linear_columns, actual_ms = draw(
        kernels, machine, rng, TRAIN_ROWS, 16 if kind == "prefill" else 1, edge
    )
    target = "ttft" if kind == "prefill" else "tpot"
    methods = {"leadtime": _leadtime(target, rows, actual_ms, ours_alone or FitOptions())}
    if ours_alone is None:
        methods |= {"xgboost": _xgboost(rows, actual_ms), "linear": _linear(linear_columns, actual_ms)}
    errors = {}
    for beyond, low, high in (("in", int(size.min()), edge), ("1-2x", edge + 1, 2 * edge), (">2x", 2 * edge + 1, most)):
        rows, _, linear_columns, actual_ms = draw(kernels, machine, rng, TEST_ROWS, low, high)
        for method, predict in methods.items():
            relative = predict(linear_columns if method == "linear" else rows) / actual_ms - 1.0
            errors[beyond, method] = float(np.median(relative)), float(np.abs(relative).mean())
    return errors


def _prefills(
    kernels: Kernels, machine: str, rng: np.random.Generator, count: int, low: int, high: int
) -> tuple[FloatMatrix, Floats, Floats, Floats]:
    """Feature rows, new tokens, columns for `linear`, milliseconds."""
    new = _log_uniform(rng, count, low, high)
    cached = np.where(rng.random(count) < 0.5, 0.0, _log_uniform(rng, count, 64, 8192))
    rows = SCHEMA.rows(
        count, {"input_tokens": new + cached, "uncached_tokens": new, "hardware_class": _class_of(machine)}
    )
    return rows, new, np.stack([new, cached], axis=1), _noisy(kernels.prefill_ms(machine, new, cached), rng)


def _decodes(
    kernels: Kernels, machine: str, rng: np.random.Generator, count: int, low: int, high: int
) -> tuple[FloatMatrix, Floats, Floats, Floats]:
    """Feature rows, batch, columns for `linear`, milliseconds. The request itself is one of the batch."""
    batch = _log_uniform(rng, count, low, high)
    most = np.minimum(4096.0, kernels.longest_context(machine, batch))
    context = np.floor(np.exp(rng.uniform(np.log(128.0), np.log(most))))
    rows = SCHEMA.rows(
        count,
        {
            "input_tokens": context,
            "decoding_requests": batch - 1,
            "decode_context_tokens": (batch - 1) * context,
            "hardware_class": _class_of(machine),
        },
    )
    columns = np.stack([batch, batch * context], axis=1)
    return rows, batch, columns, _noisy(kernels.decode_ms(machine, batch, context), rng)


def _class_of(machine: str) -> int:
    return hardware_code(MACHINES[machine][0])


def _log_uniform(rng: np.random.Generator, count: int, low: int, high: int) -> Floats:
    return np.clip(np.floor(np.exp(rng.uniform(np.log(low), np.log(high + 1), count))), low, high)


def _noisy(milliseconds: Floats, rng: np.random.Generator) -> Floats:
    return np.asarray(milliseconds * np.exp(rng.normal(0.0, NOISE, len(milliseconds))))


def snapshot_of(rows: FloatMatrix, **targets_ms: npt.ArrayLike) -> Snapshot:
    """Rows in order of arrival with these targets, as a window would hand them to the trainer."""
    count = len(rows)
    return Snapshot(
        rows=rows,
        targets={target: np.asarray(targets_ms.get(target, np.full(count, np.nan)), np.float32) for target in TARGETS},
        sequence=np.arange(1, count + 1),
        sent=np.arange(1, count + 1),
        endpoints=("10.0.0.1:8000",) * count,
        censored_rows=np.zeros((0, len(SCHEMA)), np.float32),
        censored_ms=np.zeros(0, np.float32),
        total=count,
    )


def _leadtime(target: str, rows: FloatMatrix, actual_ms: Floats, options: FitOptions) -> Callable[[Any], Any]:
    model = fit(snapshot_of(rows, **{target: actual_ms}), options)
    if model is None:
        raise ValueError(f"the trainer made no model of {len(rows)} rows")
    column = model.outputs.index(f"{target}_p50")
    return lambda asked: model.predict(asked)[:, column]


def _xgboost(rows: FloatMatrix, actual_ms: Floats) -> Callable[[Any], Any]:
    data = xgb.QuantileDMatrix(rows, label=np.log(actual_ms), max_bin=64, nthread=1)
    booster = xgb.train(XGBOOST, data, XGBOOST_ROUNDS)
    return lambda asked: np.exp(booster.inplace_predict(asked))


def _linear(columns: Floats, actual_ms: Floats) -> Callable[[Any], Any]:
    def with_one(values: Floats) -> Floats:
        return np.column_stack([np.ones(len(values)), values])

    coefficients, *_ = np.linalg.lstsq(with_one(columns), actual_ms, rcond=None)
    return lambda asked: with_one(asked) @ coefficients


def training(quick: bool) -> list[dict[str, Any]]:
    """Rows {rows, cpu_ms, rss_mb, rss_before_mb}, each from a process of its own."""
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 13_000, 100_000)
    observed = observe(max(sizes), seed=1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count in sizes:
            file = Path(folder) / f"{count}.npz"
            np.savez(
                file,
                rows=observed.rows[:count],
                ttft=observed.ttft_ms[:count],
                tpot=observed.tpot_ms[:count],
                e2e=observed.e2e_ms[:count],
            )
            # This interpreter and this repository's module; the file is ours.
            ran = subprocess.run(
                [sys.executable, "-c", _MEASURE, str(file)], check=True, capture_output=True, text=True
            )
            found.append(json.loads(ran.stdout))
    return found


def measure_cycle(file: str) -> None:
    """Run a cycle on the rows of an .npz file against a champion of the same rows; print one JSON object."""
    # Imported where they are needed: the parent measures none of it.
    import time  # noqa: PLC0415

    from services.trainer.cycle import CycleOptions, run_cycle  # noqa: PLC0415

    with np.load(file) as stored:
        snapshot = snapshot_of(stored["rows"], ttft=stored["ttft"], tpot=stored["tpot"], e2e=stored["e2e"])
    options = CycleOptions("default")
    few = snapshot_of(snapshot.rows[:500], **{target: snapshot.targets[target][:500] for target in TARGETS})
    champion = run_cycle(few, None, options, 1.8e12).champion
    before_mb = _memory_mb("VmRSS")
    began = time.process_time()
    report = run_cycle(snapshot, champion, options, 1.8e12 + 1)
    cpu_ms = (time.process_time() - began) * 1e3
    if report.parity is None:
        raise ValueError(f"the cycle of {len(snapshot)} rows was refused: {report.verdict}")
    # Not ru_maxrss, which begins with what the parent had when it forked.
    peak_mb = _memory_mb("VmHWM")
    sys.stdout.write(
        json.dumps({"rows": len(snapshot), "cpu_ms": cpu_ms, "rss_mb": peak_mb, "rss_before_mb": before_mb})
    )


def _memory_mb(field: str) -> float:
    """A size from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")
