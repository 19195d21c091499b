"""Policies against each other in virtual time: six workloads, four loads, a pool of equal pods and a mixed one.

`runs[]` has one object a run: trace, load, hardware, policy, seed, ttft_p50_ms, ttft_p90_ms, ttft_p99_ms, tpot_p90_ms,
e2e_mean_ms, e2e_p50_ms, goodput, prefix_hit_ratio; and what `sim.replay.measure` says beside. `summary` compares
`leadtime` with the others by the marks of this benchmark and names each one that is missed. Every learned policy starts
cold inside its run, fits every 10 s of its time, as a trainer does, and sees what a router sees; the first fifth is
left out. SLO: TTFT 1 s × max(1, prompt/4096), TPOT 40 ms. 100 % load: what a pool carries under `load-prefix`
(`sim.replay.measure`). Each mark says on which cells it rests, and workload by workload what came out.
`policy_revision` is a digest of the code and the constants that a policy decides by: rows of another one are made
again, and told until then.

`--quick` is a named subset on made traces (15 s). `--full` runs every cell and appends each to `results/replay.jsonl`
as it ends: started again, it goes on where it stopped, and several may share the work. Its order makes what there is at
any time a whole of its own: workload by workload with the policies that marks compare, 85 and 95 % before the rest,
seed by seed. `--trace`, `--load`, `--hardware`, `--policy` and `--seed` narrow it. `--summary` reads what is there.
Public traces lie in LEADTIME_DATA (default ../shared/data).
"""

import argparse
import ast
import functools
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.row_file import append, cells_left, parse, read_rows, show
from sim.replay.cluster import run
from sim.replay.learning import LearningOptions
from sim.replay.measure import capacity, cold_start, figures, guess, pool_capacity
from sim.replay.options import RunOptions, SloRule
from sim.replay.outcomes import RunResult
from sim.replay.policies import Policy, policy
from sim.replay.pool import PodSpec, describe, parse_hardware
from sim.replay.trace import Trace, load_trace

RESULTS: Final = Path(__file__).parent / "results" / "replay.jsonl"
SLO: Final = SloRule(1000.0, 40.0, 4096)
EQUAL: Final = "h100-8b:8"
MIXED: Final = "h100-8b:4,a100-8b:4"
POOLS: Final = (EQUAL, MIXED)
BUSY: Final = (0.85, 0.95)
CALM: Final = (0.7, 0.5)
LOADS: Final = (*BUSY, *CALM)
SEEDS: Final = (1, 2, 3)
# Requests a run: so many that the first fifth outlasts a first model, whose first labels come with the first answers.
REQUESTS: Final[Mapping[str, int]] = {
    "mooncake": 3_000,
    "D": 2_500,
    "C": 3_000,
    "A": 5_000,
    "B": 3_000,
    "azure": 9_000,
}
# Of a run that measures a capacity: queues that grow slowly have to show.
CAPACITY_REQUESTS: Final[Mapping[str, int]] = {
    "mooncake": 4_000,
    "azure": 12_000,
    "A": 6_000,
    "B": 4_000,
    "C": 4_000,
    "D": 3_000,
}
DECIDING: Final = ("services.router.scheduling.pipeline",)
LEARNING: Final = (
    "shared.features",
    "shared.inference",
    *(
        f"services.trainer.{name}"
        for name in (
            "base", "basis", "cadence", "calibrate", "champion", "cycle", "evaluate", "learner", "levels", "outliers",
            "prior", "shifts", "succession", "train", "window",
        )
    ),
)  # fmt: skip
UNLEARNED: Final = ("token-load", "lmetric", "load-prefix", "least-request", "round-robin", "random")
LEARNED: Final = ("leadtime", "predicted-latency", "predicted-latency-slo")
COMPARED: Final = (*UNLEARNED[:2], *LEARNED)
POLICIES: Final = (*COMPARED, *UNLEARNED[2:], "oracle")
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


def data_folder() -> Path:
    """Where the public traces lie."""
    return Path(os.environ.get("LEADTIME_DATA", "../shared/data"))


@functools.cache
def policy_revision(name: str) -> str:
    """A digest of what decides under this policy: its profiles' values, its plugins, the pipeline, and the model of one
    that learns. Comments and docstrings aside; so are what surrounds a policy in a router, and the simulated pods.
    """
    chosen = policy(name)
    profile = chosen.profiles.get(chosen.profile)
    profiles = [profile, *([] if profile.fallback is None else [chosen.profiles.get(profile.fallback)])]
    modules = {*DECIDING, *(LEARNING if chosen.learned else ())}
    for each in profiles:
        plugins = (*each.admitters, *each.filters, *each.scorers, each.picker, each.producer)
        modules |= {choice.plugin.build.__module__ for choice in plugins if choice is not None}
    digest = hashlib.sha256(json.dumps([each.as_dict() | {"description": ""} for each in profiles]).encode())
    for module in sorted(modules):
        digest.update(module.encode() + b"\0" + code_of(module).encode() + b"\0")
    return digest.hexdigest()[:12]


@functools.cache
def code_of(module: str) -> str:
    """A module's syntax tree without its docstrings."""
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def timed(
    cell: object, trace: Trace, pods: Sequence[PodSpec], chosen: Policy, options: RunOptions
) -> tuple[RunResult, float]:
    """A run and its CPU seconds. Raises RuntimeError, which names the cell, where its ledger doesn't end empty."""
    began_s = time.process_time()
    result = run(trace, pods, chosen, options)
    cpu_s = time.process_time() - began_s
    if result.ledger_left or result.ledger_faults or result.faults:
        raise RuntimeError(f"{cell}: {result.ledger_left} entries left, {result.ledger_faults}, {result.faults} faults")
    return result, cpu_s


def play(cell: Cell, rate_per_s: float, requests: int) -> dict[str, Any]:
    """One run as a row."""
    trace = load_trace(cell.trace, cell.seed, requests, data_folder()).at_rate(cell.load * rate_per_s)
    options = RunOptions(seed=cell.seed, slo=SLO, learning=LearningOptions())
    result, cpu_s = timed(cell, trace, parse_hardware(cell.hardware), policy(cell.policy), options)
    return {
        **asdict(cell),
        "policy_revision": policy_revision(cell.policy),
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


class Capacities:
    """Requests a second that a pool carries; of one kind of pod measured where the file hasn't got it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, str], float] = {
            (row["trace"], row["hardware"]): row["capacity_per_s"]
            for row in read_rows(path, Cell)
            if "capacity_per_s" in row
        }

    def of(self, name: str, pool: str) -> float:
        trace = load_trace(name, 0, CAPACITY_REQUESTS[name], data_folder())
        return pool_capacity(trace, parse_hardware(pool), self._of_kind)

    def _of_kind(self, trace: Trace, pods: Sequence[PodSpec]) -> float:
        key = (trace.name, describe(tuple(pods)))
        if key not in self._known:
            found = capacity(trace, pods, guess(trace, pods), lambda line: print(line, file=sys.stderr, flush=True))
            self._known[key] = found
            append(self._path, {"trace": key[0], "hardware": key[1], "capacity_per_s": found})
        return self._known[key]


def cells() -> list[Cell]:
    """Every cell, in the order in which they are run."""
    return [
        Cell(name, load, pool, each, seed)
        for seed in SEEDS
        for loads in (BUSY, CALM)
        for policies in (COMPARED, POLICIES[len(COMPARED) :])
        for name in REQUESTS
        for load in loads
        for pool in POOLS
        for each in policies
    ]


def will_do(row: Mapping[str, Any]) -> bool:
    """Whether the row is of a run by the policy as it decides at present."""
    return "policy" in row and row.get("policy_revision") == policy_revision(row["policy"])


def full(path: Path, cells: Sequence[Cell]) -> None:
    """Make every run that the file hasn't got yet, or has of another revision."""
    capacities = Capacities(path)
    for place, cell in cells_left(path, cells, will_do):
        row = play(cell, capacities.of(cell.trace, cell.hardware), REQUESTS[cell.trace])
        append(path, row)
        print(
            f"{place} {cell.trace} {cell.load:.0%} {cell.hardware} {cell.policy} {cell.seed}: "
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

    def ratios(self, metric: str, load: float, pool: str, ours: str, theirs: str) -> dict[str, float]:
        """Ours / theirs by workload."""
        return {
            name: self.means[name, load, pool, ours][metric] / self.means[name, load, pool, theirs][metric]
            for name in self.workloads(load, pool, ours, theirs)
        }

    def goodputs(self, load: float, pool: str, *policies: str) -> dict[str, dict[str, float]]:
        """Goodput by policy and workload, of workloads that all these policies have been run on."""
        names = self.workloads(load, pool, *policies)
        return {each: {name: self.means[name, load, pool, each]["goodput"] for name in names} for each in policies}


@dataclass(frozen=True, slots=True)
class Mark:
    """What a figure has to reach. `value` None: nothing was run; `by_cell`: what it is made of."""

    mark: str
    value: float | None
    limit: float
    at_least: bool
    by_cell: Mapping[str, float]

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def shown(self) -> dict[str, Any]:
        return {
            "mark": self.mark,
            "value": self.value,
            "limit": self.limit,
            "at_least": self.at_least,
            "met": self.met,
            "cells": len(self.by_cell),
            "by_cell": dict(self.by_cell),
        }


def _mean_mark(name: str, ratios: Mapping[str, float], limit: float) -> Mark:
    return Mark(name, geometric_mean(ratios.values()) if ratios else None, limit, at_least=False, by_cell=ratios)


def _equal_marks(grid: Grid, ours: str) -> list[Mark]:
    """Equal pods: means at each load against the one-line scores, and single cells against `token-load`."""
    marks = [
        _mean_mark(f"equal at {load:.0%}: {metric} / {other}", grid.ratios(metric, load, EQUAL, ours, other), limit)
        for load in sorted(LOADS)
        for other in ("token-load", "lmetric")
        for metric, limit in (("ttft_p90_ms", 1.0), ("ttft_p99_ms", 1.08), ("e2e_mean_ms", 0.98))
    ]
    single = {
        f"{name} at {load:.0%}": ratio
        for load in LOADS
        for name, ratio in grid.ratios("ttft_p90_ms", load, EQUAL, ours, "token-load").items()
    }
    within = sum(ratio <= 1.05 for ratio in single.values()) / len(single) if single else None
    worst = max(single.values()) if single else None
    marks.append(
        Mark("equal: share of cells with TTFT p90 ≤1.05× token-load", within, 0.85, at_least=True, by_cell=single)
    )
    marks.append(Mark("equal: worst cell's TTFT p90 / token-load", worst, 1.2, at_least=False, by_cell=single))
    return marks


def _mixed_marks(grid: Grid, ours: str) -> list[Mark]:
    """Mixed pods: misses and speed at 85 %, nothing far behind at 95 %."""
    # Of a grid under way only those that have been run on every workload of the first.
    of_each = {each: grid.workloads(0.85, MIXED, ours, each) for each in UNLEARNED}
    others = [each for each in UNLEARNED if of_each[each] and of_each[each] == of_each[UNLEARNED[0]]]
    good = grid.goodputs(0.85, MIXED, ours, *others) if others else {ours: {}}
    missed = {each: sum(1.0 - value for value in by_name.values()) for each, by_name in good.items()}
    share = by_cell = None
    if good[ours]:
        best = min(others, key=missed.__getitem__)
        share = missed[ours] / max(missed[best], 1e-9)
        by_cell = {
            name: (1.0 - value) / max(1.0 - good[best][name], 1e-9) for name, value in sorted(good[ours].items())
        }
    marks = [
        Mark("mixed at 85%: SLO misses / best without prediction", share, 0.35, at_least=False, by_cell=by_cell or {})
    ]
    marks += [
        _mean_mark(f"mixed at 85%: {metric} / token-load", grid.ratios(metric, 0.85, MIXED, ours, "token-load"), limit)
        for metric, limit in (("tpot_p90_ms", 0.7), ("e2e_mean_ms", 0.92), ("ttft_p90_ms", 1.0))
    ]
    marks += [
        _mean_mark(f"mixed at 95%: {metric} / token-load", grid.ratios(metric, 0.95, MIXED, ours, "token-load"), 1.1)
        for metric in METRICS
    ]
    return marks


def _incumbent_marks(grid: Grid, ours: str) -> list[Mark]:
    """Against the incumbent's presets."""
    first, second = INCUMBENT
    marks = [
        _mean_mark(
            f"{name} at {load:.0%}: ttft_p90_ms / {first}", grid.ratios("ttft_p90_ms", load, pool, ours, first), 0.7
        )
        for pool, name in ((EQUAL, "equal"), (MIXED, "mixed"))
        for load in sorted(LOADS)
    ]
    for pool, name, limit in ((EQUAL, "equal", 1.08), (MIXED, "mixed", 1.35)):
        good = grid.goodputs(0.95, pool, ours, second)
        total = sum(good[second].values())
        value = sum(good[ours].values()) / max(total, 1e-9) if good[ours] else None
        by_cell = {each: mine / max(good[second][each], 1e-9) for each, mine in good[ours].items()}
        marks.append(Mark(f"{name} at 95%: goodput / {second}", value, limit, at_least=True, by_cell=by_cell))
    return marks


def _goodput_marks(grid: Grid, ours: str) -> list[Mark]:
    gaps = {f"{name} at {load:.0%} on {pool}": gap for (name, load, pool), gap in _goodput_gaps(grid, ours).items()}
    busy = {
        f"{name} at {load:.0%} on {pool}": gap
        for (name, load, pool), gap in _goodput_gaps(grid, ours).items()
        if load in BUSY
    }
    return [
        Mark("goodput − best other, worst cell", min(gaps.values(), default=None), -0.01, at_least=True, by_cell=gaps),
        Mark(
            "goodput − best other, best cell at 85–95 %",
            max(busy.values(), default=None),
            0.10,
            at_least=True,
            by_cell=busy,
        ),
    ]


def summarise(rows: Sequence[Mapping[str, Any]], ours: str = "leadtime") -> dict[str, Any]:
    """Marks, measured and missed, each with the cells that it rests on."""
    grid = Grid.of(rows)
    marks = [
        *_equal_marks(grid, ours),
        *_mixed_marks(grid, ours),
        *_incumbent_marks(grid, ours),
        *_goodput_marks(grid, ours),
    ]
    run_cells = sorted({(row["trace"], row["load"], row["hardware"], row["seed"]) for row in rows})
    return {
        "runs": len(rows),
        "cells": len(run_cells),
        "cells_of": len(SEEDS) * len(LOADS) * len(POOLS) * len(REQUESTS),
        "seeds": sorted({row["seed"] for row in rows}),
        "of_another_revision": sum(row.get("policy_revision") != policy_revision(row["policy"]) for row in rows),
        "marks": [mark.shown() for mark in marks],
        "met": sum(mark.met is True for mark in marks),
        "missed": [
            f"{mark.mark}: {mark.value:.3f}, due {'≥' if mark.at_least else '≤'}{mark.limit:g}; " + _worst(mark)
            for mark in marks
            if mark.met is False and mark.value is not None
        ],
        "not_run": [mark.mark for mark in marks if mark.met is None],
    }


def _worst(mark: Mark) -> str:
    """The cells that a missed mark is owed to, worst first."""
    ordered = sorted(mark.by_cell.items(), key=lambda entry: entry[1], reverse=not mark.at_least)
    return ", ".join(f"{name} {value:.2f}" for name, value in ordered[:4])


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="append", choices=list(REQUESTS), help="only these; repeat it")
    parser.add_argument("--load", action="append", type=float, choices=LOADS)
    parser.add_argument("--hardware", action="append", choices=POOLS)
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--seed", action="append", type=int, choices=SEEDS)
    options = parse(parser, RESULTS, arguments)
    if options.full:
        full(
            options.results,
            [
                cell
                for cell in cells()
                if (not options.seed or cell.seed in options.seed)
                and (not options.load or cell.load in options.load)
                and (not options.hardware or cell.hardware in options.hardware)
                and (not options.policy or cell.policy in options.policy)
                and (not options.trace or cell.trace in options.trace)
            ],
        )
    rows = quick() if options.quick else [row for row in read_rows(options.results, Cell) if "policy" in row]
    show(None if options.quick else summarise(rows), rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
