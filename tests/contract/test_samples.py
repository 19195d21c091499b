"""The bytes of the decision metadata and of the sample, as one service writes them and the next one reads them.

A test that fails here has changed a wire format: readers of the version before are running somewhere.
"""

import base64

import msgspec
import pytest

from shared.errors import FieldError
from shared.features import SCHEMA
from shared.samples import (
    DecisionMetadata,
    LatencySample,
    ListedEndpoint,
    Outcome,
    Rung,
    TtftSource,
    decode_decision,
    decode_row,
    decode_sample,
    encode_decision,
    encode_sample,
)
from shared.verdicts import Reason, Unsampled, decode_unsampled, encode_unsampled
from tests.fakes.decisions import feature_row

DECISION = DecisionMetadata(
    version=1,
    decision_id="0192f0c1-0000-7000-8000-000000000001",
    pool="default",
    model="llama-3.1-8b",
    received_unix_ms=1796000000000.5,
    queue_ms=1.25,
    decision_ms=2.5,
    ttft_slo_ms=500.0,
    tpot_slo_ms=None,
    priority=-1,
    rung=Rung.PREDICTOR,
    bundle_version="b-17",
    schema_hash="1bea9f010e7411f6",
    propensity=0.75,
    streamed=True,
    endpoints=(
        ListedEndpoint("10.0.0.7:8000", b"\x00\x00\x80\x3f\x00\x00\x00\x40", {"ttft_p50": 120.5}),
        ListedEndpoint("[2001:db8::1]:8000", b"", None),
    ),
)
DECISION_TEXT = (
    "3AARAdkkMDE5MmYwYzEtMDAwMC03MDAwLTgwMDAtMDAwMDAwMDAwMDAxp2RlZmF1bHSsbGxhbWEtMy4xLThiy0J6Ip8SgAgAyz/0AAAAAAAA"
    "y0AEAAAAAAAAy0B/QAAAAAAAwP+pcHJlZGljdG9ypGItMTewMWJlYTlmMDEwZTc0MTFmNss/6AAAAAAAAMOSk60xMC4wLjAuNzo4MDAwxAgA"
    "AIA/AAAAQIGodHRmdF9wNTDLQF4gAAAAAACTslsyMDAxOmRiODo6MV06ODAwMMQAwKA="
)
SAMPLE = LatencySample(
    decision_id="0192f0c1-0000-7000-8000-000000000001",
    pool="default",
    model="llama-3.1-8b",
    endpoint="10.0.0.7:8000",
    outcome=Outcome.OK,
    status=200,
    streamed=True,
    received_unix_ms=1796000000000.5,
    completed_unix_ms=1796000000700.0,
    rung=Rung.PREDICTOR,
    schema_hash="other",
    features=[1.0, 2.5],
    queue_ms=1.25,
    decision_ms=2.5,
    ttft_slo_ms=500.0,
    priority=-1,
    bundle_version="b-17",
    propensity=0.75,
    prediction={"ttft_p50": 120.5},
    ttft_ms=100.5,
    tpot_ms=10.25,
    e2e_ms=600.0,
    ttft_source=TtftSource.ACCESS_LOG,
    input_tokens=30,
    cached_tokens=16,
    output_tokens=21,
    attempts=2,
)
SAMPLE_BYTES = (
    b'{"decision_id":"0192f0c1-0000-7000-8000-000000000001","pool":"default","model":"llama-3.1-8b",'
    b'"endpoint":"10.0.0.7:8000","outcome":"ok","status":200,"streamed":true,"received_unix_ms":1796000000000.5,'
    b'"completed_unix_ms":1796000000700.0,"rung":"predictor","schema_hash":"other","features":[1.0,2.5],'
    b'"queue_ms":1.25,"decision_ms":2.5,"ttft_slo_ms":500.0,"priority":-1,"bundle_version":"b-17","propensity":0.75,'
    b'"prediction":{"ttft_p50":120.5},"ttft_ms":100.5,"tpot_ms":10.25,"e2e_ms":600.0,"ttft_source":"access_log",'
    b'"input_tokens":30,"cached_tokens":16,"output_tokens":21,"attempts":2}'
)


def test_a_decision_is_these_characters() -> None:
    assert encode_decision(DECISION) == DECISION_TEXT
    assert decode_decision(DECISION_TEXT) == DECISION


def test_a_sample_is_these_bytes() -> None:
    assert encode_sample(SAMPLE) == SAMPLE_BYTES
    assert decode_sample(SAMPLE_BYTES) == SAMPLE


def test_what_an_earlier_router_wrote_has_no_route() -> None:
    shorter = msgspec.msgpack.decode(base64.b64decode(DECISION_TEXT))[:-1]
    assert decode_decision(base64.b64encode(msgspec.msgpack.encode(shorter)).decode()) == DECISION


def test_a_route_goes_from_the_decision_to_the_sample_and_has_its_limit() -> None:
    named = msgspec.structs.replace(SAMPLE, route="chat")
    assert encode_sample(named) == SAMPLE_BYTES[:-1] + b',"route":"chat"}'
    with pytest.raises(FieldError, match=r"sample\.route"):
        decode_sample(encode_sample(msgspec.structs.replace(SAMPLE, route="r" * 257)))


def test_a_row_is_little_endian_float32() -> None:
    assert decode_row(b"\x00\x00\x80\x3f\x00\x00\x00\x40").tolist() == [1.0, 2.0]


def test_what_a_later_writer_adds_is_passed_over() -> None:
    """A rolling deployment mixes versions: appended values of a decision, unknown keys of a sample."""
    longer = [*msgspec.msgpack.decode(base64.b64decode(DECISION_TEXT)), "added"]
    longer[15] = [[*endpoint, "added"] for endpoint in longer[15]]
    assert decode_decision(base64.b64encode(msgspec.msgpack.encode(longer)).decode()) == DECISION
    assert decode_sample(SAMPLE_BYTES[:-1] + b',"added":{"x":[1]}}') == SAMPLE


def test_what_is_unknown_is_absent_and_none() -> None:
    required = {
        name: getattr(SAMPLE, name) for name in LatencySample.__struct_fields__ if f'"{name}"'.encode() in SAMPLE_BYTES
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "input_tokens", "prediction", "bundle_version", "ttft_source"):
        required.pop(name)
    bare = LatencySample(**required)
    assert b"null" not in encode_sample(bare)
    assert decode_sample(encode_sample(bare)).ttft_ms is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("!", "decision metadata"),
        ("", "decision metadata"),
        (DECISION_TEXT[:40], "decision metadata"),
        (base64.b64encode(msgspec.msgpack.encode([2, *[0] * 15])).decode(), "decision metadata"),
        (encode_decision(msgspec.structs.replace(DECISION, version=2)), "decision metadata.version"),
    ],
)
def test_a_damaged_decision_names_itself(text: str, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        decode_decision(text)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'"status":200', b'"status":"ok"', "status"),
        (b'"outcome":"ok"', b'"outcome":"fine"', "outcome"),
        (b'"ttft_ms":100.5', b'"ttft_ms":0', "ttft_ms"),
        (b'"ttft_ms":100.5', b'"ttft_ms":NaN', "JSON"),
        (b'"e2e_ms":600.0', b'"e2e_ms":-1', "e2e_ms"),
        (b'"output_tokens":21', b'"output_tokens":-1', "output_tokens"),
        (b'"propensity":0.75', b'"propensity":0', "propensity"),
        (b'"pool":"default",', b"", "pool"),
    ],
)
def test_a_sample_at_fault_names_its_field(old: bytes, new: bytes, word: str) -> None:
    with pytest.raises(FieldError, match=word):
        decode_sample(SAMPLE_BYTES.replace(old, new))


def test_a_row_of_our_schema_is_checked_and_another_s_is_not() -> None:
    ours = msgspec.structs.replace(SAMPLE, schema_hash=SCHEMA.hash)
    with pytest.raises(FieldError, match="rows"):
        decode_sample(encode_sample(ours))
    whole = msgspec.structs.replace(ours, features=decode_row(feature_row()).tolist())
    assert decode_sample(encode_sample(whole)) == whole


def test_the_message_about_a_request_without_a_sample_has_these_bytes() -> None:
    end = Unsampled(decision_id="id-1", reason=Reason.NOT_SUCCESS, status=503, endpoint="10.0.0.1:8000")
    written = b'{"decision_id":"id-1","reason":"not_success","status":503,"endpoint":"10.0.0.1:8000"}'
    assert encode_unsampled(end) == written
    assert decode_unsampled(written[:-1] + b',"added":1}') == end
    assert decode_unsampled(b'{"decision_id":"id-1","reason":"shed"}') == Unsampled(
        decision_id="id-1", reason=Reason.SHED
    )
    bare = Unsampled(decision_id="id-1", reason=Reason.EMPTY, status=200, bodiless=True)
    assert encode_unsampled(bare) == b'{"decision_id":"id-1","reason":"empty","status":200,"bodiless":true}'
    assert decode_unsampled(encode_unsampled(bare)) == bare


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'{"decision_id":"","reason":"shed"}', b'{"decision_id":"a","reason":"unheard"}',
        b'{"decision_id":"a","reason":"shed","status":1000}', b'{"decision_id":"a","reason":"shed","endpoint":""}',
        b'{"decision_id":"' + b"a" * 65 + b'","reason":"shed"}', b"\xff", b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(FieldError):
        decode_unsampled(data)
