"""Messages about one request: the decision (router → Envoy → collector) and the completed sample (collector → trainer).

The decision travels as one string in Envoy's dynamic metadata (msgpack in base64), the sample as JSON on
JetStream. Readers tolerate added fields: new ones are appended with a default. A breaking change takes a new
`version` here and a new subject.

Limits: no prompt, no completion, nothing of a client's but the model's name ever enters either message.
"""

import base64
import binascii
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np

from shared.errors import FieldError
from shared.faults import of_message
from shared.features import SCHEMA, FloatMatrix

DECISION_VERSION: Final = 1
# Readers keep these texts as keys: without a limit one message could fill their memory.
TEXT_LIMITS: Final = {"decision_id": 64, "pool": 63, "model": 512, "endpoint": 300}
MAX_ROUTE_CHARACTERS: Final = 256
# One microsecond, Envoy's resolution: relative errors against less would drown all others.
_LEAST_MS: Final = 0.001
# A day, bent by calibration as far as it goes (shared.inference), and a little more.
_MOST_PREDICTED_MS: Final = 1e9
_LAST_UNIX_MS: Final = 253_402_300_800_000.0


class Rung(StrEnum):
    """Which step of the ladder answered: remote predictor, the router's own bundle, the physics prior while there is no
    bundle, scores without a prediction.
    """

    PREDICTOR = "predictor"
    IN_PROCESS = "in_process"
    PRIOR = "prior"
    HEURISTIC = "heuristic"
    SHADOW = "shadow"


class Outcome(StrEnum):
    """How a request ended, from its final status and Envoy's response flags."""

    OK = "ok"
    CLIENT_ABORT = "client_abort"
    CLIENT_ERROR = "client_error"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_RESET = "upstream_reset"
    TIMEOUT = "timeout"
    SHED = "shed"
    NO_ENDPOINT = "no_endpoint"


class TtftSource(StrEnum):
    """Where the first-content instant was seen."""

    ACCESS_LOG = "access_log"
    RESPONSE_STREAM = "response_stream"


class ListedEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """One of the 2–3 endpoints of the answer: `ip:port`, its row (float32 little-endian), its calibrated prediction."""

    address: str
    features: bytes
    prediction: dict[str, float] | None = None


class DecisionMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What the router knew when it answered. Field order is the wire format."""

    version: int
    decision_id: str
    pool: str
    model: str
    received_unix_ms: float
    queue_ms: float
    decision_ms: float
    ttft_slo_ms: float | None
    tpot_slo_ms: float | None
    priority: int
    rung: Rung
    bundle_version: str | None
    schema_hash: str
    propensity: float
    streamed: bool
    endpoints: tuple[ListedEndpoint, ...]
    route: str = ""
    """The gateway's name of the route that matched; empty where it tells none"""


class LatencySample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completed request: the served endpoint's row as seen at decision time, and what really happened.

    Zero of all latencies is the dispatch to the serving endpoint. `ttft_ms`: to the first content byte, streamed
    answers only. `tpot_ms`: (last − first) / (output_tokens − 1), streamed, at least 2 tokens by `usage`. `e2e_ms`: to
    the last byte. A label that isn't known is None, never 0.
    """

    decision_id: str
    pool: str
    model: str
    endpoint: str
    outcome: Outcome
    status: int
    streamed: bool
    received_unix_ms: float
    completed_unix_ms: float
    rung: Rung
    schema_hash: str
    features: list[float]
    queue_ms: float = 0.0
    decision_ms: float = 0.0
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    priority: int = 0
    bundle_version: str | None = None
    propensity: float = 1.0
    prediction: dict[str, float] | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    ttft_source: TtftSource | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_estimated: bool = False
    attempts: int = 1
    route: str = ""


def completed_sample(decision: DecisionMetadata, served: ListedEndpoint, **observed: Any) -> LatencySample:
    """What was known of the endpoint that served, with what was observed: LatencySample's other fields by name.

    Raises FieldError for a row that isn't one.
    """
    return LatencySample(
        decision_id=decision.decision_id,
        pool=decision.pool,
        model=decision.model,
        endpoint=served.address,
        received_unix_ms=decision.received_unix_ms,
        rung=decision.rung,
        schema_hash=decision.schema_hash,
        features=decode_row(served.features).tolist(),
        queue_ms=decision.queue_ms,
        decision_ms=decision.decision_ms,
        ttft_slo_ms=decision.ttft_slo_ms,
        tpot_slo_ms=decision.tpot_slo_ms,
        priority=decision.priority,
        bundle_version=decision.bundle_version,
        propensity=decision.propensity,
        prediction=served.prediction,
        route=decision.route,
        **observed,
    )


_decision_encoder = msgspec.msgpack.Encoder()
_decision_decoder = msgspec.msgpack.Decoder(DecisionMetadata)
_sample_encoder = msgspec.json.Encoder()
_sample_decoder = msgspec.json.Decoder(LatencySample)


def encode_decision(decision: DecisionMetadata) -> str:
    """Pack a decision into the one metadata string."""
    return base64.b64encode(_decision_encoder.encode(decision)).decode("ascii")


def decode_decision(text: str) -> DecisionMetadata:
    """Unpack the metadata string; raises FieldError for damage or an unknown version."""
    try:
        decision = _decision_decoder.decode(base64.b64decode(text, validate=True))
    except (msgspec.MsgspecError, binascii.Error, ValueError, RecursionError) as error:
        raise FieldError(
            "decision metadata", f"{len(text)} characters that don't decode ({error})", "base64 of msgpack"
        ) from None
    if decision.version != DECISION_VERSION:
        raise FieldError("decision metadata.version", str(decision.version), str(DECISION_VERSION))
    return decision


def encode_row(row: FloatMatrix) -> bytes:
    """One feature row as little-endian float32 bytes."""
    return np.ascontiguousarray(row, dtype="<f4").tobytes()


def decode_row(data: bytes) -> FloatMatrix:
    """Bytes of one feature row → float32 (F,). The schema hash beside it says how long it should be."""
    if len(data) % 4:
        raise FieldError("features", f"{len(data)} bytes", "a multiple of 4")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def encode_sample(sample: LatencySample) -> bytes:
    """A sample as JSON."""
    return _sample_encoder.encode(sample)


def decode_sample(data: bytes) -> LatencySample:
    """JSON → sample; raises FieldError that names the field, and checks the row against the schema where it is ours."""
    try:
        sample = _sample_decoder.decode(data)
    except msgspec.ValidationError as error:
        raise of_message(error, "sample") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested thousands deep
        raise FieldError(
            "sample", f"{len(data)} bytes that are not JSON ({error})", "a LatencySample as JSON"
        ) from None
    check_sample(sample)
    return sample


def check_sample(sample: LatencySample) -> None:
    """Raise FieldError for a value that no completed request can have."""
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        value = getattr(sample, name)
        if value is not None and not (_LEAST_MS <= value < 86_400_000.0):
            raise FieldError(f"sample.{name}", str(value), "0.001 to 86400000 ms (one day)")
    for name, limit in TEXT_LIMITS.items():
        length = len(getattr(sample, name))
        if not 0 < length <= limit:
            raise FieldError(f"sample.{name}", f"text of {length} characters", f"1 to {limit} characters")
    if len(sample.route) > MAX_ROUTE_CHARACTERS:
        raise FieldError(
            "sample.route", f"text of {len(sample.route)} characters", f"at most {MAX_ROUTE_CHARACTERS} characters"
        )
    for name in ("received_unix_ms", "completed_unix_ms"):
        value = getattr(sample, name)
        if not (0.0 <= value <= _LAST_UNIX_MS):
            raise FieldError(f"sample.{name}", str(value), f"0 to {_LAST_UNIX_MS:.0f} (the year 9999)")
    for output, value in (sample.prediction or {}).items():
        if not (0.0 <= value <= _MOST_PREDICTED_MS):
            raise FieldError(f"prediction.{output[:32]}", str(value), f"0 to {_MOST_PREDICTED_MS:g}")
    for name in ("input_tokens", "cached_tokens", "output_tokens"):
        value = getattr(sample, name)
        if value is not None and not (0 <= value <= 16_777_216):
            raise FieldError(f"sample.{name}", str(value), "0 to 16777216 tokens")
    if not (0.0 < sample.propensity <= 1.0):
        raise FieldError("sample.propensity", str(sample.propensity), "above 0, at most 1")
    if sample.schema_hash == SCHEMA.hash:
        SCHEMA.check(np.asarray([sample.features], np.float32))
