"""The physics prior: latencies of a pool that nobody has measured yet, from the step times of its hardware. Pure.

Answers for the router from a pool's first request until a bundle is there, and is what the trainer's first models lean
on; both must mean the same, and the calibration that the trainer learns of it (a bias per target and endpoint, quantile
offsets) carries its version. A prediction of it is marked: rung `prior`, `in_range` 0, quantiles far apart.

A chunked prefill shares its steps with the decoding batch, so a backlog pays for the prompts' tokens, once per chunk
for the step, and per chunk for the batch and its context. A decode step pays for the batch, the context and its share
of the prefills beside it.

Limits: one model per pool, of the size class set; two classes of size; unmeasured hardware is the mean of the measured.
Absolute times may be off by a factor; which endpoint is sooner is right far more often.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from shared.features import HARDWARE_CLASSES, SCHEMA, FloatMatrix, hardware_code
from shared.prediction import OUTPUTS

ModelSize = Literal["8b", "70b"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds: prefill of n new tokens is base + per_token · n + per_square · n², a decode step likewise."""

    prefill_base: float
    prefill_per_token: float
    prefill_per_square: float
    decode_base: float
    decode_per_sequence: float
    decode_per_context_token: float


# Least-squares fits to measured kernels (AIConfigurator, vLLM, BF16); the 70B on four GPUs. Within 1–16 % for prompts
# of 128–16,000 tokens and 3–7 % for batches of 1–256 at contexts of 1,000–8,000.
_L40S_8B: Final = StepTimes(17.45, 0.05103, 3.26e-6, 22.23, 0.0228, 2.05e-4)
_A100_8B: Final = StepTimes(7.51, 0.05456, 1.54e-6, 11.49, 0.0152, 9.68e-5)
_A100_70B: Final = StepTimes(18.49, 0.15701, 1.21e-6, 27.65, 0.0945, 6.04e-5)
MEASURED: Final[Mapping[ModelSize, Mapping[str, StepTimes]]] = MappingProxyType(
    {
        "8b": {
            "h100": StepTimes(4.90, 0.01657, 6.97e-7, 6.31, 0.0093, 4.30e-5),
            "h200": StepTimes(3.49, 0.01744, 6.46e-7, 4.85, 0.0085, 3.18e-5),
            "a100": _A100_8B,
            "l40s": _L40S_8B,
        },
        "70b": {
            "h100": StepTimes(12.12, 0.05473, 1.03e-6, 15.24, 0.0295, 2.92e-5),
            "h200": StepTimes(8.93, 0.05501, 1.18e-6, 12.13, 0.0320, 1.95e-5),
            "a100": _A100_70B,
            # Not measured: as much slower than the A100 as with the small model.
            "l40s": StepTimes(
                *(
                    large * slow / small
                    for large, slow, small in zip(astuple(_A100_70B), astuple(_L40S_8B), astuple(_A100_8B), strict=True)
                )
            ),
        },
    }
)
CHUNK_TOKENS: Final = 2048
"""New tokens of one step: vLLM's default."""
OUTPUT_TOKENS: Final = 256
"""Length of an answer of which nothing is known."""
STEP_AWAITED: Final = 0.5
"""Of a decode step, what a request that comes waits for before its own prefill can begin."""
P90_LOG: Final = 0.75
P99_LOG: Final = 1.65
_LONGEST_MS: Final = np.float32(86_400_000.0)
PRIOR_PREFIX: Final = "0" * 13 + "-"
"""Bundles are named by the millisecond of their making; this one is older than all."""


def is_prior(bundle_version: str) -> bool:
    """Whether a prediction of this version is the prior's: nothing was learned from this pool's requests."""
    return bundle_version.startswith(PRIOR_PREFIX)


def step_times(size: ModelSize) -> dict[str, StepTimes]:
    """Step times by hardware class; those not measured have the geometric mean of the measured."""
    measured = MEASURED[size]
    mean = StepTimes(*np.exp(np.mean([np.log(astuple(times)) for times in measured.values()], axis=0)).tolist())
    return {name: measured.get(name, mean) for name in HARDWARE_CLASSES}


class PriorModel:
    """Predicts like a bundle's model; `bundle_version` names the table, the size and the schema."""

    __slots__ = ("_times", "bundle_version", "outputs")

    def __init__(self, size: ModelSize) -> None:
        self.outputs = OUTPUTS
        self._times: npt.NDArray[np.float32] = np.zeros((256, len(fields(StepTimes))), np.float32)
        times = step_times(size)
        self._times[:] = astuple(times["unknown"])
        for name, row in times.items():
            self._times[hardware_code(name)] = astuple(row)
        told = f"{size}|{SCHEMA.hash}|{times}|{CHUNK_TOKENS}|{OUTPUT_TOKENS}|{STEP_AWAITED}|{P90_LOG}|{P99_LOG}"
        self.bundle_version = PRIOR_PREFIX + hashlib.sha256(told.encode()).hexdigest()[:8]

    def predict(self, rows: FloatMatrix) -> FloatMatrix:
        """float32 (n, F) → float32 (n, K) in the order of `outputs`; `in_range` is 0: nothing was seen."""

        def column(name: str) -> FloatMatrix:
            return rows[:, SCHEMA.index[name]]

        base, per_token, per_square, step, sequence, context_token = self._times[
            column("hardware_class").astype(np.int64)
        ].T
        own, pending, prompt = column("uncached_tokens"), column("pending_uncached_tokens"), column("input_tokens")
        decoding, context = column("decoding_requests"), column("decode_context_tokens")
        beside = decoding * sequence + context * context_token
        attention = 2 * per_square * own * np.maximum(prompt - own / 2, np.float32(0))
        ttft = base + per_token * own + (per_token + base / CHUNK_TOKENS) * pending + attention
        ttft += beside * (1 + (own + pending) / CHUNK_TOKENS) + STEP_AWAITED * (step + beside)
        per_step = (decoding + column("pending_requests")) * sequence + (context + prompt) * context_token
        tpot = step + per_step + per_token * (own + pending) / OUTPUT_TOKENS
        output = column("expected_output_tokens")
        unknown = np.maximum(1 - column("expected_output_tokens_known"), np.float32(0))
        e2e = ttft + (output + OUTPUT_TOKENS * unknown) * step + output * per_step
        columns = [
            np.minimum(median * np.float32(factor), _LONGEST_MS)
            for median in (ttft, tpot, e2e)
            for factor in (1.0, np.exp(P90_LOG), np.exp(P99_LOG))
        ]
        return np.stack([*columns, np.zeros(len(rows), np.float32)], axis=1).astype(np.float32)
