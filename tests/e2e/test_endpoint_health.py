"""An endpoint that accepts requests and answers 500, or nothing, at once, between others that work; the real Envoy."""

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Running, running, servers
from tests.servers import until

ENDPOINTS = 4
_NEWEST = 120


class Traffic:
    """Requests from some senders at once, each with a prompt of its own; what came of the newest."""

    def __init__(self, live: Running) -> None:
        self._live = live
        self._numbers = itertools.count()
        self.answers = 0
        self.newest: deque[tuple[int, str]] = deque(maxlen=_NEWEST)
        """Status, and the server that gave it."""

    @contextlib.asynccontextmanager
    async def running(self, senders: int = 4) -> AsyncIterator["Traffic"]:
        stopping = asyncio.Event()

        async def send() -> None:
            while not stopping.is_set():
                response = await self._live.chat(f"request {next(self._numbers)}", stream=True)
                self.newest.append((response.status_code, response.headers.get("x-sim-server", "")))
                self.answers += 1

        tasks = [asyncio.create_task(send()) for _ in range(senders)]
        try:
            yield self
        finally:
            stopping.set()
            await asyncio.gather(*tasks)

    async def more(self, count: int = _NEWEST) -> None:
        goal = self.answers + count
        await until(lambda: self.answers >= goal, f"{count} more answers", timeout_s=120.0)

    def failed(self) -> int:
        return sum(status != 200 for status, _ in self.newest)

    def served_by(self, name: str) -> int:
        return Counter(server for status, server in self.newest if status == 200)[name]


async def health(live: Running, port: int) -> Any:
    endpoints = (await live.router_json("/v1/endpoints"))["endpoints"]
    return next(endpoint["health"] for endpoint in endpoints if endpoint["address"].endswith(f":{port}"))


def port_of(live: Running, name: str) -> int:
    place = [server.name for server in live.stack.config.simulated.servers].index(name)
    return int(live.stack.endpoints[place].rpartition(":")[2])


async def aside(live: Running, port: int) -> bool:
    return bool((await health(live, port))["standing"] != "in_use")


async def has_its_share(live: Running, port: int, traffic: Traffic, name: str) -> bool:
    return not await aside(live, port) and traffic.served_by(name) >= _NEWEST // ENDPOINTS // 3


async def test_an_endpoint_that_answers_500_gets_no_more_than_trials_until_it_is_well(tmp_path: Path) -> None:
    async for live in running(tmp_path, servers(ENDPOINTS)):
        port = port_of(live, "s1")
        async with Traffic(live).running() as traffic:
            await traffic.more(40)
            assert traffic.failed() == 0
            await live.control("faults/s1", {"fail_status": 500})
            await until(partial(aside, live, port), "the endpoint is set aside", timeout_s=60.0)
            seen = await health(live, port)
            assert seen["reason"] == "error"
            assert seen["failures"]["error"] >= 5
            await traffic.more(20)  # what was on its way
            await traffic.more()
            # A request each time that it is tried: after 2, 4, 8 … s.
            assert traffic.failed() <= _NEWEST // 10
            assert await aside(live, port)

            await live.control("faults/s1")
            await until(
                partial(has_its_share, live, port, traffic, "s1"), "it has its share again", timeout_s=120.0, poll_s=0.1
            )
            assert await live.metric(live.router, 'leadtime_router_endpoint_failures_total{kind="error"}') >= 5
            assert await live.metric(live.router, 'leadtime_router_endpoint_health_events_total{event="returned"}') >= 1
            await live.control("faults/s1", {"empty": True})
            await until(partial(aside, live, port), "set aside for answers without a body", timeout_s=60.0)
            assert (await health(live, port))["reason"] == "empty"
        assert "endpoint set aside" in live.logs()
        assert "endpoint in use again" in live.logs()
