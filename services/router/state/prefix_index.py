"""Which endpoint has which beginning of a prompt in its KV cache, as far as the router can tell. Pure.

A prompt's bytes are cut into blocks of 512; block i is named by a keyed hash of blocks 0..i, so equal names mean equal
beginnings. One dictionary maps a name to a bit mask of endpoints; a lookup walks a prompt's names until no endpoint is
left. All hashing is numpy over the whole prompt (64 KB: 24 µs): per block a multilinear NH hash of 32-bit words with
64-bit products, mixed, then a running sum.

An endpoint's blocks are kept in LRU order up to what its cache holds; the tail of a prompt counts as older than its
head, as in vLLM, so a chain never loses its middle. Dropping an endpoint is one bit; its names go in small portions.

Limits: by itself it knows what was dispatched, not what a server evicted; where servers tell of their caches
(`cache_book.py`) it is corrected by their word. Names are salted: routers that share the salt agree,
nobody else can make collisions or read prompts from them. Two different blocks of one prompt collide with 2⁻³².
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_WORD_BYTES: Final = 4
_PURGE_PORTION: Final = 512
_MAX_SEEDS: Final = 4_096
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prompt's block names, and how much of it each endpoint has.

    `matched_tokens`: float32 by slot; whole blocks only, in tokens of this prompt. `names`: one a whole block.
    `block_tokens`: tokens that one block of this prompt is taken to have.
    """

    names: list[int]
    matched_tokens: npt.NDArray[np.float32]
    block_tokens: float = 0.0


class BlockHasher:
    """Prompt bytes → names of their blocks. Stateless but for the cached seeds of models."""

    def __init__(self, salt: bytes, *, block_bytes: int = 512, max_blocks: int = 2_048) -> None:
        """`salt`: any length, secret. `block_bytes`: a multiple of 8. Blocks beyond `max_blocks` aren't looked at."""
        if block_bytes < 8 or block_bytes % 8:
            raise ValueError(f"block_bytes must be a positive multiple of 8, got {block_bytes}")
        self.block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._salt = hashlib.sha256(salt).digest()
        words = block_bytes // _WORD_BYTES
        stream = hashlib.shake_256(b"leadtime block hash" + self._salt).digest(words * _WORD_BYTES)
        self._keys = np.frombuffer(stream, "<u4")
        self._half = words // 2
        # Block i's hash is mixed with its place, so that equal blocks at different places differ.
        places = np.arange(1, max_blocks + 1, dtype=np.uint64)
        self._places = places * (np.uint64(int.from_bytes(self._salt[:8], "little")) | np.uint64(1))
        self._seeds: dict[str, np.uint64] = {}

    def names(self, model: str, prompt: bytes) -> list[int]:
        """Names of the prompt's whole blocks, in order. Models never share a name."""
        count = min(len(prompt) // self.block_bytes, self._max_blocks)
        if count == 0:
            return []
        words = np.frombuffer(prompt, "<u4", count * self.block_bytes // _WORD_BYTES).reshape(count, -1)
        keyed = words + self._keys
        products = keyed[:, : self._half].astype(np.uint64)
        products *= keyed[:, self._half :]
        hashes = products.sum(axis=1)
        hashes ^= self._places[:count]
        _mix(hashes)
        hashes[:1] += self._seed(model)
        names: list[int] = np.cumsum(hashes, dtype=np.uint64).tolist()
        return names

    def _seed(self, model: str) -> np.uint64:
        seed = self._seeds.get(model)
        if seed is None:
            digest = hashlib.blake2b(model.encode(), digest_size=8, key=self._salt).digest()
            seed = np.uint64(int.from_bytes(digest, "little"))
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            self._seeds[model] = seed
        return seed


def _mix(values: npt.NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, in place."""
    values ^= values >> _SHIFTS[0]
    values *= _MIX[0]
    values ^= values >> _SHIFTS[1]
    values *= _MIX[1]
    values ^= values >> _SHIFTS[2]


class _Shelf:
    """One endpoint's names, least recently used first. `bit` is its place in the masks."""

    __slots__ = ("bit", "capacity", "names")

    def __init__(self, bit: int, capacity: int) -> None:
        self.bit = bit
        self.capacity = capacity
        self.names: OrderedDict[int, None] = OrderedDict()


class PrefixIndex:
    """Names → endpoints by slot. Belongs to one event loop."""

    def __init__(self, hasher: BlockHasher, *, default_blocks: int = 4_096, max_blocks_total: int = 500_000) -> None:
        """`default_blocks`: an endpoint's capacity while its server hasn't told it. `max_blocks_total`: over all
        endpoints, shared evenly among them (about 150 bytes of memory each).
        """
        self.hasher = hasher
        self._default_blocks = default_blocks
        self._max_blocks_total = max_blocks_total
        self._masks: dict[int, int] = {}
        self._shelves: dict[int, _Shelf] = {}
        self._slots: dict[int, int] = {}
        """Slot by bit, for the live ones."""
        self._kept = 0
        self._live = 0
        self._free_bits: list[int] = []
        self._bits = 0
        self._dying: deque[_Shelf] = deque()

    def __len__(self) -> int:
        """Blocks kept, over all endpoints."""
        return self._kept

    def match(self, model: str, prompt: bytes, input_tokens: float, slots: int) -> PrefixMatch:
        """How much of a prompt of `input_tokens` each endpoint has; `slots` is the length of the answer's array."""
        names = self.hasher.names(model, prompt)
        matched = self.lookup(names, slots)
        tokens_per_byte = input_tokens / max(len(prompt), 1)
        matched *= np.float32(tokens_per_byte)
        return PrefixMatch(names, matched, self.hasher.block_bytes * tokens_per_byte)

    def lookup(self, names: list[int], slots: int) -> npt.NDArray[np.float32]:
        """Leading bytes that each endpoint has, float32 (slots,)."""
        matched = np.zeros(slots, np.float32)
        left = self._live
        masks = self._masks
        depth = 0
        for name in names:
            having = left & masks.get(name, 0)
            if having != left:
                if depth:
                    self._set(matched, left ^ having, depth)
                left = having
                if not left:
                    return matched
            depth += 1
        self._set(matched, left, depth)
        return matched

    def _set(self, matched: npt.NDArray[np.float32], bits: int, depth: int) -> None:
        while bits:
            low = bits & -bits
            bits ^= low
            matched[self._slots[low.bit_length() - 1]] = depth * self.hasher.block_bytes

    def insert(self, names: Sequence[int], slot: int) -> None:
        """The endpoint will have computed this prompt: its blocks are the most recently used."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            shelf = self._open(slot)
        held, masks, flag = shelf.names, self._masks, 1 << shelf.bit
        before = len(held)
        limit = self._limit(shelf)
        for name in reversed(names[:limit]):
            if name in held:
                held.move_to_end(name)
            else:
                held[name] = None
                masks[name] = masks.get(name, 0) | flag
        self._kept += len(held) - before
        if len(held) > limit:
            self._give_up(shelf, len(held) - limit)
        if self._dying or self._kept > self._max_blocks_total:
            self.purge(max(_PURGE_PORTION, 2 * len(names)))

    def add(self, names: Iterable[int], slot: int) -> None:
        """The endpoint says it has these blocks; their place in a chain isn't its business."""
        shelf = self._shelves.get(slot) or self._open(slot)
        flag = 1 << shelf.bit
        before = len(shelf.names)
        for name in names:
            if name not in shelf.names:
                shelf.names[name] = None
                self._masks[name] = self._masks.get(name, 0) | flag
        self._kept += len(shelf.names) - before
        self._shrink(shelf)

    def discard(self, names: Iterable[int], slot: int) -> None:
        """The endpoint hasn't got these blocks, or never computed them."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            return
        for name in names:
            if name in shelf.names:
                del shelf.names[name]
                self._clear(name, shelf.bit)

    def held_names(self, slot: int) -> list[int]:
        """The endpoint's blocks, least recently used first."""
        shelf = self._shelves.get(slot)
        return [] if shelf is None else list(shelf.names)

    def insert_older(self, names: Sequence[int], slot: int) -> None:
        """Blocks that another index holds for the endpoint, least recently used first: older than all that is here."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            shelf = self._open(slot)
        held, masks, flag = shelf.names, self._masks, 1 << shelf.bit
        before = len(held)
        room = self._limit(shelf) - before
        for name in reversed(names[max(len(names) - room, 0) :] if room > 0 else ()):
            if name not in held:
                held[name] = None
                held.move_to_end(name, last=False)
                masks[name] = masks.get(name, 0) | flag
        self._kept += len(held) - before

    def set_capacity(self, slot: int, blocks: int) -> None:
        """How many blocks the endpoint's cache holds, as far as is known."""
        shelf = self._shelves.get(slot) or self._open(slot)
        shelf.capacity = max(blocks, 1)
        self._shrink(shelf)

    def held_blocks(self, slot: int) -> int:
        """Blocks that are kept for the endpoint."""
        shelf = self._shelves.get(slot)
        return 0 if shelf is None else len(shelf.names)

    def capacity(self, slot: int) -> int:
        """Blocks that are kept for the endpoint at most."""
        shelf = self._shelves.get(slot)
        return self._default_blocks if shelf is None else self._limit(shelf)

    def drop(self, slot: int) -> None:
        """The endpoint has lost its cache, or is gone. O(1); its blocks are cleared away by and by."""
        shelf = self._shelves.pop(slot, None)
        if shelf is None:
            return
        self._live ^= 1 << shelf.bit
        del self._slots[shelf.bit]
        self._dying.append(shelf)

    def purge(self, portion: int = _PURGE_PORTION) -> None:
        """Clear away up to `portion` blocks: of dropped endpoints, then of the fullest where all together have too many
        (an endpoint that has come since made the others' share smaller).
        """
        while self._dying and portion > 0:
            shelf = self._dying[0]
            while shelf.names and portion > 0:
                name, _ = shelf.names.popitem()
                self._clear(name, shelf.bit)
                portion -= 1
            if not shelf.names:
                self._dying.popleft()
                self._free_bits.append(shelf.bit)
        excess = min(len(self) - self._max_blocks_total, portion)
        while excess > 0:
            fullest = max(self._shelves.values(), key=lambda shelf: len(shelf.names))
            over = min(excess, max(len(fullest.names) - self._limit(fullest), 1))
            self._give_up(fullest, over)
            excess -= over

    def _open(self, slot: int) -> _Shelf:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = self._bits
            self._bits += 1
        shelf = self._shelves[slot] = _Shelf(bit, self._default_blocks)
        self._slots[bit] = slot
        self._live |= 1 << bit
        return shelf

    def _limit(self, shelf: _Shelf) -> int:
        return min(shelf.capacity, max(self._max_blocks_total // len(self._shelves), 1))

    def _shrink(self, shelf: _Shelf) -> None:
        self._give_up(shelf, len(shelf.names) - self._limit(shelf))

    def _give_up(self, shelf: _Shelf, count: int) -> None:
        """Its least recently used names. One loop: every dispatch, ours or a peer's, costs as many as it brings."""
        if count <= 0:
            return
        masks, others, pop = self._masks, ~(1 << shelf.bit), shelf.names.popitem
        for _ in range(count):
            name, _ = pop(False)
            left = masks[name] & others
            if left:
                masks[name] = left
            else:
                del masks[name]
        self._kept -= count

    def _clear(self, name: int, bit: int) -> None:
        """A shelf has given a name up."""
        self._kept -= 1
        left = self._masks[name] & ~(1 << bit)
        if left:
            self._masks[name] = left
        else:
            del self._masks[name]
