"""`prefix-cache-scorer`: the share of the prompt that lies in the endpoint's prefix cache, by our index, is better.

None for a prompt without tokens: there is nothing to share. An endpoint without a match gets 0.
"""

import numpy as np

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context, Mask, Scores

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


class PrefixConfig(StrictConfig):
    """No settings."""


class PrefixScorer:
    """The prefix-hit ratio."""

    __slots__ = ()

    def __init__(self, config: PrefixConfig) -> None:
        del config

    def score(self, context: Context, alive: Mask) -> Scores | None:
        del alive
        return hit_ratio(context)


def hit_ratio(context: Context) -> Scores | None:
    """Float32 (n,): cached share of the prompt, 0..1; None for a prompt without tokens."""
    tokens = context.request.input_tokens
    if not tokens > 0.0:
        return None
    ratio: Scores = np.maximum(_ZERO, _ONE - context.candidates.uncached_tokens / np.float32(tokens))
    return np.minimum(_ONE, ratio)
