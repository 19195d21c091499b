"""What holding requests in the router gives near and beyond a pool's capacity, in virtual time.

Five workloads on eight equal pods at 95 and 110 % of their capacity under `load-prefix`; `leadtime` without a waiting
room (`off`, the greedy policy) and with one in each of its modes (`-strict`: no tolerance for TPOT). Nobody may be shed
(priority 0), so every request is admitted and TTFT is of all; TTFT counts from receipt, the time held included.
`summary` has by load and mode goodput summed over workloads and its ratio to `off`; `most`, the ratio that a goodput of
1 on every workload would be; and the ratio of TTFT P90 to that of `off`, of each workload and their geometric mean.

`--quick` is scenario D on two pods (20 s). `--full` appends every run to `results/late_binding.jsonl` as it ends, and
goes on where it stopped; `--summary` reads it. Public traces lie in LEADTIME_DATA.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.replay import (
    EQUAL,
    QUICK_CAPACITY,
    SLO,
    Capacities,
    data_folder,
    geometric_mean,
    policy_revision,
    timed,
)
from bench.replay import RESULTS as REPLAY_RESULTS
from bench.row_file import append, cells_left, key_of, parse, read_rows, show
from services.router.scheduling.profile import load_presets
from services.router.scheduling.registry import Registry
from sim.replay.learning import LearningOptions
from sim.replay.measure import figures
from sim.replay.options import RunOptions
from sim.replay.policies import policy
from sim.replay.pool import parse_hardware
from sim.replay.trace import load_trace

RESULTS: Final = Path(__file__).parent / "results" / "late_binding.jsonl"
PRESET: Final = "leadtime"
OFF: Final = "off"
_ROOM: Final[Mapping[str, Any]] = {"enough_work_ms": 200, "hungry": "chosen", "ttl_ms": 240_000}
ROOMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smallest-first": {"mode": "smallest-first", **_ROOM},
    "smallest-first-strict": {"mode": "smallest-first", "tpot_tolerance": 0.0, **_ROOM},
    "overload": {"mode": "overload", **_ROOM},
    "late-binding": {"mode": "late-binding", **_ROOM},
}
MODES: Final = (OFF, *ROOMS)
LOADS: Final = (1.1, 0.95)
REQUESTS: Final[Mapping[str, int]] = {"mooncake": 1_500, "D": 1_200, "C": 1_500, "A": 2_500, "B": 1_200}
SEEDS: Final = (1, 2)
QUICK_POOL: Final = "h100-8b:2"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to be made."""

    trace: str
    load: float
    mode: str
    seed: int


def profile(mode: str, folder: Path) -> str:
    """The preset's name, or a file of it with a waiting room in that mode."""
    if mode == OFF:
        return PRESET
    preset = next(each for each in load_presets(Registry()) if each.name == PRESET)
    document = preset.as_dict() | {"name": f"{PRESET}-{mode}", "waiting_room": dict(ROOMS[mode])}
    path = folder / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def play(cell: Cell, hardware: str, rate_per_s: float, requests: int) -> dict[str, Any]:
    """One run as a row. Raises RuntimeError where its ledger doesn't end empty."""
    trace = load_trace(cell.trace, cell.seed, requests, data_folder()).at_rate(rate_per_s)
    options = RunOptions(seed=cell.seed, slo=SLO, learning=LearningOptions())
    with tempfile.TemporaryDirectory() as folder:
        chosen = policy(profile(cell.mode, Path(folder)))
        result, cpu_s = timed(cell, trace, parse_hardware(hardware), chosen, options)
    return {
        **asdict(cell),
        "hardware": hardware,
        "policy_revision": policy_revision(PRESET),
        "rate_per_s": rate_per_s,
        **figures(result),
        "cpu_s": cpu_s,
    }


def cells() -> list[Cell]:
    """Every run: beyond capacity first, and the modes that matter most."""
    return [
        Cell(name, load, mode, seed)
        for load in LOADS
        for modes in (MODES[:2], MODES[2:3], MODES[3:])
        for seed in SEEDS
        for name in REQUESTS
        for mode in modes
    ]


def full(path: Path) -> None:
    """Make every run that the file hasn't got yet."""
    capacities = Capacities(REPLAY_RESULTS)
    for _, cell in cells_left(path, cells()):
        row = play(cell, EQUAL, cell.load * capacities.of(cell.trace, EQUAL), REQUESTS[cell.trace])
        append(path, row)
        shown = {name: round(row[name], 3) for name in ("goodput", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")}
        print(f"{cell}: {shown}, {row['cpu_s']:.0f} s", file=sys.stderr, flush=True)


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By load and mode, over the workloads that both modes have been run on, of the same seeds."""
    runs = {key_of(row, Cell): row for row in rows}
    found = []
    for load in sorted({row["load"] for row in rows}):
        for mode in MODES[1:]:
            pairs = [
                (key[0], runs[key[0], load, OFF, key[3]], row)
                for key, row in runs.items()
                if key[1:3] == (load, mode) and (key[0], load, OFF, key[3]) in runs
            ]
            names = list(dict.fromkeys(name for name, _, _ in pairs))
            if not names:
                continue
            off = {name: statistics.fmean(a["goodput"] for each, a, _ in pairs if each == name) for name in names}
            ours = {name: statistics.fmean(b["goodput"] for each, _, b in pairs if each == name) for name in names}
            p90 = {
                name: geometric_mean(b["ttft_p90_ms"] / a["ttft_p90_ms"] for each, a, b in pairs if each == name)
                for name in names
            }
            found.append(
                {
                    "load": load,
                    "mode": mode,
                    "runs": len(pairs),
                    "goodput": ours,
                    "goodput_off": off,
                    "goodput_ratio": sum(ours.values()) / max(sum(off.values()), 1e-9),
                    "most": len(names) / max(sum(off.values()), 1e-9),
                    "ttft_p90_ratio": geometric_mean(p90.values()),
                    "ttft_p90_ratio_by_trace": p90,
                }
            )
    return found


def quick() -> list[dict[str, Any]]:
    """Scenario D on two pods beyond their capacity, in each mode."""
    rate = 1.1 * QUICK_CAPACITY["D"] * 0.7
    modes = [mode for mode in MODES if mode != "smallest-first-strict"]
    return [play(Cell("D", 1.1, mode, 1), QUICK_POOL, rate, 300) for mode in modes]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    options = parse(parser, RESULTS, arguments)
    if options.full:
        full(options.results)
    rows = quick() if options.quick else read_rows(options.results, Cell)
    show(summarise(rows), rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
