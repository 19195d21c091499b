"""A model server's KV-event publisher over real ZMQ: connects, publishes, and answers replay requests as vLLM does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class KvPublisher:
    """`send` publishes a batch under the next number; `lose` uses up a number without sending."""

    topic: str
    context: zmq.asyncio.Context
    socket: Any
    sequence: int = 0
    kept: dict[int, bytes] = field(default_factory=dict)
    replays: int = 0

    def encode(self, events: Sequence[Any]) -> bytes:
        return msgspec.msgpack.encode([0.0, list(events), 0])

    async def send(self, *events: Any) -> None:
        await self.send_raw(self.encode(events))

    async def send_raw(self, payload: bytes) -> None:
        number, self.sequence = self.sequence, self.sequence + 1
        self.kept[number] = payload
        await self.socket.send_multipart([self.topic.encode(), number.to_bytes(8, "big"), payload])

    def lose(self, *events: Any) -> None:
        self.kept[self.sequence] = self.encode(events)
        self.sequence += 1

    def restart(self) -> None:
        self.sequence = 0
        self.kept.clear()

    async def answer_replays(self, router: Any) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            self.replays += 1
            for number in sorted(n for n in self.kept if n >= int.from_bytes(start, "big")):
                await router.send_multipart([client, b"", number.to_bytes(8, "big"), self.kept[number]])
            await router.send_multipart([client, b"", END, b""])


@contextlib.asynccontextmanager
async def kv_publisher(address: str, topic: str, replay_port: int | None = None) -> AsyncIterator[KvPublisher]:
    """A publisher that connects to `address`; with `replay_port` it answers there."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    socket.connect(address)
    publisher = KvPublisher(topic, context, socket)
    task = None
    if replay_port is not None:
        router = context.socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{replay_port}")
        task = asyncio.create_task(publisher.answer_replays(router))
    try:
        yield publisher
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


def stored(first: int, count: int = 1, parent: int | None = None, tokens_from: int | None = None) -> dict[str, Any]:
    """Blocks `first`… of 4 tokens each, whose ids follow from `tokens_from` (by default from their numbers)."""
    begin = first if tokens_from is None else tokens_from
    return {
        "type": "BlockStored", "block_hashes": list(range(first, first + count)), "parent_block_hash": parent,
        "token_ids": [begin * 1_000 + i for i in range(4 * count)], "block_size": 4, "medium": "GPU", "group_idx": 0,
    }  # fmt: skip
