"""The load client's arithmetic: results to percentiles, shares and failure counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.loadgen import Distribution, LoadClient, LoadTarget, RequestResult, percentile, summarize

OK = RequestResult(
    index=0,
    group="g",
    session="s",
    turn=0,
    scheduled_ms=100.0,
    sent_ms=102.0,
    status=200,
    first_content_ms=152.0,
    last_byte_ms=242.0,
    input_tokens=100,
    output_tokens=10,
    cached_tokens=64,
    served_by="a",
    error=None,
)


def test_latencies_count_from_the_sending():
    assert (OK.lateness_ms, OK.ttft_ms, OK.e2e_ms, OK.tpot_ms) == (2.0, 50.0, 140.0, 10.0)


@pytest.mark.parametrize(
    ("change", "latency"),
    [
        ({"output_tokens": 1}, "tpot_ms"),
        ({"output_tokens": None}, "tpot_ms"),
        ({"first_content_ms": None}, "tpot_ms"),
        ({"first_content_ms": None}, "ttft_ms"),
        ({"sent_ms": None}, "ttft_ms"),
        ({"sent_ms": None}, "lateness_ms"),
        ({"last_byte_ms": None}, "e2e_ms"),
    ],
)
def test_a_latency_without_its_ends_is_unknown(change, latency):
    assert getattr(replace(OK, **change), latency) is None


@given(values=st.lists(st.floats(0, 1e6), min_size=1), share=st.floats(0.01, 1))
def test_a_percentile_is_a_value_with_that_share_at_or_below_it(values, share):
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-9
    assert sum(value < found for value in ordered) < share * len(ordered)


def test_a_summary_counts_failures_and_keeps_them_out_of_latencies():
    failed = replace(OK, error="status 503: no ready endpoint", status=503, last_byte_ms=9999.0, served_by=None)
    unsent = replace(OK, error="no answer", sent_ms=None, status=None)
    summary = summarize([OK, replace(OK, cached_tokens=0, served_by="b"), failed, unsent])
    assert (summary.requests, summary.failed) == (4, 2)
    assert summary.failures == {"status 503: no ready endpoint": 1, "no answer": 1}
    assert (summary.e2e.count, summary.e2e.p99_ms) == (2, 140.0)
    assert summary.prefix_hit_ratio == 64 / 200
    assert summary.served_by == {"a": 1, "b": 1}
    assert summary.lateness.count == 3
    assert (summary.input_tokens, summary.output_tokens) == (200, 20)


def test_a_summary_of_nothing_knows_nothing():
    summary = summarize([])
    assert summary.ttft == Distribution(0, None, None, None, None)
    assert summary.prefix_hit_ratio is None


def test_unknown_cached_tokens_are_left_out_of_the_hit_ratio():
    assert summarize([OK, replace(OK, cached_tokens=None)]).prefix_hit_ratio == 0.64


def test_kinds_of_failure_are_bounded():
    results = [replace(OK, error=f"status {number}") for number in range(100)]
    failures = summarize(results).failures
    assert len(failures) == 21
    assert failures["other"] == 80


def test_only_plain_http_is_spoken():
    with pytest.raises(ValueError, match="http://"):
        LoadClient(LoadTarget("https://example.invalid", "m"))
