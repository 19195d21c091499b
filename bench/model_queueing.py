"""`bench/model.py`, section `queueing`: TTFT as predicted at dispatch, against what came, on simulated pods that queue.

Every method predicts each request of a recording before it is learned from; the first half of a recording trains, the
second half is judged. Ours runs the trainer's window, cycle and calibration and the router's ledger (`watching.py`)
with each of three ledgers; the incumbent's two are fed as it feeds them (`incumbent.py`; ledger `own`).

Beside the agreed keys: median bias, P50 and P99 coverage, all by backlog bin (edges of the calibration) too, and the
bias of a model that was fitted on rows of the lower 80 % of backlogs, on those up to twice and beyond twice its range:
that one is frozen, without online corrections. Seeds 1 to 5 are the report's; choices were made on seeds 11 to 18.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.incumbent import Method, features, fit_and_predict, predictions
from bench.recording import SCENARIOS, Recording, Scenario, record
from bench.watching import FIT_INTERVAL_MS, LEDGERS, VirtualTrainer, Watched, watch
from services.trainer.basis import backlog_tokens
from services.trainer.calibrate import CalibrationOptions
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.window import SampleWindow

REQUESTS: Final = 5_000
QUICK_REQUESTS: Final = 3_000
QUICK_SCENARIO: Final = "multi-turn-2048"
SEEDS: Final = (1, 2, 3, 4, 5)
INCUMBENTS: Final[tuple[Method, ...]] = ("incumbent-six", "incumbent-thirteen")
EDGES: Final = CalibrationOptions().backlog_edges_tokens
BIN_NAMES: Final = tuple(f"{low:g}-{high:g}" for low, high in zip((0.0, *EDGES), (*EDGES, float("inf")), strict=True))
# A frozen model is fitted on backlogs up to this quantile of the first part's.
TRAINED_QUANTILE: Final = 0.8
BEYOND: Final = 2.0

Floats = npt.NDArray[Any]


def queueing(quick: bool) -> list[dict[str, Any]]:
    """One entry per scenario, seed, method and ledger."""
    if quick:
        return list(rows_of(SCENARIOS[QUICK_SCENARIO], 1, QUICK_REQUESTS))
    return [row for scenario in SCENARIOS.values() for seed in SEEDS for row in rows_of(scenario, seed, REQUESTS)]


def rows_of(scenario: Scenario, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """All methods on one recording."""
    recording = record(scenario, count, seed)
    judged = judged_requests(recording)
    exact: Watched | None = None
    for ledger in LEDGERS:
        watched = watch(recording, ledger, VirtualTrainer(CycleOptions("pool")))
        exact = exact or watched
        backlog = backlog_tokens(watched.rows)
        yield {
            **_key(scenario, seed, "leadtime", ledger),
            **errors(recording.ttft_ms, watched.column("ttft_p50"), judged),
            **coverage(recording.ttft_ms, watched, backlog, judged),
            **_beyond(recording, watched),
        }
    if exact is None:
        return
    backlog = backlog_tokens(exact.rows)
    for method in INCUMBENTS:
        predicted = predictions(recording, method, FIT_INTERVAL_MS, float(recording.dispatched_ms[count // 2]))
        yield {
            **_key(scenario, seed, method, "own"),
            **errors(recording.ttft_ms, predicted, judged),
            "p90_coverage": None,
            "coverage_by_bin": {
                name: {"rows": int(mask.sum()), "bias": bias(recording.ttft_ms, predicted, mask)}
                for name, mask in by_bin(backlog, judged)
            },
            **_incumbent_beyond(recording, method, backlog),
        }


def judged_requests(recording: Recording) -> npt.NDArray[np.bool_]:
    """The second half, but for those that were aborted."""
    later = np.arange(len(recording)) >= len(recording) // 2
    return np.asarray(later & ~recording.aborted & np.isfinite(recording.ttft_ms), np.bool_)


def errors(actual: Floats, predicted: Floats, judged: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """MAPE, 90th percentile of the absolute relative error, median signed relative error; all as ratios."""
    relative = predicted[judged] / actual[judged] - 1.0
    return {
        "rows": int(judged.sum()),
        "mape": float(np.abs(relative).mean()),
        "p90_ape": float(np.quantile(np.abs(relative), 0.9)),
        "bias": float(np.median(relative)),
    }


def coverage(actual: Floats, watched: Watched, backlog: Floats, judged: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Which share of the answers came within each predicted quantile, overall and by backlog bin."""
    covered = {level: actual <= watched.column(f"ttft_{level}") for level in ("p50", "p90", "p99")}
    return {
        **{f"{level}_coverage": float(inside[judged].mean()) for level, inside in covered.items()},
        "coverage_by_bin": {
            name: {
                "rows": int(mask.sum()),
                **{level: float(inside[mask].mean()) for level, inside in covered.items()},
                "bias": bias(actual, watched.column("ttft_p50"), mask),
            }
            for name, mask in by_bin(backlog, judged)
        },
    }


def by_bin(backlog: Floats, judged: npt.NDArray[np.bool_]) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """The judged rows of each backlog bin that has any."""
    bins = np.searchsorted(EDGES, backlog, side="right")
    for number, name in enumerate(BIN_NAMES):
        mask = judged & (bins == number)
        if mask.any():
            yield name, mask


def bias(actual: Floats, predicted: Floats, mask: npt.NDArray[np.bool_]) -> float | None:
    """Median signed relative error; None without rows."""
    return float(np.median(predicted[mask] / actual[mask] - 1.0)) if mask.any() else None


def _key(scenario: Scenario, seed: int, method: str, ledger: str) -> dict[str, Any]:
    return {"scenario": scenario.name, "seed": seed, "method": method, "ledger": ledger}


# --- beyond the trained backlog ---------------------------------------------------------------------------------


def _split(recording: Recording, backlog: Floats) -> tuple[Floats, dict[str, Floats]]:
    """Positions to fit on, and those to judge by how far they lie beyond the trained backlog."""
    answered = ~recording.aborted & np.isfinite(recording.ttft_ms)
    early = answered & (np.arange(len(recording)) < len(recording) // 2)
    limit = float(np.quantile(backlog[early], TRAINED_QUANTILE))
    trained = np.flatnonzero(early & (backlog <= limit))
    return trained, {
        "1_2x": answered & (backlog > limit) & (backlog <= BEYOND * limit),
        "beyond_2x": answered & (backlog > BEYOND * limit),
    }


def _beyond(recording: Recording, watched: Watched) -> dict[str, Any]:
    trained, judged = _split(recording, backlog_tokens(watched.rows))
    window = SampleWindow(bin_rows=len(trained))
    ttft = recording.ttft_ms
    for i in trained.tolist():
        window.add(watched.rows[i], {"ttft": float(ttft[i])}, "")
    report = run_cycle(window.snapshot(), None, CycleOptions("pool"), 1.0)
    if report.champion is None:
        raise SystemExit(f"{recording.scenario.name}: a model of short backlogs was refused: {report.verdict}")
    predicted = report.champion.model.predict(watched.rows)[:, 0]
    return _biases(ttft, predicted, judged)


def _incumbent_beyond(recording: Recording, method: Method, backlog: Floats) -> dict[str, Any]:
    trained, judged = _split(recording, backlog)
    rows = features(recording)[INCUMBENTS.index(method)]
    return _biases(recording.ttft_ms, fit_and_predict(rows, recording.ttft_ms, trained, method), judged)


def _biases(actual: Floats, predicted: Floats, judged: Mapping[str, Floats]) -> dict[str, Any]:
    return {
        **{f"bias_{name}": bias(actual, predicted, mask) for name, mask in judged.items()},
        **{f"rows_{name}": int(mask.sum()) for name, mask in judged.items()},
    }


# --- the marks --------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per scenario, method and ledger: mean and spread (standard deviation) over the seeds."""
    found = []
    for scenario, method, ledger in dict.fromkeys((r["scenario"], r["method"], r["ledger"]) for r in rows):
        chosen = [r for r in rows if (r["scenario"], r["method"], r["ledger"]) == (scenario, method, ledger)]
        entry: dict[str, Any] = {"scenario": scenario, "method": method, "ledger": ledger, "seeds": len(chosen)}
        for key in ("mape", "p90_ape", "bias", "p90_coverage", "bias_1_2x", "bias_beyond_2x"):
            values = [r[key] for r in chosen if r.get(key) is not None]
            if values:
                entry[key] = {"mean": float(np.mean(values)), "spread": float(np.std(values))}
        found.append(entry)
    return found
