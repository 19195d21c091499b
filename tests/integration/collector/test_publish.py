"""What the collector acknowledges is in JetStream, whatever happens to NATS; the rest is bounded and counted."""

import json
import signal
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError
from structlog.testing import capture_logs

from shared import names
from shared.samples import ListedEndpoint, encode_decision, encode_sample
from shared.settings import StreamSettings
from shared.streams import MAX_SAMPLE_BYTES, samples_stream_config
from tests.contract.test_samples import SAMPLE
from tests.fakes.decisions import make_decision
from tests.fakes.entries import SERVED, make_entry
from tests.integration.collector.running import RunningCollector, running_collector, stored, stored_ids
from tests.servers import NatsServer, nats_server, until


def sample(number: int = 1, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_sample(SAMPLE))
    return {**fields, "decision_id": f"posted-{number}", **changes}


def entry(number: int, **changes: Any) -> Any:
    return make_entry(decision=encode_decision(make_decision(SERVED, decision_id=f"logged-{number}")), **changes)


async def test_a_posted_sample_is_stored_once_under_its_decision_id(
    nats: NatsServer, collector: RunningCollector
) -> None:
    first = await collector.post(json.dumps(sample()))
    assert (first.status_code, first.json()) == (200, {"published": 1, "duplicates": 0, "rejected": 0})
    again = await collector.post(json.dumps([sample(), sample(2)]))
    assert (again.status_code, again.json()) == (200, {"published": 1, "duplicates": 1, "rejected": 0})
    found = await stored(nats.url)
    assert [dedup_id for dedup_id, _ in found] == ["posted-1", "posted-2"]
    assert found[0][1].ttft_ms == SAMPLE.ttft_ms


async def test_both_ways_of_one_completion_make_one_sample(nats: NatsServer, collector: RunningCollector) -> None:
    await collector.log(entry(1))
    await until(lambda: stored_ids(nats.url), "the logged sample is stored")
    posted = await collector.post(json.dumps(sample(decision_id="logged-1")))
    assert posted.json() == {"published": 0, "duplicates": 1, "rejected": 0}
    assert await stored_ids(nats.url) == ["logged-1"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, "sample"),
        (b"not json", 400, "sample"),
        (b"[", 400, "samples"),
        (b"[]", 400, "samples"),
        (b"\xff\xfe", 400, "sample"),
        (json.dumps([sample(), sample(2, ttft_ms=-1)]).encode(), 400, "samples[1].sample.ttft_ms"),
        (json.dumps(sample(pool="other")).encode(), 400, "sample.pool"),
        (json.dumps(sample(decision_id="a\r\nb")).encode(), 400, "sample.decision_id"),
        (b" " * 20_000, 413, None),
        (json.dumps([1] * 11).encode(), 413, None),
    ],
)
async def test_a_bad_post_is_refused_whole_and_names_its_field(
    nats: NatsServer, body: bytes, status: int, field: str | None
) -> None:
    async with running_collector(nats.url, max_post_bytes=16_384, max_post_samples=10) as collector:
        answer = await collector.post(body)
        assert answer.status_code == status
        assert answer.json()["error"]["field"] == field
        assert await stored_ids(nats.url) == []


async def test_posted_samples_that_teach_nothing_are_left_out_and_counted_by_reason(
    nats: NatsServer, collector: RunningCollector
) -> None:
    posted = [sample(1), sample(2, status=500), sample(3, output_tokens=0), sample(4, outcome="shed")]
    answer = await collector.post(json.dumps(posted))
    assert (answer.status_code, answer.json()) == (200, {"published": 1, "duplicates": 0, "rejected": 3})
    assert await stored_ids(nats.url) == ["posted-1"]
    for reason in ("accepted", "not_success", "empty", "shed"):
        assert await collector.metric(f'leadtime_collector_entries_total{{reason="{reason}",source="post"}}') == 1.0
    line = 'leadtime_collector_samples_total{outcome="ok",pool="default"}'
    assert await collector.metric(line) == 1.0


async def test_a_token_that_is_set_is_asked_for(nats: NatsServer) -> None:
    async with running_collector(nats.url, http_token="secret") as collector:
        body = json.dumps(sample())
        assert (await collector.post(body)).status_code == 401
        assert (await collector.post(body, authorization="Bearer wrong")).status_code == 401
        assert (await collector.post(body, authorization="Bearer secret")).status_code == 200


async def test_a_collector_that_starts_before_nats_serves_and_delivers_later(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        await server.stop()
        async with running_collector(server.url, ready=False) as collector:
            assert not await collector.ready()
            refused = await collector.post(json.dumps(sample()))
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            await collector.log(entry(1), entry(2))
            await server.start()
            await until(collector.ready, "ready once NATS is there")
            await until(lambda: _count(server.url, 2), "the waiting samples are stored")
            assert await stored_ids(server.url) == ["logged-1", "logged-2"]


async def test_an_outage_of_nats_is_counted_at_each_attempt_and_logged_once_a_kind(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with nats_server(tmp_path) as server:
            await server.stop()
            async with running_collector(server.url, ready=False) as collector:

                async def tried() -> bool:
                    return await collector.metric("leadtime_collector_nats_errors_total") >= 4

                await until(tried, "it was tried four times")
    told = [entry["error"] for entry in logs if entry["event"] == "error of the NATS client"]
    assert told
    assert len(told) == len(set(told))


async def test_requests_without_a_sample_are_kept_for_nats_within_a_bound_and_the_rest_counted(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        await server.stop()
        async with running_collector(server.url, ready=False) as collector:
            await collector.log(*(entry(number, status=500) for number in range(1_007)))

            async def counted() -> bool:
                return await collector.metric("leadtime_collector_untold_total") == 7

            await until(counted, "seven too many")


async def test_a_restart_of_nats_loses_nothing_that_was_acknowledged_or_waits(
    nats: NatsServer, collector: RunningCollector
) -> None:
    for number in range(3):
        assert (await collector.post(json.dumps(sample(number)))).status_code == 200
    await nats.kill()
    await collector.log(*(entry(number) for number in range(5)))

    async def noticed() -> bool:
        return not await collector.ready()

    await until(noticed, "readiness says that NATS is away")
    await nats.start()
    await until(collector.ready, "ready again")
    await until(lambda: _count(nats.url, 8), "everything is stored")
    assert await stored_ids(nats.url) == [
        *(f"posted-{number}" for number in range(3)), *(f"logged-{number}" for number in range(5))
    ]  # fmt: skip


async def test_credentials_that_are_revoked_for_a_while_are_tried_again(tmp_path: Path) -> None:
    """A reload of the server's config with another password closes live connections."""
    config = tmp_path / "nats.conf"

    def allow(password: str) -> None:
        config.write_text(f'authorization {{ user: leadtime, password: "{password}" }}\n')

    allow("right")
    async with nats_server(tmp_path, extra=["-c", str(config)]) as server:
        url = server.url.replace("nats://", "nats://leadtime:right@")
        async with running_collector(url) as collector:
            allow("another")
            server.send(signal.SIGHUP)

            async def refused() -> bool:
                return not await collector.ready()

            await until(refused, "the collector was refused")
            await collector.log(entry(1))
            allow("right")
            server.send(signal.SIGHUP)
            await until(collector.ready, "ready again")
            await until(lambda: _count(url, 1), "the waiting sample is stored")


async def test_a_connection_that_the_client_gave_up_is_made_anew(tmp_path: Path) -> None:
    """nats-py closes for good after most errors that a server sends, as this one for a limit of one subscription."""
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 1\n")
    async with (
        nats_server(tmp_path, extra=["-c", str(config)]) as server,
        running_collector(server.url, ready=False) as collector,
    ):
        await until(lambda: "maximum subscriptions" in server.log(), "the limit was met")
        assert not await collector.ready()
        config.write_text("max_subscriptions: 0\n")
        await server.restart()
        await until(collector.ready, "ready on a new connection")
        assert (await collector.post(json.dumps(sample()))).status_code == 200


async def test_a_stream_that_vanished_is_made_again(nats: NatsServer, collector: RunningCollector) -> None:
    await collector.log(entry(1))
    await until(lambda: _count(nats.url, 1), "stored")
    client = await _client(nats.url)
    await client.jetstream().delete_stream(names.SAMPLES_STREAM)
    await collector.log(entry(2))
    await until(lambda: _count(nats.url, 1), "stored in the new stream")
    assert await stored_ids(nats.url) == ["logged-2"]
    await client.close()


async def test_a_server_that_lost_its_store_gets_the_stream_anew(tmp_path: Path) -> None:
    """The broker's volume is gone after a restart: every publish would fail until somebody made the stream."""
    async with nats_server(tmp_path) as server, running_collector(server.url) as collector:
        await server.stop()
        (tmp_path / "jetstream").rename(tmp_path / "lost")
        await server.start()
        await until(collector.ready, "ready again")
        assert (await collector.post(json.dumps(sample()))).status_code == 200
        assert await stored_ids(server.url) == ["posted-1"]


async def test_a_stream_of_other_limits_is_changed_in_place(nats: NatsServer) -> None:
    client = await _client(nats.url)
    old = {**samples_stream_config(), "max_age": 7200.0, "subjects": ["leadtime.samples.v1.>", "operators.own"]}
    await client.jetstream().add_stream(StreamConfig(**{**old, "max_bytes": -1, "duplicate_window": 5.0}))
    await client.jetstream().publish("leadtime.samples.v1.default", b"kept")
    limits = StreamSettings(max_bytes=8 << 20, max_samples_per_pool=5_000)
    async with running_collector(nats.url, stream=limits) as collector:
        assert await collector.metric("leadtime_collector_stream_differs") == 0.0
    info = await client.jetstream().stream_info(names.SAMPLES_STREAM)
    found = info.config
    assert (found.max_age, found.max_bytes, found.max_msgs_per_subject) == (7 * 86_400.0, 8 << 20, 5_000)
    assert found.duplicate_window == 120.0
    assert found.subjects == ["leadtime.samples.v1.>", "operators.own"]
    assert info.state.messages == 1
    await client.close()


async def test_what_jetstream_will_not_change_is_reported_and_does_not_stand_in_the_way(nats: NatsServer) -> None:
    client = await _client(nats.url)
    await client.jetstream().add_stream(StreamConfig(**{**samples_stream_config(), "storage": "memory"}))
    three = StreamSettings(replicas=3)
    async with running_collector(nats.url, stream=three) as collector:  # one server: no replicas to be had
        assert await collector.metric("leadtime_collector_stream_differs") == 1.0
        assert (await collector.post(json.dumps(sample()))).status_code == 200
    await client.close()


async def test_a_stream_configured_otherwise_is_left_alone_where_that_is_wanted(nats: NatsServer) -> None:
    client = await _client(nats.url)
    other = StreamConfig(**{**samples_stream_config(), "max_age": 7200.0})
    await client.jetstream().add_stream(other)
    async with running_collector(nats.url, stream=StreamSettings(migrate=False)) as collector:
        assert await collector.metric("leadtime_collector_stream_differs") == 1.0
        assert (await collector.post(json.dumps(sample()))).status_code == 200
    found = (await client.jetstream().stream_info(names.SAMPLES_STREAM)).config
    assert found.max_age == 7200.0
    await client.close()


async def test_the_stream_is_made_as_agreed(nats: NatsServer, collector: RunningCollector) -> None:
    assert await collector.metric("leadtime_collector_stream_differs") == 0.0
    client = await _client(nats.url)
    found = (await client.jetstream().stream_info(names.SAMPLES_STREAM)).config
    await client.close()
    for name, wanted in samples_stream_config().items():
        assert getattr(found, name) == wanted, name


async def test_without_nats_the_oldest_sample_makes_room_and_is_counted(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        await server.stop()
        async with running_collector(server.url, ready=False, queue_samples=5) as collector:
            await collector.log(*(entry(number) for number in range(20)))
            assert await collector.metric("leadtime_collector_queue_samples") == 5.0
            assert await collector.metric('leadtime_collector_published_total{fate="pushed_out"}') == 15.0
            await server.start()
            await until(lambda: _count(server.url, 5), "the newest are stored")
            assert await stored_ids(server.url) == [f"logged-{number}" for number in range(15, 20)]


async def test_a_stop_delivers_what_is_held(nats: NatsServer) -> None:
    async with running_collector(nats.url, max_outstanding_acks=7) as collector:
        await collector.log(*(entry(number) for number in range(300)))
        await collector.stop()
        assert len(await stored_ids(nats.url)) == 300


async def test_a_sample_that_jetstream_would_never_take_is_refused(collector: RunningCollector) -> None:
    huge = sample(features=[0.123456] * 8_000)
    assert (await collector.post(json.dumps([sample(2), huge]))).status_code == 413


async def dead_letters(url: str) -> list[tuple[str, str, bytes]]:
    """(reason, source, data) of every dead letter; none where there is no stream of them."""
    client = await nats.connect(url)
    streams = client.jetstream()
    try:
        state = (await streams.stream_info(names.DEAD_STREAM)).state
        found = [await streams.get_msg(names.DEAD_STREAM, n) for n in range(1, state.messages + 1)]
    except NotFoundError:
        return []
    finally:
        await client.close()
    return [(m.headers[names.DEAD_REASON_HEADER], m.headers[names.DEAD_SOURCE_HEADER], m.data) for m in found]


async def test_a_logged_sample_that_jetstream_never_takes_becomes_a_dead_letter(
    nats: NatsServer, collector: RunningCollector
) -> None:
    """Another schema's row has any length; one that is beyond the stream's limit doesn't stand in the others' way."""
    row = b"\x01\x02\x03\x3f" * 8_000
    huge = make_decision(SERVED, schema_hash="next", endpoints=(ListedEndpoint(SERVED, row),))
    await collector.log(make_entry(decision=encode_decision(huge)), entry(2))
    await until(lambda: _count(nats.url, 1), "the other is stored")
    await until(lambda: dead_letters(nats.url), "the dead letter is stored")
    [(reason, source, data)] = await dead_letters(nats.url)
    assert (reason, source, len(data)) == ("too_large", f"collector:{huge.decision_id}", MAX_SAMPLE_BYTES)

    async def counted() -> bool:
        return await collector.metric('leadtime_collector_published_total{fate="dead_letter"}') == 1.0

    await until(counted, "it is counted")
    assert await stored_ids(nats.url) == ["logged-2"]


async def test_a_posted_sample_over_an_operators_limit_is_rejected_and_a_dead_letter(nats: NatsServer) -> None:
    """No repetition would make it better, so its sender isn't told to come again."""
    await _change(nats.url, max_msg_size=750)
    async with running_collector(nats.url, stream=StreamSettings(migrate=False)) as collector:
        large = sample(model="m" * 250)
        answer = await collector.post(json.dumps([large, sample(2)]))
        assert (answer.status_code, answer.json()) == (200, {"published": 1, "duplicates": 0, "rejected": 1})
        [(reason, source, data)] = await dead_letters(nats.url)
        assert (reason, source, json.loads(data)["model"]) == ("too_large", "collector:posted-1", large["model"])


async def test_samples_for_a_stream_that_is_full_and_keeps_the_old_wait_until_there_is_room(nats: NatsServer) -> None:
    await _change(nats.url, max_msgs=1, discard="new")
    async with running_collector(nats.url, stream=StreamSettings(migrate=False)) as collector:
        await collector.log(*(entry(number) for number in range(3)))

        async def refused() -> bool:
            return await collector.metric('leadtime_collector_publish_retries_total{reason="error"}') > 0

        await until(refused, "JetStream refuses the second")
        await _change(nats.url, max_msgs=-1)
        await until(lambda: _count(nats.url, 3), "all are stored")
        assert sorted(await stored_ids(nats.url)) == ["logged-0", "logged-1", "logged-2"]
        assert await dead_letters(nats.url) == []


async def _change(url: str, **limits: Any) -> None:
    """An operator's own limits, on the stream that is there or on a new one."""
    client = await nats.connect(url)
    streams = client.jetstream()
    try:
        try:
            await streams.update_stream((await streams.stream_info(names.SAMPLES_STREAM)).config.evolve(**limits))
        except NotFoundError:
            await streams.add_stream(StreamConfig(**{**samples_stream_config(), **limits}))
    finally:
        await client.close()


async def _client(url: str) -> Any:
    return await nats.connect(url)


async def _count(url: str, wanted: int) -> bool:
    client = await _client(url)
    try:
        state = (await client.jetstream().stream_info(names.SAMPLES_STREAM)).state
        return int(state.messages) >= wanted
    except nats.js.errors.Error:
        return False
    finally:
        await client.close()
