"""Checks on public data that isn't committed: the trace readers take the real traces, row for row.

`check_data.py FOLDER`; closes with a line of passed and failed checks.
"""

# ruff: noqa: INP001 - a script, no package

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from sim.workload import TraceScale, WorkloadRequest, load_azure, load_mooncake


def in_order(requests: list[WorkloadRequest], least: int) -> None:
    """At least so many rows, in order of arrival, each with a prompt and an answer."""
    if len(requests) < least:
        raise AssertionError(f"{len(requests)} rows, at least {least} expected")
    if any(later.arrival_ms < earlier.arrival_ms for earlier, later in pairwise(requests)):
        raise AssertionError("rows out of order")
    if any(not request.prompt or request.max_tokens < 1 for request in requests):
        raise AssertionError("a row without prompt or answer")


def azure(folder: Path) -> None:
    """The conversation trace of 2023."""
    in_order(list(load_azure(folder / "traces/azure2023_conv.csv", TraceScale(lengths=0.1))), 1_000)


def mooncake(folder: Path) -> None:
    """The conversation trace's first 15 minutes: prefixes repeat in it."""
    requests = list(load_mooncake(folder / "traces/mooncake_conversation_first15min.jsonl", TraceScale(lengths=0.02)))
    in_order(requests, 1_000)
    if len({request.group for request in requests}) == len(requests):
        raise AssertionError("no prefix repeats")


def main() -> int:
    """Run all; 1 when one failed."""
    checks: tuple[Callable[[Path], None], ...] = (azure, mooncake)
    failed = 0
    for check in checks:
        try:
            check(Path(sys.argv[1]))
        except (AssertionError, OSError, ValueError) as error:
            failed += 1
            sys.stderr.write(f"{check.__name__}: {error}\n")
    sys.stdout.write(f"{len(checks) - failed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
