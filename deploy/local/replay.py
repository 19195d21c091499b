"""`leadtime replay`: what policies would do with a trace, on this machine and in virtual time.

Reads the trace, finds the pool's capacity where none is given, runs every policy at every load and writes a table, JSON
and a picture. The work is `sim.replay`'s.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.local.progress import Told
from shared.errors import FieldError
from sim.replay.cluster import run
from sim.replay.measure import capacity, cold_start, figures, guess, pool_capacity, settled
from sim.replay.options import RunOptions, SloRule
from sim.replay.picture import picture
from sim.replay.policies import policy
from sim.replay.pool import describe, parse_hardware
from sim.replay.trace import load_trace

DEFAULT_POLICIES: Final = ("load-prefix", "token-load", "leadtime")
MAX_LOAD: Final = 3.0


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """What to replay. `capacity_per_s` None: measured first. `data`: where public traces lie."""

    trace: str
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    hardware: str
    slo: SloRule
    requests: int
    seed: int
    routers: int
    share_ledgers: bool
    capacity_per_s: float | None
    data: Path


def parse_loads(text: str) -> tuple[float, ...]:
    """`0.5,0.8` → loads; raises FieldError."""
    loads: list[float] = []
    for item in text.split(","):
        try:
            load = float(item)
        except ValueError:
            load = 0.0
        if not 0.0 < load <= MAX_LOAD:
            raise FieldError("load", f"'{item.strip()[:32]}'", f"shares of the capacity above 0, at most {MAX_LOAD:g}")
        loads.append(load)
    return tuple(loads)


def replay(command: ReplayCommand, told: Callable[[str], None], progress: Told) -> dict[str, Any]:
    """Run it all; `told` hears what belongs to the result. Raises TraceError, PoolError or ConfigurationError before
    anything has run.
    """
    policies = [policy(name) for name in command.policies]
    pods = parse_hardware(command.hardware)
    trace = load_trace(command.trace, command.seed, command.requests, command.data)
    for note in trace.notes:
        told(f"note: {note}")
    rate = command.capacity_per_s
    if rate is None:
        progress.line("finding the pool's capacity; --capacity names it, and spares this")
        rate = pool_capacity(trace, pods, lambda of, alike: capacity(of, alike, guess(of, alike), progress.line))
    runs = []
    for load in command.loads:
        loaded = trace.at_rate(load * rate)
        for chosen in policies:
            options = RunOptions(
                seed=command.seed, slo=command.slo, routers=command.routers, share_ledgers=command.share_ledgers
            )
            began_s = time.process_time()
            what = f"{chosen.name} at {load:.0%}"
            result = run(loaded, pods, chosen, options, functools.partial(progress.at, what))
            runs.append(
                {
                    "trace": trace.name,
                    "load": load,
                    "hardware": describe(pods),
                    "policy": chosen.name,
                    "seed": command.seed,
                    "rate_per_s": loaded.rate_per_s,
                    **figures(result),
                    "cold_start": cold_start(result),
                    "settled": settled(result),
                    "virtual_s": result.virtual_ms / 1e3,
                    "fits": result.fits,
                    "cpu_s": time.process_time() - began_s,
                }
            )
            progress.line(f"{what}: done")
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "hardware": describe(pods),
        "capacity_per_s": rate,
        "slo": {
            "ttft_ms": command.slo.ttft_ms,
            "tpot_ms": command.slo.tpot_ms,
            "ttft_grows_after_tokens": command.slo.ttft_grows_after_tokens,
        },
        "notes": list(trace.notes),
        "runs": runs,
    }


def table(report: dict[str, Any]) -> str:
    """The report's runs as text."""
    head = ("load", "policy", "TTFT p50", "p90", "p99", "TPOT p90", "e2e", "goodput", "cached")
    lines = [head, *(_cells(row) for row in report["runs"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) if column == 1 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    notes = ["latencies in ms, e2e: the mean", *_lengths(report["runs"]), *_unsettled(report["runs"])]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], "", *notes])


def _lengths(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What each load was: it is the same of every policy but for the time that the last answers took."""
    lines = []
    for load in dict.fromkeys(row["load"] for row in rows):
        alike = [row for row in rows if row["load"] == load]
        longest_s = max(row["virtual_s"] for row in alike)
        lines.append(f"{load:.0%}: {alike[0]['rate_per_s']:.3g} requests/s, over after {longest_s:,.0f} s")
    return lines


def _unsettled(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Runs whose figures are a burst's, and not of the load that stands before them."""
    found = [row for row in rows if not row["settled"]]
    if not found:
        return []
    which = ", ".join(f"{row['policy']} at {row['load']:.0%}" for row in found)
    return [
        "",
        f"warning: not settled: {which}.",
        "Requests come for less than twice as long as the usual answer takes: the pool",
        "fills most of the while, and a capacity found with so short a trace is too",
        "high. Take a longer trace or more --requests.",
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['load']:.0%}",
        row["policy"],
        *(_ms(row[key]) for key in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p90_ms", "e2e_mean_ms")),
        _share(row["goodput"]),
        _share(row["prefix_hit_ratio"]),
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def write_report(report: dict[str, Any], json_file: Path | None, svg_file: Path | None) -> None:
    """The report as JSON, and its picture."""
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if svg_file is not None:
        title = f"{report['trace']} on {report['hardware']}, {report['capacity_per_s']:.3g} requests/s at 100 %"
        svg_file.write_text(picture(title, report["runs"]))
