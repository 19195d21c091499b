from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import (
    MAX_BYTES_PER_TOKEN,
    MIN_BYTES_PER_TOKEN,
    TokenEstimator,
    expected_output_tokens,
)
from shared.names import length_key


def request(max_tokens: int | None) -> InferenceRequest:
    return InferenceRequest(model="m", prompt=b"", input_tokens=1.0, max_tokens=max_tokens, streamed=True)


def test_it_starts_at_four_bytes_and_learns_each_model_apart():
    tokens = TokenEstimator()
    assert tokens.bytes_per_token("a") == 4.0
    for _ in range(200):
        tokens.observe("a", 3_000, 1_000)
    assert tokens.bytes_per_token("a") == pytest.approx(3.0, abs=0.02)
    assert tokens.bytes_per_token("b") == 4.0
    assert tokens.estimate("a", 300) == pytest.approx(100, rel=0.01)


def test_an_empty_prompt_has_one_token():
    assert TokenEstimator().estimate("a", 0) == 1.0


def test_outcomes_without_bytes_or_tokens_teach_nothing():
    tokens = TokenEstimator()
    tokens.observe("a", 0, 100)
    tokens.observe("a", 100, 0)
    assert tokens.bytes_per_token("a") == 4.0


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7)), max_size=50))
def test_the_ratio_stays_within_its_bounds(outcomes):
    tokens = TokenEstimator()
    for size, count in outcomes:
        tokens.observe("a", size, count)
    assert MIN_BYTES_PER_TOKEN <= tokens.bytes_per_token("a") <= MAX_BYTES_PER_TOKEN


def test_the_number_of_models_is_bounded():
    tokens = TokenEstimator()
    for number in range(2_000):
        tokens.observe(f"model-{number}", 100_000, 100_000)
    assert tokens.bytes_per_token("model-0") < 1.5
    assert tokens.bytes_per_token("model-1999") == 4.0


def test_a_routes_own_length_comes_before_the_models():
    learned = {"m": 120.0, length_key("m", "title"): 12.0}
    asked = replace(request(None), route="title")
    assert expected_output_tokens(asked, learned) == 12.0
    assert expected_output_tokens(replace(asked, route="chat"), learned) == 120.0
    assert expected_output_tokens(replace(asked, max_tokens=5), learned) == 5.0
    assert expected_output_tokens(request(None), learned) == 120.0


@pytest.mark.parametrize(
    ("cap", "learned", "expected"),
    [
        (None, {}, None),
        (50, {}, 50.0),
        (None, {"m": 120.0}, 120.0),
        (50, {"m": 120.0}, 50.0),
        (500, {"m": 120.0}, 120.0),
    ],
)
def test_the_expected_answer_is_the_cap_or_the_learned_length_whichever_is_less(cap, learned, expected):
    assert expected_output_tokens(request(cap), learned) == expected
