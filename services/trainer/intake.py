"""A message from the stream → what the window takes, or the reason why not. Pure.

Only answered requests teach. One that was cut off says that its latency was at least so much: it is kept for the
evaluation. A row of another schema belongs to a router of another version and is left to that version's trainer.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from shared.errors import ContractError
from shared.features import SCHEMA, FloatMatrix
from shared.prediction import TARGETS
from shared.samples import LatencySample, Outcome, decode_sample

_CUT_OFF: Final = frozenset({Outcome.CLIENT_ABORT, Outcome.TIMEOUT, Outcome.UPSTREAM_RESET})
# TTFT that ends with the answer isn't the first token's: a server or a proxy that holds the stream back.
_DEGENERATE_RATIO: Final = 0.95
_DEGENERATE_MIN_TOKENS: Final = 10
_HEALTH_RATE: Final = 0.01
_HEALTH_MIN_SAMPLES: Final = 50
UNHEALTHY_SHARE: Final = 0.2
# A stamp further ahead is nobody's clock skew. Generous, since this process's own clock may be the wrong one.
FUTURE_MS: Final = 86_400_000.0
# Labels come from one clock, rounded to microseconds; TPOT also from a count of tokens.
_SLACK_RATIO: Final = 1.01
_SLACK_MS: Final = 5.0


class Reject(StrEnum):
    """Why a message taught nothing; the label of its counter."""

    MALFORMED = "malformed"
    POOL = "pool"
    SCHEMA = "schema"
    OUTCOME = "outcome"
    NO_LABEL = "no_label"
    CLOCK = "clock"
    INCONSISTENT = "inconsistent"
    DUPLICATE = "duplicate"


# Rejected for what they are, whenever they come: never delivered again.
POISON: Final = frozenset({Reject.MALFORMED, Reject.POOL})


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample to learn from, or a cut-off one (`censored_ms` set, no targets)."""

    sample: LatencySample
    row: FloatMatrix
    """float32 (F,)"""
    targets: Mapping[str, float]
    """Known latencies in ms by target"""
    censored_ms: float | None = None


class Intake:
    """Checks messages of one pool; remembers the ids of the last `remembered` to know doubles."""

    __slots__ = ("_pool", "_remembered", "_seen")

    def __init__(self, pool: str, *, remembered: int) -> None:
        self._pool = pool
        self._remembered = remembered
        self._seen: OrderedDict[str, None] = OrderedDict()

    def examine(self, data: bytes, now_unix_ms: float) -> Taken | Reject:
        """What one message holds; a sample that is taken is a double from then on."""
        try:
            sample = decode_sample(data)
        except ContractError:
            return Reject.MALFORMED
        if sample.pool != self._pool:
            return Reject.POOL
        if sample.schema_hash != SCHEMA.hash:
            return Reject.SCHEMA
        if sample.decision_id in self._seen:
            return Reject.DUPLICATE
        if max(sample.received_unix_ms, sample.completed_unix_ms) > now_unix_ms + FUTURE_MS:
            return Reject.CLOCK
        taken = _classify(sample)
        if isinstance(taken, Taken):
            self._seen[sample.decision_id] = None
            if len(self._seen) > self._remembered:
                self._seen.popitem(last=False)
        return taken


def _classify(sample: LatencySample) -> Taken | Reject:
    row = np.asarray(sample.features, np.float32)
    if sample.outcome in _CUT_OFF:
        if sample.e2e_ms is None:
            return Reject.NO_LABEL
        return Taken(sample, row, {}, sample.e2e_ms)
    if sample.outcome is not Outcome.OK:
        return Reject.OUTCOME
    if not _consistent(sample):
        return Reject.INCONSISTENT
    labels = {"ttft": sample.ttft_ms, "tpot": sample.tpot_ms, "e2e": sample.e2e_ms}
    if not sample.streamed:
        labels |= {"ttft": None, "tpot": None}
    targets = {target: value for target in TARGETS if (value := labels[target]) is not None}
    return Taken(sample, row, targets) if targets else Reject.NO_LABEL


def _consistent(sample: LatencySample) -> bool:
    """Whether the first token and those after it fit into the whole."""
    if sample.e2e_ms is None:
        return True
    part_ms = sample.ttft_ms or 0.0
    if sample.tpot_ms is not None and sample.output_tokens and not sample.output_tokens_estimated:
        part_ms += sample.tpot_ms * (sample.output_tokens - 1)
    return part_ms <= _SLACK_RATIO * sample.e2e_ms + _SLACK_MS


class LabelHealth:
    """Watches for TTFT labels that are really e2e: streamed answers of ≥10 tokens whose TTFT is ≥95 % of e2e."""

    __slots__ = ("_samples", "_share")

    def __init__(self) -> None:
        self._samples = 0
        self._share = 0.0

    def observe(self, sample: LatencySample) -> None:
        if sample.ttft_ms is None or sample.e2e_ms is None or (sample.output_tokens or 0) < _DEGENERATE_MIN_TOKENS:
            return
        self._samples += 1
        degenerate = float(sample.ttft_ms >= _DEGENERATE_RATIO * sample.e2e_ms)
        self._share += max(_HEALTH_RATE, 1.0 / self._samples) * (degenerate - self._share)

    @property
    def degenerate_share(self) -> float:
        """Rolling share, 0..1."""
        return self._share

    @property
    def healthy(self) -> bool:
        return self._samples < _HEALTH_MIN_SAMPLES or self._share <= UNHEALTHY_SHARE
