"""How many tokens a prompt has, estimated from its bytes, and how many the answer is expected to have.

The router has no tokenizer. It learns bytes per token for each model from finished requests whose server reported
`usage`: a ratio of two decayed sums, so a long prompt weighs as much as it costs and chat-template overhead is
learned with it. No I/O.

Limits: one ratio per model, whatever the language or content; it starts at 4 bytes a token.
"""

from collections.abc import Mapping
from typing import Final

from services.router.request.inference_request import InferenceRequest
from shared.names import length_key

DEFAULT_BYTES_PER_TOKEN: Final = 4.0
MIN_BYTES_PER_TOKEN: Final = 0.5
MAX_BYTES_PER_TOKEN: Final = 16.0
# Weight of the default against what is seen: one mid-sized prompt moves the ratio half the way.
_PRIOR_TOKENS: Final = 500.0
# Half of an observation's weight is gone after 34 more.
_KEEP: Final = 0.98
_MAX_MODELS: Final = 1024


class TokenEstimator:
    """Bytes per token by model name. Learns; belongs to one event loop."""

    __slots__ = ("_default", "_ratios", "_sums")

    def __init__(self, default_bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN) -> None:
        self._default = default_bytes_per_token
        self._sums: dict[str, tuple[float, float]] = {}
        self._ratios: dict[str, float] = {}

    def bytes_per_token(self, model: str) -> float:
        """The learned ratio, or the default for a model without a finished request."""
        return self._ratios.get(model, self._default)

    def estimate(self, model: str, prompt_bytes: int) -> float:
        """Tokens of a prompt of this many bytes; at least 1."""
        return max(1.0, prompt_bytes / self._ratios.get(model, self._default))

    def observe(self, model: str, prompt_bytes: int, input_tokens: int) -> None:
        """Learn from a finished request: its text's size, and its tokens by the server's `usage`."""
        if prompt_bytes <= 0 or input_tokens <= 0:
            return
        if model not in self._sums and len(self._sums) >= _MAX_MODELS:
            return
        total_bytes, total_tokens = self._sums.get(model, (self._default * _PRIOR_TOKENS, _PRIOR_TOKENS))
        total_bytes = _KEEP * total_bytes + prompt_bytes
        total_tokens = _KEEP * total_tokens + input_tokens
        self._sums[model] = (total_bytes, total_tokens)
        self._ratios[model] = min(max(total_bytes / total_tokens, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN)


def expected_output_tokens(request: InferenceRequest, learned: Mapping[str, float]) -> float | None:
    """The answer's expected length: the client's cap, or the length learned for the model where that is less.

    `learned`: tokens by `length_key`, a quantile from the trainer's calibration: the model's on this route, else the
    model's on all. None where neither a length nor a cap is known.
    """
    usual = learned.get(length_key(request.model, request.route)) if request.route else None
    if usual is None:
        usual = learned.get(request.model)
    if request.max_tokens is None:
        return usual
    return float(request.max_tokens) if usual is None else min(float(request.max_tokens), usual)
