"""Figures of a run, and what a pool can carry. Pure.

The first fifth of the requests is left out as warm-up and told apart, the last twentieth because the pool runs empty
behind it. Goodput is the share of requests, failed ones included, that met every objective they had.

A pool's capacity is the rate at which the median request of the last 30 % has twice its TTFT objective under the
hand-tuned `load-prefix` policy. Of a mixed pool it is the mean of what its pods would carry in pools of their own kind:
under a policy blind to hardware a mixed pool saturates at half of that, which says little about what it can do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from shared.errors import ConfigurationError
from shared.samples import Outcome
from sim.replay.cluster import run
from sim.replay.options import RunOptions, SloRule
from sim.replay.outcomes import Outcomes, RunResult
from sim.replay.policies import policy
from sim.replay.pool import PodSpec, describe, limits_of, short_name
from sim.replay.trace import Trace

WARM_UP: Final = 0.2
COOL_DOWN: Final = 0.05
CAPACITY_POLICY: Final = "load-prefix"
CAPACITY_SLO: Final = SloRule(1000.0, 40.0, 4096)
_WIDENINGS: Final = 12
_WIDER: Final = 1.6
_SATURATED: Final = 2.0
_TAIL: Final = 0.3


def met(outcomes: Outcomes) -> Any:
    """Bool (n,): whether each request met every objective it had; a failed one didn't."""
    ok = np.array([outcome is Outcome.OK for outcome in outcomes.outcome])
    ttft = np.isnan(outcomes.ttft_slo_ms) | (outcomes.ttft_ms <= outcomes.ttft_slo_ms)
    tpot = np.isnan(outcomes.tpot_slo_ms) | np.isnan(outcomes.tpot_ms) | (outcomes.tpot_ms <= outcomes.tpot_slo_ms)
    return ok & ttft & tpot


def figures(result: RunResult) -> dict[str, float | None]:
    """The measured stretch of a run; latencies in ms as the client sees them. None where nothing was measured."""
    count = len(result.outcomes.arrival_ms)
    return _figures(result.outcomes, slice(int(WARM_UP * count), count - int(COOL_DOWN * count)))


def cold_start(result: RunResult) -> dict[str, float | None]:
    """The same of the warm-up, when a learned policy learns."""
    return _figures(result.outcomes, slice(0, int(WARM_UP * len(result.outcomes.arrival_ms))))


def settled(result: RunResult) -> bool:
    """Whether requests came for twice as long as the usual answer takes. Else the pool fills most of the while: fewer
    requests have gone than came, and it never gets to the load that was asked for.
    """
    arrivals, median_ms = result.outcomes.arrival_ms, figures(result)["e2e_p50_ms"]
    return median_ms is not None and 2.0 * median_ms <= float(arrivals[-1] - arrivals[0])


def _figures(outcomes: Outcomes, part: slice) -> dict[str, float | None]:
    ttft, tpot, e2e = outcomes.ttft_ms[part], outcomes.tpot_ms[part], outcomes.e2e_ms[part]
    inputs = outcomes.input_tokens[part]
    requests = len(inputs)
    failed = sum(outcome is not Outcome.OK for outcome in outcomes.outcome[part])
    predicted, predicted_p90 = outcomes.predicted_ttft_ms[part], outcomes.predicted_ttft_p90_ms[part]
    known = ~np.isnan(predicted) & ~np.isnan(ttft)
    return {
        "requests": float(requests),
        "failed": float(failed),
        "ttft_p50_ms": _quantile(ttft, 0.5),
        "ttft_p90_ms": _quantile(ttft, 0.9),
        "ttft_p99_ms": _quantile(ttft, 0.99),
        "tpot_p50_ms": _quantile(tpot, 0.5),
        "tpot_p90_ms": _quantile(tpot, 0.9),
        "e2e_mean_ms": _mean(e2e),
        "e2e_p50_ms": _quantile(e2e, 0.5),
        "goodput": float(np.mean(met(outcomes)[part])) if requests else None,
        "prefix_hit_ratio": float(outcomes.cached_tokens[part].sum() / max(inputs.sum(), 1)),
        "predicted_share": float(known.mean()) if requests else None,
        "ttft_mape": _mean(np.abs(predicted[known] / ttft[known] - 1.0)),
        "ttft_bias": _quantile(predicted[known] / ttft[known] - 1.0, 0.5),
        "ttft_p90_coverage": _mean((ttft[known] <= predicted_p90[known]).astype(np.float64)),
    }


def _quantile(values: Any, share: float) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.quantile(values, share)) if len(values) else None


def _mean(values: Any) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def saturated(result: RunResult) -> bool:
    """Whether the median request of the last 30 % had more than twice its TTFT objective."""
    outcomes = result.outcomes
    tail = slice(int((1.0 - _TAIL) * len(outcomes.arrival_ms)), None)
    late = np.where(np.isnan(outcomes.ttft_ms[tail]), math.inf, outcomes.ttft_ms[tail] / outcomes.ttft_slo_ms[tail])
    return bool(np.median(late) > _SATURATED)


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look for a capacity: requests a second, and how near is near enough."""

    low: float
    high: float
    tolerance: float = 0.03


def capacity(
    trace: Trace, pods: Sequence[PodSpec], search: Search, told: Callable[[str], None] = lambda _: None
) -> float:
    """Requests a second that a pool of one kind of pod carries, bisected in the logarithm.

    The bracket is widened where it doesn't hold the answer. `told` hears of each step. Raises ConfigurationError where
    no rate within reach fills the pool, or none is carried.
    """
    chosen = policy(CAPACITY_POLICY)

    def too_much(rate: float) -> bool:
        over = saturated(run(trace.at_rate(rate), pods, chosen, RunOptions(seed=0, slo=CAPACITY_SLO)))
        told(f"{trace.name} on {describe(tuple(pods))}: {rate:.2f}/s {'is too much' if over else 'is carried'}")
        return over

    low, high = search.low, search.high
    for _ in range(_WIDENINGS):
        if not too_much(low):
            break
        low, high = low / _WIDER, low
    else:
        raise ConfigurationError(f"{trace.name}: even {low:.2g} requests/s are too much; --capacity names another rate")
    if high == search.high:
        for _ in range(_WIDENINGS):
            if too_much(high):
                break
            low, high = high, high * _WIDER
        else:
            raise ConfigurationError(
                f"{trace.name}: found {len(trace.requests)} requests, too few or too light to fill "
                f"{describe(tuple(pods))}; a longer trace, fewer pods, or --capacity"
            )
    while high / low > 1.0 + search.tolerance:
        middle = math.sqrt(low * high)
        if too_much(middle):
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def guess(trace: Trace, pods: Sequence[PodSpec]) -> Search:
    """A bracket from the pods' own speed: what they could prefill and decode if nothing were cached or shared."""
    inputs = float(np.mean([request.input_tokens for request in trace.requests]))
    outputs = float(np.mean([request.output_tokens for request in trace.requests]))
    profile = pods[0].profile
    batch = min(128.0, 0.8 * profile.kv_capacity_tokens / (inputs + outputs))
    step_ms = profile.decode_ms(int(batch), int(batch * (inputs + outputs / 2)))
    work_ms = profile.prefill_ms(2048) / 2048 * inputs + profile.prefill_ms_per_square_token * inputs * inputs
    work_ms += outputs * step_ms / batch
    rate = 1e3 / work_ms * len(pods)
    return Search(0.7 * rate, 1.8 * rate)


def pool_capacity(trace: Trace, pods: Sequence[PodSpec], of_kind: Callable[[Trace, Sequence[PodSpec]], float]) -> float:
    """Capacity of any pool: each kind's share of what a pool of that kind alone, and of the same size, carries."""
    total = 0.0
    for name in sorted({short_name(pod.profile) for pod in pods}):
        own = [pod for pod in pods if short_name(pod.profile) == name]
        alike = [replace(own[0], limits=limits_of(own[0].profile))] * len(pods)
        total += of_kind(trace, alike) * len(own) / len(pods)
    return total
