"""Several routers that share what they know against one that knows it all, in virtual time.

Mixed pods at 85 %, where the default policy gains most over `token-load`. Each seed has a trace of its own; on it run
`token-load` (one router), `leadtime` with one router, the same with other chances on pods and links (what differs
then is chance), and with 2 and 4 routers that hear of each other's dispatches in batches every 20 ms. A gain is how far
a latency lies below `token-load`'s, as a share of it, or how far goodput lies above. `lost` is the share of one
router's gain (the mean of its two runs) that is missing, over all cells and seeds, `error` its standard error over
them; `chance` is the same of one router's second run against its first. `ratio` is the geometric mean of a latency with
N routers over that with one.

`--quick` is scenario A on four pods with two routers (20 s). `--full` appends every run to
`results/many_routers.jsonl` as it ends, and goes on where it stopped; `--summary` reads it. Public traces lie in
LEADTIME_DATA.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.replay import (
    MIXED,
    QUICK_CAPACITY,
    QUICK_POOL,
    SLO,
    Capacities,
    data_folder,
    geometric_mean,
    policy_revision,
    timed,
)
from bench.replay import RESULTS as REPLAY_RESULTS
from bench.row_file import append, cells_left, key_of, parse, read_rows, show
from sim.replay.learning import LearningOptions
from sim.replay.measure import figures
from sim.replay.options import RunOptions
from sim.replay.policies import policy
from sim.replay.pool import parse_hardware
from sim.replay.trace import load_trace

RESULTS: Final = Path(__file__).parent / "results" / "many_routers.jsonl"
OURS: Final = "leadtime"
BASIS: Final = "token-load"
LOAD: Final = 0.85
REQUESTS: Final[Mapping[str, int]] = {"D": 1_500, "A": 2_500, "B": 1_500, "mooncake": 1_500}
SEEDS: Final = (1, 2, 3)
ROUTERS: Final = (1, 2, 4)
LATENCIES: Final = ("ttft_p90_ms", "tpot_p90_ms", "e2e_mean_ms")
METRICS: Final = (*LATENCIES, "goodput")
_OTHER_CHANCES: Final = 1_000


_BASIS_RUN: Final = (BASIS, 1, False)
_Runs = Mapping[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to be made. `again`: with other chances than the first."""

    trace: str
    seed: int
    policy: str
    routers: int
    again: bool


def play(cell: Cell, hardware: str, rate_per_s: float, requests: int) -> dict[str, Any]:
    """One run as a row. Raises RuntimeError where routers disagree at its end."""
    trace = load_trace(cell.trace, cell.seed, requests, data_folder()).at_rate(rate_per_s)
    options = RunOptions(
        seed=cell.seed + _OTHER_CHANCES * cell.again,
        slo=SLO,
        routers=cell.routers,
        learning=LearningOptions(),
    )
    result, cpu_s = timed(cell, trace, parse_hardware(hardware), policy(cell.policy), options)
    return {
        **asdict(cell),
        "hardware": hardware,
        "policy_revision": policy_revision(cell.policy),
        "rate_per_s": rate_per_s,
        **figures(result),
        "cpu_s": cpu_s,
    }


def cells(trace: str, seed: int, routers: Sequence[int] = ROUTERS) -> list[Cell]:
    """What is run on one trace."""
    ours = [Cell(trace, seed, OURS, count, again=False) for count in routers]
    return [Cell(trace, seed, BASIS, 1, again=False), *ours, Cell(trace, seed, OURS, 1, again=True)]


def full(path: Path, seeds: Sequence[int]) -> None:
    """Make every run that the file hasn't got yet."""
    capacities = Capacities(REPLAY_RESULTS)
    every = [cell for seed in seeds for name in REQUESTS for cell in cells(name, seed)]
    for _, cell in cells_left(path, every):
        row = play(cell, MIXED, LOAD * capacities.of(cell.trace, MIXED), REQUESTS[cell.trace])
        append(path, row)
        shown = {metric: round(row[metric], 3) for metric in METRICS}
        print(f"{cell}: {shown}, {row['cpu_s']:.0f} s", file=sys.stderr, flush=True)


# --- what came of it --------------------------------------------------------------------------------------------------


def _gain(metric: str, row: Mapping[str, Any], basis: Mapping[str, Any]) -> float:
    if metric == "goodput":
        return float(row[metric] - basis[metric])
    return float(1.0 - row[metric] / basis[metric])


def _share(missing: Sequence[float], gain: float) -> dict[str, float | None]:
    """The sum of what is missing as a share of the sum of gains, with its standard error; None of a single cell, or
    where nothing was gained.
    """
    total = gain * len(missing)
    if not total:
        return {"lost": None, "error": None}
    error = statistics.stdev(missing) * math.sqrt(len(missing)) / abs(total) if len(missing) > 1 else None
    return {"lost": sum(missing) / total, "error": error}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lost shares of gains by number of routers and metric, over the traces that every run is there of."""
    runs = {key_of(row, Cell): row for row in rows}
    counts = sorted({row["routers"] for row in rows if row["policy"] == OURS} - {1})
    needed = [_BASIS_RUN, (OURS, 1, False), (OURS, 1, True), *((OURS, count, False) for count in counts)]
    traces = [
        key[:2]
        for key in runs
        if key[2:] == needed[0] and all((*key[:2], *each) in runs for each in needed)
    ]  # fmt: skip
    by_trace = {
        name: _by_metric(runs, [trace for trace in traces if trace[0] == name], counts)
        for name in dict.fromkeys(str(trace[0]) for trace in traces)
    }
    return {"cells": len(traces), "metrics": _by_metric(runs, traces, counts), "by_trace": by_trace}


def _by_metric(runs: _Runs, traces: Sequence[tuple[Any, ...]], counts: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in METRICS:

        def gains(routers: int, *, again: bool, metric: str = metric) -> list[float]:
            return [_gain(metric, runs[*trace, OURS, routers, again], runs[*trace, *_BASIS_RUN]) for trace in traces]

        first, second = gains(1, again=False), gains(1, again=True)
        one = [(a + b) / 2.0 for a, b in zip(first, second, strict=True)]
        gain = statistics.fmean(one) if one else math.nan
        chance = _share([a - b for a, b in zip(first, second, strict=True)], gain)
        found[metric] = {"gain": gain, "chance": chance}
        for count in counts:
            missing = [a - b for a, b in zip(one, gains(count, again=False), strict=True)]
            found[metric][str(count)] = _share(missing, gain)
            if metric in LATENCIES:
                found[metric][str(count)]["ratio"] = geometric_mean(
                    runs[*trace, OURS, count, False][metric]
                    / math.sqrt(runs[*trace, OURS, 1, False][metric] * runs[*trace, OURS, 1, True][metric])
                    for trace in traces
                )
    return found


# --- the command ------------------------------------------------------------------------------------------------------


def quick() -> list[dict[str, Any]]:
    """Scenario A on four pods, one and two routers."""
    rate = LOAD * QUICK_CAPACITY["A"]
    return [play(cell, QUICK_POOL, rate, 450) for cell in cells("A", 1, (1, 2))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", action="append", type=int, choices=SEEDS, help="only these; repeat it")
    options = parse(parser, RESULTS, arguments)
    if options.full:
        full(options.results, options.seed or SEEDS)
    rows = quick() if options.quick else read_rows(options.results, Cell)
    show(summarise(rows), rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
