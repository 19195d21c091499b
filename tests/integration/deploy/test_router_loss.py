"""Two routers, of which one dies: what was on its way to it is picked by nobody, all others by the one that is left."""

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
async def test_a_dead_router_costs_what_was_on_its_way_to_it_at_most(shape: Shape) -> None:
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

                async def healthy() -> float:
                    return (await proxy.stats("cluster.picker.membership_healthy")).popitem()[1]

                async def ask(times: int) -> list[int]:
                    return [
                        (await client.post("/v1/chat/completions", json={"model": "m"})).status_code
                        for _ in range(times)
                    ]

                async def noticed() -> bool:
                    return await healthy() == 1

                async def both() -> bool:
                    return await healthy() == 2

                await until(both, "both routers are healthy")
                assert await ask(6) == [200] * 6
                await routers[0].stop(0.0)
                meanwhile = await ask(10)
                # One that was on its way to the dead router goes on unpicked, or in full duplex is lost.
                assert meanwhile.count(200) >= (10 if shape == "buffered" else 9)
                await until(noticed, "Envoy has noticed")
                asked, arrived = director.asked, len(two.requests)
                assert asked >= 15
                assert await ask(10) == [200] * 10
                assert director.asked == asked + 10
                assert len(two.requests) == arrived + 10
        finally:
            for router in routers:
                await router.stop(0.0)
