"""NATS and Redis for trials start with the manifests' own arguments, and ask for the services' credentials."""

import re
from pathlib import Path

import nats
import nats.errors
import pytest
import redis.asyncio
import redis.exceptions

from deploy.local.binaries import find_binaries
from shared.settings import NatsSettings
from tests.manifests.overlays import overlay
from tests.servers import ServerProcess, fetch, free_port, until

WHOLE = "plain-envoy"


def arguments(name: str) -> list[str]:
    """The container's, with `$(NAME)` replaced as Kubernetes does."""
    whole = overlay(WHOLE)
    workload = whole.workload(name)
    environment = whole.environment(workload)
    return [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], each) for each in workload.container["args"]]


def service_environment(service: str) -> dict[str, str]:
    whole = overlay(WHOLE)
    return whole.environment(whole.workload(f"leadtime-{service}"))


async def test_nats_serves_jetstream_to_whom_the_secret_lets_in(tmp_path: Path) -> None:
    whole = overlay(WHOLE)
    (volume,) = whole.workload("leadtime-nats").pod["volumes"]
    port, monitor = free_port(), free_port()
    text = whole.config_map(volume["configMap"]["name"])["nats.conf"]
    for pod_s, here in (("4222", str(port)), ("8222", str(monitor)), ("/data", str(tmp_path / "store"))):
        assert pod_s in text
        text = text.replace(pod_s, here)
    config = tmp_path / "nats.conf"
    config.write_text(f"{text}\nhost: 127.0.0.1\n")
    server = ServerProcess("nats-server", tmp_path / "nats.log")
    server.spawn(
        [
            find_binaries().nats_server,
            *(each.replace("/etc/nats/nats.conf", str(config)) for each in arguments("leadtime-nats")),
        ]
    )
    try:

        async def healthy() -> bool:
            return (await fetch(f"http://127.0.0.1:{monitor}/healthz"))[0] == 200

        await server.ready(healthy)
        given = service_environment("trainer")
        settings = NatsSettings(
            servers=f"nats://127.0.0.1:{port}",
            user=given["LEADTIME_NATS_USER"],
            password=given["LEADTIME_NATS_PASSWORD"],
        )
        client = await nats.connect(**settings.connect_options())
        assert (await client.jetstream().account_info()).limits is not None
        await client.close()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await nats.connect(f"nats://127.0.0.1:{port}", user="leadtime", password="guessed", allow_reconnect=False)
    finally:
        await server.stop()


async def test_redis_asks_for_the_secret_s_password(tmp_path: Path) -> None:
    port = free_port()
    given = [str(tmp_path) if each == "/data" else each for each in arguments("leadtime-redis")]
    server = ServerProcess("redis-server", tmp_path / "redis.log")
    server.spawn([find_binaries().redis_server, "--bind", "127.0.0.1", "--port", str(port), *given])
    try:
        password = service_environment("trainer")["LEADTIME_REDIS_PASSWORD"]
        client = redis.asyncio.Redis(port=port, password=password, protocol=2)

        async def answers() -> bool:
            try:
                return bool(await client.ping())
            except redis.exceptions.ConnectionError:
                return False

        await until(answers, "it answers to the password")
        await client.aclose()
        stranger = redis.asyncio.Redis(port=port, protocol=2)
        with pytest.raises(redis.exceptions.AuthenticationError):
            await stranger.ping()
        await stranger.aclose()
    finally:
        await server.stop()
