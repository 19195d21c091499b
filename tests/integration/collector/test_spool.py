"""While JetStream can't take samples they lie on the disk, survive the process, and arrive once."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.integration.collector.running import running_collector, stored_ids
from tests.integration.collector.test_publish import entry, sample
from tests.servers import NatsServer, ServerProcess, fetch, free_port, nats_server, until

WRITTEN = 'leadtime_collector_spool_samples_total{event="written"}'


async def stored(url: str, count: int) -> list[str]:
    """Await so many samples in the stream; their ids."""

    async def enough() -> list[str] | None:
        try:
            ids = await stored_ids(url)
        except Exception:  # no stream yet
            return None
        return ids if len(ids) >= count else None

    ids: list[str] = await until(enough, f"{count} samples are stored")
    return ids


async def test_a_post_is_acknowledged_by_the_disk_while_nats_is_away(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        await server.stop()
        async with running_collector(server.url, spool_dir=tmp_path / "spool") as collector:
            status, body = await fetch(f"{collector.url}/readyz")
            assert status == 200
            assert "nats" in json.loads(body)["degraded"]
            answer = await collector.post(json.dumps([sample(1), sample(2)]))
            assert (answer.status_code, answer.json()["published"]) == (200, 2)
            await collector.log(entry(1))

            async def three() -> bool:
                return await collector.metric(WRITTEN) == 3.0

            await until(three, "all three are on disk")
            await server.start()
            assert sorted(await stored(server.url, 3)) == ["logged-1", "posted-1", "posted-2"]

            async def empty() -> bool:
                return await collector.metric("leadtime_collector_spooled_samples") == 0.0

            await until(empty, "the spool is empty again")
            assert "degraded" not in json.loads((await fetch(f"{collector.url}/readyz"))[1])
        assert not list((tmp_path / "spool").glob("*.spool"))


async def test_samples_survive_the_kill_of_the_collector(tmp_path: Path) -> None:
    """kill -9 while NATS is away; a second collector on the same directory delivers what was acknowledged, once."""
    async with nats_server(tmp_path / "nats") as server:
        await server.stop()
        process, url = await _spawned(tmp_path, server)
        for number in range(5):
            assert (await _post(url, sample(number))) == 200
        await process.kill()
        (segment,) = (tmp_path / "spool").glob("*.spool")
        with segment.open("ab") as torn:
            torn.write(segment.read_bytes()[:60])
        await server.start()
        process, _ = await _spawned(tmp_path, server)
        try:
            assert await stored(server.url, 5) == [f"posted-{number}" for number in range(5)]
        finally:
            assert await process.stop(signal.SIGTERM) == 0
        assert await stored_ids(server.url) == [f"posted-{number}" for number in range(5)]


async def test_a_restart_of_nats_under_load_loses_nothing_that_was_acknowledged(
    tmp_path: Path, nats: NatsServer
) -> None:
    acknowledged = []
    async with running_collector(nats.url, spool_dir=tmp_path / "spool", ack_timeout_ms=500) as collector:
        for number in range(60):
            if number == 20:
                await nats.kill()
            if number == 40:
                await nats.start()
            if (await collector.post(json.dumps(sample(number)))).status_code == 200:
                acknowledged.append(f"posted-{number}")
        ids = await stored(nats.url, len(acknowledged))
    assert len(acknowledged) == 60
    assert sorted(ids) == sorted(acknowledged)


async def test_a_frozen_nats_holds_a_post_no_longer_than_the_acknowledgements_time(
    tmp_path: Path, nats: NatsServer
) -> None:
    async with running_collector(nats.url, spool_dir=tmp_path / "spool", ack_timeout_ms=1_500) as collector:
        assert (await collector.post(json.dumps(sample(1)))).status_code == 200
        nats.send(signal.SIGSTOP)
        try:
            assert (await collector.post(json.dumps(sample(2)))).status_code == 200
        finally:
            nats.send(signal.SIGCONT)
        assert sorted(await stored(nats.url, 2)) == ["posted-1", "posted-2"]


async def test_a_full_spool_refuses_posts_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        await server.stop()
        async with running_collector(
            server.url, spool_dir=tmp_path / "spool", spool_max_bytes=64 * 1024, queue_samples=10, ack_timeout_ms=200
        ) as collector:
            statuses = [(await collector.post(json.dumps(sample(number)))).status_code for number in range(120)]
            kept = [f"posted-{number}" for number, status in enumerate(statuses) if status == 200]
            assert set(statuses) == {200, 503}
            assert statuses.count(200) > 20
            assert await collector.metric('leadtime_collector_spool_failures_total{reason="full"}') >= 1.0
            await server.start()
            assert set(await stored(server.url, len(kept))) >= set(kept)


async def test_a_stop_leaves_on_disk_what_it_could_not_deliver(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        async with running_collector(server.url, spool_dir=tmp_path / "spool", drain_timeout_ms=100) as collector:
            server.send(signal.SIGSTOP)
            await collector.log(*(entry(number) for number in range(50)))
            await collector.stop()
        server.send(signal.SIGCONT)
        async with running_collector(server.url, spool_dir=tmp_path / "spool"):
            assert sorted(await stored(server.url, 50)) == sorted(f"logged-{number}" for number in range(50))


async def _spawned(tmp_path: Path, server: NatsServer) -> tuple[ServerProcess, str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = ServerProcess(
        "collector",
        tmp_path / "collector.log",
        {
            "LEADTIME_NATS_SERVERS": server.url,
            "LEADTIME_COLLECTOR_HTTP_PORT": str(port),
            "LEADTIME_COLLECTOR_SPOOL_DIR": str(tmp_path / "spool"),
        },
    )
    process.spawn([sys.executable, "-m", "services.collector"])

    async def ready() -> bool:
        return (await fetch(f"{url}/readyz"))[0] == 200

    await process.ready(ready)
    return process, url


async def _post(url: str, document: dict[str, Any]) -> int:
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.post(f"{url}/v1/samples", json=document)).status_code
