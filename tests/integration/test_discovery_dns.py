"""Endpoints by DNS against a real server on loopback: A, AAAA and SRV records, with their TTL."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from services.router.discovery.endpoints import parse_endpoints
from services.router.discovery.follow import Discovery
from services.router.discovery.names import Dns, LookupFailed, NamesConfig, NamesSource, NoSuchName
from services.router.request.tokens import TokenEstimator
from services.router.state.pool import PoolConfig, PoolState
from shared.clock import SystemClock
from shared.lifecycle import Readiness
from tests.fakes.fake_dns import FakeDns, fake_dns
from tests.servers import until

QUICK = NamesConfig(resolve_interval_ms=200.0, shortest_ttl_ms=100.0, gone_after=2)


class Bed:
    def __init__(self) -> None:
        self.pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
        self.registry = CollectorRegistry()

    def listed(self) -> set[str]:
        return {endpoint.address for endpoint in self.pool.table if not endpoint.retired}

    async def settles(self, *addresses: str) -> None:
        await until(lambda: self.listed() == set(addresses), f"{addresses} are listed")


@contextlib.asynccontextmanager
async def discovering(server: FakeDns, text: str, config: NamesConfig = QUICK) -> AsyncIterator[Bed]:
    bed, clock = Bed(), SystemClock()
    dns = Dns([server.server], timeout_ms=500.0)
    source = NamesSource(
        parse_endpoints(text), clock=clock, registry=bed.registry, rng=random.Random(1), config=config, dns=dns
    )
    discovery = Discovery(bed.pool, [source], clock=clock, registry=bed.registry, readiness=Readiness())
    task = asyncio.create_task(discovery.run())
    try:
        yield bed
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_records_are_followed_as_their_ttl_says():
    async with fake_dns() as server:
        server.set("llm.pool", "A", "10.0.0.1", "10.0.0.2", ttl=0)
        async with discovering(server, "dns://llm.pool:8000;hardware_class=h100") as bed:
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8000")
            server.set("llm.pool", "A", "10.0.0.2", "10.0.0.3", ttl=3600)
            await bed.settles("10.0.0.2:8000", "10.0.0.3:8000")
            asked = len(server.asked)
            server.set("llm.pool", "A", "10.0.0.4")
            await asyncio.sleep(0.5)  # nothing may happen: there is no event to await
            assert len(server.asked) == asked
            assert bed.listed() == {"10.0.0.2:8000", "10.0.0.3:8000"}
            assert bed.pool.table.get("10.0.0.3:8000").hardware_class == 2


async def test_a_name_without_ipv4_stands_for_its_ipv6_addresses():
    async with fake_dns() as server:
        server.set("six.pool", "AAAA", "fd00::1")
        async with discovering(server, "dns://six.pool:8000") as bed:
            await bed.settles("[fd00::1]:8000")


async def test_srv_records_tell_hosts_and_ports_and_the_lowest_priority_counts():
    async with fake_dns() as server:
        server.set("_http._tcp.llm", "SRV", "10 1 8000 a.llm.", "10 9 8001 b.llm.", "20 1 8002 spare.llm.")
        server.set("a.llm", "A", "10.0.0.1")
        server.set("b.llm", "A", "10.0.0.2")
        server.set("spare.llm", "A", "10.0.0.3")
        async with discovering(server, "srv://_http._tcp.llm") as bed:
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8001")
            server.set("_http._tcp.llm", "SRV", "20 1 8002 spare.llm.")
            await bed.settles("10.0.0.3:8002")


@pytest.mark.parametrize("failure", ["failing", "silent"])
async def test_a_server_that_fails_keeps_the_endpoints_and_one_that_recovers_is_heard(failure):
    async with fake_dns() as server:
        server.set("llm.pool", "A", "10.0.0.1", ttl=0)
        async with discovering(server, "dns://llm.pool:8000") as bed:
            await bed.settles("10.0.0.1:8000")
            setattr(server, failure, True)
            name = {"result": "failed"}
            await until(
                lambda: bed.registry.get_sample_value("leadtime_router_name_lookups_total", name), "a lookup failed"
            )
            assert bed.listed() == {"10.0.0.1:8000"}
            setattr(server, failure, False)
            server.set("llm.pool", "A", "10.0.0.2", ttl=0)
            await bed.settles("10.0.0.2:8000")


async def test_a_name_that_is_gone_takes_its_endpoints_away_after_some_answers():
    async with fake_dns() as server:
        server.set("llm.pool", "A", "10.0.0.1", ttl=0)
        async with discovering(server, "dns://llm.pool:8000") as bed:
            await bed.settles("10.0.0.1:8000")
            server.records.clear()
            await bed.settles()
            gone = bed.registry.get_sample_value("leadtime_router_name_lookups_total", {"result": "no_such_name"})
            assert gone >= 2


async def test_a_part_of_an_srv_answer_that_fails_is_no_answer():
    async with fake_dns() as server:
        server.set("_http._tcp.llm", "SRV", "1 1 8000 a.llm.", "1 1 8000 b.llm.")
        server.set("a.llm", "A", "10.0.0.1")
        dns = Dns([server.server], timeout_ms=500.0)
        assert (await dns.services("_http._tcp.llm")).addresses == ("10.0.0.1:8000",)
        with pytest.raises(NoSuchName):
            await dns.services("_grpc._tcp.llm")
        server.failing = True
        with pytest.raises(LookupFailed):
            await dns.services("_http._tcp.llm")
