"""What each endpoint's KV cache holds by its own word, and how that corrects the prefix index. Pure.

The index names a prompt's beginnings by its *text*; a server names its blocks by *tokens*, and a router has no
tokenizer. The book finds out which is which from what passes anyway: a request of P prompt tokens leaves exactly one
chain of P // block tokens blocks on the server that served it. Where just one chain of that length was stored between
its dispatch and its end, that is its chain, and each beginning of its text is *anchored* to the block that holds as
much of the chain; two of one length at once are let be. No call to the server, no model files, any request form and
chat template.

Blocks are named by a keyed hash of their tokens and what came before, so an anchor learned from one server holds for
all, and for prompts that another router, or nobody here, sent. From then on an event about an anchored block is told to
the index as the text that it stands for: stored → there, removed → gone. What isn't anchored stays approximate.

Bounded: blocks per endpoint and anchors in all. Limits: an anchored beginning is exact to a block; a chain whose start
was missed (events before the router listened, a gap) has no place and is left out until it is stored anew.
"""

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.router.state.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

_MAX_ENDS: Final = 4_096
"""Of one endpoint: ends of chains, newest last, among which a request's is looked for."""
_NAME_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class TextChange:
    """For the prefix index: beginnings of texts that an endpoint has, or has no longer."""

    held: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(slots=True)
class _Block:
    """`name`: keyed hash of its tokens and all before. `depth`: how many blocks its chain has up to it."""

    name: int
    depth: int
    parent: BlockHash | None
    copies: int = 1
    """A server may compute one twice; each copy is stored and removed by itself."""


@dataclass(slots=True)
class _Table:
    """One endpoint."""

    blocks: dict[BlockHash, _Block] = field(default_factory=dict)
    names: dict[int, int] = field(default_factory=dict)
    """Copies by name."""
    ends: deque[tuple[float, BlockHash, int]] = field(default_factory=lambda: deque(maxlen=_MAX_ENDS))
    """When, the last block of what was stored, and its depth."""
    block_tokens: int = 0


class CacheBook:
    """Tables by slot. Belongs to one event loop."""

    def __init__(self, salt: bytes, *, max_blocks: int = 200_000, max_anchors: int = 200_000) -> None:
        """`salt`: secret of the names. `max_blocks`: of one endpoint; what says more is forgotten whole (counted)."""
        self._key = hashlib.sha256(b"leadtime cache book" + salt).digest()
        self._max_blocks = max_blocks
        self._max_anchors = max_anchors
        self._tables: dict[int, _Table] = {}
        self._texts: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Beginnings of texts by the name of the block they end in, least recently learned first."""
        self._anchored: dict[int, int] = {}
        """The other way round."""
        self.overflows = 0
        self.learned = 0
        self.ambiguous = 0

    def __len__(self) -> int:
        """Blocks of all endpoints."""
        return sum(len(table.blocks) for table in self._tables.values())

    @property
    def anchors(self) -> int:
        return len(self._anchored)

    def live(self, slot: int) -> bool:
        """Whether the endpoint has told of its cache."""
        return slot in self._tables

    def forget(self, slot: int) -> None:
        """What it said no longer holds: another process, or events were missed."""
        self._tables.pop(slot, None)

    def apply(self, slot: int, events: Iterable[KvEvent], now_ms: float) -> TextChange | None:
        """What an endpoint has said at `now_ms`; None: everything it had is gone."""
        table = self._tables.setdefault(slot, _Table())
        held: list[int] = []
        gone: list[int] = []
        cleared = False
        for event in events:
            match event:
                case BlockStored():
                    self._store(table, event, held, now_ms)
                case BlockRemoved():
                    self._remove(table, event, gone)
                case AllBlocksCleared():
                    self._tables[slot] = table = _Table(block_tokens=table.block_tokens)
                    held.clear()
                    gone.clear()
                    cleared = True
        if len(table.blocks) > self._max_blocks:
            self.overflows += 1
            self.forget(slot)
        if cleared and not held:
            return None
        # Within one batch a block may go and come back: what holds is what the table says now.
        return TextChange(
            tuple(text for text in held if self._anchored.get(text) in table.names),
            tuple(text for text in gone if self._anchored.get(text) not in table.names),
        )

    def learn(
        self, slot: int, texts: Sequence[int], text_tokens: float, input_tokens: int, since_ms: float, until_ms: float
    ) -> dict[int, TextChange]:
        """A request of `input_tokens` was on the endpoint between the two instants; what that changes, by slot.

        `texts`: names of its prompt's beginnings, each `text_tokens` tokens longer than the last.
        """
        table = self._tables.get(slot)
        if table is None or not table.block_tokens:
            return {}
        blocks = input_tokens // table.block_tokens
        if blocks == 0 or not texts:
            return {}
        ends = {
            table.blocks[end].name: end
            for at_ms, end, depth in table.ends
            if depth == blocks and since_ms <= at_ms <= until_ms and end in table.blocks
        }
        if len(ends) != 1:
            self.ambiguous += len(ends) > 1
            return {}
        chain = self._chain(table, next(iter(ends.values())))
        if len(chain) != blocks:
            return {}
        fresh: list[int] = []
        for place, text in enumerate(texts, 1):
            depth = min(max(int(place * text_tokens) // table.block_tokens, 1), blocks)
            if self._anchored.get(text) != chain[depth - 1]:
                self._anchor(text, chain[depth - 1])
                fresh.append(text)
        if not fresh:
            return {}
        self.learned += 1
        return {other: self._standing(known, fresh) for other, known in self._tables.items()}

    def _standing(self, table: _Table, texts: Sequence[int]) -> TextChange:
        held = [text for text in texts if self._anchored.get(text) in table.names]
        gone = [text for text in texts if self._anchored.get(text) not in table.names]
        return TextChange(tuple(held), tuple(gone))

    def _store(self, table: _Table, event: BlockStored, held: list[int], now_ms: float) -> None:
        table.block_tokens = event.block_tokens
        name, depth = self._root(event.salt), 0
        if event.parent is not None:
            parent = table.blocks.get(event.parent)
            if parent is None:  # its chain began before we listened
                return
            name, depth = parent.name, parent.depth
        size, before = event.block_tokens, event.parent
        for at, block_hash in enumerate(event.hashes):
            name = self._name(name, event.token_ids[at * size : (at + 1) * size])
            depth += 1
            known = table.blocks.get(block_hash)
            if known is not None and known.name == name:
                known.copies += 1
            else:
                table.blocks[block_hash] = _Block(name, depth, before)
                table.names[name] = table.names.get(name, 0) + 1
                held += self._texts.get(name, ())
            before = block_hash
        table.ends.append((now_ms, event.hashes[-1], depth))

    def _remove(self, table: _Table, event: BlockRemoved, gone: list[int]) -> None:
        for block_hash in event.hashes:
            block = table.blocks.get(block_hash)
            if block is None:
                continue
            block.copies -= 1
            if block.copies:
                continue
            del table.blocks[block_hash]
            left = table.names[block.name] - 1
            if left:
                table.names[block.name] = left
            else:
                del table.names[block.name]
                gone += self._texts.get(block.name, ())

    @staticmethod
    def _chain(table: _Table, end: BlockHash) -> list[int]:
        """Names from a chain's start to its `end`; shorter than its depth where a part is gone."""
        names: list[int] = []
        at: BlockHash | None = end
        while at is not None:
            block = table.blocks.get(at)
            if block is None:
                break
            names.append(block.name)
            at = block.parent
        names.reverse()
        return names

    def _anchor(self, text: int, name: int) -> None:
        old = self._anchored.get(text)
        if old is not None:
            self._unlink(text, old)
        self._anchored[text] = name
        self._texts[name] = (*self._texts.get(name, ()), text)
        self._texts.move_to_end(name)
        while len(self._anchored) > self._max_anchors:
            _, texts = self._texts.popitem(last=False)
            for forgotten in texts:
                self._anchored.pop(forgotten, None)

    def _unlink(self, text: int, name: int) -> None:
        rest = tuple(other for other in self._texts.get(name, ()) if other != text)
        if rest:
            self._texts[name] = rest
        else:
            self._texts.pop(name, None)

    def _root(self, salt: str) -> int:
        return self._digest(salt.encode()) if salt else 0

    def _name(self, before: int, token_ids: Sequence[int]) -> int:
        return self._digest(struct.pack(f"<Q{len(token_ids)}I", before, *token_ids))

    def _digest(self, data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=_NAME_BYTES, key=self._key).digest(), "little")
