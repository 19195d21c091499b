"""The ext-proc port asks for its token, refuses what is no message, and says in a sentence why it can't listen."""

import socket

import grpc
import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from services.router.extproc.server import ExtProcServer
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from sim.extproc_client import ExtProcClient
from tests.fakes.fake_director import FakeDirector


async def test_a_call_without_the_token_is_refused_and_one_with_it_is_answered() -> None:
    registry = CollectorRegistry()
    server = ExtProcServer(FakeDirector(), registry, SystemClock(), max_body_bytes=1_000, token="right-token")
    port, _ = await server.start("127.0.0.1", 0, 0)
    try:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            async with ExtProcClient(f"127.0.0.1:{port}", metadata=metadata) as client:
                # Nothing is written: gRPC's client loses the status of a call that is refused while it writes.
                call = client.stream().call
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        async with ExtProcClient(f"127.0.0.1:{port}", metadata=(("authorization", "Bearer right-token"),)) as client:
            assert (await client.pick("/v1/models", None)).destinations
        assert registry.get_sample_value("leadtime_router_extproc_aborts_total", {"reason": "unauthenticated"}) == 2
    finally:
        await server.stop(0.0)


async def test_bytes_that_are_no_message_end_their_stream_with_a_status_and_are_counted() -> None:
    registry = CollectorRegistry()
    server = ExtProcServer(FakeDirector(), registry, SystemClock(), max_body_bytes=1_000)
    port, _ = await server.start("127.0.0.1", 0, 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with structlog.testing.capture_logs() as logs:
                for data in (b"\xff\xff\xff", b"GET / HTTP/1.1"):
                    call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
                    await call.write(data)
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call.read()
                    assert (await call.code(), await call.details()) == (grpc.StatusCode.INTERNAL, "not_a_message")
        assert logs == []
        assert registry.get_sample_value("leadtime_router_extproc_aborts_total", {"reason": "not_a_message"}) == 2
    finally:
        await server.stop(0.0)


async def test_a_taken_port_is_a_fault_of_the_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ExtProcServer(FakeDirector(), CollectorRegistry(), SystemClock(), max_body_bytes=1_000)
        with pytest.raises(ConfigurationError, match=f"EXTPROC_PORT.*{port}"):
            await server.start("127.0.0.1", port, 0)
