"""What the latency model must reach, against what `bench/model.py` measured: one entry per mark. Pure.

`worst` is the figure furthest from its mark, `where` the cell, run or bin it is of, `limit` what it must not pass (of a
share that has to lie between two, its distance from the middle), `missed` how many of `of` pass it. A quick run has
few of the cells. Ratios are as in the result: 0.05 is 5 %. Marks without figures are left out, as of extrapolation
without the public data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

BIAS_TO_TWICE: Final = 0.05
BIAS_BEYOND: Final = 0.08
IN_RANGE_MAPE_OVER_XGBOOST: Final = 0.003
MAPE_OF_SIX: Final = 0.55
MAPE_OF_THIRTEEN: Final = 0.8
BACKLOG_BIAS: Final = 0.10
BACKLOG_BIAS_MIXED: Final = 0.15
COVERAGE: Final = 0.90
COVERAGE_WITHIN: Final = 0.02
BIN_COVERAGE_WITHIN: Final = 0.05
BIN_ROWS: Final = 400
LABELS_TO_RECOVER: Final = 400
CYCLE_ROWS: Final = 13_000
CYCLE_CPU_MS: Final = 1_000
PARITY: Final = 1e-4
RSS_GROWTH: Final = 0.05
ROUNDING: Final = 1e-9
# What the product has: it sees no first tokens.
LEDGER: Final = "timer+scrape"

Figures = Iterable[tuple[str, float]]


def marks(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries {mark, worst, where, limit, missed, of, met} of the sections that there are."""
    extrapolation = _cells(result.get("extrapolation", []))
    queueing = result.get("queueing", [])
    ours = [row for row in queueing if row["method"] == "leadtime" and row["ledger"] == LEDGER]
    steps = [row for row in result.get("drift", []) if row["kind"] == "step"]
    export = result.get("export")
    found = [
        _mark("prefill: |median bias| up to twice the range", BIAS_TO_TWICE, _prefill_bias(extrapolation, "1-2x")),
        _mark("prefill: |median bias| beyond twice the range", BIAS_BEYOND, _prefill_bias(extrapolation, ">2x")),
        _mark(
            "in range: MAPE above XGBoost's",
            IN_RANGE_MAPE_OVER_XGBOOST,
            _over_xgboost(extrapolation, "mape", _in_range),
        ),
        _mark("decode: MAPE above XGBoost's", 0.0, _over_xgboost(extrapolation, "mape", _decode_beyond)),
        _mark("decode: |median bias| above XGBoost's", 0.0, _over_xgboost(extrapolation, "bias", _decode_beyond)),
        _mark("queueing: MAPE of the six features'", MAPE_OF_SIX, _shares(queueing, ours, "incumbent-six")),
        _mark("queueing: MAPE of the thirteen's", MAPE_OF_THIRTEEN, _shares(queueing, ours, "incumbent-thirteen")),
        _mark("queueing: |bias| beyond twice the backlog", BACKLOG_BIAS, _backlog_bias(ours, mixed=False)),
        _mark("queueing: |bias| beyond twice the backlog, mixed", BACKLOG_BIAS_MIXED, _backlog_bias(ours, mixed=True)),
        _mark("queueing: P90 coverage from 90 %", COVERAGE_WITHIN, _coverage(ours, "p90_coverage")),
        _mark("queueing: P90 coverage of a bin from 90 %", BIN_COVERAGE_WITHIN, _bin_coverage(ours, "coverage_by_bin")),
        _mark("after a step: P90 coverage from 90 %", COVERAGE_WITHIN, _coverage(steps, "p90_coverage_after")),
        _mark(
            "after a step: P90 coverage of a bin from 90 %", BIN_COVERAGE_WITHIN, _bin_coverage(steps, "coverage_after")
        ),
        _mark(
            "labels to recover from a step",
            LABELS_TO_RECOVER,
            (
                (f"seed {row['seed']}", np.inf if row["labels_to_recover"] is None else row["labels_to_recover"])
                for row in steps
            ),
        ),
        _mark(
            "a cycle: CPU ms",
            CYCLE_CPU_MS,
            ((f"{row['rows']} rows", row["cpu_ms"]) for row in result.get("training", []) if row["rows"] == CYCLE_ROWS),
        ),
    ]
    if export is not None:
        found += [
            _mark("export: parity", PARITY, [("tree ensemble", export["parity_max_rel"])]),
            _mark("reloads: growth of resident memory", RSS_GROWTH, [(f"{export['reloads']}", export["rss_growth"])]),
            _mark("reloads: failed predictions", 0, [(f"{export['reloads']}", export["failed"])]),
        ]
    return [entry for entry in found if entry["of"]]


def line(mark: Mapping[str, Any]) -> str:
    """One entry for people."""
    verdict = "met" if mark["met"] else f"MISSED in {mark['missed']} of {mark['of']}"
    worst = "never" if mark["worst"] is None else f"{mark['worst']:.4g}"
    return f"{mark['mark']}: {worst} ({mark['where']}), at most {mark['limit']:.4g}: {verdict}"


def _mark(name: str, limit: float, figures: Figures) -> dict[str, Any]:
    known = list(figures)
    where, worst = max(known, key=lambda figure: figure[1], default=("", 0.0))
    missed = sum(bool(value > limit + ROUNDING) for _, value in known)
    # JSON has no infinity.
    worst_known = None if np.isinf(worst) else float(worst)
    return {
        "mark": name, "worst": worst_known, "where": where, "limit": limit, "missed": missed, "of": len(known),
        "met": missed == 0,
    }  # fmt: skip


Cells = dict[tuple[str, str, str], dict[str, Mapping[str, Any]]]


def _cells(rows: Sequence[Mapping[str, Any]]) -> Cells:
    """(machine, split, beyond) → method → row."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault((row["machine"], row["split"], row["beyond"]), {})[row["method"]] = row
    return cells


def _prefill_bias(cells: Cells, beyond: str) -> Iterator[tuple[str, float]]:
    for key, methods in cells.items():
        if key[1].startswith("prefill") and key[2] == beyond:
            yield " ".join(key), abs(methods["leadtime"]["bias"])


def _in_range(_: str, beyond: str) -> bool:
    return beyond == "in"


def _decode_beyond(split: str, beyond: str) -> bool:
    return split.startswith("decode") and beyond != "in"


def _over_xgboost(cells: Cells, figure: str, asked: Callable[[str, str], bool]) -> Iterator[tuple[str, float]]:
    for key, methods in cells.items():
        if asked(*key[1:]):
            yield " ".join(key), abs(methods["leadtime"][figure]) - abs(methods["xgboost"][figure])


def _shares(
    rows: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], method: str
) -> Iterator[tuple[str, float]]:
    """Per scenario our error by theirs, both means over the seeds that both have."""
    theirs = {(row["scenario"], row["seed"]): row["mape"] for row in rows if row["method"] == method}
    for scenario in dict.fromkeys(row["scenario"] for row in ours):
        pairs = [
            (row["mape"], theirs[scenario, row["seed"]])
            for row in ours
            if row["scenario"] == scenario and (scenario, row["seed"]) in theirs
        ]
        if pairs:
            own, other = np.mean(pairs, axis=0)
            yield scenario, float(own / other)


def _backlog_bias(ours: Sequence[Mapping[str, Any]], *, mixed: bool) -> Iterator[tuple[str, float]]:
    """Per scenario, mean of the seeds."""
    for scenario in dict.fromkeys(row["scenario"] for row in ours):
        biases = [
            row["bias_beyond_2x"]
            for row in ours
            if row["scenario"] == scenario and row.get("bias_beyond_2x") is not None
        ]
        if biases and scenario.startswith("mixed") == mixed:
            yield scenario, abs(float(np.mean(biases)))


def _coverage(rows: Sequence[Mapping[str, Any]], key: str) -> Iterator[tuple[str, float]]:
    for row in rows:
        yield _run(row), abs(row[key] - COVERAGE)


def _bin_coverage(rows: Sequence[Mapping[str, Any]], key: str) -> Iterator[tuple[str, float]]:
    for row in rows:
        for name, found in row[key].items():
            if found["rows"] >= BIN_ROWS:
                yield f"{_run(row)} {name}", abs(found["p90"] - COVERAGE)


def _run(row: Mapping[str, Any]) -> str:
    return f"{row.get('scenario') or row['kind']} seed {row['seed']}"
