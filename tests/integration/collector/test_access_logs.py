"""The access-log listener: who may stream, how streams end, and a real Envoy at its other end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, render
from services.collector.intake import HEALTH_SERVICE
from shared.samples import Outcome, encode_decision
from tests.fakes.decisions import make_decision
from tests.fakes.entries import make_entry, make_message
from tests.fakes.fake_model_server import FakeModelServer, Script, chat, event, fake_model_server, stream_script
from tests.fakes.fake_picker import FakePicker, fake_picker
from tests.integration.collector.running import RunningCollector, running_collector, stored, stored_ids
from tests.servers import EnvoyProxy, NatsServer, envoy, until

QUICK = stream_script([(20.0, event(chat({"content": "tok"})))], before=[], tokens=4, gap_ms=5.0)


class Sender:
    """An access-log stream held open."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        self.call = als_pb2_grpc.AccessLogServiceStub(self._channel).StreamAccessLogs(metadata=metadata)

    async def write(self, *entries: Any) -> None:
        message = als_pb2.StreamAccessLogsMessage()
        message.http_logs.log_entry.extend(make_message(entry) for entry in entries)
        await self.call.write(message)

    async def close(self) -> None:
        await self._channel.close()


@contextlib.asynccontextmanager
async def sender(port: int, token: str | None = None) -> AsyncIterator[Sender]:
    opened = Sender(port, token)
    try:
        yield opened
    finally:
        await opened.close()


async def code_of(opened: Sender) -> grpc.StatusCode:
    return await asyncio.wait_for(opened.call.code(), 5.0)


async def test_many_entries_of_one_message_are_each_judged(collector: RunningCollector) -> None:
    await collector.log(make_entry(), make_entry(status=500), make_entry(decision=None), make_entry(status=500))

    async def entries(reason: str) -> float:
        return await collector.metric(f'leadtime_collector_entries_total{{reason="{reason}",source="access_log"}}')

    assert (await entries("accepted"), await entries("not_success"), await entries("no_metadata")) == (1.0, 2.0, 1.0)


async def test_a_stream_without_the_token_is_refused(nats: NatsServer) -> None:
    async with running_collector(nats.url, als_token="secret") as collector:
        for token in (None, "wrong"):
            async with sender(collector.settings.als_port, token) as opened:
                assert await code_of(opened) is grpc.StatusCode.UNAUTHENTICATED
        async with sender(collector.settings.als_port, "secret") as opened:
            await opened.write(make_entry())
            await opened.call.done_writing()
            assert await code_of(opened) is grpc.StatusCode.OK
        assert await collector.metric('leadtime_collector_als_refused_total{reason="token"}') == 2.0


async def test_streams_beyond_the_limit_are_refused(nats: NatsServer) -> None:
    async with (
        running_collector(nats.url, als_max_streams=1) as collector,
        sender(collector.settings.als_port) as first,
    ):
        await first.write(make_entry())
        await until(lambda: stored_ids(nats.url), "the first stream is served")
        async with sender(collector.settings.als_port) as second:
            assert await code_of(second) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stream_ends_after_its_age_right_after_a_message(nats: NatsServer) -> None:
    async with (
        running_collector(nats.url, als_stream_age_s=1.0) as collector,
        sender(collector.settings.als_port) as opened,
    ):

        async def ended() -> bool:
            if opened.call.done():
                return True
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                await opened.write(make_entry(intermediate=True))
            return False

        await until(ended, "the stream is ended", poll_s=0.1)
        assert await code_of(opened) is grpc.StatusCode.OK


async def test_health_answers_for_the_service_and_a_stop_ends_streams(nats: NatsServer) -> None:
    async with running_collector(nats.url) as collector, sender(collector.settings.als_port) as opened:
        await opened.write(make_entry())
        await until(lambda: stored_ids(nats.url), "the stream is served")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{collector.settings.als_port}") as channel:
            request = health_pb2.HealthCheckRequest(service=HEALTH_SERVICE)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(collector.stop(), 5.0)
        assert await code_of(opened) is not grpc.StatusCode.OK


@contextlib.asynccontextmanager
async def gateway(
    script: Script, *collectors: RunningCollector
) -> AsyncIterator[tuple[EnvoyProxy, FakePicker, FakeModelServer, httpx.AsyncClient]]:
    """Envoy between a client, one scripted endpoint, a fake picker that lists it, and these collectors."""
    async with fake_model_server(lambda _: script) as server, fake_picker([server.address]) as picker:
        config = EnvoyConfig(
            endpoints=(Address("127.0.0.1", int(server.address.rpartition(":")[2])),),
            routers=(RouterAddress(Address("127.0.0.1", picker.port), picker.health_port),),
            collectors=tuple(Address("127.0.0.1", collector.settings.als_port) for collector in collectors),
            log_flush_s=0.05,
        )
        async with envoy(render(config)) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=30.0) as client:
            yield proxy, picker, server, client


async def ask(client: httpx.AsyncClient, picker: FakePicker, number: int) -> httpx.Response:
    picker.metadata = encode_decision(make_decision(*picker.destination, decision_id=f"asked-{number}"))
    return await client.post("/v1/chat/completions", json={"model": "m", "messages": []})


async def test_a_request_through_envoy_becomes_the_sample_of_its_endpoint(
    nats: NatsServer, collector: RunningCollector
) -> None:
    async with gateway(stream_script(), collector) as (_, picker, server, client):
        answer = await ask(client, picker, 1)
        assert answer.content == stream_script().body
        await until(lambda: stored_ids(nats.url), "the sample is stored")
    ((dedup_id, sample),) = await stored(nats.url)
    assert dedup_id == sample.decision_id == "asked-1"
    assert sample.endpoint == server.address
    assert sample.outcome is Outcome.OK
    assert sample.ttft_ms is not None
    assert 390.0 < sample.ttft_ms < 520.0
    assert sample.tpot_ms is not None
    assert 8.0 < sample.tpot_ms < 20.0
    assert (sample.input_tokens, sample.cached_tokens, sample.output_tokens) == (30, 16, 21)


async def test_a_client_s_abort_is_a_sample_that_says_at_least_this(
    nats: NatsServer, collector: RunningCollector
) -> None:
    async with gateway(stream_script(), collector) as (_, picker, _, client):
        picker.metadata = encode_decision(make_decision(*picker.destination))
        async with client.stream("POST", "/v1/chat/completions", json={"model": "m"}) as response:
            async for _ in response.aiter_raw():
                break
        await until(lambda: stored_ids(nats.url), "the sample is stored")
    ((_, sample),) = await stored(nats.url)
    assert sample.outcome is Outcome.CLIENT_ABORT
    assert sample.ttft_ms is None
    assert sample.e2e_ms is not None
    assert 90.0 < sample.e2e_ms < 400.0


async def test_without_a_collector_requests_succeed_and_samples_resume_with_the_next_one(nats: NatsServer) -> None:
    async with running_collector(nats.url) as first:
        port = first.settings.als_port
        async with gateway(QUICK, first) as (_, picker, _, client):
            assert (await ask(client, picker, 1)).status_code == 200
            await until(lambda: stored_ids(nats.url), "the first sample is stored")
            await first.stop()
            assert (await ask(client, picker, 2)).status_code == 200
            async with running_collector(nats.url, als_port=port):

                async def resumed() -> bool:
                    assert (await ask(client, picker, 3)).status_code == 200
                    return "asked-3" in await stored_ids(nats.url)

                await until(resumed, "samples resume", poll_s=0.1)


async def test_an_envoy_s_stream_moves_over_to_another_collector(nats: NatsServer) -> None:
    async with (
        running_collector(nats.url, als_stream_age_s=1.0) as one,
        running_collector(nats.url, als_stream_age_s=1.0) as two,
        gateway(QUICK, one, two) as (_, picker, _, client),
    ):
        asked = 0

        async def both_have_seen_one() -> bool:
            nonlocal asked
            asked += 1
            assert (await ask(client, picker, asked)).status_code == 200
            counts = [await each.metric("leadtime_collector_als_messages_total") for each in (one, two)]
            return min(counts) > 0

        await until(both_have_seen_one, "both collectors have been sent entries", poll_s=0.05)
        await until(lambda: _all_of(nats.url, asked), "no sample is lost on the way over")


async def _all_of(url: str, asked: int) -> bool:
    return len(await stored_ids(url)) == asked


@pytest.mark.parametrize("secret", ["the secret prompt"])
async def test_no_prompt_and_no_credential_is_in_what_is_stored(
    nats: NatsServer, collector: RunningCollector, capfd: pytest.CaptureFixture[str], secret: str
) -> None:
    async with gateway(QUICK, collector) as (_, picker, server, client):
        picker.metadata = encode_decision(make_decision(*picker.destination))
        body = {"model": "m", "messages": [{"role": "user", "content": secret}]}
        headers = {"authorization": "Bearer client-key"}
        await client.post("/v1/chat/completions?key=query-key", json=body, headers=headers)
        await until(lambda: stored_ids(nats.url), "the sample is stored")
        assert server.requests[0].headers["authorization"] == "Bearer client-key"
    ((_, sample),) = await stored(nats.url)
    seen = repr(sample) + "".join(capfd.readouterr())
    for word in (secret, "client-key", "query-key"):
        assert word not in seen
