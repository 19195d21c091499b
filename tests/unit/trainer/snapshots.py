"""Snapshots for tests: from simulated observations, or from a formula over a few columns."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from bench.queueing import Observations
from services.trainer.export import Rendered
from services.trainer.window import SampleWindow, Snapshot
from shared.features import SCHEMA, FloatMatrix

NOW = 1_800_000_000_000.0


def window_of(observations: Observations, **options: int) -> SampleWindow:
    """A window that took every observation, in order."""
    window = SampleWindow(**options)
    for i, row in enumerate(observations.rows):
        targets = {"e2e": float(observations.e2e_ms[i])}
        if observations.streamed[i]:
            targets["ttft"] = float(observations.ttft_ms[i])
            if np.isfinite(observations.tpot_ms[i]):
                targets["tpot"] = float(observations.tpot_ms[i])
        window.add(row, targets, f"10.0.0.{observations.pod[i] + 1}:8000")
    return window


def rows_of(count: int, **columns: npt.ArrayLike) -> FloatMatrix:
    """Rows with these columns; float32 (count, F)."""
    return SCHEMA.rows(count, columns)


def snapshot_of(rows: FloatMatrix, **targets: npt.ArrayLike) -> Snapshot:
    """All rows in order of arrival with these targets; the rest is unknown."""
    count = len(rows)
    known: Mapping[str, npt.NDArray[np.float32]] = {
        target: np.asarray(targets.get(target, np.full(count, np.nan)), np.float32)
        for target in ("ttft", "tpot", "e2e")
    }
    return Snapshot(
        rows=rows,
        targets=known,
        sequence=np.arange(1, count + 1),
        sent=np.arange(1, count + 1),
        endpoints=("10.0.0.1:8000",) * count,
        censored_rows=np.zeros((0, len(SCHEMA)), np.float32),
        censored_ms=np.zeros(0, np.float32),
        total=count,
    )


def prompts(tokens: npt.ArrayLike) -> FloatMatrix:
    """Idle endpoint, nothing cached, prompts of these lengths."""
    tokens = np.asarray(tokens, np.float32)
    return rows_of(len(tokens), input_tokens=tokens, uncached_tokens=tokens)


def line_snapshot(
    count: int, seed: int = 1, formula: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]] | None = None
) -> Snapshot:
    """TTFT of 20 + 0.1 × tokens (or a given formula) on prompts of up to 1024 tokens."""
    tokens = np.random.default_rng(seed).integers(1, 1025, size=count).astype(np.float64)
    ttft_ms = formula(tokens) if formula else 20.0 + 0.1 * tokens
    return snapshot_of(prompts(tokens), ttft=ttft_ms)


def runner(rendered: Rendered) -> Callable[[FloatMatrix], FloatMatrix]:
    """What a rendering predicts, without a bundle around it."""
    session = ort.InferenceSession(rendered.model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda rows: session.run(["predictions"], {"features": rows})[0]
