"""A response on its way through becomes the sample of the endpoint that served it, or a reason against one."""

import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.completion import CompletionObserver
from shared.samples import LatencySample, Outcome, Rung, TtftSource, decode_row, decode_sample, encode_sample
from shared.verdicts import Note, Reason, Verdict
from tests.fakes.decisions import feature_row, make_decision
from tests.fakes.fake_model_server import DONE, ROLE, USAGE, chat, event

A, B = "10.0.0.7:8000", "10.0.0.8:8000"
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
CONTENT = event(chat({"content": "tok"}))
STREAM = [event(ROLE), CONTENT, *[event(chat({"content": f" t{n}"})) for n in range(20)], event(USAGE), DONE]
DOCUMENT = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": USAGE["usage"]}).encode()


class Watch:
    """An observer with what it told. Chunks arrive 10 ms apart, the first at 1,100; our answer went out at 1,000."""

    def __init__(self, *addresses: str, **decision: Any) -> None:
        self.completions: list[Verdict] = []
        self.first_contents: list[tuple[str, float]] = []
        self.decision = make_decision(*(addresses or (A, B)), **decision)
        self.now_ms = 1_090.0
        self.observer = CompletionObserver(
            self.decision,
            sent_ms=1_000.0,
            done=self.completions.append,
            on_first_content=lambda decision_id, now_ms: self.first_contents.append((decision_id, now_ms)),
        )

    def respond(
        self, *chunks: bytes, status: int = 200, headers: dict[str, str] = SSE, served: str | None = A, end: bool = True
    ) -> Verdict:
        self.observer.headers(status, headers, served, self.now_ms)
        for chunk in chunks:
            self.now_ms += 10.0
            self.observer.body(chunk, self.now_ms)
        self.now_ms += 10.0
        if end:
            self.observer.end(self.now_ms)
        self.observer.closed(self.now_ms)
        (completion,) = self.completions
        return completion


def sample(completion: Verdict) -> LatencySample:
    assert completion.reason is Reason.ACCEPTED
    assert completion.sample is not None
    assert decode_sample(encode_sample(completion.sample)) == completion.sample
    return completion.sample


def test_a_whole_stream_is_a_sample_with_every_label() -> None:
    watch = Watch(ttft_slo_ms=500.0)
    found = sample(watch.respond(*STREAM))
    assert (found.outcome, found.status, found.streamed, found.attempts) == (Outcome.OK, 200, True, 1)
    assert found.ttft_ms == 110.0
    assert found.e2e_ms == watch.now_ms - 1_000.0
    assert found.tpot_ms == pytest.approx((watch.now_ms - 1_110.0) / 20)
    assert found.ttft_source is TtftSource.RESPONSE_STREAM
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (30, 21, 16)
    assert not found.output_tokens_estimated
    assert found.completed_unix_ms == watch.decision.received_unix_ms + 1.0 + 2.0 + watch.now_ms - 1_000.0
    assert (found.decision_id, found.pool, found.model) == (watch.decision.decision_id, "default", "m")
    assert (found.rung, found.bundle_version, found.ttft_slo_ms) == (Rung.PREDICTOR, "b1", 500.0)


def test_the_first_content_is_told_once_as_it_passes() -> None:
    watch = Watch()
    watch.respond(*STREAM)
    assert watch.first_contents == [(watch.decision.decision_id, 1_110.0)]


def test_the_row_and_prediction_are_those_of_the_endpoint_that_served() -> None:
    found = sample(Watch().respond(*STREAM, served=B))
    assert found.endpoint == B
    assert found.features == decode_row(feature_row(input_tokens=101.0, uncached_tokens=51.0)).tolist()
    assert found.prediction == {"ttft_p50": 110.0, "tpot_p50": 11.0}


def test_after_a_retry_only_what_does_not_hang_on_the_dispatch_is_known() -> None:
    found = sample(Watch().respond(*STREAM, served=B))
    assert (found.ttft_ms, found.e2e_ms, found.ttft_source) == (None, None, None)
    assert found.tpot_ms is not None
    assert found.attempts == 2


def test_a_retry_that_envoy_counts_is_one_though_the_first_endpoint_served() -> None:
    found = sample(Watch().respond(*STREAM, headers={**SSE, "x-envoy-attempt-count": "3"}))
    assert (found.ttft_ms, found.attempts) == (None, 3)
    once = sample(Watch().respond(*STREAM, headers={**SSE, "x-envoy-attempt-count": "1"}))
    assert once.ttft_ms is not None


def test_a_retried_answer_without_time_per_token_teaches_nothing() -> None:
    assert Watch().respond(DOCUMENT, headers=JSON, served=B).reason is Reason.NO_TIMING


def test_without_a_word_of_envoy_the_first_listed_endpoint_served() -> None:
    assert sample(Watch().respond(*STREAM, served=None)).endpoint == A


def test_an_endpoint_that_was_not_listed_makes_no_sample() -> None:
    assert Watch().respond(*STREAM, served="10.9.9.9:8000").reason is Reason.UNLISTED_ENDPOINT


def test_a_plain_answer_has_usage_and_e2e_alone() -> None:
    found = sample(Watch(streamed=False).respond(DOCUMENT[:20], DOCUMENT[20:], headers=JSON))
    assert (found.ttft_ms, found.tpot_ms, found.streamed) == (None, None, False)
    assert found.e2e_ms is not None
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (30, 21, 16)


def test_what_was_streamed_is_said_by_the_answer_and_not_by_the_request() -> None:
    assert not sample(Watch(streamed=True).respond(DOCUMENT, headers=JSON)).streamed
    assert sample(Watch(streamed=False).respond(*STREAM)).streamed
    assert sample(Watch(streamed=True).respond(b"x", headers={})).streamed


def test_a_stream_without_content_has_no_ttft_and_a_note() -> None:
    completion = Watch().respond(event(ROLE), event(USAGE), DONE)
    assert completion.notes == (Note.NO_FIRST_CONTENT,)
    assert (sample(completion).ttft_ms, sample(completion).tpot_ms) == (None, None)


def test_without_usage_the_output_is_estimated_and_marked() -> None:
    completion = Watch().respond(event(ROLE), CONTENT, b": " + b"x" * 2_000 + b"\n", DONE)
    assert completion.notes == (Note.NO_USAGE,)
    found = sample(completion)
    assert found.output_tokens_estimated
    assert found.output_tokens == 10
    assert found.tpot_ms is None
    assert found.ttft_ms is not None


def test_an_answer_in_one_go_has_no_time_per_token() -> None:
    watch = Watch()
    watch.observer.headers(200, SSE, A, 1_050.0)
    watch.observer.body(b"".join(STREAM), 1_100.0)
    watch.observer.end(1_100.5)
    (completion,) = watch.completions
    assert completion.notes == (Note.HELD_BACK,)
    assert sample(completion).tpot_ms is None


@pytest.mark.parametrize("status", [301, 400, 404, 429, 500, 503])
def test_a_whole_answer_that_is_no_success_makes_no_sample(status: int) -> None:
    assert Watch().respond(b'{"error":{}}', status=status, headers=JSON).reason is Reason.NOT_SUCCESS


def test_an_answer_without_a_body_or_a_token_is_empty() -> None:
    bare = Watch().respond(headers=JSON)
    assert (bare.reason, bare.bodiless) == (Reason.EMPTY, True)
    none = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 0}}).encode()
    untold = Watch().respond(none, headers=JSON)
    assert (untold.reason, untold.bodiless) == (Reason.EMPTY, False)
    assert not Watch().respond(headers=JSON, status=404).bodiless


def test_an_informational_answer_is_no_answer() -> None:
    watch = Watch()
    watch.observer.headers(100, {}, None, 1_010.0)
    assert sample(watch.respond(*STREAM)).status == 200


def test_an_answer_that_breaks_off_is_a_lower_bound() -> None:
    before = sample(Watch().respond(event(ROLE), end=False))
    assert (before.outcome, before.ttft_ms, before.tpot_ms) == (Outcome.CLIENT_ABORT, None, None)
    after = sample(Watch().respond(*STREAM[:5], end=False))
    assert (after.outcome, after.ttft_ms, after.tpot_ms) == (Outcome.CLIENT_ABORT, 110.0, None)
    assert after.e2e_ms is not None
    assert after.output_tokens_estimated


def test_a_client_that_leaves_after_the_usage_had_a_whole_answer() -> None:
    completion = Watch().respond(*STREAM, end=False)
    assert completion.notes == (Note.CLOSED_AFTER_USAGE,)
    found = sample(completion)
    assert found.outcome is Outcome.OK
    assert found.tpot_ms is not None


def test_a_request_that_ends_before_its_answer_began_is_an_abort() -> None:
    watch = Watch()
    watch.observer.closed(1_250.0)
    found = sample(watch.completions[0])
    assert (found.outcome, found.status, found.e2e_ms, found.endpoint) == (Outcome.CLIENT_ABORT, 0, 250.0, A)
    assert found.output_tokens is None


def test_the_end_is_told_once() -> None:
    watch = Watch()
    watch.respond(*STREAM)
    watch.observer.end(2_000.0)
    watch.observer.closed(2_000.0)
    assert len(watch.completions) == 1


def test_a_clock_that_stands_still_is_no_timing() -> None:
    watch = Watch()
    watch.observer.headers(200, JSON, A, 1_000.0)
    watch.observer.body(DOCUMENT, 1_000.0)
    watch.observer.end(1_000.0)
    assert watch.completions[0].reason is Reason.NO_TIMING


def test_a_row_that_is_none_is_the_router_s_fault_and_counted_so() -> None:
    listed = make_decision(A).endpoints[0]
    broken = type(listed)(A, feature_row()[:-4] + b"\x00\x00\xc0\x7f", None)
    assert Watch(endpoints=(broken,)).respond(*STREAM).reason is Reason.BAD_FEATURES


def zipped(chunks: list[bytes], wbits: int) -> list[bytes]:
    packer = zlib.compressobj(wbits=wbits)
    packed = [packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH) for chunk in chunks]
    return [*packed[:-1], packed[-1] + packer.flush()]


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15), ("deflate", -15)])
def test_an_encoded_stream_has_the_labels_of_the_plain_one(encoding: str, wbits: int) -> None:
    plain = sample(Watch().respond(*STREAM))
    assert sample(Watch().respond(*zipped(STREAM, wbits), headers={**SSE, "content-encoding": encoding})) == plain


def test_a_truncated_encoded_stream_keeps_its_first_content() -> None:
    chunks = zipped(STREAM, 31)[:6]
    found = sample(Watch().respond(*chunks[:-1], chunks[-1][:3], headers={**SSE, "content-encoding": "gzip"}))
    assert found.ttft_ms == 110.0
    assert found.output_tokens_estimated


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip"])
def test_what_can_not_be_unpacked_has_no_label_but_its_end(encoding: str) -> None:
    completion = Watch().respond(*STREAM, headers={**SSE, "content-encoding": encoding})
    found = sample(completion)
    assert (found.ttft_ms, found.tpot_ms, found.input_tokens) == (None, None, None)
    assert found.e2e_ms is not None
    assert set(completion.notes) == {Note.NO_FIRST_CONTENT, Note.NO_USAGE}


def split(chunks: list[bytes], cuts: list[int]) -> list[bytes]:
    data = b"".join(chunks)
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, 6_000), max_size=40), body=st.sampled_from(["stream", "document", "gzip"]))
def test_any_chunking_of_the_same_bytes_has_the_same_labels(cuts: list[int], body: str) -> None:
    """All chunks at one instant: the labels don't depend on the cuts, down to the last byte."""
    chunks = {"stream": STREAM, "document": [DOCUMENT], "gzip": zipped(STREAM, 31)}[body]
    headers = {"stream": SSE, "document": JSON, "gzip": {**SSE, "content-encoding": "gzip"}}[body]
    found = []
    for parts in ([b"".join(chunks)], split(chunks, cuts)):
        watch = Watch()
        watch.observer.headers(200, headers, A, 1_050.0)
        for part in parts:
            watch.observer.body(part, 1_100.0)
        watch.observer.end(1_400.0)
        found.append(watch.completions)
    assert found[0] == found[1]


texts = st.text(max_size=20)


@settings(max_examples=200, deadline=None)
@given(
    status=st.integers(0, 999),
    headers=st.dictionaries(
        st.sampled_from(["content-type", "content-encoding", "x-envoy-attempt-count"]),
        texts | st.sampled_from(["text/event-stream", "application/json", "gzip", "deflate"]),
    ),
    served=st.none() | texts | st.just(B),
    chunks=st.lists(st.binary(max_size=60) | st.sampled_from(STREAM), max_size=8),
    end=st.booleans(),
)
def test_no_response_raises_and_each_is_judged_once(
    status: int, headers: dict[str, str], served: str | None, chunks: list[bytes], end: bool
) -> None:
    completion = Watch().respond(*chunks, status=status, headers=headers, served=served, end=end)
    assert (completion.sample is not None) is (completion.reason is Reason.ACCEPTED)
    if completion.sample is not None:
        assert decode_sample(encode_sample(completion.sample)) == completion.sample
