"""How many sequences a server computes at once (vLLM's `--max-num-seqs`), found out from its own counts. Pure.

No server tells. At its limit it admits one request for each that ends: again and again it runs exactly as many as it
ever has, while others wait and its KV cache has room. A long prefill looks alike for as long as it takes, so a scrape
counts only where a request has begun to answer since the last one that did. One that runs more refutes the limit.

Limits: no limit below `_LEAST` is found, since small batches are as large as ever by chance; nor one where the KV cache
fills first.
"""

from dataclasses import dataclass
from typing import Final

# Fewer at once come back to their largest number by chance.
_LEAST: Final = 16
_SEEN: Final = 5
# Fuller than that, it may be the cache that keeps others waiting.
_KV_HAS_ROOM: Final = 0.9


@dataclass(slots=True)
class _Most:
    """The most that an endpoint was seen to run, how often at its limit, and its count of progress then."""

    running: int = 0
    times: int = 0
    progress: float | None = None


class SequenceLimits:
    """By the endpoint's slot in the table."""

    __slots__ = ("_most",)

    def __init__(self) -> None:
        self._most: dict[int, _Most] = {}

    def seen(
        self, slot: int, *, running: float, waiting: float, kv_cache_utilization: float, progress: float | None
    ) -> int:
        """The limit after this scrape, 0 while unknown. `progress`: a count that grows as requests begin to answer,
        always the same one; None where the server has none, and then no limit is found.
        """
        most = self._most.setdefault(slot, _Most())
        count = round(running)
        if count > most.running:
            most.running, most.times, most.progress = count, 0, None
        if (
            count == most.running >= _LEAST
            and waiting >= 1.0
            and kv_cache_utilization < _KV_HAS_ROOM
            and progress is not None
            and progress != most.progress
        ):
            most.times += 1
            most.progress = progress
        return most.running if most.times >= _SEEN else 0

    def forget(self, slot: int) -> None:
        """Another process has the slot, or none."""
        self._most.pop(slot, None)
