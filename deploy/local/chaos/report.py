"""The chaos suite's table and judgement, from what was measured. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

SETTLE_LIMIT_S: Final = 1.0
_NONE: Final = ("samples_lost", "samples_doubled", "bundles_mixed")
_COLUMNS: Final = (
    ("fault", "fault", "<"),
    ("requests", "requests", ">"),
    ("failed_by_leadtime", "failed: ours", ">"),
    ("failed_by_endpoint", "the endpoint's", ">"),
    ("p99_added_ms", "p99 added, ms", ">"),
    ("ledger_error_max", "ledger error, most", ">"),
    ("ledger_settle_s", "settled, s", ">"),
    ("samples_acknowledged", "acknowledged", ">"),
    ("samples_lost", "lost", ">"),
    ("samples_doubled", "doubled", ">"),
    ("predictions_checked", "predictions checked", ">"),
    ("bundles_mixed", "mixed", ">"),
)


def failures(result: Mapping[str, Any]) -> list[str]:
    """What didn't hold, fault by fault; empty when all did."""
    found = []
    for fault in result["faults"]:
        name = fault["fault"]
        if fault["requests"] < 1:
            found.append(f"{name}: no request was sent")
        if fault["failed_by_leadtime"]:
            found.append(f"{name}: {fault['failed_by_leadtime']} requests failed by Leadtime: {fault['reasons']}")
        found += [f"{name}: {key} is {fault[key]}" for key in _NONE if fault[key]]
        found += [f"{name}: stuck: {what}" for what in fault["stuck"]]
        settled = fault["ledger_settle_s"]
        if settled is None or settled > SETTLE_LIMIT_S:
            found.append(f"{name}: the ledgers weren't exact within {SETTLE_LIMIT_S:g} s ({settled})")
    if sum(fault["predictions_checked"] for fault in result["faults"]) < 1:
        found.append("no prediction could be held against its bundle")
    if unexplained := result["predictions"]["unexplained"]:
        found.append(f"{len(unexplained)} predictions that no bundle explains: {unexplained[:5]}")
    if result["ledger_faults"]:
        found.append(f"routers found {result['ledger_faults']} inconsistencies in their ledgers")
    trained = result["samples"]
    if trained["not_seen_by_trainer"]:
        found.append(f"{trained['not_seen_by_trainer']} samples of the stream haven't reached the trainer")
    if trained["trained_twice"]:
        found.append(f"{trained['trained_twice']} samples were trained twice")
    return found


def table(faults: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text, a line a fault."""
    rows = [[title for _, title, _ in _COLUMNS]]
    rows += [["–" if fault[key] is None else str(fault[key]) for key, _, _ in _COLUMNS] for fault in faults]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            f"{cell:{align}{width}}" for cell, width, (_, _, align) in zip(row, widths, _COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value at a share of the sorted ones; None of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
