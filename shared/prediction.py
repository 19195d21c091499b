"""The predictor's request and answer, in both encodings.

JSON for people and other languages, raw float32 for the router: the body is n × F little-endian, pool and schema stand
in headers, the answer is n × K with the bundle's version and the names of its K columns in headers.
"""

from typing import Final

import msgspec
import numpy as np

from shared.errors import FieldError
from shared.faults import of_message
from shared.features import FloatMatrix
from shared.names import POOL_PATTERN

MAX_ROWS: Final = 16_384
MAX_PREDICTED_MS: Final = 86_400_000.0

TARGETS: Final = ("ttft", "tpot", "e2e")
QUANTILES: Final = ("p50", "p90", "p99")
IN_RANGE: Final = "in_range"
# Every output a bundle may have, in order; a target that wasn't trained is absent from a bundle's own list.
OUTPUTS: Final = (*(f"{target}_{quantile}" for target in TARGETS for quantile in QUANTILES), IN_RANGE)


def plausible(values: FloatMatrix) -> bool:
    """Whether every value of an answer, float32 (n, K), can be true: finite, 0 to one day in ms.

    A bundle that is whole and signed may still answer nonsense; a decision by it is worse than one without it.
    """
    return not values.size or bool(values.min() >= 0.0 and values.max() <= MAX_PREDICTED_MS)


class PredictRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON body of `POST /v1/predict`. `schema` is the hash of the feature list the rows follow."""

    pool: str
    schema: str
    rows: list[list[float]]


class PredictResponse(msgspec.Struct, frozen=True):
    """`predictions[i][k]` belongs to `rows[i]` and `outputs[k]`; ms, but `in_range` is 0 or 1."""

    bundle: str
    outputs: list[str]
    predictions: list[list[float]]


_request_decoder = msgspec.json.Decoder(PredictRequest)


def decode_request(body: bytes) -> PredictRequest:
    """Parse and check a JSON request but for its rows' values; raises FieldError."""
    try:
        request = _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise of_message(error, "body", PredictRequest.__struct_fields__) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("body", f"{len(body)} bytes that are not JSON ({error})", "a JSON object") from None
    check_header(request.pool, request.schema)
    return request


def check_header(pool: str, schema: str) -> None:
    """Raise FieldError for a pool or schema that can't be one."""
    if POOL_PATTERN.fullmatch(pool) is None:
        raise FieldError("pool", f"text of {len(pool)} characters", "a DNS label of a-z, 0-9 and '-'")
    if len(schema) != 16 or not set(schema) <= set("0123456789abcdef"):
        raise FieldError("schema", f"text of {len(schema)} characters", "16 hexadecimal digits")


def rows_from_json(rows: list[list[float]], columns: int) -> FloatMatrix:
    """Nested lists → float32 (n, columns); raises FieldError naming the row whose length is wrong."""
    for i, row in enumerate(rows):
        if len(row) != columns:
            raise FieldError(f"rows[{i}]", f"{len(row)} values", f"{columns} values")
    return _bounded(np.asarray(rows, np.float32).reshape(len(rows), columns))


def rows_from_bytes(body: bytes, columns: int) -> FloatMatrix:
    """Raw body → float32 (n, columns); raises FieldError for a length that is no whole number of rows."""
    if not body or len(body) % (4 * columns):
        raise FieldError(
            "body", f"{len(body)} bytes", f"a positive multiple of {4 * columns} ({columns} float32 a row)"
        )
    return _bounded(np.frombuffer(body, "<f4").reshape(-1, columns))


def _bounded(rows: FloatMatrix) -> FloatMatrix:
    if not 1 <= len(rows) <= MAX_ROWS:
        raise FieldError("rows", f"{len(rows)} rows", f"1 to {MAX_ROWS} rows")
    return rows
