"""The incumbent's predictors on a recording: the documents' six features, and the thirteen of its present code.

Both learn as its training server does: raw milliseconds, squared error, its hyperparameters, its buckets (queue × KV
use × prefix hit, the newest 500 rows each), 90 % of them for the fit, a refit at a fixed interval; every prediction is
made before its label is known. What they are fed is what the incumbent feeds them: gauges 50 ms old at most, counters
of its own that see every first token (its body stream passes through it), a prefix hit that is exact here.

`six`: KV use, input length, queue depth, running requests, prefix hit, input tokens in flight; one model. `thirteen`:
the present code's, with the gate by queue (two models) once each side has 200 rows. Encoder columns, decode tokens in
flight and pod type are constant in its own feed, and so here. Limits: TTFT only; one trainer, one router.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from bench.recording import Kind, Recording

Method = Literal["incumbent-six", "incumbent-thirteen"]

# llm-d's training server: 200 trees of depth 6 on raw milliseconds.
HYPERPARAMETERS: Final = {
    "objective": "reg:squarederror", "tree_method": "hist", "max_depth": 6, "eta": 0.05, "subsample": 0.8,
    "colsample_bytree": 0.8, "min_child_weight": 5, "gamma": 0.2, "alpha": 0.01, "lambda": 0.1, "seed": 42,
    "nthread": 1,
}  # fmt: skip
TREES: Final = 200
BUCKET_ROWS: Final = 500
MIN_GATED_ROWS: Final = 200
TEST_SHARE: Final = 0.1
QUEUE_EDGES: Final = (1, 3, 6, 11)
KV_BINS: Final = 20
PREFIX_BINS: Final = 4

SIX: Final = ("kv", "input", "waiting", "running", "prefix", "input_in_flight")
THIRTEEN: Final = (
    "is_queued", "kv", "input", "waiting", "running", "prefill_in_flight", "decode_in_flight", "encoder_matched",
    "encoder_input", "prefix", "effective_input", "prefill_bucket", "pod_type",
)  # fmt: skip
# Columns that the model for an empty queue does without.
_QUEUE_COLUMNS: Final = (0, 3)
_LEAST_MS: Final = 1e-3


@dataclass(slots=True)
class _Pod:
    """What its picker knows of one endpoint."""

    kv: float = 0.0
    waiting: float = 0.0
    running: int = 0
    input_in_flight: int = 0
    prefill_in_flight: int = 0


def features(recording: Recording) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """float32 (n, 6) and float32 (n, 13) of every request at its dispatch, in order of dispatch."""
    pods = [_Pod() for _ in recording.scenario.pods]
    n = len(recording)
    six, thirteen = np.zeros((n, len(SIX)), np.float32), np.zeros((n, len(THIRTEEN)), np.float32)
    prefilling: set[int] = set()
    for event in recording.events:
        if event.kind is Kind.SCRAPE:
            pod = pods[event.what.pod]
            pod.kv, pod.waiting = event.what.kv_cache_utilization, event.what.waiting_requests
            continue
        i = event.what
        pod = pods[int(recording.pod[i])]
        tokens, uncached = int(recording.input_tokens[i]), int(recording.uncached_tokens[i])
        if event.kind is Kind.DISPATCH:
            prefix = 1.0 - uncached / tokens
            six[i] = (pod.kv, tokens, pod.waiting, pod.running, prefix, pod.input_in_flight)
            bucket = min(PREFIX_BINS - 1, int(prefix * PREFIX_BINS))
            thirteen[i] = (
                pod.waiting > 0, pod.kv, tokens, pod.waiting, pod.running, pod.prefill_in_flight, 0, 0, 0, prefix,
                uncached, bucket, 0,
            )  # fmt: skip
            pod.running += 1
            pod.input_in_flight += tokens
            pod.prefill_in_flight += uncached
            prefilling.add(i)
            continue
        if i in prefilling:  # the first token, or an end before it
            prefilling.discard(i)
            pod.prefill_in_flight -= uncached
        if event.kind is not Kind.FIRST:
            pod.running -= 1
            pod.input_in_flight -= tokens
    return six, thirteen


@dataclass(slots=True)
class _Store:
    """Buckets of the newest rows, by number of request."""

    buckets: dict[tuple[int, int, int], deque[int]] = field(default_factory=dict)

    def add(self, i: int, kv: float, waiting: float, prefix: float) -> None:
        key = (
            sum(waiting >= edge for edge in QUEUE_EDGES),
            min(KV_BINS - 1, int(kv * KV_BINS)),
            min(PREFIX_BINS - 1, int(prefix * PREFIX_BINS)),
        )
        self.buckets.setdefault(key, deque(maxlen=BUCKET_ROWS)).append(i)

    def rows(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(i for bucket in self.buckets.values() for i in bucket), np.int64)


class _Model:
    """One booster, or a pair gated by the queue."""

    def __init__(self, rows: npt.NDArray[np.float32], y_ms: npt.NDArray[np.float64], *, gated: bool) -> None:
        self._one = _boost(rows, y_ms)
        self._pair: tuple[xgb.Booster, xgb.Booster] | None = None
        if gated:
            queued = rows[:, 0] > 0
            if min(int(queued.sum()), int((~queued).sum())) >= MIN_GATED_ROWS:
                self._pair = (
                    _boost(np.delete(rows[~queued], _QUEUE_COLUMNS, axis=1), y_ms[~queued]),
                    _boost(rows[queued], y_ms[queued]),
                )

    def predict(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        if self._pair is None:
            answer = _ask(self._one, rows)
        else:
            queued = rows[:, 0] > 0
            answer = np.zeros(len(rows))
            if queued.any():
                answer[queued] = _ask(self._pair[1], rows[queued])
            if not queued.all():
                answer[~queued] = _ask(self._pair[0], np.delete(rows[~queued], _QUEUE_COLUMNS, axis=1))
        return np.maximum(answer, _LEAST_MS)


def _boost(rows: npt.NDArray[np.float32], y_ms: npt.NDArray[np.float64]) -> xgb.Booster:
    return xgb.train(HYPERPARAMETERS, xgb.DMatrix(rows, label=y_ms, nthread=1), TREES)


def _ask(booster: xgb.Booster, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.asarray(booster.inplace_predict(rows), np.float64)


def predictions(
    recording: Recording, method: Method, fit_interval_ms: float, from_ms: float = -math.inf
) -> npt.NDArray[np.float64]:
    """TTFT in ms, (n,), as predicted at dispatch; NaN before the first fit.

    Fits begin at `from_ms` (labels are kept from the start), then come every `fit_interval_ms`.
    """
    rows = features(recording)[0 if method == "incumbent-six" else 1]
    kv, waiting, prefix = _keys(rows, method)
    ttft = recording.ttft_ms
    finished = ~recording.aborted & np.isfinite(ttft)
    rng = np.random.default_rng(0)
    kept_for_test = rng.random(len(recording)) < TEST_SHARE
    by_end = [int(i) for i in np.argsort(recording.end_ms, kind="stable") if finished[i] and not kept_for_test[i]]
    found = np.full(len(recording), np.nan)
    store, arrived = _Store(), 0
    start_ms = max(from_ms, float(recording.dispatched_ms[0]) + fit_interval_ms)
    last_ms = float(recording.dispatched_ms[-1])
    while start_ms <= last_ms:
        while arrived < len(by_end) and recording.end_ms[by_end[arrived]] <= start_ms:
            i = by_end[arrived]
            store.add(i, float(kv[i]), float(waiting[i]), float(prefix[i]))
            arrived += 1
        chosen = store.rows()
        asked = (recording.dispatched_ms >= start_ms) & (recording.dispatched_ms < start_ms + fit_interval_ms)
        if len(chosen) and asked.any():
            model = _Model(rows[chosen], ttft[chosen], gated=method == "incumbent-thirteen")
            found[asked] = model.predict(rows[asked])
        start_ms += fit_interval_ms
    return found


def fit_and_predict(
    rows: npt.NDArray[np.float32], ttft_ms: npt.NDArray[np.float64], trained: npt.NDArray[np.int64], method: Method
) -> npt.NDArray[np.float64]:
    """One fit on the rows at `trained`, asked for all rows: TTFT in ms, (n,)."""
    model = _Model(rows[trained], ttft_ms[trained], gated=method == "incumbent-thirteen")
    return model.predict(rows)


def _keys(rows: npt.NDArray[np.float32], method: Method) -> tuple[Any, Any, Any]:
    names = SIX if method == "incumbent-six" else THIRTEEN
    return tuple(rows[:, names.index(name)] for name in ("kv", "waiting", "prefix"))  # type: ignore[return-value]
