import random
import socket

import pytest
from prometheus_client import CollectorRegistry

from services.router.discovery.endpoints import EndpointSpec, Lookup, address_of, one_family, parse_endpoints
from services.router.discovery.follow import Discovery
from services.router.discovery.names import NamesConfig, NamesSource
from services.router.request.tokens import TokenEstimator
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.roles import Role
from shared.errors import FieldError
from shared.lifecycle import Readiness
from tests.fakes.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("", ()),
        (" , ", ()),
        ("llm:8000", (EndpointSpec("llm", 8000),)),
        ("http://llm:8000/", (EndpointSpec("llm", 8000),)),
        ("10.0.0.1:80;hardware_class=h100, llm:1", (EndpointSpec("10.0.0.1", 80, 2), EndpointSpec("llm", 1))),
        ("http://[::1]:8000 ; hardware_class=CPU", (EndpointSpec("::1", 8000, 19),)),
        ("10.0.0.1:80;role=prefill", (EndpointSpec("10.0.0.1", 80, 0, Role.PREFILL),)),
        ("dns://llm.pool:8000", (EndpointSpec("llm.pool", 8000, lookup=Lookup.DNS),)),
        ("srv://_http._tcp.llm;role=both", (EndpointSpec("_http._tcp.llm", 0, lookup=Lookup.SRV),)),
    ],
)
def test_the_setting_is_read(text, specs):
    assert parse_endpoints(text) == specs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("llm", "host:port"),
        ("llm:", "port"),
        ("llm:0", "1 to 65535"),
        ("llm:99999", "1 to 65535"),
        (":8000", "host:port"),
        ("https://llm:8000", "http://"),
        ("::1:8000", "brackets"),
        ("llm/path:8000", "host:port"),
        ("llm:8000;speed=2", "hardware_class"),
        ("llm:8000;hardware_class=abacus", "a100"),
        ("ok:1,llm", "entry 2"),
        ("srv://llm:8000", "without a port"),
        ("llm:1;role=cook", "prefill, decode"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_place_and_what_is_allowed(text, says):
    with pytest.raises(FieldError, match=says):
        parse_endpoints(text)


def test_addresses_are_written_in_one_form():
    assert address_of("10.0.0.1", 80) == "10.0.0.1:80"
    assert address_of("0:0::1", 80) == "[::1]:80"


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (["::1", "127.0.0.1", "127.0.0.1"], ["127.0.0.1:80"]),
        (["10.0.0.2", "fd00::2", "10.0.0.1", "fd00::1"], ["10.0.0.1:80", "10.0.0.2:80"]),
        (["fd00::2", "fd00::1", "fe80::1%eth0"], ["[fd00::1]:80", "[fd00::2]:80"]),
        (["fe80::1%eth0"], []),
    ],
)
def test_a_server_with_addresses_of_both_families_is_one_endpoint(hosts, addresses):
    assert one_family(hosts, 80) == addresses


class Names:
    """A resolver that answers what a test says."""

    def __init__(self, **answers):
        self.answers = answers

    async def __call__(self, host: str, port: int) -> list[str]:
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [f"{ip}:{port}" for ip in answer]


class Bed:
    def __init__(self, text: str, **answers):
        self.pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
        self.names = Names(**answers)
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.source = NamesSource(
            parse_endpoints(text),
            clock=self.clock,
            registry=self.registry,
            rng=random.Random(1),
            config=NamesConfig(gone_after=2),
            resolver=self.names,
        )
        self.readiness = Readiness()
        self.discovery = Discovery(
            self.pool, [self.source], clock=self.clock, registry=self.registry, readiness=self.readiness
        )

    async def listed(self) -> list[str]:
        self.clock.advance(20_000.0)
        await self.source.look_up_due()
        self.discovery.apply()
        return sorted(endpoint.address for endpoint in self.pool.table if not endpoint.retired)


async def test_a_name_stands_for_all_its_addresses_and_the_difference_is_applied():
    bed = Bed("10.0.0.9:80,llm:8000;hardware_class=h100", llm=["10.0.0.1", "10.0.0.2"])
    assert await bed.listed() == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:80"]
    kept = bed.pool.table.get("10.0.0.2:8000")
    assert kept is not None
    assert kept.hardware_class == 2
    bed.names.answers["llm"] = ["10.0.0.2", "10.0.0.3"]
    assert await bed.listed() == ["10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.9:80"]
    assert bed.pool.table.get("10.0.0.2:8000") is kept


async def test_a_resolver_that_fails_keeps_the_last_answer():
    bed = Bed("llm:8000", llm=["10.0.0.1"])
    await bed.listed()
    for failure in (socket.gaierror(socket.EAI_AGAIN, "again"), OSError(), TimeoutError()):
        bed.names.answers["llm"] = failure
        for _ in range(5):
            assert await bed.listed() == ["10.0.0.1:8000"]
    assert bed.registry.get_sample_value("leadtime_router_name_lookups_total", {"result": "failed"}) == 15


@pytest.mark.parametrize("answer", [socket.gaierror(socket.EAI_NONAME, "none"), []])
async def test_a_name_that_is_gone_takes_its_endpoints_away_after_some_answers(answer):
    bed = Bed("llm:8000", llm=["10.0.0.1"])
    await bed.listed()
    bed.names.answers["llm"] = answer
    assert await bed.listed() == ["10.0.0.1:8000"]
    assert await bed.listed() == []
    bed.names.answers["llm"] = ["10.0.0.1"]
    assert await bed.listed() == ["10.0.0.1:8000"]


async def test_a_name_that_nobody_knows_yet_is_no_fault():
    bed = Bed("llm:8000", llm=socket.gaierror(socket.EAI_NONAME, "none"))
    assert await bed.listed() == []


async def test_an_address_listed_twice_is_one_endpoint():
    bed = Bed("10.0.0.1:8000;hardware_class=h100,llm:8000", llm=["10.0.0.1"])
    assert await bed.listed() == ["10.0.0.1:8000"]
    assert next(iter(bed.pool.table)).hardware_class == 2


async def test_what_a_source_could_not_confirm_for_long_is_told_and_stays():
    bed = Bed("llm:8000", llm=["10.0.0.1"])
    await bed.listed()
    assert "degraded" not in bed.readiness.report()
    bed.names.answers["llm"] = OSError()
    for _ in range(4):
        await bed.listed()
    assert "not confirmed for 80 s" in bed.readiness.report()["degraded"]["discovery: names"]
    assert bed.readiness.ready
    age = bed.registry.get_sample_value("leadtime_router_discovery_age_seconds", {"source": "names"})
    assert age == 80.0
    bed.names.answers["llm"] = ["10.0.0.1"]
    assert await bed.listed() == ["10.0.0.1:8000"]
    assert "degraded" not in bed.readiness.report()
