"""Several routers behind the real Envoy: all active, one ledger, and one that dies costs nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.conftest import Running, running, servers
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: Any) -> AsyncIterator[Running]:
    directory: Path = tmp_path_factory.mktemp("routers")
    async for stack in running(
        directory, servers(), {"LEADTIME_ROUTER_LEDGER_CHECKS": "true"}, predictors=0, routers=3
    ):
        yield stack


async def asked(live: Running, path: str) -> list[Any]:
    """Every router's answer; None from one that is down."""

    async def one(url: str) -> Any:
        try:
            return (await live.client.get(url + path)).json()
        except httpx.TransportError:
            return None

    return list(await asyncio.gather(*(one(url) for url in live.stack.addresses.router_urls)))


async def all_know(live: Running, peers: int) -> None:
    async def known() -> bool:
        return all(
            answer is not None
            and sum(peer["live"] and not peer["behind"] and peer["same_salt"] for peer in answer["peers"]) == peers
            for answer in await asked(live, "/v1/peers")
        )

    await until(known, f"every router knows {peers} others", poll_s=0.05)


async def in_flight(live: Running) -> list[int | None]:
    return [None if answer is None else answer["inflight_requests"] for answer in await asked(live, "/v1/stats")]


async def long_requests(live: Running, count: int) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(live.chat(f"a long one {number}", stream=True, max_tokens=2_500, ignore_eos=True))
        for number in range(count)
    ]


async def test_all_routers_decide_and_each_counts_the_requests_of_all(three: Running) -> None:
    await all_know(three, 2)
    tasks = await long_requests(three, 12)

    async def all_counted() -> bool:
        return await in_flight(three) == [12, 12, 12]

    await until(all_counted, "every router counts all twelve", poll_s=0.02)
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 12

    async def none_left() -> bool:
        return await in_flight(three) == [0, 0, 0]

    await until(none_left, "every ledger is empty", poll_s=0.02)
    decided = [sum(answer["served_by"].values()) for answer in await asked(three, "/v1/stats")]
    assert sum(decided) == 12
    assert min(decided) > 0
    for url in three.stack.addresses.router_urls:
        assert await three.metric(url, "leadtime_router_ledger_faults_total") == 0


async def test_a_killed_router_costs_no_request_and_its_own_count_until_they_end(three: Running) -> None:
    await all_know(three, 2)
    tasks = await long_requests(three, 9)

    async def all_counted() -> bool:
        return await in_flight(three) == [9, 9, 9]

    await until(all_counted, "every router counts all nine", poll_s=0.02)
    own = (await asked(three, "/v1/peers"))[1]["own_requests"]
    assert own > 0
    await three.stack.kill("router-2")
    more = await asyncio.gather(*(three.chat(f"after the death {number}") for number in range(12)))
    assert [answer.status_code for answer in more] == [200] * 12
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 9

    async def none_left() -> bool:
        return await in_flight(three) == [0, None, 0]

    await until(none_left, "what the dead router had under way is counted out by its outcomes", poll_s=0.02)

    tasks = await long_requests(three, 6)
    await three.stack.restart("router-2")
    await all_know_again(three)
    counted = await in_flight(three)
    assert counted == [counted[0]] * 3
    await asyncio.gather(*tasks)


async def all_know_again(live: Running) -> None:
    """The restarted router has been given snapshots: it agrees with the others."""

    async def agreed() -> bool:
        peers = (await asked(live, "/v1/peers"))[1]
        counted = await in_flight(live)
        return (
            sum(peer["live"] and not peer["behind"] for peer in peers["peers"]) == 2
            and peers["events"]["snapshots_taken"] >= 2
            and len(set(counted)) == 1
        )

    await until(agreed, "the restarted router agrees with the others", poll_s=0.02)
