"""Request trailers, in both shapes, through the real Envoy: the body arrives whole, and once."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, render
from services.router.extproc.server import ExtProcServer
from shared.clock import SystemClock
from tests.fakes.fake_director import FakeDirector
from tests.fakes.fake_model_server import Script, fake_model_server
from tests.servers import EnvoyProxy, envoy, free_port, until

ANSWER = Script([(0.0, b"answer")], content_type="application/json")


def with_trailers(bootstrap: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Our config drops trailers of HTTP/1.1, as Envoy does by default; here they pass. In full duplex without retries,
    as on Istio's routes: with them Envoy 1.40 sends the body on twice.
    """
    manager = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_protocol_options"] = {"enable_trailers": True}
    if shape == "full_duplex":
        del manager["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]["retry_policy"]
    return bootstrap


async def post(proxy: EnvoyProxy, path: str, chunks: list[bytes]) -> bytes:
    """A chunked request that ends with a trailer, over a plain socket; returns all that comes back."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
    )
    writer.write(head.encode())
    for chunk in chunks:
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
    writer.write(b"0\r\nx-sum: 7\r\n\r\n")
    await writer.drain()
    try:
        async with asyncio.timeout(10.0):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "dropped"])
@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
@pytest.mark.parametrize("chunks", [[], [b"{}"], [b"x" * 70_000] * 3], ids=["no body", "small", "large"])
async def test_a_body_that_ends_with_trailers_arrives_once(
    shape: Shape, path: str, chunks: list[bytes], shown: bool
) -> None:
    """`dropped` is our config as it is."""
    async with fake_model_server(lambda _: ANSWER) as model:
        director = FakeDirector(model.address)
        router = ExtProcServer(director, CollectorRegistry(), SystemClock(), max_body_bytes=1 << 20)
        try:
            port, health = await router.start("127.0.0.1", 0, 0)
            await router.set_ready(True)
            config = EnvoyConfig(
                endpoints=(Address("127.0.0.1", int(model.address.rpartition(":")[2])),),
                routers=(RouterAddress(Address("127.0.0.1", port), health),),
                collectors=(Address("127.0.0.1", free_port()),),
                shape=shape,
            )
            async with envoy(with_trailers(render(config), shape) if shown else render(config)) as proxy:

                async def healthy() -> bool:
                    return (await proxy.stats("cluster.picker.membership_healthy")).popitem()[1] == 1

                await until(healthy, "the router is healthy")
                answer = await post(proxy, path, chunks)
        finally:
            await router.stop(0.0)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
        assert b"answer" in answer
        (seen,) = model.requests
        assert seen.body == b"".join(chunks)
        assert director.asked == 1
