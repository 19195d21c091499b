"""How much of a prompt's text each endpoint's cache can be believed to hold. Pure.

A server tells the size of its KV cache in tokens; how much of it is really there for prefixes shows in what it finds of
what was believed to be there: decoding requests take room too, and others may use the server.
"""

from typing import Final

_SHRINK: Final = 0.9
_GROW: Final = 1.02
_FLOOR: Final = 0.05


class CacheRoom:
    """By the endpoint's slot in the table."""

    __slots__ = ("_factors", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._factors: dict[int, float] = {}

    def told(self, slot: int, kv_tokens: int) -> None:
        """The server says how many tokens its cache holds."""
        self._tokens[slot] = kv_tokens

    def learn(self, slot: int, *, found: bool) -> None:
        """Whether the server had what was believed to be in its cache."""
        factor = self._factors.get(slot, 1.0)
        self._factors[slot] = min(factor * _GROW, 1.0) if found else max(factor * _SHRINK, _FLOOR)

    def blocks(self, slot: int, block_tokens: float) -> int | None:
        """How many blocks of so many tokens it holds; None before the server has told its size."""
        tokens = self._tokens.get(slot)
        return None if tokens is None else int(tokens / block_tokens * self._factors.get(slot, 1.0))

    def forget(self, slot: int) -> None:
        """Another process has the slot, or none."""
        self._tokens.pop(slot, None)
        self._factors.pop(slot, None)
