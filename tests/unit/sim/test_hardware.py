"""The profile table against the measured kernel times it was fitted to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.hardware import PROFILES

COEFFICIENTS = {
    "llama-8b-h100": (4.90, 0.01657, 6.97e-7, 6.31, 0.0093, 4.30e-5),
    "llama-8b-h200": (3.49, 0.01744, 6.46e-7, 4.85, 0.0085, 3.18e-5),
    "llama-8b-a100": (7.51, 0.05456, 1.54e-6, 11.49, 0.0152, 9.68e-5),
    "llama-8b-l40s": (17.45, 0.05103, 3.26e-6, 22.23, 0.0228, 2.05e-4),
    "llama-70b-h100-tp4": (12.12, 0.05473, 1.03e-6, 15.24, 0.0295, 2.92e-5),
    "llama-70b-h200-tp4": (8.93, 0.05501, 1.18e-6, 12.13, 0.0320, 1.95e-5),
    "llama-70b-a100-tp4": (18.49, 0.15701, 1.21e-6, 27.65, 0.0945, 6.04e-5),
}


def test_every_profile_holds_its_fitted_coefficients():
    assert set(PROFILES) == set(COEFFICIENTS)
    for name, coefficients in COEFFICIENTS.items():
        profile = PROFILES[name]
        assert (
            profile.prefill_base_ms,
            profile.prefill_ms_per_token,
            profile.prefill_ms_per_square_token,
            profile.decode_base_ms,
            profile.decode_ms_per_sequence,
            profile.decode_ms_per_context_token,
        ) == coefficients
        assert profile.name == name


@pytest.mark.parametrize(
    ("name", "tokens", "measured_ms"),
    [
        ("llama-8b-h100", 128, 7.6), ("llama-8b-h100", 1024, 22.1), ("llama-8b-h100", 4096, 90.1),
        ("llama-8b-h100", 8192, 199.7), ("llama-8b-h100", 16384, 440.0),
        ("llama-8b-a100", 2048, 125.0), ("llama-8b-a100", 4096, 259.0), ("llama-8b-a100", 8192, 557.0),
    ],
)  # fmt: skip
def test_prefill_times_are_near_the_measured_kernels(name, tokens, measured_ms):
    assert PROFILES[name].prefill_ms(tokens) == pytest.approx(measured_ms, rel=0.14)


@pytest.mark.parametrize(
    ("sequences", "context", "measured_ms"), [(1, 1000, 6.2), (32, 1000, 8.3), (128, 1000, 12.8), (32, 8000, 17.7)]
)
def test_decode_times_are_near_the_measured_kernels(sequences, context, measured_ms):
    assert PROFILES["llama-8b-h100"].decode_ms(sequences, sequences * context) == pytest.approx(measured_ms, rel=0.07)


def test_kv_capacity_is_what_memory_leaves_beside_the_weights():
    assert PROFILES["llama-8b-h100"].kv_capacity_tokens == 427_246
    assert PROFILES["llama-8b-l40s"].kv_capacity_tokens == 207_519
    assert PROFILES["llama-70b-h200-tp4"].kv_capacity_tokens == 1_121_826


@given(chunks=st.lists(st.integers(1, 4000), min_size=1, max_size=6))
def test_chunks_of_a_prompt_cost_its_whole_but_for_the_repeated_base(chunks):
    profile = PROFILES["llama-8b-h100"]
    spent, context = 0.0, 0
    for tokens in chunks:
        spent += profile.prefill_ms(tokens, context) - profile.prefill_base_ms
        context += tokens
    assert spent + profile.prefill_base_ms == pytest.approx(profile.prefill_ms(context))


@given(speed=st.floats(0.1, 10))
def test_a_scaled_profile_divides_every_time_and_is_a_class_of_its_own(speed):
    profile = PROFILES["llama-8b-a100"]
    scaled = profile.scaled(speed)
    assert scaled.prefill_ms(700, 300) == pytest.approx(profile.prefill_ms(700, 300) / speed)
    assert scaled.decode_ms(9, 4000) == pytest.approx(profile.decode_ms(9, 4000) / speed)
    assert scaled.kv_capacity_tokens == profile.kv_capacity_tokens
    assert (scaled.hardware_class == profile.hardware_class) == (speed == 1)


def test_a_speed_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="speed must be > 0, got 0"):
        PROFILES["llama-8b-a100"].scaled(0)
