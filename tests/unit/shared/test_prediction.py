"""Bodies of the predictor: parsed, shaped, refused."""

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import FieldError
from shared.prediction import (
    MAX_ROWS,
    OUTPUTS,
    check_header,
    decode_request,
    rows_from_bytes,
    rows_from_json,
)

SCHEMA = "0123456789abcdef"
GOOD = {"pool": "default", "schema": SCHEMA, "rows": [[1, 2.5]]}


def test_outputs_are_targets_by_quantiles_and_in_range():
    assert OUTPUTS == (
        "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99", "e2e_p50", "e2e_p90", "e2e_p99",
        "in_range",
    )  # fmt: skip


def test_a_request_is_read_with_whole_numbers_and_fractions():
    request = decode_request(orjson.dumps(GOOD))
    assert (request.pool, request.schema, request.rows) == ("default", SCHEMA, [[1.0, 2.5]])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        orjson.dumps({**GOOD, "row": 1}),
        orjson.dumps({"pool": "default", "rows": []}),
        orjson.dumps({**GOOD, "rows": [[1, None]]}),
        orjson.dumps({**GOOD, "rows": [["NaN"]]}),
        orjson.dumps({**GOOD, "rows": [1]}),
        b'{"pool": "default", "schema": "0123456789abcdef", "rows": [[NaN]]}',
    ],
)
def test_a_body_that_is_no_request_is_a_field_error(body):
    with pytest.raises(FieldError) as caught:
        decode_request(body)
    assert caught.value.field.split(".")[0] == "body"


@pytest.mark.parametrize(
    ("pool", "schema", "field"),
    [
        ("", SCHEMA, "pool"),
        ("A", SCHEMA, "pool"),
        ("a b", SCHEMA, "pool"),
        ("a", "", "schema"),
        ("a", "g" * 16, "schema"),
    ],
)
def test_a_pool_or_schema_that_cannot_be_one_is_named(pool, schema, field):
    with pytest.raises(FieldError) as caught:
        check_header(pool, schema)
    assert caught.value.field == field


@given(st.integers(1, 20), st.integers(1, 20))
def test_raw_rows_come_back_as_they_were_sent(count, columns):
    rows = np.arange(count * columns, dtype="<f4").reshape(count, columns)
    assert np.array_equal(rows_from_bytes(rows.tobytes(), columns), rows)


@given(st.integers(1, 20), st.integers(1, 20))
def test_json_rows_equal_raw_rows(count, columns):
    rows = np.arange(count * columns, dtype=np.float32).reshape(count, columns) / 3
    assert np.array_equal(rows_from_json(rows.tolist(), columns), rows_from_bytes(rows.tobytes(), columns))


@pytest.mark.parametrize("size", [0, 1, 4, 7, 13])
def test_bytes_that_are_no_whole_rows_are_refused(size):
    with pytest.raises(FieldError, match="8"):
        rows_from_bytes(bytes(size), 2)


def test_a_row_of_another_length_is_named():
    with pytest.raises(FieldError) as caught:
        rows_from_json([[1.0, 2.0], [1.0]], 2)
    assert caught.value.field == "rows[1]"


@pytest.mark.parametrize("count", [0, MAX_ROWS + 1])
def test_no_rows_and_too_many_rows_are_refused(count):
    with pytest.raises(FieldError, match=str(MAX_ROWS)):
        rows_from_json([[1.0]] * count, 1)
    with pytest.raises(FieldError):
        rows_from_bytes(bytes(4 * count), 1)
