"""What a person sees of a demo: lines while it starts, a bar per phase, a table at the end.

On a terminal the bars move, twice a second: drawing takes time from the load client in the same process. Elsewhere each
phase is one line when it ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column, Table

from deploy.local.results import VOID_SHARE
from sim.loadgen import percentile

_BAR_FROM_WIDTH: Final = 104
"""Columns of a terminal that has room for the bar beside the numbers."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """A phase so far; `ttft_ms` ascending."""

    name: str
    total: int
    done: int
    failed: int
    ttft_ms: Sequence[float]
    served_by: Mapping[str, int]
    bundles: int


class Screen:
    """Use as a context manager: leaving it leaves the terminal as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        columns: list[ProgressColumn] = [
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            # The only one that may be broken where the terminal is narrow: a name or count cut short says nothing.
            TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=False)),
        ]
        if console.width < _BAR_FROM_WIDTH:
            del columns[1]
        self._progress = Progress(
            *columns,
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, text: str) -> None:
        """One line of what goes on."""
        self._console.print(f"· {text}", highlight=False, markup=False, soft_wrap=True)

    def begin_phase(self, name: str, total: int, seconds: float) -> None:
        self._tasks[name] = self._progress.add_task(name, total=total, detail=f"{total / seconds:.0f} requests/s")
        self._progress.refresh()

    def show(self, progress: PhaseProgress) -> None:
        """The newest numbers of the phase under way."""
        task = self._tasks.get(progress.name)
        if task is not None:
            self._progress.update(task, completed=progress.done, detail=_detail(progress))
            self._progress.refresh()

    def end_phase(self, progress: PhaseProgress) -> None:
        self.show(progress)
        if not self._console.is_terminal:
            self.step(f"{progress.name}: {progress.done}/{progress.total} {_detail(progress)}")

    def table(self, report: Mapping[str, Any], run_dir: str) -> None:
        """The end: the table, what it rests on, and what is void."""
        self._console.print(result_table(report))
        for line in summary_lines(report):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._console.print(f"logs: {run_dir}", highlight=False, markup=False, soft_wrap=True)


def _detail(progress: PhaseProgress) -> str:
    parts = []
    if progress.ttft_ms:
        p50, p90 = (percentile(progress.ttft_ms, share) for share in (0.5, 0.9))
        parts.append(f"TTFT p50 {p50:.0f} p90 {p90:.0f} ms")
    decided = sum(progress.served_by.values())
    if decided:
        main = max(progress.served_by, key=lambda rung: progress.served_by[rung])
        parts.append(f"{main} {progress.served_by[main] / decided:.0%}")
    parts.append(f"bundles {progress.bundles}")
    if progress.failed:
        parts.append(f"FAILED {progress.failed}")
    return " · ".join(parts)


_ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    ("TTFT p50", "ttft_p50_ms", "ms"),
    ("TTFT p90", "ttft_p90_ms", "ms"),
    ("TTFT p99", "ttft_p99_ms", "ms"),
    ("TPOT p50", "tpot_p50_ms", "ms1"),
    ("TPOT p90", "tpot_p90_ms", "ms1"),
    ("e2e p50", "e2e_p50_ms", "ms"),
    ("e2e p90", "e2e_p90_ms", "ms"),
    ("prefix hits", "prefix_hit_ratio", "ratio"),
    ("TTFT prediction error", "ttft_mape", "ratio"),
    ("TTFT prediction bias", "ttft_bias", "signed"),
    ("requests", "requests", "count"),
    ("failed", "failed", "count"),
    ("samples", "samples", "count"),
    ("bundles in use", "bundles", "count"),
    ("client lateness mean", "client_lateness_mean_ms", "ms1"),
    ("client lateness p99", "client_lateness_p99_ms", "ms1"),
    ("simulator lateness mean", "simulator_lateness_mean_ms", "ms1"),
    ("simulator lateness p99", "simulator_lateness_p99_ms", "ms1"),
)


def result_table(report: Mapping[str, Any]) -> Table:
    """One column per policy; a void one says so in its head."""
    table = Table(title="The same arrivals under each policy")
    table.add_column("")
    policies: Mapping[str, Mapping[str, Any]] = report["policies"]
    for name, policy in policies.items():
        table.add_column(f"{name} (void)" if policy["void"] else name, justify="right")
    for label, key, kind in _ROWS:
        table.add_row(label, *(_cell(policy[key], kind) for policy in policies.values()))
    for rung in ("predictor", "in_process", "prior", "heuristic"):
        table.add_row(
            f"decided by {rung}", *(_cell(policy["served_by"][rung], "count") for policy in policies.values())
        )
    return table


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "–"
    match kind:
        case "ms":
            return f"{value:,.0f} ms"
        case "ms1":
            return f"{value:.1f} ms"
        case "ratio":
            return f"{value:.1%}"
        case "signed":
            return f"{value:+.1%}"
        case _:
            return f"{value:,}"


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """What the run as a whole amounts to, in words; nothing is left unsaid that is against it."""
    rungs = ", ".join(f"{rung} {count}" for rung, count in report["served_by"].items())
    counts = ", ".join(f"{key} {report[key]}" for key in ("requests", "failed", "samples", "bundles"))
    lines = [f"all phases: {counts}; decisions of the measured ones: {rungs}"]
    lines += [f"leadtime's TTFT p90 is {ratio:.2f}x {rival}'s" for rival, ratio in ttft_p90_ratios(report)]
    for name, policy in {"learning": report["learning"], **report["policies"]}.items():
        lines += [f"failed under {name}: {count} x {reason}" for reason, count in policy["failures"].items()]
    for name in report["void_phases"]:
        lines.append(
            f"VOID: {name}: requests were sent, or tokens simulated, later than planned by more than "
            f"{VOID_SHARE:.0%} of its median TTFT; the machine was too busy, and its column proves nothing"
        )
    return lines


def ttft_p90_ratios(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(rival, leadtime's TTFT p90 over the rival's), where both are known."""
    policies: Mapping[str, Mapping[str, Any]] = report["policies"]
    ours = policies.get("leadtime", {}).get("ttft_p90_ms")
    return [
        (name, ours / policy["ttft_p90_ms"])
        for name, policy in policies.items()
        if name != "leadtime" and ours is not None and policy["ttft_p90_ms"]
    ]
