"""What servers say of their caches, through the whole stack: simulated servers publish, the router's next decision
knows.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.conftest import Running, running, servers
from tests.servers import free_port, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "the quick brown fox jumps over the lazy dog " * 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def telling(tmp_path_factory: Any) -> AsyncIterator[Running]:
    address = f"tcp://127.0.0.1:{free_port()}"
    environment = {"LEADTIME_ROUTER_KV_EVENTS": address}
    async for stack in running(tmp_path_factory.mktemp("kv"), servers(2, kv_events=address), environment):
        yield stack


async def cached(stack: Running, text: str) -> list[float]:
    """Tokens of a prompt that each endpoint is believed to have, the most first, as its own decision sees it."""
    await stack.chat(text)
    decision = await stack.newest_decision()
    features = [candidate["features"] for candidate in decision["candidates"]]
    return sorted((f["input_tokens"] - f["uncached_tokens"] for f in features), reverse=True)


async def test_the_router_knows_what_a_server_has_forgotten(telling: Running) -> None:
    assert (await cached(telling, LONG))[0] == 0

    async def heard() -> bool:
        endpoints = (await telling.router_json("/v1/endpoints"))["endpoints"]
        return any(endpoint["tells_of_its_cache"] for endpoint in endpoints)

    await until(heard, "a server tells of its cache")
    for i in range(4):  # each is alone with its length, so its text is anchored once its outcome is back
        samples = await telling.samples()
        await telling.chat(LONG + "and then " * i)

        async def back(samples: int = samples) -> bool:
            return await telling.samples() > samples

        await until(back, "its outcome is on the stream")
    await asyncio.sleep(0.2)  # the router hears it as well
    assert (await cached(telling, LONG))[0] > 1_500
    await telling.control("reset-caches")

    async def known() -> bool:
        prefix = 'leadtime_router_kv_events_total{event="AllBlocksCleared"}'
        return await telling.metric(telling.router, prefix) >= 1

    await until(known, "the router has heard that the caches are empty")
    assert (await cached(telling, LONG))[0] == 0
    assert await telling.metric(telling.router, 'leadtime_router_kv_batches_total{result="ok"}') > 0
    assert await telling.metric(telling.router, 'leadtime_router_kv_batches_total{result="malformed"}') == 0
