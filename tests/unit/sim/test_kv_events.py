"""A simulated server's word on its cache is what its cache does: replayed, it gives the cache's own contents."""

import asyncio
import random

import zmq
import zmq.asyncio

from services.router.state.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_events
from sim.engine import Engine, EngineLimits, EngineRequest
from sim.hardware import PROFILES
from sim.kv_events import KvEventPublisher
from sim.tokens import block_chain

BLOCK = 4


def prompt(seed: int, tokens: int) -> bytes:
    return random.Random(seed).randbytes(tokens * 4)


async def test_events_replay_to_what_the_cache_holds() -> None:
    context = zmq.asyncio.Context()
    listener = context.socket(zmq.SUB)
    listener.setsockopt(zmq.SUBSCRIBE, b"kv@")
    address = f"tcp://127.0.0.1:{listener.bind_to_random_port('tcp://127.0.0.1')}"
    limits = EngineLimits(
        num_blocks=40, block_tokens=BLOCK, max_num_seqs=8, max_batched_tokens=64, max_model_tokens=100
    )
    engine = Engine(next(iter(PROFILES.values())), limits, random.Random(1))
    publisher = KvEventPublisher(address, "kv@a:1@m", BLOCK, asyncio.get_running_loop())
    engine.pool.listener = publisher
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    numbers: list[int] = []

    async def take() -> None:
        _, number, payload = await listener.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        for event in decode_events(payload):
            match event:
                case BlockStored():
                    parent = event.parent
                    for at, block in enumerate(event.hashes):
                        held[block] = parent, event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                        parent = block
                case BlockRemoved():
                    for block in event.hashes:
                        del held[block]
                case AllBlocksCleared():
                    held.clear()

    try:
        now_ms = 0.0
        while not await listener.poll(20):  # what is published before the connection stands is lost
            publisher.cleared()
        while await listener.poll(50):
            await take()
        publisher.restart()
        numbers.clear()
        for seed in (1, 2, 3, 1, 4, 2):
            tokens = prompt(seed, 40 + seed)
            chain = block_chain(tokens, BLOCK)
            publisher.register(tokens, chain)
            engine.submit(EngineRequest(f"{now_ms}", 40 + seed, 1, chain), now_ms)
            while (step := engine.step(now_ms)) is not None:
                now_ms = step.step.end_ms
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        published = publisher._sequence
        while len(numbers) < published:
            await asyncio.wait_for(take(), 5.0)
        assert numbers == list(range(published))
        assert set(held) == set(engine.pool._cached)
        for seed in (1, 2, 3, 4):
            tokens, before = prompt(seed, 40 + seed), None
            for at, block in enumerate(block_chain(tokens, BLOCK)):
                if block in held:
                    piece = tokens[at * BLOCK * 4 : (at + 1) * BLOCK * 4]
                    ids = tuple(int.from_bytes(piece[i : i + 4], "little") for i in range(0, len(piece), 4))
                    assert held[block] == (before, ids)
                before = block
        engine.reset_cache()
        await asyncio.sleep(0)
        await asyncio.wait_for(take(), 5.0)
        assert held == {}
    finally:
        publisher.close()
        context.destroy(linger=0)
