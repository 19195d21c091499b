"""`rediscovery-filter`: a few requests go to endpoints that nearly none come to, so that what is believed of them is
tried.

A prediction learns of an endpoint from its answers alone. One that was slow for a while and has recovered gets no
request where others are idle, and without requests it stays slow in the model's eyes. So with a small probability a
request goes to the forgotten: those to whom fewer requests come than `forgotten_share` of the candidates' mean, and
which have nothing pending. Where nobody is forgotten, nothing is left to chance.

Limits: arrivals fade over half a minute; a pool to which less comes than five requests an endpoint in that time has no
forgotten ones.
"""

from typing import Annotated, Final

import numpy as np
from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Branch, Context, Mask

# Five in half a minute, ms⁻¹: with fewer, having got none may be chance.
_ENOUGH_PER_MS: Final = 5.0 / 30_000.0


class RediscoveryConfig(StrictConfig):
    """Who is forgotten, and how often one is tried."""

    exploration_probability: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of requests that go to the forgotten, while there are any."""
    forgotten_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Of the candidates' mean arrivals; an endpoint with less is forgotten."""


class RediscoveryFilter:
    """Everyone, or now and then the forgotten."""

    __slots__ = ("_config",)

    def __init__(self, config: RediscoveryConfig) -> None:
        self._config = config

    def branches(self, context: Context, alive: Mask) -> tuple[Branch, ...]:
        everyone = Branch(1.0, alive)
        candidates, probability = context.candidates, self._config.exploration_probability
        arrivals = candidates.arrivals_per_ms
        mean = float(arrivals[alive].mean())
        limit = np.float32(self._config.forgotten_share * mean)
        if mean < _ENOUGH_PER_MS or probability <= 0.0 or arrivals.min() >= limit:
            return (everyone,)
        forgotten = (arrivals < limit) & alive & (candidates.pending_requests == 0.0)
        if not forgotten.any():
            return (everyone,)
        return (Branch(1.0 - probability, alive), Branch(probability, forgotten))
