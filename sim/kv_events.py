"""A simulated server's word on its KV cache, as vLLM gives it: ZMQ, msgpack, numbered, connecting to whoever listens.

The server tells the publisher each request's chain (which tokens make which block); the block pool tells it what is
stored, evicted and cleared; what one turn of the event loop brings leaves as one message. A token's id is its four
bytes.

Limits: no replay; the chains of the newest `_MAX_BLOCKS` blocks are known, a block of an older one is stored in
silence.
"""

import asyncio
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from sim.tokens import BYTES_PER_TOKEN

_MAX_BLOCKS: Final = 200_000
_HIGH_WATER: Final = 10_000
_encoder = msgspec.msgpack.Encoder()


class KvEventPublisher:
    """Behind `sim.kv_cache.CacheListener`."""

    def __init__(self, address: str, topic: str, block_tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        """Connects to `address` at once; what nobody hears is lost, as vLLM's is."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._topic = topic.encode()
        self._block_tokens = block_tokens
        self._loop = loop
        self._sequence = 0
        self._chains: OrderedDict[int, tuple[int | None, bytes]] = OrderedDict()
        """By block: the one before it, and its tokens' bytes."""
        self._events: list[dict[str, Any]] = []

    def restart(self) -> None:
        """Another process answers: numbers begin anew."""
        self._sequence = 0
        self._events.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def register(self, tokens: bytes, chain: Sequence[int]) -> None:
        """A request's blocks, in order, and the bytes of all its tokens."""
        size = self._block_tokens * BYTES_PER_TOKEN
        parent: int | None = None
        for at, block in enumerate(chain):
            self._chains[block] = parent, tokens[at * size : (at + 1) * size]
            self._chains.move_to_end(block)
            parent = block
        while len(self._chains) > _MAX_BLOCKS:
            self._chains.popitem(last=False)

    def stored(self, block: int) -> None:
        known = self._chains.get(block)
        if known is None:
            return
        parent, tokens = known
        ids = list(struct.unpack(f"<{self._block_tokens}I", tokens))
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(block)
            last["token_ids"] += ids
            return
        self._add(
            {
                "type": "BlockStored", "block_hashes": [block], "parent_block_hash": parent, "token_ids": ids,
                "block_size": self._block_tokens, "lora_id": None, "medium": "GPU", "group_idx": 0,
            }
        )  # fmt: skip

    def removed(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._add({"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"})

    def cleared(self) -> None:
        self._add({"type": "AllBlocksCleared"})

    def _add(self, event: dict[str, Any]) -> None:
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if not events or self._socket.closed:
            return
        number, self._sequence = self._sequence, self._sequence + 1
        payload = _encoder.encode([time.time(), events, 0])
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
