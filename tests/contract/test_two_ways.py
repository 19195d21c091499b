"""Two ways of a completion, one result: the access log's sample and the response stream's are the same.

Each recorded response runs once through a real Envoy whose script, filters and access log make one sample (by the
collector's own functions), and whose ext-proc stream shows the same bytes to a `CompletionObserver`, which makes the
other. Which labels there are must agree exactly, tokens too; latencies within `TOLERANCE_MS`: the response stream's
zero is our answer to Envoy and its eye is one hop behind, and here all of it shares one event loop. On an idle machine
the difference is far less (`test_a_quiet_machine…`). A machine that stalls in between makes a difference of its own,
but not each time: what is apart is played again, `TIMES` at most, and only latencies get that second chance.
"""

import asyncio
import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, render
from services.collector import validate
from services.collector.envoy_log import plain_entry
from services.collector.validate import Probes, judge
from services.router import completion
from services.router.completion import CompletionObserver
from shared.samples import LatencySample, Outcome, TtftSource
from shared.verdicts import Verdict
from tests import servers
from tests.fakes.access_log_receiver import AccessLogReceiver, access_log_receiver
from tests.fakes.decisions import make_decision
from tests.fakes.fake_model_server import (
    DONE,
    ROLE,
    USAGE,
    Script,
    Seen,
    chat,
    event,
    fake_model_server,
    stream_script,
)
from tests.fakes.observing_picker import ObservingPicker, observed_mode, observing_picker
from tests.integration.test_first_content import SCRIPTS, zipped

TOGETHER = 8
TOLERANCE_MS = 150.0
"""Several variants at once on one event loop, two cores and whatever else the machine does."""
QUIET_MS = 25.0
TIMES = 4
TEXT = "日本語のテキスト😀"


def one_by_one(data: bytes, start_ms: float, step_ms: float) -> list[tuple[float, bytes]]:
    return [(start_ms + step_ms * n, data[n : n + 1]) for n in range(len(data))]


def json_answer(usage: Any = USAGE["usage"], text: str = "hi", content_type: str = "application/json") -> Script:
    document = {"choices": [{"message": {"content": text}}], **({"usage": usage} if usage else {})}
    body = json.dumps(document).encode()
    return Script([(50.0, body[:20]), (120.0, body[20:])], content_type=content_type, header_delay_ms=40.0)


def anthropic(*, cached: bool) -> Script:
    usage = {"input_tokens": 30, "output_tokens": 1, **({"cache_read_input_tokens": 16} if cached else {})}
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}}
    return Script(
        [
            (50.0, event({"type": "message_start", "message": {"content": [], "usage": usage}})),
            (60.0, event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})),
            (70.0, event({"type": "ping"})),
            *((200.0 + 10 * n, b"event: content_block_delta\n" + event(text)) for n in range(20)),
            (400.0, event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 21}})),
            (400.0, event({"type": "message_stop"})),
        ]
    )


RESPONSES = Script(
    [
        (50.0, event({"type": "response.created", "response": {"output": [], "usage": None}})),
        *((200.0 + 10 * n, event({"type": "response.output_text.delta", "delta": TEXT})) for n in range(20)),
        (
            400.0,
            event(
                {
                    "type": "response.completed",
                    "response": {
                        "usage": {
                            "input_tokens": 30, "output_tokens": 21, "input_tokens_details": {"cached_tokens": 16}
                        }
                    },
                }
            ),
        ),
    ]
)  # fmt: skip

LONG_RESPONSE = Script(
    [
        *RESPONSES.writes[:-1],
        (
            400.0,
            event(
                {
                    "type": "response.completed",
                    "response": {
                        "output": [{"content": [{"type": "output_text", "text": TEXT * 10_000}]}],
                        "usage": {"input_tokens": 30, "output_tokens": 21},
                        "metadata": {"text": "x"},
                    },
                }
            ),
        ),
    ]
)
"""The event that ends an answer holds all of it once more: 700 KB, and the usage at its end."""
FIRST = [(60.0, event(chat({"content": TEXT})))]
BEFORE = [(20.0, event(ROLE))]
SHORT = stream_script(FIRST, BEFORE)
"""First content after 60 ms, the end after 260."""
MANY = {"usage": {"prompt_tokens": 30, "completion_tokens": 20_001}}
RUNNING_USAGE = Script(
    [
        (20.0, event({**ROLE, "usage": {"prompt_tokens": 30, "completion_tokens": 0}})),
        *(
            (60.0 + 10 * n, event({**chat({"content": "t"}), "usage": {"completion_tokens": n + 1}})) for n in range(20)
        ),
        (270.0, event(USAGE)),
        (270.0, DONE),
    ]
)  # fmt: skip

OWN: dict[str, Script] = {
    "short": SHORT,
    "no_usage": stream_script(FIRST, BEFORE, usage=False),
    "no_done": Script(SHORT.writes[:-1]),
    "usage_unterminated": Script([*SHORT.writes[:-2], (270.0, event(USAGE).rstrip())]),
    "usage_without_blank_line": Script([*SHORT.writes[:-2], (270.0, event(USAGE)[:-1])]),
    "usage_before_the_last_content": Script(
        [*SHORT.writes[:-2], (260.0, event(USAGE)), (270.0, event(chat({"content": "end"}))), (270.0, DONE)]
    ),
    "usage_then_null": Script([*SHORT.writes[:-1], (270.0, event({"choices": [], "usage": None})), (270.0, DONE)]),
    "usage_in_every_event": RUNNING_USAGE,
    "every_byte": Script(one_by_one(event(ROLE) + event(chat({"content": TEXT})) + event(USAGE) + DONE, 20.0, 1.0)),
    "one_token": Script([(20.0, event(chat({"content": "x"}))), (30.0, event({"usage": {"completion_tokens": 1}}))]),
    "no_token": Script([(20.0, event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}))]),
    "in_one_go": Script([(60.0, b"".join(data for _, data in SHORT.writes[:-2]) + event(MANY) + DONE)]),
    "anthropic_whole": anthropic(cached=False),
    "anthropic_cached": anthropic(cached=True),
    "responses_whole": RESPONSES,
    "responses_long": LONG_RESPONSE,
    "scalars_between": Script(
        [
            *((10.0 * n, f"data: {scalar}\n\n".encode()) for n, scalar in enumerate(("null", "1", '"x"', "true"))),
            *SHORT.writes[:-2],
            *((265.0, f"data: {scalar}\n\n".encode()) for scalar in ("null", "1", '"usage"', "[]")),
            *((270.0, data) for _, data in SHORT.writes[-2:]),
        ]
    ),
    "half_an_emoji": Script(
        [*BEFORE, (60.0, b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n'), *SHORT.writes[2:]]
    ),
    "usage_as_floats": Script(
        [
            *SHORT.writes[:-2],
            (270.0, event({"usage": {"prompt_tokens": 30.0, "completion_tokens": 21.0}})),
            (270.0, DONE),
        ]
    ),
    "only_comments": Script([(20.0, b": ping\n\n"), (60.0, DONE)]),
    "json_whole": json_answer(),
    "json_large": json_answer(text="x" * 300_000),
    "json_charset": json_answer(content_type="application/json; charset=utf-8"),
    "json_without_usage": json_answer(usage=None, text="word " * 500),
    "empty": Script([], content_type="application/json"),
    "created": replace(SHORT, status=201),
    "unavailable": Script([(5.0, b"{}")], status=500, content_type="application/json"),
    "gzip_if_asked": SHORT,
    "abort_before_content": Script([*BEFORE, *((at + 20_000.0, data) for at, data in SHORT.writes[1:])]),
    "abort_after_content": Script([*BEFORE, *FIRST, *((at + 20_000.0, data) for at, data in SHORT.writes[2:])]),
    "abort_after_usage": Script([*SHORT.writes, (20_000.0, b": late\n\n")]),
    "abort_in_prefill": replace(SHORT, header_delay_ms=20_000.0),
    "dies": Script([*BEFORE, *FIRST, (700.0, event(chat({"content": "last"})))], dies=True),
    "gzip_anyway": zipped(SHORT),
    "retry": SHORT,
    "too_much_before_content": Script(
        [(20.0, b": " + b"x" * 1_400_000 + b"\n\n"), *((at + 600.0, data) for at, data in SHORT.writes)]
    ),
}
REUSED = [
    "vllm_chat", "vllm_completions", "plain", "spaced", "crlf", "cr", "null_first", "reasoning", "reasoning_short",
    "tool_call", "refusal", "comments", "escaped", "split_value", "split_key", "role_with_content", "large",
    "completions", "responses", "anthropic", "usage_split_from_done", "no_content", "json", "error",
]  # fmt: skip
ALL = {**{name: SCRIPTS[name] for name in REUSED}, **OWN}
ABORT_AT = {
    "abort_before_content": b"\n\n",
    "abort_after_content": json.dumps(TEXT)[1:-1].encode(),
    "abort_after_usage": b"[DONE]",
}
"""What a client has seen that leaves."""
LEAVES_AFTER_S = 0.3
DIFFERENT = {"dies", "gzip_anyway", "retry", "abort_in_prefill"}
"""Where the two ways can't agree in everything, each with its own test."""
SAME = sorted(set(ALL) - DIFFERENT)
LABELS = ("ttft_ms", "tpot_ms", "e2e_ms")
EXACT = (
    "decision_id", "pool", "model", "endpoint", "outcome", "status", "streamed", "received_unix_ms", "rung",
    "schema_hash", "features", "queue_ms", "decision_ms", "ttft_slo_ms", "tpot_slo_ms", "priority", "bundle_version",
    "propensity", "prediction", "input_tokens", "cached_tokens", "output_tokens", "output_tokens_estimated", "attempts",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """One response, both ways."""

    logged: Verdict
    shown: Verdict

    @property
    def samples(self) -> tuple[LatencySample, LatencySample]:
        assert self.logged.sample is not None
        assert self.shown.sample is not None
        return self.logged.sample, self.shown.sample


@contextlib.asynccontextmanager
async def one_envoy(
    reached: Callable[[str], object],
) -> AsyncIterator[tuple[httpx.AsyncClient, ObservingPicker, AccessLogReceiver]]:
    """Two model servers behind one Envoy that does both; each request names its script, which is its decision's id.

    `reached` is told of each request that has come to a server.
    """

    def first(seen: Seen) -> Script:
        reached(seen.headers["x-variant"])
        name = seen.headers["x-variant"].partition("#")[0]
        if name == "retry":
            return Script([(0.0, b"{}")], status=503, content_type="application/json", header_delay_ms=100.0)
        return zipped(ALL[name]) if "gzip" in seen.headers.get("accept-encoding", "") else ALL[name]

    def second(seen: Seen) -> Script:
        return ALL[seen.headers["x-variant"].partition("#")[0]]

    async with (
        fake_model_server(first) as one,
        fake_model_server(second) as two,
        observing_picker(
            lambda headers: make_decision(
                one.address,
                two.address,
                decision_id=headers["x-variant"].replace("#", "."),
                streamed="json" not in headers["x-variant"],
            )
        ) as picker,
        access_log_receiver() as log,
    ):
        config = EnvoyConfig(
            endpoints=tuple(Address("127.0.0.1", int(fake.address.rpartition(":")[2])) for fake in (one, two)),
            routers=(RouterAddress(Address("127.0.0.1", picker.port), picker.port),),
            collectors=(Address("127.0.0.1", log.port),),
        )
        async with (
            servers.envoy(observed_mode(render(config))) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=30.0, limits=httpx.Limits(max_connections=None)) as client,
        ):
            yield client, picker, log


async def send(client: httpx.AsyncClient, name: str) -> bytes:
    headers = {"x-request-id": name, "x-variant": name, "accept-encoding": "gzip"}
    leaves_at = ABORT_AT.get(name.partition("#")[0])
    received = b""
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with (
            asyncio.timeout(60.0),
            client.stream("POST", "/v1/chat/completions", json={}, headers=headers) as response,
        ):
            async for part in response.aiter_raw():
                received += part
                if leaves_at is not None and leaves_at in received:
                    await asyncio.sleep(LEAVES_AFTER_S)
                    break
    return received


async def leave_in_prefill(client: httpx.AsyncClient, name: str, reached: asyncio.Event) -> bytes:
    """Send, and leave once a server has the request."""
    sending = asyncio.create_task(send(client, name))
    async with asyncio.timeout(60.0):
        await reached.wait()
    await asyncio.sleep(LEAVES_AFTER_S)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return b""


async def pair_of(picker: ObservingPicker, log: AccessLogReceiver, name: str) -> Pair:
    shown = await picker.completion(name.replace("#", "."))
    message = await log.entry(lambda entry: entry.request.request_id == name)
    return Pair(judge(plain_entry(message), "default", Probes()), shown)


@dataclass(frozen=True)
class Run:
    pairs: dict[str, Pair]
    bodies: dict[str, bytes]
    quiet: list[Pair]


async def run_all() -> Run:
    arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
    async with one_envoy(lambda name: arrived[name].set()) as (client, picker, log):

        async def play(name: str) -> bytes:
            if name.startswith("abort_in_prefill"):
                return await leave_in_prefill(client, name, arrived[name])
            return await send(client, name)

        bodies: dict[str, bytes] = {}
        for start in range(0, len(ALL), TOGETHER):
            names = list(ALL)[start : start + TOGETHER]  # the largest is the last
            bodies |= zip(names, await asyncio.gather(*map(play, names)), strict=True)
        pairs = {name: await pair_of(picker, log, name) for name in ALL}
        for again in range(1, TIMES):
            for name in [name for name, pair in pairs.items() if apart(pair, name)]:
                await play(f"{name}#{again}")
                pairs[name] = await pair_of(picker, log, f"{name}#{again}")
        for batch in range(TIMES):
            quiet = []
            for number in range(8):
                name = f"short#quiet.{batch}.{number}"
                await send(client, name)
                quiet.append(await pair_of(picker, log, name))
            if is_close(later(quiet)):
                break
    return Run(pairs, bodies, quiet)


def apart(pair: Pair, name: str) -> bool:
    """Whether some latency differs by more than it may."""
    if pair.logged.sample is None or pair.shown.sample is None:
        return False
    logged, shown = pair.samples
    if name == "gzip_if_asked" and (
        abs((logged.ttft_ms or 60.0) - 60.0) >= TOLERANCE_MS
        or abs((logged.tpot_ms or 10.0) - 10.0) >= TOLERANCE_MS / 20
    ):
        return True
    both = [(getattr(logged, label), getattr(shown, label)) for label in ("ttft_ms", "e2e_ms")]
    tpot_ms = TOLERANCE_MS / ((logged.output_tokens or 2) - 1 or 1)
    return any(a is not None and b is not None and not -5.0 < b - a < TOLERANCE_MS for a, b in both) or (
        logged.tpot_ms is not None
        and shown.tpot_ms is not None
        and abs(shown.tpot_ms - logged.tpot_ms) >= min(tpot_ms, TOLERANCE_MS / 20)
    )


def later(pairs: list[Pair]) -> dict[str, float]:
    """By how much the response stream's labels are longer: medians."""
    samples = [pair.samples for pair in pairs]
    return {
        label: statistics.median(getattr(shown, label) - getattr(logged, label) for logged, shown in samples)
        for label in LABELS
    }


def is_close(longer: dict[str, float]) -> bool:
    return (
        0.0 < longer["ttft_ms"] < QUIET_MS
        and 0.0 < longer["e2e_ms"] < QUIET_MS
        and abs(longer["tpot_ms"]) < QUIET_MS / 20
    )


@pytest.fixture(scope="module")
def run() -> Run:
    return asyncio.run(run_all())


def differences(pair: Pair) -> dict[str, tuple[object, object]]:
    """Fields that must be equal and aren't, and labels that one way alone knows."""
    logged, shown = pair.samples
    found = {name: (getattr(logged, name), getattr(shown, name)) for name in (*EXACT, *LABELS)}
    return {
        name: (a, b)
        for name, (a, b) in found.items()
        if (((a is None) is not (b is None)) if name in LABELS else a != b)
    }


@pytest.mark.parametrize("name", SAME)
def test_both_ways_make_the_same_of_a_response(run: Run, name: str) -> None:
    pair = run.pairs[name]
    assert pair.logged.reason.value == pair.shown.reason.value
    assert sorted(note.value for note in pair.logged.notes) == sorted(note.value for note in pair.shown.notes)
    if pair.logged.sample is None:
        assert pair.shown.sample is None
        return
    assert differences(pair) == {}
    logged, shown = pair.samples
    if logged.ttft_ms is not None and shown.ttft_ms is not None:
        assert -5.0 < shown.ttft_ms - logged.ttft_ms < TOLERANCE_MS
        assert (logged.ttft_source, shown.ttft_source) == (TtftSource.ACCESS_LOG, TtftSource.RESPONSE_STREAM)
    if logged.e2e_ms is not None and shown.e2e_ms is not None:
        assert -5.0 < shown.e2e_ms - logged.e2e_ms < TOLERANCE_MS
    if logged.tpot_ms is not None and shown.tpot_ms is not None:
        assert shown.tpot_ms == pytest.approx(logged.tpot_ms, abs=TOLERANCE_MS / ((logged.output_tokens or 2) - 1))
    assert abs(shown.completed_unix_ms - make_decision("a").received_unix_ms) < 10_000.0


LABELLED = {
    "short": (True, True, 21), "vllm_chat": (True, True, 8), "vllm_completions": (True, True, 4),
    "no_usage": (True, False, None), "no_done": (True, True, 21), "usage_before_the_last_content": (True, True, 21),
    "usage_then_null": (True, True, 21), "usage_in_every_event": (True, True, 21), "every_byte": (True, True, 21),
    "one_token": (True, False, 1), "anthropic_whole": (True, True, 21), "anthropic_cached": (True, True, 21),
    "responses_whole": (True, True, 21), "tool_call": (True, True, 21), "reasoning": (True, True, 21),
    "in_one_go": (True, False, 20_001), "no_content": (False, False, 21), "only_comments": (False, False, None),
    "too_much_before_content": (False, False, 21), "created": (False, False, 21), "json_whole": (False, False, 21),
    "json_charset": (False, False, 21), "usage_unterminated": (True, False, None),
    "usage_without_blank_line": (True, False, None),
    "json_large": (False, False, 21), "json_without_usage": (False, False, None), "gzip_if_asked": (True, True, 21),
    "abort_before_content": (False, False, None), "abort_after_content": (True, False, None),
    "abort_after_usage": (True, True, 21),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LABELLED))
def test_which_labels_there_are(run: Run, name: str) -> None:
    """Equal could mean equally blind: this says what is seen."""
    ttft, tpot, tokens = LABELLED[name]
    for sample in run.pairs[name].samples:
        assert (sample.ttft_ms is not None, sample.tpot_ms is not None) == (ttft, tpot)
        assert sample.e2e_ms is not None
        if tokens is None:
            assert sample.output_tokens_estimated or sample.output_tokens is None
        else:
            assert (sample.output_tokens, sample.output_tokens_estimated) == (tokens, False)


@pytest.mark.parametrize("name", sorted(set(ALL) - set(ABORT_AT) - {"dies", "abort_in_prefill"}))
def test_the_bytes_that_were_looked_at_are_the_server_s(run: Run, name: str) -> None:
    assert run.bodies[name] == ALL[name].body


def test_an_answer_that_is_encoded_unasked_is_read_by_one_way_only(run: Run) -> None:
    """Envoy's filters are blind to it; what the access log knows of it is the same."""
    logged, shown = run.pairs["gzip_anyway"].samples
    assert (logged.ttft_ms, logged.tpot_ms, logged.input_tokens) == (None, None, None)
    plain = run.pairs["short"].samples[1]
    assert (shown.input_tokens, shown.output_tokens) == (plain.input_tokens, plain.output_tokens)
    assert shown.ttft_ms is not None
    assert shown.ttft_ms > 55.0  # the first content, not the role before it
    assert shown.tpot_ms is not None


def test_an_answer_that_is_encoded_because_the_client_asks_has_the_labels_of_the_plain_one(run: Run) -> None:
    """In the access log's shape nobody asks; where Envoy isn't ours the client's wish reaches the server."""
    logged = run.pairs["gzip_if_asked"].samples[0]
    found: list[Verdict] = []
    observer = CompletionObserver(make_decision("a:1"), sent_ms=1_000.0, done=found.append)
    script = zipped(SHORT)
    observer.headers(200, {"content-type": script.content_type, **dict(script.headers)}, "a:1", 1_001.0)
    for at_ms, data in script.writes:
        observer.body(data, 1_000.0 + at_ms)
    observer.end(1_000.0 + script.writes[-1][0])
    (shown,) = found
    assert shown.sample is not None
    for name in ("input_tokens", "output_tokens", "cached_tokens", "output_tokens_estimated", "outcome"):
        assert getattr(shown.sample, name) == getattr(logged, name)
    assert shown.sample.ttft_ms == 60.0
    assert logged.ttft_ms == pytest.approx(60.0, abs=TOLERANCE_MS)
    assert shown.sample.tpot_ms == 10.0
    assert logged.tpot_ms == pytest.approx(10.0, abs=TOLERANCE_MS / 20)


def test_after_a_retry_the_response_stream_knows_less_and_nothing_else(run: Run) -> None:
    logged, shown = run.pairs["retry"].samples
    assert logged.endpoint == shown.endpoint
    assert logged.prediction == shown.prediction == {"ttft_p50": 110.0, "tpot_p50": 11.0}
    assert (logged.attempts, shown.attempts) == (2, 2)
    assert logged.ttft_ms is not None
    assert (shown.ttft_ms, shown.e2e_ms) == (None, None)
    assert shown.tpot_ms == pytest.approx(logged.tpot_ms, abs=TOLERANCE_MS / 20)
    assert shown.output_tokens == logged.output_tokens


@pytest.mark.parametrize("name", ["dies", "abort_in_prefill"])
def test_an_answer_that_breaks_off_is_a_lower_bound_both_ways(run: Run, name: str) -> None:
    logged, shown = run.pairs[name].samples
    assert shown.outcome is Outcome.CLIENT_ABORT
    assert logged.outcome is (Outcome.UPSTREAM_RESET if name == "dies" else Outcome.CLIENT_ABORT)
    assert (logged.ttft_ms is None) is (shown.ttft_ms is None)
    assert (logged.tpot_ms, shown.tpot_ms) == (None, None)
    assert logged.e2e_ms == pytest.approx(shown.e2e_ms, abs=TOLERANCE_MS)


def test_a_quiet_machine_shows_what_the_other_zero_and_the_hop_cost(run: Run) -> None:
    longer = later(run.quiet)
    assert is_close(longer), longer


def test_both_ways_use_the_same_words() -> None:
    assert {reason.value for reason in completion.Reason} <= {reason.value for reason in validate.Reason}
    assert {note.value for note in completion.Note} == {note.value for note in validate.Note}
