"""Which endpoints of a large pool a decision looks at: those that ledger and prefix can't rule out. Pure.

A model's run costs by the row, and beyond some 128 endpoints nearly all are worse than some other in everything that is
known for nothing: the tokens that would have to be computed before the first of this request, the requests under way,
the prefix in the cache. So each hardware class sends its best by four keys: tokens ahead and own (time to first token),
requests under way (time per token), tokens matched (presets that weigh prefixes), and the first two together. Hardware
classes are kept apart because only the model knows what a token costs on each.

It is a bound by rank and no proof for every cost: one that weighs tokens against requests in its own way may find its
very best between the keys. What that costs is asked by `bench/scale.py` and told in DECISIONS.md: 0.05 % of predicted
TTFT for 128 of 1,000, and in virtual time nothing that could be told from chance.

Ties are broken by a noise that turns with every decision; in an idle pool everybody is equal, and nobody's turn must
never come.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

_BY_TOKENS: Final = 0.4
_BY_REQUESTS: Final = 0.2
_BY_PREFIX: Final = 0.2


def shortlist(
    own_tokens: Column,
    pending_tokens: Column,
    requests: Column,
    classes: Sequence[Places],
    limit: int,
    noise: Column,
) -> Places:
    """Places (ascending) of at most `limit` of n endpoints; all columns float32 (n,), `classes` a partition of 0…n−1.

    `own_tokens`: of this request, uncached there. `noise`: 0..1, less than a token and a request; breaks ties.
    """
    chosen = np.zeros(len(own_tokens), np.bool_)
    for places, quota in zip(classes, _quotas([len(places) for places in classes], limit), strict=True):
        if quota >= len(places):
            chosen[places] = True
            continue
        ties = noise[places]
        own = own_tokens[places]
        tokens = own + pending_tokens[places] + ties
        under_way = requests[places] + ties
        both = tokens / (1.0 + float(tokens.mean())) + under_way / (1.0 + float(under_way.mean()))
        picked = np.zeros(len(places), np.bool_)
        picked[_least(tokens, int(quota * _BY_TOKENS))] = True
        picked[_least(under_way, int(quota * _BY_REQUESTS))] = True
        picked[_least(own + ties, int(quota * _BY_PREFIX))] = True
        both[picked] = np.inf
        picked[_least(both, quota - int(picked.sum()))] = True
        chosen[places[picked]] = True
    return np.flatnonzero(chosen)


def _least(values: Column, count: int) -> Places:
    """Places of the `count` smallest."""
    return np.argpartition(values, count - 1)[:count] if count > 0 else np.empty(0, np.intp)


def _quotas(sizes: Sequence[int], limit: int) -> list[int]:
    """How many of each class: equal shares, and what small classes don't need goes to the others."""
    quotas = [0] * len(sizes)
    left, order = limit, sorted(range(len(sizes)), key=lambda i: sizes[i])
    for position, i in enumerate(order):
        quotas[i] = min(sizes[i], max(1, left // (len(order) - position)))
        left -= quotas[i]
    return quotas
