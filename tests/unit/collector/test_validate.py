"""Each entry becomes a sample or one counted reason, whatever it holds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.entry import AccessLogEntry
from services.collector.labels import ClockJumpError, latencies
from services.collector.validate import Probes, check_posted, judge, judge_posted, unsampled
from shared.errors import FieldError
from shared.features import SCHEMA
from shared.labels import estimated_output_tokens
from shared.samples import (
    LatencySample,
    ListedEndpoint,
    Outcome,
    Rung,
    TtftSource,
    decode_sample,
    encode_decision,
    encode_sample,
)
from shared.verdicts import Note, Reason, Verdict
from tests.fakes.decisions import feature_row, make_decision
from tests.fakes.entries import SERVED, START_UNIX_US, make_entry

ABORT = frozenset({"downstream_connection_termination"})
PROBES = Probes()


def verdict(**changes: Any) -> Any:
    return judge(make_entry(**changes), "default", PROBES)


def accepted(**changes: Any) -> LatencySample:
    found = verdict(**changes)
    assert found.reason is Reason.ACCEPTED
    assert found.sample is not None
    return found.sample


def decided(*addresses: str, **changes: Any) -> str:
    return encode_decision(make_decision(*(addresses or (SERVED,)), **changes))


def listed(row: bytes, prediction: dict[str, float] | None = None) -> tuple[ListedEndpoint, ...]:
    return (ListedEndpoint(SERVED, row, prediction),)


NAN_ROW = feature_row()[:-4] + b"\x00\x00\xc0\x7f"

REJECTED: list[tuple[str, dict[str, Any], Reason]] = [
    ("a periodic entry of a request that goes on", {"intermediate": True}, Reason.INTERMEDIATE),
    ("a kubelet's probe", {"user_agent": "kube-probe/1.30"}, Reason.PROBE),
    ("a health path", {"path": "/health", "method": "POST"}, Reason.PROBE),
    ("a list of models", {"path": "/v1/models", "method": "GET"}, Reason.PROBE),
    ("any GET", {"path": "/v1/anything", "method": "GET"}, Reason.PROBE),
    ("a marked probe", {"probe_marked": True}, Reason.PROBE),
    ("shed by the picker, busy", {"upstream_address": None, "status": 429}, Reason.SHED),
    ("shed by the picker, none ready", {"upstream_address": None, "status": 503}, Reason.SHED),
    ("refused by the picker", {"upstream_address": None, "status": 400}, Reason.NOT_SUCCESS),
    (
        "no healthy endpoint",
        {"upstream_address": None, "status": 503, "flags": frozenset({"no_healthy_upstream"})},
        Reason.NO_ENDPOINT,
    ),
    (
        "nobody could be reached",
        {"status": 503, "flags": frozenset({"upstream_connection_failure", "upstream_retry_limit_exceeded"})},
        Reason.NO_ENDPOINT,
    ),
    ("left before the pick", {"upstream_address": None, "status": 0}, Reason.ABORTED_BEFORE_DISPATCH),
    ("left before the dispatch", {"flags": ABORT, "tx_end_us": None, "status": 0}, Reason.ABORTED_BEFORE_DISPATCH),
    ("retried, and nobody knows where", {"upstream_address": None, "attempts": 2}, Reason.RETRIED_WITHOUT_SERVER),
    ("the picker failed open", {"decision": None}, Reason.NO_METADATA),
    ("metadata that isn't base64", {"decision": "!!"}, Reason.BAD_METADATA),
    ("metadata that isn't msgpack", {"decision": "AAAA"}, Reason.BAD_METADATA),
    ("metadata of a version to come", {"decision": decided(version=99)}, Reason.BAD_METADATA),
    ("an id that breaks a header", {"decision": decided(decision_id="a\r\nb")}, Reason.BAD_METADATA),
    ("an empty id", {"decision": decided(decision_id="")}, Reason.BAD_METADATA),
    ("an endless model", {"decision": decided(model="m" * 513)}, Reason.BAD_METADATA),
    ("an endless route", {"decision": decided(route="r" * 257)}, Reason.BAD_METADATA),
    ("a queue time that is no number", {"decision": decided(queue_ms=float("nan"))}, Reason.BAD_METADATA),
    ("a priority beyond all reason", {"decision": decided(priority=2**40)}, Reason.BAD_METADATA),
    ("another pool's decision", {"decision": decided(pool="other")}, Reason.WRONG_POOL),
    ("a fallback to an endpoint that wasn't listed", {"upstream_address": "10.0.0.99:8000"}, Reason.UNLISTED_ENDPOINT),
    ("a row that is too short", {"decision": decided(endpoints=listed(feature_row()[:-4]))}, Reason.BAD_FEATURES),
    ("a row of half a float", {"decision": decided(endpoints=listed(b"abc"))}, Reason.BAD_FEATURES),
    ("a row with NaN", {"decision": decided(endpoints=listed(NAN_ROW))}, Reason.BAD_FEATURES),
    (
        "another schema's row with NaN",
        {"decision": decided(endpoints=listed(NAN_ROW), schema_hash="else")},
        Reason.BAD_FEATURES,
    ),
    (
        "a prediction without end",
        {"decision": decided(endpoints=listed(feature_row(), {"ttft_p50": float("inf")}))},
        Reason.BAD_FEATURES,
    ),
    ("a propensity of nothing", {"decision": decided(propensity=0.0)}, Reason.IMPLAUSIBLE),
    ("a client's error", {"status": 404}, Reason.NOT_SUCCESS),
    ("a server's error", {"status": 500}, Reason.NOT_SUCCESS),
    ("a redirect", {"status": 307}, Reason.NOT_SUCCESS),
    ("an answer without a body", {"response_bytes": 0}, Reason.EMPTY),
    ("an answer without a token", {"output_tokens": 0}, Reason.EMPTY),
    ("no dispatch in the log", {"tx_end_us": None}, Reason.NO_TIMING),
    ("an end before the dispatch", {"rx_end_us": 3_000}, Reason.NO_TIMING),
    ("content before the first byte", {"first_content_unix_us": START_UNIX_US + 50_000}, Reason.CLOCK_JUMP),
    ("content after the last byte", {"first_content_unix_us": START_UNIX_US + 900_000}, Reason.CLOCK_JUMP),
    ("content an hour ago", {"first_content_unix_us": START_UNIX_US - 3_600_000_000}, Reason.CLOCK_JUMP),
    (
        "an answer of more than a day",
        {"rx_end_us": 2 * 86_400_000_000, "last_byte_us": 2 * 86_400_000_000},
        Reason.IMPLAUSIBLE,
    ),
]


@pytest.mark.parametrize(("changes", "reason"), [case[1:] for case in REJECTED], ids=[case[0] for case in REJECTED])
def test_what_is_no_completed_request_has_its_reason(changes: dict[str, Any], reason: Reason) -> None:
    found = verdict(**changes)
    assert found.reason is reason
    assert found.sample is None


def test_every_reason_has_a_case() -> None:
    assert {case[2] for case in REJECTED} == set(Reason) - {Reason.ACCEPTED}


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"status": 503}, ("not_success", 503, SERVED)),
        (
            {"status": 503, "flags": frozenset({"no_healthy_upstream"}), "upstream_address": None},
            ("no_endpoint", 503, None),
        ),
        ({"decision": None}, None),
        ({"decision": "damaged"}, None),
        ({"intermediate": True}, None),
        ({"decision": decided(pool="other")}, None),
    ],
)
def test_the_router_is_told_of_its_requests_that_make_no_sample(changes: dict[str, Any], end: Any) -> None:
    entry = make_entry(**changes)
    found = unsampled(entry, judge(entry, "default", PROBES).reason)
    assert (found and (found.reason.value, found.status, found.endpoint)) == end


@pytest.mark.parametrize(
    ("changes", "bodiless"),
    [
        ({"response_bytes": 0}, True),
        ({"output_tokens": 0}, False),  # as of embeddings
        ({"response_bytes": 0, "status": 404}, False),
        ({"response_bytes": 0, "flags": frozenset({"upstream_request_timeout"})}, False),
    ],
)
def test_the_router_is_told_of_a_good_status_without_a_body(changes: dict[str, Any], bodiless: bool) -> None:
    entry = make_entry(**changes)
    found = unsampled(entry, judge(entry, "default", PROBES).reason)
    assert found is not None
    assert found.bodiless is bodiless


def test_a_completed_stream_makes_the_sample_of_the_endpoint_that_served() -> None:
    sample = accepted(decision=decided("10.0.0.8:8000", SERVED, ttft_slo_ms=500.0), attempts=2)
    assert sample.endpoint == SERVED
    assert sample.features[SCHEMA.index["input_tokens"]] == 101.0
    assert sample.prediction == {"ttft_p50": 110.0, "tpot_p50": 11.0}
    assert (sample.ttft_ms, sample.tpot_ms, sample.e2e_ms) == (400.0, 10.0, 600.0)
    assert sample.ttft_source is TtftSource.ACCESS_LOG
    assert (sample.input_tokens, sample.cached_tokens, sample.output_tokens) == (30, 16, 21)
    assert sample.attempts == 2
    assert sample.outcome is Outcome.OK
    assert sample.rung is Rung.PREDICTOR
    assert sample.ttft_slo_ms == 500.0
    assert sample.completed_unix_ms == START_UNIX_US / 1e3 + 604.1
    assert not sample.output_tokens_estimated


def test_another_schema_s_row_is_passed_on_as_it_is() -> None:
    """A rolling deployment mixes schemas; the trainer takes those whose hash it knows."""
    row = feature_row()[:-8]
    sample = accepted(decision=decided(endpoints=listed(row), schema_hash="next"))
    assert len(sample.features) == len(SCHEMA) - 2


def test_a_plain_answer_has_only_its_whole_time() -> None:
    sample = accepted(event_stream=False, first_content_unix_us=None)
    assert (sample.ttft_ms, sample.tpot_ms, sample.e2e_ms) == (None, None, 600.0)
    assert sample.ttft_source is None
    assert not sample.streamed


def test_the_content_type_says_whether_it_was_streamed_and_the_decision_where_it_is_not_logged() -> None:
    assert not accepted(event_stream=False, first_content_unix_us=None).streamed
    assert accepted(event_stream=None).streamed
    assert not accepted(event_stream=None, decision=decided(streamed=False), first_content_unix_us=None).streamed


def test_a_stream_without_first_content_keeps_its_whole_time_and_is_noted() -> None:
    found = verdict(first_content_unix_us=None)
    assert found.sample.ttft_ms is None
    assert found.sample.e2e_ms == 600.0
    assert found.notes == (Note.NO_FIRST_CONTENT,)


def test_an_answer_without_usage_has_no_tpot_and_an_estimate_that_is_marked() -> None:
    found = verdict(output_tokens=None, input_tokens=None, cached_tokens=None)
    assert found.sample.ttft_ms == 400.0
    assert found.sample.tpot_ms is None
    assert found.sample.output_tokens_estimated
    assert found.sample.output_tokens == 10
    assert found.notes == (Note.NO_USAGE,)


def test_one_token_has_no_time_per_token() -> None:
    assert accepted(output_tokens=1).tpot_ms is None


def test_an_answer_that_was_held_back_has_no_time_per_token() -> None:
    found = verdict(first_content_unix_us=START_UNIX_US + 603_999)
    assert found.sample.tpot_ms is None
    assert found.notes == (Note.HELD_BACK,)


CENSORED: list[tuple[str, dict[str, Any], Outcome, float | None]] = [
    (
        "left in prefill",
        {"flags": ABORT, "status": 0, "rx_end_us": None, "first_content_unix_us": None, "first_body_us": None},
        Outcome.CLIENT_ABORT,
        None,
    ),
    ("left in decode", {"flags": ABORT, "rx_end_us": None, "last_byte_us": None}, Outcome.CLIENT_ABORT, 400.0),
    (
        "left over HTTP/2",
        {"flags": frozenset({"downstream_remote_reset"}), "rx_end_us": None},
        Outcome.CLIENT_ABORT,
        400.0,
    ),
    (
        "the server died",
        {"details": "upstream_reset_after_response_started{protocol_error}", "rx_end_us": None},
        Outcome.UPSTREAM_RESET,
        400.0,
    ),
    ("nobody wrote for too long", {"flags": frozenset({"stream_idle_timeout"})}, Outcome.TIMEOUT, 400.0),
]


@pytest.mark.parametrize(("changes", "outcome", "ttft_ms"), [c[1:] for c in CENSORED], ids=[c[0] for c in CENSORED])
def test_what_broke_off_is_kept_as_at_least_this(
    changes: dict[str, Any], outcome: Outcome, ttft_ms: float | None
) -> None:
    sample = accepted(output_tokens=None, **changes)
    assert sample.outcome is outcome
    assert sample.ttft_ms == ttft_ms
    assert sample.tpot_ms is None
    assert sample.e2e_ms is not None
    assert sample.e2e_ms >= 600.0


def test_a_client_that_closes_after_the_usage_has_a_complete_answer() -> None:
    """Clients that stop reading at [DONE] close before the body's end; usage comes last, so nothing is missing."""
    found = verdict(flags=ABORT, rx_end_us=None, last_byte_us=None)
    assert found.sample.outcome is Outcome.OK
    assert found.sample.tpot_ms == pytest.approx(10.005)
    assert found.notes == (Note.CLOSED_AFTER_USAGE,)


def test_a_slewed_clock_is_no_jump_but_never_moves_a_label_out_of_its_bounds() -> None:
    sample = accepted(first_content_unix_us=START_UNIX_US + 103_500)
    assert sample.ttft_ms == 100.0


def test_without_the_first_byte_s_time_the_dispatch_is_the_bound() -> None:
    assert accepted(first_body_us=None, last_byte_us=None).ttft_ms == 400.0
    with pytest.raises(ClockJumpError):
        latencies(
            make_entry(first_body_us=None, first_content_unix_us=START_UNIX_US - 10_000), streamed=True, ended=True
        )


@pytest.mark.parametrize(
    ("size", "streamed", "tokens"), [(0, True, 1), (2_382, True, 10), (300, False, 1), (1_200, False, 200)]
)
def test_an_output_length_is_estimated_from_the_size(size: int, streamed: bool, tokens: int) -> None:
    assert estimated_output_tokens(size, streamed=streamed) == tokens


ANY_US = st.none() | st.integers(-(10**7), 10**12)
FLAGS = st.frozensets(
    st.sampled_from(
        [
            "downstream_connection_termination",
            "upstream_remote_reset",
            "stream_idle_timeout",
            "no_healthy_upstream",
            "x",
        ]
    ),
    max_size=3,
)
ENTRIES = st.builds(
    AccessLogEntry,
    start_unix_us=st.just(START_UNIX_US),
    duration_us=st.integers(0, 10**12),
    tx_end_us=ANY_US,
    rx_end_us=ANY_US,
    first_body_us=ANY_US,
    last_byte_us=ANY_US,
    first_content_unix_us=st.none() | st.integers(START_UNIX_US - 10**7, START_UNIX_US + 10**7),
    status=st.sampled_from([0, 200, 201, 307, 404, 429, 500, 503]),
    details=st.sampled_from(["", "via_upstream", "upstream_reset_after_response_started{x}", "\x00"]),
    flags=FLAGS,
    upstream_address=st.sampled_from([None, SERVED, "[::1]:80", ""]),
    attempts=st.integers(1, 5),
    method=st.sampled_from(["POST", "GET", ""]),
    path=st.sampled_from(["/v1/chat/completions", "/health", ""]),
    user_agent=st.text(max_size=8),
    probe_marked=st.booleans(),
    event_stream=st.none() | st.booleans(),
    response_bytes=st.integers(0, 10**9),
    input_tokens=st.none() | st.integers(0, 2**24),
    output_tokens=st.none() | st.integers(0, 2**24),
    cached_tokens=st.none() | st.integers(0, 2**24),
    decision=st.none() | st.text(max_size=20) | st.just(decided()),
    intermediate=st.just(False),
)


@given(ENTRIES)
def test_no_entry_raises_and_labels_are_positive_and_ordered(entry: AccessLogEntry) -> None:
    found = judge(entry, "default", PROBES)
    assert (found.sample is None) is (found.reason is not Reason.ACCEPTED)
    if found.sample is None:
        return
    sample = found.sample
    assert decode_sample(encode_sample(sample)) == sample
    assert sample.e2e_ms is not None
    assert sample.e2e_ms > 0
    if sample.ttft_ms is not None:
        assert sample.streamed
        assert 0 < sample.ttft_ms <= sample.e2e_ms
    if sample.tpot_ms is not None:
        assert sample.ttft_ms is not None
        assert sample.outcome is Outcome.OK
        assert 0 < sample.tpot_ms <= sample.e2e_ms


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"decision_id": "a b"}, "sample.decision_id"),
        ({"model": ""}, "sample.model"),
        ({"pool": "other"}, "sample.pool"),
        ({"route": "r" * 257}, "sample.route"),
        ({"ttft_ms": 700.0}, "sample.ttft_ms"),
        ({"streamed": False}, "sample.ttft_ms"),
        ({"queue_ms": float("nan")}, "sample.queue_ms"),
        ({"completed_unix_ms": float("inf")}, "sample.completed_unix_ms"),
        ({"features": [float("nan")]}, "sample.features"),
        ({"prediction": {"ttft_p50": float("nan")}}, "sample.prediction"),
        ({"priority": -(2**40)}, "sample.priority"),
    ],
)
def test_a_posted_sample_at_fault_names_its_field(changes: dict[str, Any], field: str) -> None:
    sample = accepted()
    values = {name: getattr(sample, name) for name in sample.__struct_fields__}
    with pytest.raises(FieldError) as caught:
        check_posted(LatencySample(**{**values, **changes}), "default")
    assert caught.value.field == field


def posted(**changes: Any) -> Verdict:
    sample = accepted()
    values = {name: getattr(sample, name) for name in sample.__struct_fields__}
    return judge_posted(LatencySample(**{**values, **changes}), "default")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, Reason.ACCEPTED),
        ({"status": 500}, Reason.NOT_SUCCESS),
        ({"outcome": Outcome.UPSTREAM_ERROR, "status": 502}, Reason.NOT_SUCCESS),
        ({"outcome": Outcome.CLIENT_ERROR, "status": 400}, Reason.NOT_SUCCESS),
        ({"outcome": Outcome.SHED, "status": 429}, Reason.SHED),
        ({"outcome": Outcome.NO_ENDPOINT, "status": 503}, Reason.NO_ENDPOINT),
        ({"output_tokens": 0, "tpot_ms": None}, Reason.EMPTY),
        ({"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}, Reason.NO_TIMING),
        ({"outcome": Outcome.CLIENT_ABORT, "ttft_ms": None, "tpot_ms": None, "e2e_ms": None}, Reason.NO_TIMING),
        ({"outcome": Outcome.CLIENT_ABORT, "tpot_ms": None}, Reason.ACCEPTED),
        ({"outcome": Outcome.CLIENT_ABORT}, Reason.IMPLAUSIBLE),
        ({"output_tokens": None}, Reason.IMPLAUSIBLE),
        ({"output_tokens": 1}, Reason.IMPLAUSIBLE),
        ({"output_tokens_estimated": True}, Reason.IMPLAUSIBLE),
        ({"streamed": False, "ttft_ms": None}, Reason.IMPLAUSIBLE),
        ({"attempts": 2, "ttft_ms": None, "e2e_ms": None}, Reason.ACCEPTED),
    ],
)
def test_a_posted_sample_is_judged_as_an_entry_is(changes: dict[str, Any], reason: Reason) -> None:
    found = posted(**changes)
    assert found.reason is reason
    assert (found.sample is None) is (reason is not Reason.ACCEPTED)


def test_a_posted_answer_that_was_held_back_loses_its_time_per_token() -> None:
    found = posted(tpot_ms=0.01)
    assert found.sample is not None
    assert found.sample.tpot_ms is None
    assert found.notes == (Note.HELD_BACK,)


def test_what_a_posted_sample_lacks_is_noted() -> None:
    assert posted(ttft_ms=None, tpot_ms=None).notes == (Note.NO_FIRST_CONTENT,)
    assert posted(output_tokens=30, output_tokens_estimated=True, tpot_ms=None).notes == (Note.NO_USAGE,)
