"""Both renderings on a real GPU: parity with native XGBoost, latency and rows per second at 100, 1,000 and 10,000 rows.

`prepare FILE` needs Hummingbird and no GPU: it makes a bundle with both renderings by the trainer's own cycle, and puts
it into one file with rows that the model never saw and what native XGBoost says of them. `measure FILE` needs neither
the trainer nor XGBoost: it verifies the bundle as a predictor does, runs both renderings and prints JSON. With `--dry`
the CPU's provider stands in for CUDA: that tries everything but the GPU.

`bench/gpu.sh` sets both up and runs them; this isn't among the benchmarks that run everywhere.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime as ort

from services.predictor.settings import Device, DevicePolicy
from services.predictor.slot import load_on_device
from shared.bundle import BundleGate, BundleRefusedError, pack, seal
from shared.errors import IntegrityError
from shared.features import FloatMatrix
from shared.inference import CPU_PROVIDER, CUDA, Accelerator, BundleModel

POOL: Final = "gpu"
SIZES: Final = (100, 1_000, 10_000)
SECONDS_A_SIZE: Final = 2.0
TOLERANCE: Final = 1e-4
_KEY: Final = b"a key of a benchmark"


def prepare(file: Path) -> None:
    """Make the bundle, its rows and native XGBoost's answers; raises SystemExit without a tensor rendering."""
    from bench import bundles  # noqa: PLC0415 - these need the trainer's libraries
    from services.trainer.cycle import CycleOptions, run_cycle  # noqa: PLC0415
    from services.trainer.tensor import load_hummingbird  # noqa: PLC0415
    from services.trainer.train import fit  # noqa: PLC0415

    snapshot = bundles.snapshot(7_000)
    options = CycleOptions(POOL, tensor=load_hummingbird(1))
    report = run_cycle(snapshot, None, options, time.time() * 1e3)
    # The same samples and seed make the same model.
    model = fit(snapshot, options.fit)
    if report.champion is None or model is None or "tensor" not in report.champion.bundle.graphs:
        raise SystemExit(f"no bundle with both renderings: {report.verdict}, {report.tensor}")
    rows = bundles.rows(1, max(SIZES))[0]
    blob = np.frombuffer(seal(pack(report.champion.bundle), _KEY), np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, bundle=blob, version=np.array(report.champion.version), rows=rows, expected=model.predict(rows))


def measure(file: Path, accelerator: Accelerator) -> dict[str, Any]:
    """Parity, then speed, of both renderings."""
    with np.load(file, allow_pickle=False) as given:
        blob, version = given["bundle"].tobytes(), str(given["version"])
        rows, expected = given["rows"], given["expected"]
    bundle = BundleGate(POOL, _KEY).open(version, blob)
    cpu = BundleModel(bundle)
    device = BundleModel(bundle, rendering="tensor", accelerator=accelerator)
    began_s = time.perf_counter()
    served = load_on_device(bundle, Device.CUDA, DevicePolicy.REQUIRE, 1, 0.0, accelerator=accelerator)
    load_ms = (time.perf_counter() - began_s) * 1e3
    return {
        "provider": device.provider,
        "bundle": {"bytes": len(blob), "outputs": list(cpu.outputs)},
        "parity": {
            "tolerance": TOLERANCE,
            "rows": len(rows),
            "tree_ensemble": _parity(cpu, rows, expected),
            "tensor": _parity(device, rows, expected),
        },
        "speed": [
            {"rows": count, "cpu": _speed(cpu, rows, count), "device": _speed(device, rows, count)} for count in SIZES
        ],
        "load_ms": round(load_ms, 1),
        "crossover_rows": served.crossover_rows,
        "told": served.fallback,
    }


def _parity(model: BundleModel, rows: FloatMatrix, expected: FloatMatrix) -> float:
    worst = 0.0
    for count in (1, 7, len(rows)):
        found = model.predict(rows[:count]).astype(np.float64)
        error = np.abs(found - expected[:count]) / np.maximum(np.abs(expected[:count]), 1e-3)
        worst = max(worst, float(error.max()))
    return worst


def _speed(model: BundleModel, rows: FloatMatrix, count: int) -> dict[str, float]:
    """Wall time of calls one after the other, each on other rows."""
    blocks = [np.ascontiguousarray(rows[start : start + count]) for start in range(0, len(rows) - count + 1, count)]
    for block in blocks[:10]:
        model.predict(block)
    taken_ms: list[float] = []
    end_s = time.perf_counter() + SECONDS_A_SIZE
    while time.perf_counter() < end_s or len(taken_ms) < 10:
        began_s = time.perf_counter()
        model.predict(blocks[len(taken_ms) % len(blocks)])
        taken_ms.append((time.perf_counter() - began_s) * 1e3)
    p50, p99 = np.percentile(taken_ms, [50, 99])
    return {
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "rows_per_s": round(count * len(taken_ms) / (sum(taken_ms) / 1e3)),
        "calls": len(taken_ms),
    }


def gpu_name() -> str | None:
    """The GPU as its driver names it; None without one."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip().splitlines()[0] if asked.stdout.strip() else None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=["prepare", "measure"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--dry", action="store_true", help="the CPU's provider in place of CUDA")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    options = parser.parse_args(arguments)
    if options.step == "prepare":
        prepare(options.file)
        return 0
    result: dict[str, Any] = {
        "state": "dry" if options.dry else "run",
        "gpu": gpu_name(),
        "machine": {
            "python": platform.python_version(),
            "onnxruntime": ort.__version__,
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
        },
    }
    try:
        # ONNX Runtime prints what it misses.
        with contextlib.redirect_stdout(sys.stderr):
            result |= measure(options.file, Accelerator(CPU_PROVIDER) if options.dry else CUDA)
    except (IntegrityError, BundleRefusedError) as error:
        result |= {"state": "not run", "reason": str(error)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    passed = result["state"] != "not run" and max(result["parity"][k] for k in ("tree_ensemble", "tensor")) <= TOLERANCE
    return 0 if passed else 1
