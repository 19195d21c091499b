"""`bench/model.py`, section `drift`: how soon predictions are right again after the pods have changed.

A pool runs for a while, then changes while it runs: `step` (everything ×1.5 at once, arrivals too, so that queues stay
what they were), `step at the same load` (only the pods ×1.5: queues grow as well), `ramp` (×1.5 over some minutes),
`swap` (one endpoint of four becomes half as fast, and keeps its name and hardware class). `labels_to_recover`: labels
that the trainer has received since the change, or since the end of the ramp, when the rolling mean error of 100
requests, in order of their ends, is within 15 % of the mean before for the first time after the worst such mean; for
the swap over the changed endpoint's requests, and `own_labels_to_recover` counts its labels alone. None: it never was.
`coverage_after`: P90 coverage by backlog bin of requests 500 to 2,500 after the change.

Slower pods under the same load have longer queues, whose errors are larger, so that nobody would come back to the error
of before. `mape_if_always_so` is that of the same requests on pods that were so from the beginning, and
`labels_to_recover_to_that` counts until the error is within 15 % of it.

The ledger is the product's (timer + scrape). Labels come at a request's end, so what was sent before the change and
what was sent before its first label came back can't be right: these are about as many as are in flight, twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.model_queueing import by_bin, errors
from bench.recording import SCENARIOS, Recording, Scenario, Shift, record
from bench.watching import VirtualTrainer, Watched, watch
from services.trainer.basis import backlog_tokens
from services.trainer.cadence import Cadence
from services.trainer.cycle import CycleOptions

LEDGER: Final = "timer+scrape"
ROLLING: Final = 100
WITHIN: Final = 1.15
# The worst window lies within so many labels of the change.
HURT_WITHIN: Final = 600
SEEDS: Final[Mapping[str, tuple[int, ...]]] = {
    "step": (1, 2, 3, 4, 5),
    "step at the same load": (1, 2),
    "ramp": (1, 2),
    "swap": (1, 2),
}
BEFORE: Final = 2_500
AFTER: Final = 2_800
QUICK_BEFORE: Final = 2_000
QUICK_AFTER: Final = 2_700
# After a change a fit every 10 s counts: this is the trainer's default cadence.
CADENCE: Final = Cadence(10_000.0)
SETTLED: Final = (500, 2_500)
SLOWER_ENDPOINT: Final = 1
# The load is one that the slowed pods still carry.
LOADS: Final[Mapping[str, float]] = {"step": 17.0, "step at the same load": 11.0, "ramp": 11.0, "swap": 11.0}


def drift(quick: bool) -> list[dict[str, Any]]:
    """One entry per kind and seed."""
    if quick:
        return [run("step", 1, QUICK_BEFORE, QUICK_AFTER)]
    return [run(kind, seed, BEFORE, AFTER) for kind in LOADS for seed in SEEDS[kind]]


def run(kind: str, seed: int, before: int, after: int, options: CycleOptions | None = None) -> dict[str, Any]:
    """One change: the error before, how many labels it took to be back, the error and the coverage afterwards."""
    scenario = replace(SCENARIOS["poisson-2048"], requests_per_s=LOADS[kind])
    recording, shift = changing(scenario, kind, seed, before, after)
    watched = watch(recording, LEDGER, VirtualTrainer(options or CycleOptions("pool"), CADENCE))
    affected = _affected(recording, shift)
    order = np.argsort(recording.end_ms, kind="stable")
    order = order[affected[order]]
    relative = np.abs(watched.column("ttft_p50") / recording.ttft_ms - 1.0)
    earlier = affected & (recording.dispatched_ms < shift.begins_ms)
    earlier &= recording.dispatched_ms >= 0.5 * shift.begins_ms
    steady = float(relative[earlier].mean())
    settled = _settled(recording, shift)
    row = {
        "kind": kind,
        "seed": seed,
        "labels_to_recover": labels_to_recover(recording, relative, order, shift, steady),
    }
    if shift.pods is not None:
        row["own_labels_to_recover"] = labels_to_recover(recording, relative, order, shift, steady, counted=affected)
    if not shift.dilates:
        always = _error_if_always(scenario, shift, seed, before + after, options)
        row["mape_if_always_so"] = always
        row["labels_to_recover_to_that"] = labels_to_recover(recording, relative, order, shift, always)
    return row | {
        "mape_before": steady,
        "mape_after": errors(recording.ttft_ms, watched.column("ttft_p50"), settled),
        "p90_coverage_after": float((recording.ttft_ms <= watched.column("ttft_p90"))[settled].mean()),
        "coverage_after": _coverage(recording, watched, settled),
    }


def _affected(recording: Recording, shift: Shift) -> npt.NDArray[np.bool_]:
    """Answered requests of the pods that change."""
    answered = ~recording.aborted & np.isfinite(recording.ttft_ms)
    return answered if shift.pods is None else answered & np.isin(recording.pod, shift.pods)


def _settled(recording: Recording, shift: Shift) -> npt.NDArray[np.bool_]:
    """Those of requests 500 to 2,500 after the change."""
    later = recording.dispatched_ms >= shift.begins_ms
    numbers = np.cumsum(later) - 1
    settled: npt.NDArray[np.bool_] = (
        _affected(recording, shift) & later & (numbers >= SETTLED[0]) & (numbers < SETTLED[1])
    )
    return settled


def _error_if_always(scenario: Scenario, shift: Shift, seed: int, count: int, options: CycleOptions | None) -> float:
    """The error of the settled requests where pods were from the beginning what the shift makes of them."""
    recording = record(scenario, count, seed, replace(shift, begins_ms=0.0, ramp_ms=0.0))
    watched = watch(recording, LEDGER, VirtualTrainer(options or CycleOptions("pool"), CADENCE))
    relative = np.abs(watched.column("ttft_p50") / recording.ttft_ms - 1.0)
    return float(relative[_settled(recording, shift)].mean())


def changing(scenario: Scenario, kind: str, seed: int, before: int, after: int) -> tuple[Recording, Shift]:
    """A recording whose pods change after about `before` requests."""
    begins_ms = before / scenario.requests_per_s * 1e3
    shift = {
        "step": Shift(begins_ms, 1.5, dilates=True),
        "step at the same load": Shift(begins_ms, 1.5),
        "ramp": Shift(begins_ms, 1.5, ramp_ms=after / 4 / scenario.requests_per_s * 1e3),
        "swap": Shift(begins_ms, 2.0, pods=(SLOWER_ENDPOINT,)),
    }[kind]
    return record(scenario, before + after, seed, shift), shift


def labels_to_recover(
    recording: Recording,
    relative: npt.NDArray[Any],
    order: npt.NDArray[np.int64],
    shift: Shift,
    steady: float,
    *,
    counted: npt.NDArray[np.bool_] | None = None,
) -> int | None:
    """`order`: requests whose errors count, by their ends; `counted`: those whose labels do, all if it isn't given."""
    ends = recording.end_ms[order]
    start = int(np.searchsorted(ends, shift.begins_ms + shift.ramp_ms))
    if start < ROLLING:
        return None
    # The first windows hold requests of before the change alone, and one may err more by chance: from the worst on.
    rolling = np.convolve(relative[order], np.ones(ROLLING) / ROLLING, mode="valid")[start - ROLLING + 1 :]
    worst = int(np.argmax(rolling[:HURT_WITHIN]))
    if rolling[worst] <= WITHIN * steady:
        return 0
    well = np.flatnonzero(rolling[worst:] <= WITHIN * steady)
    if not len(well):
        return None
    last = start + worst + int(well[0])
    # Labels of every endpoint, also of those that haven't changed.
    answered = ~recording.aborted & (recording.end_ms > shift.begins_ms + shift.ramp_ms)
    if counted is not None:
        answered &= counted
    return int((answered & (recording.end_ms <= ends[last])).sum())


def _coverage(recording: Recording, watched: Watched, settled: npt.NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    covered = recording.ttft_ms <= watched.column("ttft_p90")
    return {
        name: {"rows": int(mask.sum()), "p90": float(covered[mask].mean())}
        for name, mask in by_bin(backlog_tokens(watched.rows), settled)
    }
