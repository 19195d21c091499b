"""Two routers, of which one dies: no request notices, in either shape of ext-proc."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, render
from services.router.extproc.server import ExtProcServer
from shared.clock import SystemClock
from tests.fakes.fake_director import FakeDirector
from tests.fakes.fake_model_server import Script, fake_model_server
from tests.servers import envoy, free_port, until

ANSWER = Script([(0.0, b"{}")], content_type="application/json")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
async def test_a_dead_router_costs_no_request_while_another_is_left(shape: Shape) -> None:
    async with fake_model_server(lambda _: ANSWER) as one, fake_model_server(lambda _: ANSWER) as two:
        director = FakeDirector(two.address)
        routers = [ExtProcServer(director, CollectorRegistry(), SystemClock(), max_body_bytes=1 << 20) for _ in "ab"]
        try:
            ports = [await router.start("127.0.0.1", 0, 0) for router in routers]
            for router in routers:
                await router.set_ready(True)
            config = EnvoyConfig(
                endpoints=tuple(Address("127.0.0.1", port_of(server.address)) for server in (one, two)),
                routers=tuple(RouterAddress(Address("127.0.0.1", port), health) for port, health in ports),
                collectors=(Address("127.0.0.1", free_port()),),
                shape=shape,
            )
            async with envoy(render(config)) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=20.0) as client:

                async def both() -> bool:
                    return (await proxy.stats("cluster.picker.membership_healthy")).popitem()[1] == 2

                await until(both, "both routers are healthy")
                for _ in range(6):
                    assert (await client.post("/v1/chat/completions", json={"model": "m"})).status_code == 200
                await routers[0].stop(0.0)
                for _ in range(10):
                    assert (await client.post("/v1/chat/completions", json={"model": "m"})).status_code == 200
        finally:
            for router in routers:
                await router.stop(0.0)
        assert director.asked == 16
        assert (len(one.requests), len(two.requests)) == (0, 16)
