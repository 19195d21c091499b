"""The feature schema: order, hash, rows built and rows refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import FieldError
from shared.features import FEATURES, HARDWARE_CLASSES, SCHEMA, SCHEMA_HASH, Feature, Schema, hardware_code

NAMES = [feature.name for feature in FEATURES]
# The order and the hash are what bundles are keyed by: a change here is a new schema, not an edit.
GOLDEN_NAMES = [
    "input_tokens", "uncached_tokens", "pending_uncached_tokens", "pending_requests", "oldest_pending_age_ms",
    "decoding_requests", "decode_context_tokens", "expected_output_tokens", "expected_output_tokens_known",
    "step_time_ms", "step_time_known", "waiting_requests", "running_requests", "kv_cache_utilization",
    "scrape_age_ms", "scrape_known", "hardware_class",
]  # fmt: skip
GOLDEN_HASH = "1bea9f010e7411f6"


def test_the_order_of_the_columns_and_the_hash_are_golden():
    assert list(SCHEMA.names) == GOLDEN_NAMES
    assert SCHEMA_HASH == SCHEMA.hash == GOLDEN_HASH


def test_any_change_that_alters_what_a_row_means_changes_the_hash():
    feature = Feature("a", "ms", 0, 10, 0, "meaning")
    same = Schema([feature])
    for other in (
        Feature("b", "ms", 0, 10, 0, "meaning"),
        Feature("a", "s", 0, 10, 0, "meaning"),
        Feature("a", "ms", 1, 10, 0, "meaning"),
        Feature("a", "ms", 0, 11, 0, "meaning"),
        Feature("a", "ms", 0, 10, 1, "meaning"),
    ):
        assert Schema([other]).hash != same.hash
    assert Schema([Feature("a", "ms", 0, 10, 0, "said better")]).hash == same.hash


def test_two_features_of_one_name_are_refused():
    feature = Feature("a", "ms", 0, 10, 0, "")
    with pytest.raises(ValueError, match="differ"):
        Schema([feature, feature])


def test_every_unknown_column_has_a_default_in_its_range():
    assert all(feature.low <= feature.default <= feature.high for feature in FEATURES)


def test_columns_that_are_not_given_take_their_default():
    rows = SCHEMA.rows(3, {"input_tokens": 7})
    assert rows.dtype == np.float32
    assert rows.shape == (3, len(SCHEMA))
    assert rows[:, SCHEMA.index["input_tokens"]].tolist() == [7, 7, 7]
    assert not rows[:, 1:].any()


def test_a_column_outside_the_schema_is_a_key_error():
    with pytest.raises(KeyError):
        SCHEMA.rows(1, {"endpoint": 1})


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.lists(st.floats(width=32), min_size=4, max_size=4),
    )
)
def test_whatever_is_measured_the_rows_built_from_it_pass_the_check(columns):
    rows = SCHEMA.rows(4, columns)
    SCHEMA.check(rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, 2.0])
@pytest.mark.parametrize("row", [0, 4])
def test_a_value_out_of_range_is_named_by_row_and_column(value, row):
    rows = SCHEMA.rows(5, {})
    rows[row, SCHEMA.index["kv_cache_utilization"]] = value
    with pytest.raises(FieldError) as caught:
        SCHEMA.check(rows)
    assert caught.value.field == f"rows[{row}].kv_cache_utilization"
    assert caught.value.allowed == "a finite number of ratio from 0 to 1"


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 5)])
def test_rows_of_another_shape_are_refused(shape):
    with pytest.raises(FieldError, match="shape"):
        SCHEMA.check(np.zeros(shape, np.float32))


def test_hardware_classes_have_the_codes_that_samples_store():
    assert HARDWARE_CLASSES[:5] == ("unknown", "a100", "h100", "h200", "b200")
    assert hardware_code("H100") == 2
    with pytest.raises(FieldError, match="hardware_class"):
        hardware_code("abacus")
