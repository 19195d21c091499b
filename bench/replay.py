"""Policies against each other in virtual time: six workloads, four loads, a pool of equal pods and a mixed one.

`runs[]` has one object a run: trace, load, hardware, policy, seed, ttft_p50_ms, ttft_p90_ms, ttft_p99_ms, tpot_p90_ms,
e2e_mean_ms, e2e_p50_ms, goodput, prefix_hit_ratio; and what `sim.replay.measure` says beside. `summary` compares
`leadtime` with the others by the marks of this benchmark and names each one that is missed. Every learned policy starts
cold inside its run and sees what a router sees; the first fifth is left out. SLO: TTFT 1 s × max(1, prompt/4096), TPOT
40 ms. 100 % load: what a pool carries under `load-prefix` (`sim.replay.measure`).

`--quick` is a named subset on made traces (15 s). `--full` runs every cell and appends each to `results/replay.jsonl`
as it ends: started again, it goes on where it stopped. `--trace`, `--load`, `--hardware`, `--policy` and `--seed`
narrow it. `--summary` reads what is there. Public traces lie in LEADTIME_DATA (default ../shared/data).
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sim.replay.cluster import RunOptions, SloRule, run
from sim.replay.measure import capacity, cold_start, figures, guess, pool_capacity
from sim.replay.policies import policy
from sim.replay.pool import PodSpec, describe, parse_hardware
from sim.replay.trace import Trace, load_trace

RESULTS: Final = Path(__file__).parent / "results" / "replay.jsonl"
SLO: Final = SloRule(1000.0, 40.0, 4096)
EQUAL: Final = "h100-8b:8"
MIXED: Final = "h100-8b:4,a100-8b:4"
POOLS: Final = (EQUAL, MIXED)
LOADS: Final = (0.85, 0.95, 0.7, 0.5)
SEEDS: Final = (1, 2, 3)
# Requests a run: so many that the first fifth outlasts a first model, whose first labels come with the first answers.
REQUESTS: Final[Mapping[str, int]] = {
    "mooncake": 4_000,
    "azure": 12_000,
    "A": 8_000,
    "B": 4_000,
    "C": 4_000,
    "D": 3_000,
}
UNLEARNED: Final = ("token-load", "lmetric", "load-prefix", "least-request", "round-robin", "random")
LEARNED: Final = ("leadtime", "predicted-latency", "predicted-latency-slo")
POLICIES: Final = (*UNLEARNED[:3], *LEARNED, "oracle", *UNLEARNED[3:])
INCUMBENT: Final = ("predicted-latency", "predicted-latency-slo")
METRICS: Final = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p90_ms", "e2e_mean_ms", "e2e_p50_ms")
QUICK_CAPACITY: Final[Mapping[str, float]] = {"A": 22.0, "D": 2.5}
QUICK_POOL: Final = "h100-8b:2,a100-8b:2"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to be made."""

    trace: str
    load: float
    hardware: str
    policy: str
    seed: int

    @property
    def key(self) -> tuple[str, float, str, str, int]:
        return (self.trace, self.load, self.hardware, self.policy, self.seed)


def data_folder() -> Path:
    """Where the public traces lie."""
    return Path(os.environ.get("LEADTIME_DATA", "../shared/data"))


def play(cell: Cell, rate_per_s: float, requests: int) -> dict[str, Any]:
    """One run as a row."""
    trace = load_trace(cell.trace, cell.seed, requests, data_folder()).at_rate(cell.load * rate_per_s)
    pods = parse_hardware(cell.hardware)
    began_s = time.process_time()
    result = run(trace, pods, policy(cell.policy), RunOptions(seed=cell.seed, slo=SLO))
    cpu_s = time.process_time() - began_s
    if result.ledger_left or result.ledger_faults or result.faults:
        raise RuntimeError(f"{cell}: {result.ledger_left} entries left, {result.ledger_faults}, {result.faults} faults")
    return {
        "trace": cell.trace,
        "load": cell.load,
        "hardware": cell.hardware,
        "policy": cell.policy,
        "seed": cell.seed,
        "rate_per_s": cell.load * rate_per_s,
        **figures(result),
        "cold_start": cold_start(result),
        "fits": result.fits,
        "fits_refused": result.fits_refused,
        "fit_cpu_s": result.fit_cpu_ms / 1e3,
        "first_bundle_s": None if result.first_bundle_ms is None else result.first_bundle_ms / 1e3,
        "virtual_s": result.virtual_ms / 1e3,
        "cpu_s": cpu_s,
        "requests_per_cpu_minute": requests / cpu_s * 60.0,
    }


# --- the full run -----------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a results file; a last line that was cut off by an interruption is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row; one that an interruption cut off is left standing on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.is_file() or not (text := path.read_text()) or text.endswith("\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def capacities(path: Path, wanted: Sequence[str]) -> dict[tuple[str, str], float]:
    """Capacity by workload and pool; those of one kind of pod are measured where the file hasn't got them."""
    known: dict[tuple[str, str], float] = {
        (row["trace"], row["hardware"]): row["capacity_per_s"] for row in read_rows(path) if "capacity_per_s" in row
    }

    def of_kind(trace: Trace, pods: Sequence[PodSpec]) -> float:
        key = (trace.name, describe(tuple(pods)))
        if key not in known:
            known[key] = capacity(trace, pods, guess(trace, pods), lambda line: print(line, file=sys.stderr))
            append(path, {"trace": key[0], "hardware": key[1], "capacity_per_s": known[key]})
        return known[key]

    found = {}
    for name, pool in itertools.product(wanted, POOLS):
        trace = load_trace(name, 0, REQUESTS[name], data_folder())
        found[name, pool] = pool_capacity(trace, parse_hardware(pool), of_kind)
    return found


def full(path: Path, cells: Sequence[Cell]) -> None:
    """Make every run that the file hasn't got yet."""
    done = {Cell(*(row[key] for key in Cell.__slots__)).key for row in read_rows(path) if "policy" in row}
    rates = capacities(path, list(dict.fromkeys(cell.trace for cell in cells)))
    left = [cell for cell in cells if cell.key not in done]
    for place, cell in enumerate(left):
        row = play(cell, rates[cell.trace, cell.hardware], REQUESTS[cell.trace])
        append(path, row)
        print(
            f"{place + 1}/{len(left)} {cell.trace} {cell.load:.0%} {cell.hardware} {cell.policy} {cell.seed}: "
            f"TTFT p90 {row['ttft_p90_ms']:.0f} ms, goodput {row['goodput']:.3f}, {row['cpu_s']:.0f} s",
            file=sys.stderr,
            flush=True,
        )


# --- what came of it --------------------------------------------------------------------------------------------------


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


@dataclass(frozen=True, slots=True)
class Grid:
    """Means over seeds by (workload, load, pool, policy), of cells that every compared policy has."""

    means: Mapping[tuple[str, float, str, str], Mapping[str, float]]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "Grid":
        gathered: dict[tuple[str, float, str, str], list[Mapping[str, Any]]] = {}
        for row in rows:
            gathered.setdefault((row["trace"], row["load"], row["hardware"], row["policy"]), []).append(row)
        return cls(
            {
                key: {
                    **{name: geometric_mean(row[name] for row in group) for name in METRICS},
                    "goodput": sum(row["goodput"] for row in group) / len(group),
                }
                for key, group in gathered.items()
            }
        )

    def workloads(self, load: float, pool: str, *policies: str) -> list[str]:
        """Workloads that all these policies have been run on."""
        names = dict.fromkeys(key[0] for key in self.means)
        return [name for name in names if all((name, load, pool, each) in self.means for each in policies)]

    def ratio(self, metric: str, load: float, pool: str, ours: str, theirs: str) -> float | None:
        """Geometric mean over workloads of ours / theirs."""
        names = self.workloads(load, pool, ours, theirs)
        if not names:
            return None
        return geometric_mean(
            self.means[name, load, pool, ours][metric] / self.means[name, load, pool, theirs][metric] for name in names
        )

    def sum_ratio(self, load: float, pool: str, ours: str, theirs: str) -> float | None:
        """Goodput summed over workloads, ours / theirs."""
        names = self.workloads(load, pool, ours, theirs)
        if not names:
            return None
        total = sum(self.means[name, load, pool, theirs]["goodput"] for name in names)
        return sum(self.means[name, load, pool, ours]["goodput"] for name in names) / max(total, 1e-9)


def summarise(rows: Sequence[Mapping[str, Any]], ours: str = "leadtime") -> dict[str, Any]:
    """Marks, measured and missed. A mark of which no cell was run is None."""
    grid = Grid.of(rows)
    marks: list[dict[str, Any]] = []

    def mark(name: str, value: float | None, limit: float, *, least: bool = False) -> None:
        holds = None if value is None else (value >= limit if least else value <= limit)
        marks.append({"mark": name, "value": value, "limit": limit, "at_least": least, "met": holds})

    for load in sorted(LOADS):
        at = f"at {load:.0%}"
        for other in ("token-load", "lmetric"):
            for metric, limit in (("ttft_p90_ms", 1.0), ("ttft_p99_ms", 1.08), ("e2e_mean_ms", 0.98)):
                mark(f"equal {at}: {metric} / {other}", grid.ratio(metric, load, EQUAL, ours, other), limit)
        for pool, name in ((EQUAL, "equal"), (MIXED, "mixed")):
            other = "predicted-latency"
            mark(f"{name} {at}: ttft_p90_ms / {other}", grid.ratio("ttft_p90_ms", load, pool, ours, other), 0.7)
    single = [
        grid.means[name, load, EQUAL, ours]["ttft_p90_ms"] / grid.means[name, load, EQUAL, "token-load"]["ttft_p90_ms"]
        for load in LOADS
        for name in grid.workloads(load, EQUAL, ours, "token-load")
    ]
    if single:
        within = sum(ratio <= 1.05 for ratio in single) / len(single)
        mark("equal: share of cells with TTFT p90 ≤1.05× token-load", within, 0.85, least=True)
        mark("equal: worst cell's TTFT p90 / token-load", max(single), 1.2)
    misses = _misses(grid, ours)
    mark("mixed at 85%: SLO misses / best without prediction", misses, 0.35)
    for metric, limit in (("tpot_p90_ms", 0.7), ("e2e_mean_ms", 0.92), ("ttft_p90_ms", 1.0)):
        mark(f"mixed at 85%: {metric} / token-load", grid.ratio(metric, 0.85, MIXED, ours, "token-load"), limit)
    for metric in METRICS:
        mark(f"mixed at 95%: {metric} / token-load", grid.ratio(metric, 0.95, MIXED, ours, "token-load"), 1.1)
    for pool, name, limit in ((EQUAL, "equal", 1.08), (MIXED, "mixed", 1.35)):
        other = "predicted-latency-slo"
        mark(f"{name} at 95%: goodput / {other}", grid.sum_ratio(0.95, pool, ours, other), limit, least=True)
    gaps = _goodput_gaps(grid, ours)
    if gaps:
        mark("goodput − best other, worst cell", min(gaps.values()), -0.01, least=True)
        busy = [gap for (_, load, _), gap in gaps.items() if load in {0.85, 0.95}]
        if busy:
            mark("goodput − best other, best cell at 85–95 %", max(busy), 0.10, least=True)
    cells = [
        {"trace": name, "load": load, "hardware": pool, "goodput_gap": gap}
        for (name, load, pool), gap in gaps.items()
        if gap < -0.01
    ]
    return {
        "runs": len(rows),
        "marks": marks,
        "missed": [entry["mark"] for entry in marks if entry["met"] is False],
        "not_run": [entry["mark"] for entry in marks if entry["met"] is None],
        "cells_behind_in_goodput": cells,
    }


def _misses(grid: Grid, ours: str) -> float | None:
    """SLO misses of ours / those of the best policy without prediction, at 85 % on the mixed pool."""
    others = [each for each in UNLEARNED if grid.workloads(0.85, MIXED, ours, each)]
    if not others:
        return None
    names = grid.workloads(0.85, MIXED, ours, *others)
    if not names:
        return None

    def missed(each: str) -> float:
        return sum(1.0 - grid.means[name, 0.85, MIXED, each]["goodput"] for name in names)

    return missed(ours) / max(min(map(missed, others)), 1e-9)


def _goodput_gaps(grid: Grid, ours: str) -> dict[tuple[str, float, str], float]:
    """Ours minus the best other policy but the oracle's, by cell."""
    gaps = {}
    for name, load, pool, each in grid.means:
        if each != ours:
            continue
        others = [
            means["goodput"]
            for (other_name, other_load, other_pool, other), means in grid.means.items()
            if (other_name, other_load, other_pool) == (name, load, pool) and other != ours and "oracle" not in other
        ]
        if others:
            gaps[name, load, pool] = grid.means[name, load, pool, ours]["goodput"] - max(others)
    return gaps


# --- the command ------------------------------------------------------------------------------------------------------


def quick() -> list[dict[str, Any]]:
    """The named subset: scenarios A and D on four pods at 85 %, three policies."""
    return [
        play(Cell(name, 0.85, QUICK_POOL, each, 1), rate, 450)
        for name, rate in QUICK_CAPACITY.items()
        for each in ("token-load", "lmetric", "leadtime")
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a named subset, under 50 s")
    parser.add_argument("--full", action="store_true", help="every cell; goes on where it stopped")
    parser.add_argument("--summary", action="store_true", help="only read what the results file holds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--json", type=Path, help="also write the object here")
    parser.add_argument("--trace", action="append", choices=list(REQUESTS), help="only these; repeat it")
    parser.add_argument("--load", action="append", type=float, choices=LOADS)
    parser.add_argument("--hardware", action="append", choices=POOLS)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--seed", action="append", type=int)
    options = parser.parse_args(arguments)
    if not (options.quick or options.full or options.summary):
        parser.error("one of --quick, --full and --summary is needed")
    if options.full:
        full(
            options.results,
            [
                Cell(name, load, pool, each, seed)
                for seed in options.seed or SEEDS
                for load in options.load or LOADS
                for pool in options.hardware or POOLS
                for each in options.policy or POLICIES
                for name in options.trace or REQUESTS
            ],
        )
    rows = quick() if options.quick else [row for row in read_rows(options.results) if "policy" in row]
    text = json.dumps({"summary": None if options.quick else summarise(rows), "runs": rows}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
