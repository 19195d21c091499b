"""KV blocks of one simulated server, with prefix sharing and least-recently-used eviction.

Pure; `engine` is its only caller. A block is in exactly one of four states: free, private (held by one sequence, no
hash), pinned (hashed, held by one or more sequences) or idle (hashed, held by none, evictable). Private and free blocks
are only counted; hashed ones are objects. Cost is per block at admission and release, none per token.

It differs from vLLM in two points: blocks that never got a hash are reused before any hashed one, where vLLM keeps both
kinds in one queue; and a block computed twice is merged, where vLLM keeps both copies.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class CacheListener(Protocol):
    """Told what becomes findable under a hash, and what is no longer."""

    def stored(self, block: int) -> None: ...

    def removed(self, blocks: Sequence[int]) -> None: ...

    def cleared(self) -> None: ...


class CachedBlock:
    """A block that holds one full, hashed piece of a prompt chain."""

    __slots__ = ("block_hash", "holders")

    def __init__(self, block_hash: int) -> None:
        self.block_hash = block_hash
        self.holders = 1


class KvBlockPool:
    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.private_blocks = 0
        self.pinned_blocks = 0
        self._cached: dict[int, CachedBlock] = {}
        # Oldest first. A sequence's tail is released before its head, so chains are evicted from their ends.
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        self.listener: CacheListener | None = None

    @property
    def idle_blocks(self) -> int:
        return len(self._idle)

    @property
    def available_blocks(self) -> int:
        """Blocks that `take` can hand out: free ones and evictable ones."""
        return self.free_blocks + len(self._idle)

    @property
    def used_ratio(self) -> float:
        """Share of blocks that running sequences hold, 0..1; evictable blocks count as unused."""
        return (self.private_blocks + self.pinned_blocks) / self.total_blocks

    def match(self, hashes: Sequence[int], max_blocks: int) -> tuple[list[CachedBlock], int]:
        """The longest cached chain at the start of `hashes`, and how many of its blocks are idle. Changes nothing."""
        found: list[CachedBlock] = []
        idle = 0
        cached = self._cached
        for block_hash in hashes[:max_blocks] if len(hashes) > max_blocks else hashes:
            block = cached.get(block_hash)
            if block is None:
                break
            found.append(block)
            if block.holders == 0:
                idle += 1
        return found, idle

    def pin(self, blocks: Sequence[CachedBlock]) -> None:
        """Count one more holder of each block."""
        idle = self._idle
        for block in blocks:
            if block.holders == 0:
                del idle[block.block_hash]
                self.pinned_blocks += 1
            block.holders += 1

    def take(self, blocks: int) -> bool:
        """Make `blocks` private ones, evicting idle ones when none is free; False (and no change) if short."""
        missing = blocks - self.free_blocks
        if missing > 0:
            idle = self._idle
            if missing > len(idle):
                return False
            cached = self._cached
            evicted = [idle.popitem(last=False)[0] for _ in range(missing)]
            for block_hash in evicted:
                del cached[block_hash]
            if self.listener is not None:
                self.listener.removed(evicted)
            self.free_blocks += missing
        self.free_blocks -= blocks
        self.private_blocks += blocks
        return True

    def publish(self, block_hash: int) -> CachedBlock:
        """Make one private block findable under its hash; if that hash is cached already, hold that block instead."""
        block = self._cached.get(block_hash)
        self.private_blocks -= 1
        if block is None:
            block = CachedBlock(block_hash)
            self._cached[block_hash] = block
            self.pinned_blocks += 1
            if self.listener is not None:
                self.listener.stored(block_hash)
            return block
        self.free_blocks += 1
        if block.holders == 0:
            del self._idle[block_hash]
            self.pinned_blocks += 1
        block.holders += 1
        return block

    def publish_all(self, hashes: Sequence[int]) -> list[CachedBlock]:
        """`publish` for each, in one go."""
        cached, idle = self._cached, self._idle
        found: list[CachedBlock] = []
        fresh = 0
        for block_hash in hashes:
            block = cached.get(block_hash)
            if block is None:
                block = cached[block_hash] = CachedBlock(block_hash)
                fresh += 1
                if self.listener is not None:
                    self.listener.stored(block_hash)
            else:
                if block.holders == 0:
                    del idle[block_hash]
                    self.pinned_blocks += 1
                block.holders += 1
            found.append(block)
        self.pinned_blocks += fresh
        self.private_blocks -= len(found)
        self.free_blocks += len(found) - fresh
        return found

    def release(self, blocks: Sequence[CachedBlock], private_blocks: int) -> None:
        """Give back what one sequence held: its hashed blocks in chain order, and a number of private ones."""
        self.private_blocks -= private_blocks
        self.free_blocks += private_blocks
        cached = self._cached
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders == 0:
                self.pinned_blocks -= 1
                # After a reset the hash may be unknown, or belong to another block.
                if cached.get(block.block_hash) is block:
                    self._idle[block.block_hash] = block
                else:
                    self.free_blocks += 1

    def reset(self) -> None:
        """Forget every cached prefix. Blocks that sequences hold stay theirs and are free once released."""
        self.free_blocks += len(self._idle)
        self._idle.clear()
        self._cached.clear()
        if self.listener is not None:
            self.listener.cleared()
