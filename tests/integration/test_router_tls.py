"""TLS of the ext-proc port, with real handshakes: ALPN, renewal while serving, client certificates, Envoy itself."""

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, render
from services.router.extproc.server import ExtProcServer
from services.router.extproc.tls import TlsFiles, from_files, self_signed
from shared.clock import SystemClock
from shared.errors import FieldError
from sim.extproc_client import ExtProcClient
from tests.certificates import Authority
from tests.fakes.fake_director import FakeDirector
from tests.fakes.fake_model_server import Script, fake_model_server
from tests.servers import envoy, fetch, free_port, until

ADDRESS = "127.0.0.1:1"
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@contextlib.asynccontextmanager
async def serving(
    credentials: grpc.ServerCredentials, director: FakeDirector | None = None
) -> AsyncIterator[tuple[int, int]]:
    server = ExtProcServer(director or FakeDirector(), CollectorRegistry(), SystemClock(), max_body_bytes=1_000)
    ports = await server.start("127.0.0.1", 0, 0, credentials)
    await server.set_ready(True)
    try:
        yield ports
    finally:
        await server.stop(0.2)


def presented(port: int) -> tuple[bytes, str | None]:
    """The certificate that a server presents (DER), and the protocol that ALPN agreed on."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), 5.0) as plain, context.wrap_socket(plain) as secured:
        return secured.getpeercert(binary_form=True) or b"", secured.selected_alpn_protocol()


def write(directory: Path, authority: Authority, name: str = "router") -> TlsFiles:
    key, certificate = authority.issue(name)
    files = TlsFiles(directory / "tls.crt", directory / "tls.key")
    for path, data in ((files.certificate, certificate), (files.key, key)):
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(path)
    return files


def der(files: TlsFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text())


async def test_self_signed_offers_h2_and_a_new_key_each_time() -> None:
    seen = set()
    for _ in range(2):
        async with serving(self_signed(NOW)) as (port, _health):
            certificate, protocol = await asyncio.to_thread(presented, port)
            assert protocol == "h2"
            seen.add(certificate)
    assert len(seen) == 2


async def test_a_client_that_verifies_is_served_from_files(tmp_path: Path) -> None:
    authority = Authority.make()
    files = write(tmp_path, authority)
    async with serving(from_files(files)) as (port, _health):
        trusted = grpc.ssl_channel_credentials(authority.pem)
        async with ExtProcClient(f"localhost:{port}", credentials=trusted) as client:
            assert (await client.pick("/v1/models", None)).destinations == (ADDRESS,)


async def test_a_renewed_pair_is_served_from_the_next_handshake_on(tmp_path: Path) -> None:
    authority = Authority.make()
    files = write(tmp_path, authority)
    async with serving(from_files(files)) as (port, _health):
        before, _ = await asyncio.to_thread(presented, port)
        assert before == der(files)
        write(tmp_path, authority)
        after, _ = await asyncio.to_thread(presented, port)
        assert after == der(files) != before


async def test_a_broken_renewal_leaves_the_pair_in_use_until_it_is_whole(tmp_path: Path) -> None:
    authority = Authority.make()
    files = write(tmp_path, authority)
    async with serving(from_files(files)) as (port, _health):
        first, _ = await asyncio.to_thread(presented, port)
        files.certificate.write_bytes(authority.issue("other")[1])
        assert (await asyncio.to_thread(presented, port))[0] == first
        files.key.unlink()
        assert (await asyncio.to_thread(presented, port))[0] == first
        write(tmp_path, authority)
        assert (await asyncio.to_thread(presented, port))[0] == der(files) != first


async def test_with_a_client_authority_only_its_clients_may_call(tmp_path: Path) -> None:
    authority = Authority.make()
    files = write(tmp_path, authority)
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    guarded = TlsFiles(files.certificate, files.key, tmp_path / "ca.crt")
    key, certificate = authority.issue("envoy")
    async with serving(from_files(guarded)) as (port, _health):
        own = grpc.ssl_channel_credentials(authority.pem, key, certificate)
        async with ExtProcClient(f"localhost:{port}", credentials=own) as client:
            assert (await client.pick("/v1/models", None)).destinations == (ADDRESS,)
        stranger = grpc.ssl_channel_credentials(authority.pem)
        async with ExtProcClient(f"localhost:{port}", credentials=stranger) as client:
            with pytest.raises(grpc.aio.AioRpcError):
                await client.pick("/v1/models", None)


def test_files_that_can_t_be_used_are_refused_at_start(tmp_path: Path) -> None:
    authority = Authority.make()
    with pytest.raises(FieldError):
        from_files(TlsFiles(tmp_path / "none", tmp_path / "none"))
    files = write(tmp_path, authority)
    files.key.write_bytes(authority.issue("other")[0])
    with pytest.raises(FieldError, match="tls_key_file"):
        from_files(files)


@pytest.mark.parametrize("shape", ["buffered", "full_duplex"])
async def test_envoy_reaches_a_self_signed_router_and_its_plain_health_port(shape: Shape) -> None:
    answer = Script([(0.0, b"{}")], content_type="application/json")
    async with fake_model_server(lambda _: answer) as one, fake_model_server(lambda _: answer) as two:
        director = FakeDirector(two.address)
        async with serving(self_signed(NOW), director) as (port, health):
            config = EnvoyConfig(
                endpoints=tuple(Address("127.0.0.1", int(s.address.rpartition(":")[2])) for s in (one, two)),
                routers=(RouterAddress(Address("127.0.0.1", port), health),),
                collectors=(Address("127.0.0.1", free_port()),),
                router_tls=True,
                shape=shape,
            )
            async with envoy(render(config)) as proxy:

                async def healthy() -> bool:
                    return (await proxy.stats("cluster.picker.membership_healthy")).popitem()[1] == 1

                await until(healthy, "the health check passes")
                for _ in range(4):
                    assert (await fetch(f"{proxy.url}/v1/models"))[0] == 200
        assert director.asked == 4
        assert (len(one.requests), len(two.requests)) == (0, 4)
