"""The physics prior: right points of the tables it comes from, laws of latency, marked as nothing learned."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.features import SCHEMA, hardware_code
from shared.prediction import OUTPUTS, plausible
from shared.prior import MEASURED, PriorModel, is_prior, step_times

SIZES = ("8b", "70b")
LOADS = (
    "input_tokens",
    "uncached_tokens",
    "pending_uncached_tokens",
    "pending_requests",
    "decoding_requests",
    "decode_context_tokens",
    "expected_output_tokens",
)


def predict(size="8b", **columns):
    count = max(np.size(value) for value in columns.values())
    return dict(zip(OUTPUTS, PriorModel(size).predict(SCHEMA.rows(count, columns)).T, strict=True))


@pytest.mark.parametrize(
    ("size", "hardware", "tokens", "measured_ms"),
    [("8b", "h100", 2048, 43.5), ("8b", "h100", 8192, 199.7), ("8b", "a100", 4096, 259.0), ("8b", "a100", 8192, 557.0)],
)
def test_a_prefill_on_an_idle_endpoint_takes_what_was_measured(size, hardware, tokens, measured_ms):
    found = predict(size, input_tokens=tokens, uncached_tokens=tokens, hardware_class=hardware_code(hardware))
    assert found["ttft_p50"][0] == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize(("batch", "context", "measured_ms"), [(1, 1000, 6.2), (32, 1000, 8.3), (128, 1000, 12.8)])
def test_a_decode_step_takes_what_was_measured(batch, context, measured_ms):
    found = predict(
        input_tokens=context,
        decoding_requests=batch - 1,
        decode_context_tokens=(batch - 1) * context,
        hardware_class=hardware_code("h100"),
    )
    assert found["tpot_p50"][0] == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize("size", SIZES)
def test_hardware_that_was_not_measured_lies_between_the_measured(size):
    measured = [hardware_code(name) for name in MEASURED[size]]
    found = predict(
        size, input_tokens=1000, uncached_tokens=1000, hardware_class=[*measured, hardware_code("l4"), 0, 200]
    )
    *known, other, unknown, unlisted = found["ttft_p50"]
    assert min(known) < other < max(known)
    assert other == unknown == unlisted


def test_the_larger_model_is_slower_everywhere():
    for name, small in step_times("8b").items():
        large = step_times("70b")[name]
        assert large.prefill_per_token > small.prefill_per_token
        assert large.decode_base > small.decode_base


def test_an_unknown_answer_length_is_taken_for_a_usual_one():
    row = {"input_tokens": 500, "uncached_tokens": 500}
    unknown = predict(**row)["e2e_p50"][0]
    usual = predict(**row, expected_output_tokens=256, expected_output_tokens_known=1)["e2e_p50"][0]
    assert unknown == pytest.approx(usual, rel=0.05)


@pytest.mark.parametrize("size", SIZES)
def test_its_version_names_it_and_looks_like_a_bundles_that_is_older_than_all(size):
    version = PriorModel(size).bundle_version
    assert re.fullmatch(r"[0-9]{13}-[0-9a-f]{8}", version)
    assert is_prior(version)
    assert not is_prior("1800000000000-0123abcd")
    assert version == PriorModel(size).bundle_version
    assert len({PriorModel(name).bundle_version for name in SIZES}) == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_it_never_falls_as_load_grows_and_its_quantiles_are_in_order(data):
    size = data.draw(st.sampled_from(SIZES))
    low = {name: data.draw(st.integers(0, 200_000)) for name in LOADS}
    low["uncached_tokens"] = min(low["uncached_tokens"], low["input_tokens"])
    low["hardware_class"] = data.draw(st.integers(0, 255))
    low["expected_output_tokens_known"] = 1
    grown = data.draw(st.sampled_from([name for name in LOADS if name != "uncached_tokens"]))
    values = {name: [value, value + (data.draw(st.integers(0, 100_000)) if name == grown else 0)]
              for name, value in low.items()}  # fmt: skip
    found = predict(size, **values)
    for target in ("ttft", "tpot", "e2e"):
        p50, p90, p99 = (found[f"{target}_{quantile}"] for quantile in ("p50", "p90", "p99"))
        assert p50[1] >= p50[0] > 0
        assert (p50 <= p90).all()
        assert (p90 <= p99).all()
    assert not found["in_range"].any()


def test_rows_at_the_ends_of_the_schema_have_latencies_that_can_be():
    ends = np.array([[f.low for f in SCHEMA.features], [f.high for f in SCHEMA.features]], np.float32)
    assert plausible(PriorModel("70b").predict(ends))
