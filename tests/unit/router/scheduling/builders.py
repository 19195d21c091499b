"""Candidates, predictions and contexts for scheduler tests: say what matters, the rest is an idle, known endpoint."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest, Slo
from services.router.scheduling.interfaces import Context, Mask
from services.router.state.snapshot import Candidates
from shared.samples import Rung

_COLUMNS = (
    "uncached_tokens",
    "pending_uncached_tokens",
    "pending_requests",
    "oldest_pending_age_ms",
    "decoding_requests",
    "decode_context_tokens",
    "step_time_ms",
    "step_time_known",
    "waiting_requests",
    "running_requests",
    "kv_cache_utilization",
    "scrape_age_ms",
    "scrape_known",
    "hardware_class",
    "prefill_ms_per_token",
    "kv_capacity_tokens",
    "sequence_limit",
    "arrivals_per_ms",
)


def column(values: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)


def candidates(count: int, **columns: Sequence[float] | npt.NDArray[Any]) -> Candidates:
    """`count` endpoints; the columns that aren't given are 0, but every scrape is known."""
    filled: dict[str, Any] = {name: np.zeros(count, np.float32) for name in _COLUMNS}
    filled["scrape_known"] = np.ones(count, np.float32)
    for name, values in columns.items():
        assert name in filled
        filled[name] = column(values)
        assert len(filled[name]) == count
    return Candidates(tuple(f"10.0.0.{i + 1}:8000" for i in range(count)), np.arange(count), **filled)


def prediction(**outputs: Sequence[float] | npt.NDArray[Any]) -> Prediction:
    return Prediction({name: column(values) for name, values in outputs.items()}, "bundle", Rung.PREDICTOR)


def request(
    *,
    input_tokens: float = 1000.0,
    max_tokens: int | None = None,
    slo: Slo | None = None,
    streamed: bool = True,
    priority: int = 0,
    session_id: str = "",
) -> InferenceRequest:
    return InferenceRequest(
        "model",
        b"",
        input_tokens,
        max_tokens,
        streamed=streamed,
        slo=slo or Slo(),
        priority=priority,
        session_id=session_id,
    )


def context(
    endpoints: Candidates,
    predicted: Prediction | None = None,
    *,
    input_tokens: float = 1000.0,
    max_tokens: int | None = None,
    slo: Slo | None = None,
    elapsed_ms: float = 0.0,
    expected_output_tokens: float | None = None,
    seed: int = 0,
    streamed: bool = True,
    priority: int = 0,
    session_id: str = "",
) -> Context:
    return Context(
        request(
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            slo=slo,
            streamed=streamed,
            priority=priority,
            session_id=session_id,
        ),
        endpoints,
        predicted,
        np.random.default_rng(seed),
        elapsed_ms,
        expected_output_tokens,
    )


def everyone(count: int) -> Mask:
    return np.ones(count, np.bool_)


def only(count: int, *alive: int) -> Mask:
    mask = np.zeros(count, np.bool_)
    mask[list(alive)] = True
    return mask
