"""Simulated servers over real HTTP: one process with a server per behaviour, asked by real clients."""

import asyncio
import contextlib
import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.processes import tied
from shared.labels import EventStreamObserver
from sim.loadgen import LoadTarget, send_load, summarize
from sim.workload import Phase, PrefixScenario, WorkloadRequest, poisson_arrivals, prefix_sharing
from tests.servers import until

SPEC = {
    "servers": [
        {"name": "plain", "models": ["base", "adapter"], "noise": 0.0},
        {"name": "fast", "speed": 20, "seed": 3},
        {"name": "slow", "speed": 0.05},
        {"name": "role-first", "role_chunk_first": True, "speed": 0.01, "noise": 0.0},
        {"name": "held-back", "slow_headers_ms": 150, "speed": 20},
        {"name": "small", "num_gpu_blocks": 40, "max_model_len": 640, "max_num_seqs": 4},
        {"name": "drawn", "speed": 20, "stop_early": True, "output_lengths": {"median_tokens": 9, "sigma": 0}},
        {"name": "usage", "speed": 20, "force_usage": True, "cached_tokens_in_usage": False},
        {"name": "faulty", "speed": 20},
        {"name": "restarted", "speed": 20},
        {"name": "closed", "faults": {"refuse_connections": True}},
        {"name": "load-1"},
        {"name": "load-2", "profile": "llama-8b-a100"},
    ]
}


@dataclass
class Simulation:
    control: str
    urls: dict[str, str]
    process: subprocess.Popen[bytes]


def start(spec: dict[str, Any]) -> Simulation:
    process = subprocess.Popen(
        tied([sys.executable, "-m", "sim.server", "--spec", "-"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(orjson.dumps(spec))
    process.stdin.close()
    line = process.stdout.readline()
    assert line, "the simulation ended before it was ready"
    ready = orjson.loads(line)
    return Simulation(ready["control"], {server["name"]: server["url"] for server in ready["servers"]}, process)


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    running = start(SPEC)
    yield running
    running.process.terminate()
    assert running.process.wait(10) == 0


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as opened:
        yield opened


def chat_body(content: str = "hello", max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **fields}


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]


async def stats(simulation: Simulation, client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    return (await client.get(f"{simulation.control}/control/stats")).json()["servers"][name]


async def set_faults(simulation: Simulation, client: httpx.AsyncClient, name: str, **faults: Any) -> None:
    answer = await client.post(f"{simulation.control}/control/faults/{name}", json=faults)
    assert answer.status_code == 200


@dataclass
class RawAnswer:
    """What one raw request got: network reads with their times (ms after sending), and how the connection ended."""

    reads: list[bytes] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    was_reset: bool = False

    @property
    def data(self) -> bytes:
        return b"".join(self.reads)


async def raw_request(url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> RawAnswer:
    """POST on a connection of its own and read until the server's end of it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = orjson.dumps(body)
    answer = RawAnswer()
    started = time.monotonic()
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(payload), payload)
    )
    try:
        while data := await reader.read(65536):
            answer.reads.append(data)
            answer.times_ms.append((time.monotonic() - started) * 1000)
    except ConnectionResetError:
        answer.was_reset = True
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    return answer


# What a server answers


async def test_a_chat_stream_is_vllms_role_tokens_finish_usage_and_done(simulation, client):
    body = chat_body(max_tokens=5, stream=True, stream_options={"include_usage": True})
    answer = await client.post(f"{simulation.urls['plain']}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-sim-server"] == "plain"
    role, *tokens, usage = events(answer.text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(event["choices"][0]["delta"]["content"]) for event in tokens] == [4] * 5
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 4 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len({event["id"] for event in (role, *tokens, usage)}) == 1


async def test_a_stream_has_no_usage_unless_asked_or_forced(simulation, client):
    body = chat_body(stream=True)
    plain = await client.post(f"{simulation.urls['plain']}/v1/chat/completions", json=body)
    forced = await client.post(f"{simulation.urls['usage']}/v1/chat/completions", json=body)
    assert "usage" not in plain.text
    assert events(forced.text)[-1]["usage"] == {"prompt_tokens": 9, "total_tokens": 13, "completion_tokens": 4}


async def test_streamed_and_plain_answers_say_the_same_and_again_the_same(simulation, client):
    url = f"{simulation.urls['plain']}/v1/chat/completions"
    streamed = await client.post(url, json=chat_body("same", 20, stream=True))
    text = "".join(event["choices"][0]["delta"]["content"] for event in events(streamed.text))
    for _ in range(2):
        plain = (await client.post(url, json=chat_body("same", 20))).json()
        assert plain["choices"][0]["message"]["content"] == text
        assert plain["usage"]["completion_tokens"] == 20


async def test_completions_take_every_form_of_prompt_and_stream_each_choice(simulation, client):
    url = f"{simulation.urls['fast']}/v1/completions"
    for prompt, prompt_tokens in (("12345678", 2), ([1, 2, 3], 3), (["1234", "12345678"], 3), ([[1], [2, 3]], 3)):
        plain = (await client.post(url, json={"prompt": prompt, "max_tokens": 6})).json()
        choices = len(plain["choices"])
        assert plain["usage"]["prompt_tokens"] == prompt_tokens
        assert plain["usage"]["completion_tokens"] == 6 * choices
        body = {"prompt": prompt, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
        found = events((await client.post(url, json=body)).text)
        texts = [""] * choices
        for event in found[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [choice["text"] for choice in plain["choices"]]
        assert found[-1]["usage"]["completion_tokens"] == 6 * choices


async def test_a_length_that_is_not_stated_is_drawn_from_the_prompt(simulation, client):
    url = f"{simulation.urls['drawn']}/v1/completions"

    async def length_and_reason(**fields: Any) -> tuple[int, str]:
        answer = (await client.post(url, json={"prompt": "p", **fields})).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert await length_and_reason() == (9, "stop")
    assert await length_and_reason(max_tokens=20) == (9, "stop")
    assert await length_and_reason(max_tokens=5) == (5, "length")
    assert await length_and_reason(max_tokens=20, ignore_eos=True) == (20, "length")


async def test_a_repeated_prompt_is_answered_from_the_prefix_cache_until_it_is_reset(simulation, client):
    url = f"{simulation.urls['fast']}/v1/completions"
    body = {"prompt": "a prompt that is repeated " * 40, "max_tokens": 2}

    async def cached() -> int:
        return (await client.post(url, json=body)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() == 256
    assert (await client.post(f"{simulation.control}/control/reset-caches")).status_code == 200
    assert await cached() == 0


async def test_the_next_turn_finds_the_answer_it_carries_in_the_cache(simulation, client):
    url = f"{simulation.urls['fast']}/v1/chat/completions"
    question = {"role": "user", "content": "tell me a story about caches"}
    first = (await client.post(url, json={"messages": [question], "max_tokens": 160})).json()
    follow_up = [question, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = (await client.post(url, json={"messages": follow_up, "max_tokens": 2})).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160


async def test_models_health_and_version_are_vllms(simulation, client):
    url = simulation.urls["plain"]
    models = (await client.get(f"{url}/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["base", "adapter"]
    health = await client.get(f"{url}/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await client.get(f"{url}/version")).json() == {"version": "0.32.0"}


async def test_metrics_parse_and_follow_the_traffic(simulation, client):
    url = simulation.urls["small"]

    async def metrics() -> dict[str, float]:
        answer = await client.get(f"{url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            sample.name + sample.labels.get("finished_reason", ""): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    before = await metrics()
    await client.post(f"{url}/v1/completions", json={"prompt": "x" * 400, "max_tokens": 7})
    after = await metrics()
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 100
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
    assert after["vllm:request_success_totallength"] - before["vllm:request_success_totallength"] == 1
    assert after["vllm:time_to_first_token_seconds_count"] == before["vllm:time_to_first_token_seconds_count"] + 1
    assert after["vllm:num_requests_running"] == 0
    assert abs(after["process_start_time_seconds"] - time.time()) < 120


@pytest.mark.parametrize(
    "path", ["/", "/v1/chat/completions/render", "/tokenize", "/v1/completions/", "/get_model_info", "/v1/embeddings"]
)
async def test_other_paths_are_a_404_of_openais_shape(simulation, client, path):
    answer = await client.post(simulation.urls["plain"] + path, json={"prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404


async def test_a_query_is_ignored_and_a_wrong_method_named(simulation, client):
    url = simulation.urls["plain"]
    assert (await client.get(f"{url}/health?full=1")).status_code == 200
    answer = await client.get(f"{url}/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_bad_requests_are_400s_of_openais_shape_and_unknown_models_404(simulation, client):
    url = f"{simulation.urls['small']}/v1/chat/completions"
    for content, status, param in (
        (b"{", 400, None),
        (orjson.dumps({"model": "sim"}), 400, "messages"),
        (orjson.dumps(chat_body(max_tokens=0)), 400, "max_tokens"),
        (orjson.dumps(chat_body(max_tokens=640)), 400, "max_tokens"),
        (orjson.dumps(chat_body("x" * 4000)), 400, "max_tokens"),
        (orjson.dumps(chat_body(model="other")), 404, "model"),
    ):
        answer = await client.post(url, content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, status, param)


# When it answers


async def test_a_stream_takes_the_time_its_profile_says(simulation, client):
    del client
    body = chat_body("x" * 4000, 30, stream=True)
    answer = await raw_request(simulation.urls["plain"], body)
    # Prefill of 1,009 tokens: 4.90 + 0.01657 * 1009 + ... = 22.3 ms; 29 decode steps of about 6.4 ms.
    # The upper bounds leave room for a busy machine.
    assert 21 < answer.times_ms[0] < 500
    assert 180 < answer.times_ms[-1] < 1000


async def test_head_role_chunk_and_first_token_leave_in_one_write(simulation):
    answer = await raw_request(simulation.urls["slow"], chat_body(max_tokens=2, stream=True))
    first = answer.reads[0]
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"role":"assistant"' in first
    assert first.count(b"data: ") == 2


async def test_the_role_chunk_can_come_at_once_and_content_at_its_time(simulation):
    answer = await raw_request(simulation.urls["role-first"], chat_body(max_tokens=1, stream=True))
    observer = EventStreamObserver()
    for data, time_ms in zip(answer.reads, answer.times_ms, strict=True):
        observer.feed(data, time_ms)
    assert b'"role":"assistant"' in answer.reads[0]
    assert b'"role":"assistant"' not in b"".join(answer.reads[1:])
    assert answer.times_ms[0] < 300
    assert observer.first_content_ms >= 489  # the profile's base of 4.9 ms at a hundredth of the speed


async def test_headers_can_be_held_back(simulation):
    for body in (chat_body(max_tokens=2, stream=True), chat_body(max_tokens=2)):
        answer = await raw_request(simulation.urls["held-back"], body)
        assert answer.times_ms[0] >= 148
        assert answer.data.startswith(b"HTTP/1.1 200 OK")


async def test_one_connection_serves_many_requests_also_pipelined(simulation):
    host, port = simulation.urls["fast"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = orjson.dumps({"prompt": "x", "max_tokens": 3})
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
    writer.write(one + one + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    data = await reader.read()
    writer.close()
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.endswith(b'{"version":"0.32.0"}')


async def test_http_1_0_gets_an_unchunked_stream(simulation):
    host, port = simulation.urls["fast"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = orjson.dumps(chat_body(stream=True))
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"transfer-encoding" not in head
    assert len(events(body.decode())) == 5


async def test_what_is_not_http_is_refused(simulation):
    host, port = simulation.urls["fast"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


# What goes wrong


@pytest.mark.parametrize("when", ["in prefill", "in decode"])
async def test_a_client_that_goes_frees_its_request(simulation, client, when):
    url = simulation.urls["slow"]
    host, port = url.removeprefix("http://").split(":")
    before = await stats(simulation, client, "slow")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = orjson.dumps(chat_body(max_tokens=500, stream=True))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
    )
    if when == "in decode":
        await reader.readuntil(b"data: ")

    async def running() -> bool:
        return (await stats(simulation, client, "slow"))["running"] == 1

    await until(running, "the request runs")
    writer.close()

    async def freed() -> bool:
        now = await stats(simulation, client, "slow")
        return now["running"] == 0 and now["kv_used_ratio"] == 0 and now["disconnected"] == before["disconnected"] + 1

    await until(freed, "the aborted request is freed", timeout_s=5)


async def test_requests_can_fail_a_number_of_times(simulation, client):
    url = f"{simulation.urls['faulty']}/v1/completions"
    await set_faults(simulation, client, "faulty", fail_status=503, fail_count=2)
    statuses = [(await client.post(url, json={"prompt": "x", "max_tokens": 1})).status_code for _ in range(3)]
    assert statuses == [503, 503, 200]


async def test_answers_can_be_empty(simulation, client):
    await set_faults(simulation, client, "faulty", empty=True)
    answer = await client.post(f"{simulation.urls['faulty']}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert (answer.status_code, answer.content) == (200, b"")
    await set_faults(simulation, client, "faulty")


async def test_a_hang_answers_nothing_until_the_client_gives_up(simulation, client):
    await set_faults(simulation, client, "faulty", hang=True)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(f"{simulation.urls['faulty']}/v1/completions", json={"prompt": "x"}, timeout=0.2)
    await set_faults(simulation, client, "faulty")
    answer = await client.post(f"{simulation.urls['faulty']}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_connection_can_be_reset_in_mid_stream(simulation, client, tokens):
    await set_faults(simulation, client, "faulty", reset_after_tokens=tokens, reset_count=1)
    broken = await raw_request(simulation.urls["faulty"], chat_body(max_tokens=10, stream=True))
    whole = await raw_request(simulation.urls["faulty"], chat_body(max_tokens=10, stream=True))
    assert broken.was_reset
    assert broken.data.count(b'"content":" ') == tokens
    assert whole.data.count(b'"content":" ') == 10
    assert (await stats(simulation, client, "faulty"))["running"] == 0


async def test_the_metrics_page_can_be_slow_while_the_rest_is_not(simulation, client):
    url = simulation.urls["faulty"]
    await set_faults(simulation, client, "faulty", metrics_delay_ms=200)
    started = time.monotonic()
    page = asyncio.create_task(client.get(f"{url}/metrics"))
    assert (await client.get(f"{url}/health")).status_code == 200
    assert not page.done()
    assert (await page).status_code == 200
    assert time.monotonic() - started >= 0.198
    await set_faults(simulation, client, "faulty")


async def test_a_server_can_be_slowed_down_while_it_runs(simulation, client):
    body = chat_body(max_tokens=5)

    async def duration_s() -> float:
        started = time.monotonic()
        await client.post(f"{simulation.urls['faulty']}/v1/chat/completions", json=body)
        return time.monotonic() - started

    await set_faults(simulation, client, "faulty", slowdown=300)  # 15 times slower than the profile: >= 450 ms
    assert await duration_s() > 0.4
    await set_faults(simulation, client, "faulty")
    assert await duration_s() < 0.4


async def test_an_offer_to_upgrade_is_ignored(simulation, client):
    answer = await client.get(f"{simulation.urls['fast']}/version", headers={"connection": "Upgrade", "upgrade": "h2c"})
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_answers_can_be_compressed(simulation, client):
    url = f"{simulation.urls['faulty']}/v1/chat/completions"
    await set_faults(simulation, client, "faulty", gzip="accepted")
    for body in (chat_body(stream=True), chat_body()):
        plain = await client.post(url, json=body, headers={"accept-encoding": "identity"})
        packed = await client.post(url, json=body, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert plain.text.count("content") == packed.text.count("content")
    await set_faults(simulation, client, "faulty", gzip="always")
    raw = await raw_request(simulation.urls["faulty"], chat_body())
    assert json.loads(gzip.decompress(raw.data.partition(b"\r\n\r\n")[2]))["usage"]["completion_tokens"] == 4
    await set_faults(simulation, client, "faulty")


async def test_a_bad_fault_is_refused_and_named(simulation, client):
    answer = await client.post(f"{simulation.control}/control/faults/faulty", json={"hagn": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("hagn: no such key; allowed: empty, fail_count, ")
    assert (await client.post(f"{simulation.control}/control/faults/nobody", json={})).status_code == 404


async def test_a_closed_server_refuses_connections_until_it_is_opened(simulation, client):
    url = f"{simulation.urls['closed']}/health"
    with pytest.raises(httpx.ConnectError):
        await client.get(url)
    await set_faults(simulation, client, "closed")
    assert (await client.get(url)).status_code == 200
    await set_faults(simulation, client, "closed", refuse_connections=True)
    assert (await client.get(url)).status_code == 200  # the open connection goes on
    async with httpx.AsyncClient() as newcomer:
        with pytest.raises(httpx.ConnectError):
            await newcomer.get(url)


async def test_a_stopped_server_is_gone_and_comes_back_cold_on_its_port(simulation, client):
    url = simulation.urls["restarted"]
    prompt = {"prompt": "warm me up " * 50, "max_tokens": 1}

    async def started_at() -> float:
        text = (await client.get(f"{url}/metrics")).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("process_start_time"))

    first_start = await started_at()
    await client.post(f"{url}/v1/completions", json=prompt)
    hanging = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 30_000}))

    async def running() -> bool:
        return (await stats(simulation, client, "restarted"))["running"] == 1

    await until(running, "the request runs")
    assert (await client.post(f"{simulation.control}/control/stop/restarted")).status_code == 200
    with pytest.raises(httpx.HTTPError):
        await hanging
    with pytest.raises(httpx.ConnectError):
        await client.get(f"{url}/health")
    assert not (await stats(simulation, client, "restarted"))["listening"]

    assert (await client.post(f"{simulation.control}/control/start/restarted")).status_code == 200
    answer = (await client.post(f"{url}/v1/completions", json=prompt)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await started_at() > first_start


async def test_small_servers_preempt_and_still_answer_everything(simulation, client):
    url = f"{simulation.urls['small']}/v1/completions"
    bodies = [{"prompt": f"{number} " * 150, "max_tokens": 200} for number in range(6)]
    answers = await asyncio.gather(*[client.post(url, json=body) for body in bodies])
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [200] * 6
    assert (await stats(simulation, client, "small"))["preemptions"] > 0


# The load client against it


async def test_a_load_is_sent_at_its_times_and_measured(simulation, client):
    scenario = PrefixScenario("t", 3, 50, 400, 40, 10, 12, 3)
    requests = list(prefix_sharing(scenario, poisson_arrivals([Phase(40, 1.5)], 5), 5))
    await client.post(f"{simulation.control}/control/stats/reset")
    halves = [
        send_load(requests[index::2], LoadTarget(simulation.urls[name], "sim"))
        for index, name in enumerate(("load-1", "load-2"))
    ]
    results = [result for half in await asyncio.gather(*halves) for result in half]
    summary = summarize(results)
    assert (summary.requests, summary.failed) == (len(requests), 0)
    assert summary.served_by == {"load-1": (len(requests) + 1) // 2, "load-2": len(requests) // 2}
    assert summary.output_tokens == sum(request.max_tokens for request in requests)
    assert 0.4 < summary.prefix_hit_ratio < 0.95
    assert summary.ttft.p50_ms > 5
    assert summary.tpot.p50_ms > 5
    assert summary.ttft.p50_ms < summary.e2e.p50_ms
    assert summary.lateness.p50_ms < 500
    told = (await client.get(f"{simulation.control}/control/stats")).json()
    assert told["servers"]["load-1"]["finished"] == (len(requests) + 1) // 2
    assert told["servers"]["load-1"]["generated_tokens"] + told["servers"]["load-2"]["generated_tokens"] == (
        summary.output_tokens
    )
    assert told["lateness"]["steps"] > 0
    assert 0 < told["cpu_s"] < told["elapsed_s"]


async def test_a_load_reports_every_kind_of_failure_and_goes_on(simulation, client):
    await set_faults(simulation, client, "faulty", fail_status=500, fail_count=1)
    requests = [WorkloadRequest(index, index * 50.0, 5, "", "", prompt="abcd") for index in range(3)]
    results = await send_load(requests, LoadTarget(simulation.urls["faulty"], "sim"))
    by_index = {result.index: result for result in results}
    assert by_index[0].status == 500
    assert by_index[0].error.startswith('status 500: {"error"')
    assert by_index[1].error is None

    await set_faults(simulation, client, "faulty", reset_after_tokens=2)
    broken = (await send_load(requests[:1], LoadTarget(simulation.urls["faulty"], "sim")))[0]
    assert broken.error.startswith("connection: ")
    assert broken.ttft_ms is not None

    await set_faults(simulation, client, "faulty", hang=True)
    target = LoadTarget(simulation.urls["faulty"], "sim", timeout_s=0.1)
    assert (await send_load(requests[:1], target))[0].error == "no complete answer within 0.1 s"
    limited = await send_load(
        [WorkloadRequest(index, 0.0, 5, "", "", prompt="abcd") for index in range(3)],
        LoadTarget(simulation.urls["faulty"], "sim", timeout_s=0.1, max_in_flight=1),
    )
    assert sum("in flight" in result.error for result in limited) >= 1
    await set_faults(simulation, client, "faulty")

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = await send_load(requests[:1], LoadTarget(f"http://127.0.0.1:{unused.getsockname()[1]}", "sim"))
    assert refused[0].error.startswith("connection: ")
    assert refused[0].sent_ms is None


async def test_plain_answers_have_an_end_but_no_first_content(simulation):
    request = WorkloadRequest(0, 0.0, 5, "", "", prompt="abcd")
    result = (await send_load([request], LoadTarget(simulation.urls["fast"], "sim", stream=False)))[0]
    assert (result.error, result.ttft_ms, result.output_tokens) == (None, None, 5)
    assert result.e2e_ms > 0


# The process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_at_once_with_status_0_though_requests_run(number):
    running = start({"servers": [{"name": "a", "speed": 0.01}]})
    host, port = running.urls["a"].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\ncontent-length: 14\r\n\r\n{"prompt":"x"}')
        running.process.send_signal(number)
        assert running.process.wait(10) == 0
    assert running.process.stdout.read() == b""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (b"{", b"--spec: body: not JSON"),
        (b'{"servers": []}', b"--spec: servers: found a list; allowed:"),
        (b'{"servers":[{}]}', b"--spec: servers.0.name: found nothing; allowed: a value"),
        (b'{"servers":[{"name":"a","prot":1}]}', b"--spec: servers.0.prot: no such key; allowed: block_size, "),
        (b'{"servers":[{"name":"a","port":-1}]}', b"--spec: servers.0.port: found -1; allowed: greater than or equal"),
    ],
)
def test_a_bad_spec_ends_with_status_2_and_its_reason(spec, reason):
    ended = subprocess.run(
        [sys.executable, "-m", "sim.server", "--spec", "-"], input=spec, capture_output=True, check=False
    )
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert b"pydantic" not in ended.stderr
    assert ended.stdout == b""


def test_a_spec_that_is_not_there_is_told(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "sim.server", "--spec", str(tmp_path / "no")], capture_output=True, check=False
    )
    assert ended.returncode == 2
    assert b"can't be read (No such file or directory)" in ended.stderr


def test_a_spec_can_be_a_file_and_a_port_in_use_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        path, port = tmp_path / "spec.json", occupied.getsockname()[1]
        for spec, who in (
            ({"servers": [{"name": "a", "port": port}]}, "server a"),
            ({"servers": [{"name": "a"}], "control_port": port}, "the control API"),
        ):
            path.write_bytes(orjson.dumps(spec))
            ended = subprocess.run(
                [sys.executable, "-m", "sim.server", "--spec", str(path)], capture_output=True, check=False
            )
            assert ended.returncode == 2
            told = f"sim.server: {who}: can't listen on 127.0.0.1, port {port}: Address already in use"
            assert ended.stderr.decode().strip() == told
