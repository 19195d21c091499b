"""The newest decisions with what came of them: for people (`/v1/decisions`) and for the live prediction error. Pure.

Bounded: a ring of records and a ring of errors. Arrays are kept as they were and turned into JSON only when asked for.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.router.scheduling.decision import Decision
from shared.features import SCHEMA, FloatMatrix
from shared.prior import is_prior
from shared.samples import LatencySample, Rung
from shared.verdicts import Reason, Unsampled


@dataclass(slots=True)
class DecisionRecord:
    """One decision as it was taken, and its outcome once that has come back."""

    decision_id: str
    received_unix_ms: float
    model: str
    input_tokens: float
    rung: Rung
    bundle_version: str | None
    decision_ms: float
    addresses: tuple[str, ...]
    rows: FloatMatrix = field(repr=False)
    predictions: Mapping[str, npt.NDArray[np.float32]] = field(repr=False)
    decision: Decision = field(repr=False)
    outcome: LatencySample | Unsampled | None = None
    queue_ms: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, candidate by candidate, best first."""
        order = self.decision.order
        ranked = [*order, *(i for i in range(len(self.addresses)) if i not in order)]
        return {
            "decision_id": self.decision_id,
            "received_unix_ms": self.received_unix_ms,
            "model": self.model,
            "input_tokens": self.input_tokens,
            "profile": self.decision.profile,
            "used_fallback": self.decision.used_fallback,
            "rung": self.rung.value,
            "bundle_version": self.bundle_version,
            "low_confidence": self.bundle_version is not None and is_prior(self.bundle_version),
            "propensity": round(self.decision.propensity, 6),
            "decision_ms": round(self.decision_ms, 3),
            "queue_ms": round(self.queue_ms, 3),
            "listed": [self.addresses[i] for i in order],
            "filters": [
                {"plugin": n.plugin, "kept": int(n.kept.sum()), "ignored": n.ignored, "chance": n.chance}
                for n in self.decision.narrowings
            ],
            "candidates": [
                {
                    "address": self.addresses[i],
                    "features": dict(zip(SCHEMA.names, self.rows[i].tolist(), strict=True)),
                    "prediction": {name: float(column[i]) for name, column in self.predictions.items()} or None,
                    "scores": self.decision.scores_of(i),
                }
                for i in ranked
            ],
            "outcome": _outcome(self.outcome) if self.outcome else None,
        }


def _outcome(end: LatencySample | Unsampled) -> dict[str, Any]:
    if isinstance(end, Unsampled):
        return {"sample": end.reason.value, "endpoint": end.endpoint, "status": end.status}
    sample = end
    return {
        "sample": Reason.ACCEPTED.value,
        "endpoint": sample.endpoint,
        "outcome": sample.outcome.value,
        "status": sample.status,
        "ttft_ms": sample.ttft_ms,
        "tpot_ms": sample.tpot_ms,
        "e2e_ms": sample.e2e_ms,
        "input_tokens": sample.input_tokens,
        "cached_tokens": sample.cached_tokens,
        "output_tokens": sample.output_tokens,
        "output_tokens_estimated": sample.output_tokens_estimated,
    }


class DecisionLog:
    """A ring of the newest decisions, found again by id."""

    __slots__ = ("_capacity", "_records")

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def add(self, record: DecisionRecord) -> None:
        self._records[record.decision_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def observe(self, end: LatencySample | Unsampled) -> None:
        """Put an outcome beside its decision, if that is still in the ring."""
        record = self._records.get(end.decision_id)
        if record is not None and not (isinstance(end, Unsampled) and isinstance(record.outcome, LatencySample)):
            record.outcome = end

    def predicted_ttft_ms(self, decision_id: str, address: str) -> float | None:
        """The median predicted for one candidate of a decision in the ring; None where there is none."""
        record = self._records.get(decision_id)
        column = record.predictions.get("ttft_p50") if record is not None else None
        if record is None or column is None or address not in record.addresses:
            return None
        return float(column[record.addresses.index(address)])

    def newest(self, count: int) -> list[DecisionRecord]:
        """The newest `count` decisions, newest first."""
        records: Iterable[DecisionRecord] = reversed(self._records.values())
        return [record for record, _ in zip(records, range(count), strict=False)]

    def find(self, decision_id: str) -> DecisionRecord | None:
        return self._records.get(decision_id)


class PredictionError:
    """Error of the newest predictions of one target against what happened."""

    __slots__ = ("_count", "_log_ratio", "_relative")

    def __init__(self, capacity: int = 2_048) -> None:
        self._relative = np.zeros(capacity)
        self._log_ratio = np.zeros(capacity)
        self._count = 0

    def observe(self, predicted_ms: float, actual_ms: float) -> None:
        """Count one pair; both above 0."""
        i = self._count % len(self._relative)
        self._relative[i] = (predicted_ms - actual_ms) / actual_ms
        self._log_ratio[i] = np.log(predicted_ms / actual_ms)
        self._count += 1

    def report(self) -> dict[str, float | int | None]:
        """`mape` and `bias` (median of the signed relative error) as ratios; None before the first pair."""
        n = min(self._count, len(self._relative))
        if n == 0:
            return {"samples": 0, "mape": None, "bias": None}
        return {
            "samples": self._count,
            "mape": float(np.mean(np.abs(self._relative[:n]))),
            "bias": float(np.expm1(np.median(self._log_ratio[:n]))),
        }

    def reset(self) -> None:
        self._count = 0
