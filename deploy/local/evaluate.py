"""`leadtime evaluate`: a decision log and profiles → what each would have earned, as text and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.local.words import counted
from services.router.offpolicy.estimate import Estimate
from services.router.offpolicy.evaluation import Evaluation, Metric, evaluate_profile
from services.router.offpolicy.log import LoggedDecision, LoggedOutcome, join, read_lines
from services.router.scheduling.profile import Profile, Profiles, load_presets
from services.router.scheduling.profile_file import load_profile_file
from services.router.scheduling.registry import Registry
from shared.errors import FieldError, reason_of


def read_logs(paths: Sequence[Path]) -> Iterator[LoggedDecision | LoggedOutcome]:
    """Entries of all files; raises FieldError for a file that can't be read, or a line."""
    for path in paths:
        try:
            with path.open("rb") as lines:
                yield from read_lines(lines, str(path))
        except OSError as error:
            raise FieldError(
                str(path), f"a file that can't be read ({reason_of(error)})", "a decision log, or samples"
            ) from None


def profiles_of(wanted: Sequence[str]) -> tuple[Profiles, tuple[str, ...]]:
    """Presets and profile files by name or path; raises ConfigurationError."""
    registry = Registry()
    known: list[Profile] = [*load_presets(registry)]
    names = []
    for text in wanted:
        if Path(text).suffix in {".yaml", ".yml"}:
            own = load_profile_file(Path(text), registry).profile
            known.append(own)
            names.append(own.name)
        else:
            names.append(text)
    profiles = Profiles(known)
    for name in names:
        profiles.get(name)
    return profiles, tuple(names)


def evaluate_logs(paths: Sequence[Path], wanted: Sequence[str], confidence: float) -> list[Evaluation]:
    """One evaluation a profile. Raises FieldError, ConfigurationError, and ValueError for a log without decisions."""
    profiles, names = profiles_of(wanted)
    joined = join(read_logs(paths))
    return [evaluate_profile(joined, profiles.pipeline(name), confidence=confidence) for name in names]


def as_json(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Plain values; what can't be told is None."""
    return [_plain(asdict(evaluation)) for evaluation in evaluations]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key.value if isinstance(key, Metric) else key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def report_of(evaluation: Evaluation) -> str:
    """One profile's estimates, a block a metric: no line is longer than a narrow terminal."""
    decisions = counted(evaluation.decisions, "decision")
    lines = [f"{evaluation.profile}: {decisions}, agreement {evaluation.agreed:.0%}"]
    for metric, verdict in evaluation.metrics.items():
        carried = f"{verdict.effective_rows:.0f} effective, {verdict.covered:.0%} covered"
        lines.append(f"  {metric.value}: {counted(verdict.rows, 'row')}, {carried}")
        estimates = (
            ("as logged", verdict.logged),
            ("estimate (DR)", verdict.dr),
            ("difference", verdict.difference),
            ("SNIPS", verdict.snips),
        )
        digits = 3 if metric is Metric.GOODPUT else 1
        lines += [f"    {name:<13}  {_shown(estimate, digits)}" for name, estimate in estimates]
    return "\n".join(lines)


def remarks_of(evaluation: Evaluation) -> list[str]:
    """What isn't in the figures: decisions without an outcome, and those that would have been shed."""
    remarks = []
    if evaluation.without_outcome:
        has = "has" if evaluation.without_outcome == 1 else "have"
        remarks.append(f"{counted(evaluation.without_outcome, 'decision')} {has} no outcome in these files")
    if evaluation.shed:
        remarks.append(f"it would have shed {evaluation.shed:.1%} of all")
    return remarks


def warnings_of(evaluation: Evaluation) -> list[str]:
    """Why not to believe which estimates: each warning once, with the metrics that it is of."""
    metrics: dict[str, list[str]] = {}
    for metric, verdict in evaluation.metrics.items():
        for warning in verdict.warnings:
            metrics.setdefault(warning, []).append(metric.value)
    return [f"{', '.join(names)}: {warning}" for warning, names in metrics.items()]


def _shown(estimate: Estimate, digits: int) -> str:
    if not math.isfinite(estimate.value):
        return f"{'unknown':>10}"
    value = f"{estimate.value:>10.{digits}f}"
    if not math.isfinite(estimate.low):
        return value
    return f"{value}  [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
