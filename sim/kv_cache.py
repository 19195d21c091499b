"""KV blocks of one simulated server, with prefix sharing and least-recently-used eviction.

Pure; `engine` and `jump_engine` are its callers. A `BlockHolder` is what one sequence has of it; `admit`, `grow`,
`publish` and `give_back` are all that a scheduler does with a sequence's blocks. A block is in exactly one of four
states: free, private (held by one sequence, no hash), pinned (hashed, held by one or more sequences) or idle (hashed,
held by none, evictable). Private and free blocks are only counted; hashed ones are objects. Cost is per block at
admission and release, none per token.

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


class BlockHolder:
    """One sequence's memory: its hashed blocks in chain order, the number of those without a hash, and their sum.

    `block_hashes` names its chain; `computed_tokens` have their KV. Callers only read the blocks.
    """

    __slots__ = ("block_hashes", "blocks", "computed_tokens", "held_blocks", "private_blocks", "published_blocks")

    def __init__(self, block_hashes: Sequence[int]) -> None:
        self.block_hashes = block_hashes
        self.computed_tokens = 0
        self.blocks: list[CachedBlock] = []
        self.private_blocks = 0
        self.held_blocks = 0
        # How many full blocks were offered to the cache, with a hash or without.
        self.published_blocks = 0


class KvBlockPool:
    """`total_blocks` of `block_tokens` tokens each; without `prefix_caching` nothing is found or findable."""

    def __init__(self, total_blocks: int, block_tokens: int, *, prefix_caching: bool = True) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
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

    # --- one sequence -------------------------------------------------------------------------------------------

    def admit(self, holder: BlockHolder, tokens: int) -> bool:
        """Pin what is cached of a sequence of `tokens` tokens, so that they count as computed; False (and no change)
        where the rest of it wouldn't fit. The last token is always left: it gives the logits for the next.
        """
        size = self.block_tokens
        hits: list[CachedBlock] = []
        idle_hits = 0
        if self.prefix_caching:
            hits, idle_hits = self.match(holder.block_hashes, (tokens - 1) // size)
        if self.free_blocks + len(self._idle) - idle_hits < -(-tokens // size) - len(hits):
            return False
        self.pin(hits)
        holder.blocks = hits
        holder.held_blocks = holder.published_blocks = len(hits)
        holder.computed_tokens = len(hits) * size
        return True

    def grow(self, holder: BlockHolder, tokens: int) -> bool:
        """Hold blocks for `tokens` more tokens and offer the full ones to the cache; False (no change) if short."""
        size = self.block_tokens
        end = holder.computed_tokens + tokens
        needed = -(-end // size) - holder.held_blocks
        if needed > 0:
            if not self.take(needed):
                return False
            holder.held_blocks += needed
            holder.private_blocks += needed
        full = end // size
        if full > holder.published_blocks:
            self.publish(holder, full)
        return True

    def publish(self, holder: BlockHolder, full_blocks: int) -> None:
        """Offer its full blocks to the cache; those without a hash stay private."""
        if self.prefix_caching:
            new_hashes = holder.block_hashes[holder.published_blocks : full_blocks]
            if new_hashes:
                holder.blocks += self._published(new_hashes)
                holder.private_blocks -= len(new_hashes)
        holder.published_blocks = full_blocks

    def give_back(self, holder: BlockHolder) -> None:
        """All that it holds; what it had computed is to be computed again, or wanted no more."""
        self._release(holder.blocks, holder.private_blocks)
        holder.blocks = []
        holder.private_blocks = holder.held_blocks = holder.published_blocks = 0

    # --- blocks -------------------------------------------------------------------------------------------------

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

    def _published(self, hashes: Sequence[int]) -> list[CachedBlock]:
        """Make private blocks findable under their hashes; where one is cached already, hold that block instead."""
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

    def _release(self, blocks: Sequence[CachedBlock], private_blocks: int) -> None:
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
