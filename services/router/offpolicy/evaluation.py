"""A decision log and another profile → what that would have earned, metric by metric. Pure.

The profile's own pipeline is asked, decision by decision, with which probability it would have put each candidate first
(`Pipeline.first_probabilities`: nothing is drawn, nothing learned). What was done is the endpoint that came first,
whichever served in the end.

Limits: one decision at a time. Another policy would also have left other queues behind for the requests after; that is
the replay's question, not this one's. Requests without the label (errors, aborts, answers that weren't streamed) are
left out of that metric and counted. A profile that reads the session, or counts turns, is asked without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.offpolicy.estimate import Verdict, evaluate
from services.router.offpolicy.log import Joined, LoggedDecision, LoggedOutcome, context_of
from services.router.scheduling.interfaces import Context
from services.router.scheduling.objectives import predicted
from services.router.scheduling.pipeline import Pipeline
from shared.samples import Outcome

_Floats = npt.NDArray[np.float64]

# How a request ends that the serving side failed; one whose client left is judged by what came until then.
_FAILED: Final = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_RESET, Outcome.TIMEOUT, Outcome.NO_ENDPOINT})


class Metric(StrEnum):
    """What a request may be judged by. `goodput`: 1 where every stated objective was met, of those that state one."""

    TTFT_MS = "ttft_ms"
    TPOT_MS = "tpot_ms"
    E2E_MS = "e2e_ms"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One profile against the log. `agreed`: mean probability of doing what was done. `shed`: share that its admitters
    would have refused.
    """

    profile: str
    decisions: int
    without_outcome: int
    agreed: float
    shed: float
    metrics: dict[Metric, Verdict]


def evaluate_profile(joined: Sequence[Joined], pipeline: Pipeline, *, confidence: float = 0.95) -> Evaluation:
    """Raises ValueError for a log without decisions."""
    if not joined:
        raise ValueError("the log has no decisions")
    rng = np.random.default_rng(0)
    contexts = [context_of(entry.decision, rng) for entry in joined]
    chances = [pipeline.first_probabilities(context) for context in contexts]
    chosen = [float(chance[entry.decision.chosen]) for entry, chance in zip(joined, chances, strict=True)]
    metrics = {}
    for metric in Metric:
        verdict = _verdict(metric, joined, contexts, chances, confidence)
        if verdict is not None:
            metrics[metric] = verdict
    shed = sum(pipeline.run(context).refusal is not None for context in contexts if context.request.priority < 0)
    return Evaluation(
        profile=pipeline.profile,
        decisions=len(joined),
        without_outcome=sum(entry.outcome is None for entry in joined),
        agreed=float(np.mean(chosen)),
        shed=shed / len(joined),
        metrics=metrics,
    )


def _verdict(
    metric: Metric,
    joined: Sequence[Joined],
    contexts: Sequence[Context],
    chances: Sequence[_Floats],
    confidence: float,
) -> Verdict | None:
    rewards, done, expected, guessed_done, guessed_expected = [], [], [], [], []
    for entry, context, chance in zip(joined, contexts, chances, strict=True):
        reward = _reward(metric, entry.decision, entry.outcome)
        if reward is None:
            continue
        guesses = _guesses(metric, context)
        at = entry.decision.chosen
        rewards.append(reward)
        done.append(entry.decision.propensity)
        expected.append(float(chance[at]))
        guessed_done.append(float(guesses[at]))
        guessed_expected.append(float(chance @ guesses))
    if not rewards:
        return None
    return evaluate(rewards, done, expected, guessed_done, guessed_expected, confidence=confidence)


def _reward(metric: Metric, decision: LoggedDecision, outcome: LoggedOutcome | None) -> float | None:
    if outcome is None:
        return None
    if metric is not Metric.GOODPUT:
        value: float | None = getattr(outcome, metric.value)
        return value
    if outcome.outcome in _FAILED:  # whatever came before it broke off: no objective was met
        return 0.0 if decision.ttft_slo_ms or decision.tpot_slo_ms else None
    met: bool | None = None
    # The TTFT objective counts from receipt, the label from dispatch.
    spent_ms = decision.elapsed_ms
    for slo_ms, actual_ms in (
        (decision.ttft_slo_ms, None if outcome.ttft_ms is None else outcome.ttft_ms + spent_ms),
        (decision.tpot_slo_ms, outcome.tpot_ms),
    ):
        if slo_ms is not None and actual_ms is not None:
            met = (met is None or met) and actual_ms <= slo_ms
    return None if met is None else float(met)


def _guesses(metric: Metric, context: Context) -> _Floats:
    """The model's guess of the reward for each candidate, float64 (n,); 0 where there is none: DR is then SNIPS."""
    count, prediction = len(context.candidates), context.prediction
    nothing = np.zeros(count)
    if prediction is None:
        return nothing
    if metric is Metric.GOODPUT:
        return _chance_of_all(context)
    column = prediction.get(f"{metric.value.removesuffix('_ms')}_p50")
    return nothing if column is None else np.nan_to_num(column.astype(np.float64))


def _chance_of_all(context: Context) -> _Floats:
    """How probably each candidate meets all objectives, from the predicted median and p90."""
    chance = np.ones(len(context.candidates))
    prediction, slo = context.prediction, context.request.slo
    if prediction is None:
        return chance
    for target, limit in (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms)):
        if limit is None:
            continue
        median = predicted(prediction, target)  # type: ignore[arg-type]
        high = predicted(prediction, target, "p90")  # type: ignore[arg-type]
        if median is None or high is None:
            continue
        left = max(limit - (context.elapsed_ms if target == "ttft" else 0.0), 1e-3)
        middle = np.maximum(median.astype(np.float64), 1e-3)
        spread = np.maximum(np.log(np.maximum(high, middle) / middle) / 1.2815516, 0.02)
        chance *= 1.0 / (1.0 + np.exp(-1.702 * np.log(left / middle) / spread))
    return np.asarray(np.nan_to_num(chance))
