"""From what the demo saw to what it says: one report of plain numbers, the same for the table and the JSON file. Pure.

Latencies are the load client's, through Envoy: from the sending of a request to its first content and its last byte.
Prediction errors are the samples': the prediction at decision time for the endpoint that served, against its label.

A phase is void when the client sent, or the simulated servers answered, later than planned by more than 5 % of the
phase's median TTFT on average: the machine was too busy for its figures to mean anything. A void phase is shown and
said, not dropped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from shared.samples import LatencySample, Rung
from sim.loadgen import Distribution, LoadSummary

VOID_SHARE: Final = 0.05
RUNGS: Final = (Rung.PREDICTOR, Rung.IN_PROCESS, Rung.PRIOR, Rung.HEURISTIC)


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """One phase as seen from outside and from inside."""

    name: str
    """A policy's name, or `learning`."""
    load: LoadSummary
    simulator_lateness_mean_ms: float
    simulator_lateness_p99_ms: float
    served_by: Mapping[str, int]
    """Decisions by rung."""
    bundles: Mapping[str, int]
    """Decisions by bundle version."""
    samples: tuple[LatencySample, ...]
    """Those of this phase that came out of JetStream's subject."""
    cpu_share: Mapping[str, float]
    """Processor seconds per second, by process."""

    @property
    def lateness_mean_ms(self) -> float:
        """The worse of the client's and the simulator's."""
        return max(self.load.lateness.mean_ms or 0.0, self.simulator_lateness_mean_ms)

    @property
    def void(self) -> bool:
        p50_ms = self.load.ttft.p50_ms
        return p50_ms is None or self.lateness_mean_ms > VOID_SHARE * p50_ms


@dataclass(frozen=True, slots=True)
class PredictionError:
    """`mape` is the mean absolute relative error, `bias` the median signed one; None without a pair."""

    samples: int
    mape: float | None
    bias: float | None


def prediction_error(samples: Iterable[LatencySample], target: str = "ttft") -> PredictionError:
    """Error of the median prediction of a target over the samples that have both it and the label."""
    relative = []
    for sample in samples:
        predicted = (sample.prediction or {}).get(f"{target}_p50")
        actual = getattr(sample, f"{target}_ms")
        if predicted is not None and actual is not None:
            relative.append((predicted - actual) / actual)
    if not relative:
        return PredictionError(0, None, None)
    return PredictionError(len(relative), fmean(abs(error) for error in relative), median(relative))


def report(learning: PhaseOutcome, phases: Sequence[PhaseOutcome]) -> dict[str, Any]:
    """The report; requests, samples and bundles of all phases, decisions and errors of the measured ones."""
    everything = (learning, *phases)
    samples = [sample for phase in everything for sample in phase.samples]
    judged = phases[-1] if phases else learning
    error = prediction_error(judged.samples)
    bundles = {version for phase in everything for version in phase.bundles}
    return {
        "requests": sum(phase.load.requests for phase in everything),
        "failed": sum(phase.load.failed for phase in everything),
        "samples": len(samples),
        "bundles": len(bundles),
        "void": any(phase.void for phase in phases),
        "void_phases": [phase.name for phase in phases if phase.void],
        "served_by": {rung.value: sum(phase.served_by.get(rung.value, 0) for phase in phases) for rung in RUNGS},
        "prediction": {
            "ttft_mape": error.mape,
            "ttft_bias": error.bias,
            "samples": error.samples,
            "tpot_mape": prediction_error(judged.samples, "tpot").mape,
        },
        "policies": {phase.name: _policy(phase) for phase in phases},
        "learning": _policy(learning),
    }


def _policy(phase: PhaseOutcome) -> dict[str, Any]:
    load = phase.load
    error = prediction_error(phase.samples)
    return {
        **_distribution("ttft", load.ttft),
        **_distribution("tpot", load.tpot),
        **_distribution("e2e", load.e2e),
        "requests": load.requests,
        "failed": load.failed,
        "failures": dict(load.failures),
        "samples": len(phase.samples),
        "bundles": len(phase.bundles),
        "void": phase.void,
        "prefix_hit_ratio": load.prefix_hit_ratio,
        "ttft_mape": error.mape,
        "ttft_bias": error.bias,
        "served_by": {rung.value: phase.served_by.get(rung.value, 0) for rung in RUNGS},
        "endpoints": dict(sorted(load.served_by.items())),
        "client_lateness_mean_ms": load.lateness.mean_ms,
        "client_lateness_p99_ms": load.lateness.p99_ms,
        "simulator_lateness_mean_ms": phase.simulator_lateness_mean_ms,
        "simulator_lateness_p99_ms": phase.simulator_lateness_p99_ms,
        "cpu_share": dict(phase.cpu_share),
    }


def _distribution(name: str, values: Distribution) -> dict[str, float | None]:
    return {f"{name}_p50_ms": values.p50_ms, f"{name}_p90_ms": values.p90_ms, f"{name}_p99_ms": values.p99_ms}
