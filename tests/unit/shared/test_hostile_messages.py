"""What anyone could write into NATS or Redis by hand: refused by name, never a crash, never taken for truth."""

import json

import msgspec
import numpy as np
import pytest

from shared.bundle import Calibration
from shared.errors import FieldError, IntegrityError
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.prediction import MAX_PREDICTED_MS, decode_request, plausible
from shared.samples import decode_decision, decode_sample, encode_sample
from tests.bundles import OUTPUTS, default_weights, linear_graph, make_bundle
from tests.samples import make_sample

DEEP = b"[" * 50_000 + b"]" * 50_000
SAMPLE = make_sample("one", received_unix_ms=1.8e12, completed_unix_ms=1.8e12, ttft_ms=20.0)
CALIBRATION = {"pool": "default", "bundle_version": "v", "sequence": 1, "updated_unix_ms": 1.8e12}


def with_deep_extra_field(message: bytes) -> bytes:
    """Readers pass over fields that they don't know: such a one may hold anything."""
    return message[:-1] + b',"later":' + DEEP + b"}"


def test_nesting_beyond_the_reader_s_depth_is_a_fault_of_the_message():
    for read in (
        lambda: decode_sample(with_deep_extra_field(encode_sample(SAMPLE))),
        lambda: decode_request(with_deep_extra_field(b'{"pool":"default"}')),
        lambda: Calibration.decode(with_deep_extra_field(json.dumps(CALIBRATION).encode()), pool="default"),
        lambda: decode_decision("kZGR" * 50_000),
    ):
        with pytest.raises(FieldError):
            read()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"decision_id": ""}, "sample.decision_id"),
        ({"decision_id": "x" * 65}, "sample.decision_id"),
        ({"model": "x" * 513}, "sample.model"),
        ({"endpoint": "x" * 100_000}, "sample.endpoint"),
        ({"received_unix_ms": -1.0}, "sample.received_unix_ms"),
        ({"completed_unix_ms": 1e300}, "sample.completed_unix_ms"),
        ({"ttft_ms": 5e-324}, "sample.ttft_ms"),
        ({"e2e_ms": 1e-9}, "sample.e2e_ms"),
        ({"prediction": {"ttft_p50": -1.0}}, "prediction.ttft_p50"),
        ({"prediction": {"ttft_p50": 1e300}}, "prediction.ttft_p50"),
        ({"features": [1e300] * len(SCHEMA)}, "rows[0].input_tokens"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_sample_that_no_request_can_have_made_names_its_field(changes, field):
    with pytest.raises(FieldError) as caught:
        decode_sample(encode_sample(msgspec.structs.replace(SAMPLE, **changes)))
    assert caught.value.field == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", '"inf"', "1e300", "-11"])
@pytest.mark.parametrize(
    "field",
    [
        '"log_bias":{"ttft":%s}',
        '"backlog_edges_tokens":[%s],"quantile_log_offset":{}',
        '"quantile_log_offset":{"ttft_p90":[%s]}',
        '"endpoint_log_bias":{"ttft":{"10.0.0.1:8000":%s}}',
        '"expected_output_tokens":{"m":%s}',
    ],
)
def test_a_calibration_with_a_number_that_would_spoil_predictions_is_refused(field, number):
    body = json.dumps(CALIBRATION)[:-1] + "," + field % number + "}"
    with pytest.raises(FieldError, match="calibration"):
        Calibration.decode(body.encode(), pool="default")


def test_a_calibration_with_edges_out_of_order_is_refused():
    body = json.dumps(CALIBRATION | {"backlog_edges_tokens": [5.0, 5.0]}).encode()
    with pytest.raises(FieldError, match="backlog_edges_tokens"):
        Calibration.decode(body, pool="default")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5, 2 * MAX_PREDICTED_MS])
def test_one_value_that_no_latency_can_have_makes_an_answer_implausible(value):
    answer = np.full((3, 2), 20.0, np.float32)
    assert plausible(answer)
    assert plausible(answer[:0])
    answer[1, 1] = value
    assert not plausible(answer)


@pytest.mark.parametrize("offset", [np.nan, np.inf, -1e6, 1e9])
def test_a_bundle_that_answers_nonsense_is_not_loaded(offset):
    graph = linear_graph(default_weights(len(OUTPUTS)), offset)
    with pytest.raises(IntegrityError, match="no latency"):
        BundleModel(make_bundle(graph=graph))
