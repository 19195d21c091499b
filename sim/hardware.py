"""Step times and KV capacity of real accelerators, as frozen profiles.

Pure; read by `engine` once per step. The coefficients are least-squares fits to AIConfigurator's measured kernels (vLLM
0.24, BF16; prefill of one prompt of 128..16k tokens, decode of 1..256 sequences at 1k..8k context); each fit's largest
relative error is 1..16 % for prefill and 3..7 % for decode. Outside those ranges a profile extrapolates. One step pays
its prefill terms and its decode terms in sum; a real mixed batch reads the weights once, so mixed steps err on the slow
side by at most the smaller base.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What one model on one accelerator (or tensor-parallel group) costs.

    `prefill_*` give milliseconds from new tokens, `decode_*` from sequences and the tokens of their contexts.
    `hardware_class` is the name routers group endpoints by; speed-scaled profiles are classes of their own.
    """

    name: str
    hardware_class: str
    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_square_token: float
    decode_base_ms: float
    decode_ms_per_sequence: float
    decode_ms_per_context_token: float
    kv_capacity_tokens: int

    def prefill_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Time to prefill `new_tokens` after `context_tokens` already in the KV cache; 0 for no tokens."""
        if new_tokens == 0:
            return 0.0
        return self.step_ms(new_tokens, new_tokens * (new_tokens + 2 * context_tokens), 0, 0)

    def decode_ms(self, sequences: int, context_tokens: int) -> float:
        """Time of one decode step; `context_tokens` is the sum over the sequences."""
        return self.step_ms(0, 0, sequences, context_tokens)

    def step_ms(
        self, prefill_tokens: int, prefill_square_tokens: int, decode_sequences: int, decode_context_tokens: int
    ) -> float:
        """Time of one engine step.

        `prefill_square_tokens` is the sum of n * (n + 2 * k) over chunks of n tokens after k cached or computed ones:
        the share of the attention triangle that the chunk computes, so chunks of a prompt add up to its whole square.
        """
        duration_ms = 0.0
        if prefill_tokens:
            duration_ms = (
                self.prefill_base_ms
                + self.prefill_ms_per_token * prefill_tokens
                + self.prefill_ms_per_square_token * prefill_square_tokens
            )
        if decode_sequences:
            duration_ms += (
                self.decode_base_ms
                + self.decode_ms_per_sequence * decode_sequences
                + self.decode_ms_per_context_token * decode_context_tokens
            )
        return duration_ms

    def scaled(self, speed: float) -> "HardwareProfile":
        """The same hardware `speed` times as fast (0.5: every step takes twice as long), with the same KV capacity."""
        if not speed > 0:
            raise ValueError(f"speed must be > 0, got {speed!r}")
        if speed == 1:
            return self
        return replace(
            self,
            name=f"{self.name}@{speed:g}x",
            hardware_class=f"{self.hardware_class}@{speed:g}x",
            prefill_base_ms=self.prefill_base_ms / speed,
            prefill_ms_per_token=self.prefill_ms_per_token / speed,
            prefill_ms_per_square_token=self.prefill_ms_per_square_token / speed,
            decode_base_ms=self.decode_base_ms / speed,
            decode_ms_per_sequence=self.decode_ms_per_sequence / speed,
            decode_ms_per_context_token=self.decode_ms_per_context_token / speed,
        )


KV_BYTES_PER_TOKEN_8B = 128 * 1024
KV_BYTES_PER_TOKEN_70B = 320 * 1024
WEIGHT_GB_8B = 16
WEIGHT_GB_70B = 140
USABLE_MEMORY_RATIO = 0.9


def kv_capacity_tokens(memory_gb: float, weight_gb: float, kv_bytes_per_token: int) -> int:
    """Tokens that fit beside the weights in the 90 % of device memory that a server claims (GB = 10^9 bytes)."""
    return int((memory_gb * USABLE_MEMORY_RATIO - weight_gb) * 1e9 / kv_bytes_per_token)


def _8b(memory_gb: float) -> int:
    return kv_capacity_tokens(memory_gb, WEIGHT_GB_8B, KV_BYTES_PER_TOKEN_8B)


def _70b(memory_gb: float) -> int:
    return kv_capacity_tokens(memory_gb, WEIGHT_GB_70B, KV_BYTES_PER_TOKEN_70B)


PROFILES: Mapping[str, HardwareProfile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            HardwareProfile("llama-8b-h100", "h100", 4.90, 0.01657, 6.97e-7, 6.31, 0.0093, 4.30e-5, _8b(80)),
            HardwareProfile("llama-8b-h200", "h200", 3.49, 0.01744, 6.46e-7, 4.85, 0.0085, 3.18e-5, _8b(141)),
            HardwareProfile("llama-8b-a100", "a100", 7.51, 0.05456, 1.54e-6, 11.49, 0.0152, 9.68e-5, _8b(80)),
            HardwareProfile("llama-8b-l40s", "l40s", 17.45, 0.05103, 3.26e-6, 22.23, 0.0228, 2.05e-4, _8b(48)),
            HardwareProfile("llama-70b-h100-tp4", "h100", 12.12, 0.05473, 1.03e-6, 15.24, 0.0295, 2.92e-5, _70b(320)),
            HardwareProfile("llama-70b-h200-tp4", "h200", 8.93, 0.05501, 1.18e-6, 12.13, 0.0320, 1.95e-5, _70b(564)),
            HardwareProfile("llama-70b-a100-tp4", "a100", 18.49, 0.15701, 1.21e-6, 27.65, 0.0945, 6.04e-5, _70b(320)),
        )
    }
)
