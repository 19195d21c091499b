"""The decision log: one JSON object a line, decisions with all their candidates, and outcomes as they come back. Pure.

Written by a router (`log_file.py`) where `LEADTIME_ROUTER_DECISION_LOG` names a file; read by `leadtime evaluate`. A
decision holds what a policy sees, so that another policy can be asked what it would have done: features and predictions
of every candidate, objectives, the time already spent. Samples as the collector publishes them, one JSON a line, count
as outcomes too.

No prompt, no completion, no header and no session is in it; addresses and the model's name are. Readers tolerate added
keys.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest, Slo
from services.router.scheduling.interfaces import Context
from services.router.state.snapshot import Candidates
from shared.errors import FieldError
from shared.faults import of_message
from shared.features import SCHEMA, FloatMatrix
from shared.samples import LatencySample, Outcome, Rung
from shared.verdicts import Reason, Unsampled

LOG_VERSION: Final = 1
_ALLOWED: Final = "a decision, an outcome or a sample as JSON"
_SERVER_ERROR: Final = 500
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024


class LoggedDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="decision", tag_field="kind"):
    """One decision. `features` (n, F) in the order of `feature_names`: the model's, and what else policies read.
    `predictions` by output, (n,) each.

    `chosen`: index of the endpoint that came first; `propensity`: its probability over every lot that was drawn.
    """

    decision_id: str
    received_unix_ms: float
    model: str
    profile: str
    propensity: float
    chosen: int
    addresses: list[str]
    feature_names: list[str]
    features: list[list[float]]
    predictions: dict[str, list[float]]
    input_tokens: float
    streamed: bool
    elapsed_ms: float
    version: int = LOG_VERSION
    queue_ms: float = 0.0
    max_tokens: int | None = None
    expected_output_tokens: float | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    priority: int = 0
    bundle_version: str | None = None
    rung: Rung = Rung.HEURISTIC


class LoggedOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="outcome", tag_field="kind"):
    """What became of a decision. A latency that isn't known is absent; `endpoint` "": none that is known answered."""

    decision_id: str
    endpoint: str
    outcome: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


_encoder = msgspec.json.Encoder(decimal_format="number")
_decoder = msgspec.json.Decoder(LoggedDecision | LoggedOutcome)
_sample_decoder = msgspec.json.Decoder(LatencySample)


def encode_line(entry: LoggedDecision | LoggedOutcome) -> bytes:
    """One line, with its end."""
    return _encoder.encode(entry) + b"\n"


def outcome_of(sample: LatencySample) -> LoggedOutcome:
    """A sample as an outcome."""
    return LoggedOutcome(
        decision_id=sample.decision_id,
        endpoint=sample.endpoint,
        outcome=sample.outcome.value,
        ttft_ms=sample.ttft_ms,
        tpot_ms=sample.tpot_ms,
        e2e_ms=sample.e2e_ms,
    )


def failure_of(end: Unsampled) -> LoggedOutcome | None:
    """A request that was answered with a server's error as an outcome; None: it ended in another way."""
    if end.status < _SERVER_ERROR or end.reason is Reason.SHED:
        return None
    return LoggedOutcome(decision_id=end.decision_id, endpoint=end.endpoint or "", outcome=Outcome.UPSTREAM_ERROR.value)


def logged_decision(
    decision_id: str,
    request: InferenceRequest,
    candidates: Candidates,
    rows: FloatMatrix,
    prediction: Prediction | None,
    **facts: Any,
) -> LoggedDecision:
    """`rows` float32 (n, F) of the schema; `facts`: the other fields by name."""
    beside = candidates.policy_columns()
    return LoggedDecision(
        decision_id=decision_id,
        model=request.model,
        addresses=list(candidates.addresses),
        feature_names=[*SCHEMA.names, *beside],
        features=np.column_stack([rows, *beside.values()]).tolist(),
        predictions={name: column.tolist() for name, column in prediction.columns.items()} if prediction else {},
        input_tokens=request.input_tokens,
        streamed=request.streamed,
        max_tokens=request.max_tokens,
        ttft_slo_ms=request.slo.ttft_ms,
        tpot_slo_ms=request.slo.tpot_ms,
        priority=request.priority,
        bundle_version=prediction.bundle_version if prediction else None,
        rung=prediction.rung if prediction else Rung.HEURISTIC,
        **facts,
    )


def read_lines(lines: Iterable[bytes], source: str) -> Iterator[LoggedDecision | LoggedOutcome]:
    """Entries of a log, or samples, in order; raises FieldError that names the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        if len(line) > _MAX_LINE_BYTES:
            raise FieldError(where, f"{len(line)} bytes", f"at most {_MAX_LINE_BYTES}")
        of_log = b'"kind"' in line[:64]
        try:
            entry = _decoder.decode(line) if of_log else outcome_of(_sample_decoder.decode(line))
        except msgspec.ValidationError as error:
            raise of_message(error, f"{where}: {'entry' if of_log else 'sample'}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FieldError(where, f"bytes that aren't JSON ({str(error)[:200]})", _ALLOWED) from None
        if isinstance(entry, LoggedDecision):
            _check(entry, where)
        yield entry


def _check(entry: LoggedDecision, where: str) -> None:
    count = len(entry.addresses)
    if entry.version != LOG_VERSION:
        raise FieldError(f"{where}: version", str(entry.version), str(LOG_VERSION))
    if not 0 <= entry.chosen < count:
        raise FieldError(f"{where}: chosen", str(entry.chosen), f"0 to {count - 1}")
    if not 0.0 < entry.propensity <= 1.0:
        raise FieldError(f"{where}: propensity", str(entry.propensity), "above 0, at most 1")
    if len(entry.features) != count or any(len(row) != len(entry.feature_names) for row in entry.features):
        raise FieldError(f"{where}: features", "a table of another shape", f"{count} rows, one value a name")
    for name, values in entry.predictions.items():
        if len(values) != count:
            raise FieldError(f"{where}: predictions.{name[:32]}", f"{len(values)} values", str(count))


def context_of(entry: LoggedDecision, rng: np.random.Generator) -> Context:
    """What the policy saw, as it can be seen again: without the prompt's bytes and the session."""
    count = len(entry.addresses)
    table = np.asarray(entry.features, np.float32).reshape(count, len(entry.feature_names))
    columns = {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(entry.feature_names)}

    def column(name: str) -> npt.NDArray[np.float32]:
        found = columns.get(name)
        return np.zeros(count, np.float32) if found is None else found

    candidates = Candidates(
        tuple(entry.addresses), np.arange(count), **{name: column(name) for name in _CANDIDATE_COLUMNS}
    )
    prediction = None
    if entry.predictions:
        predicted = {name: np.asarray(values, np.float32) for name, values in entry.predictions.items()}
        prediction = Prediction(predicted, entry.bundle_version or "", entry.rung)
    request = InferenceRequest(
        model=entry.model,
        prompt=b"",
        input_tokens=entry.input_tokens,
        max_tokens=entry.max_tokens,
        streamed=entry.streamed,
        slo=Slo(entry.ttft_slo_ms, entry.tpot_slo_ms),
        priority=entry.priority,
    )
    return Context(request, candidates, prediction, rng, entry.elapsed_ms, entry.expected_output_tokens)


_CANDIDATE_COLUMNS: Final = tuple(
    name for name in Candidates.__dataclass_fields__ if name not in {"addresses", "slots"}
)


@dataclass(frozen=True, slots=True)
class Joined:
    """A decision with its outcome; None where none came back."""

    decision: LoggedDecision
    outcome: LoggedOutcome | None


def join(entries: Iterable[LoggedDecision | LoggedOutcome]) -> list[Joined]:
    """Decisions in order of their receipt, each with the last outcome that was told of it."""
    decisions: dict[str, LoggedDecision] = {}
    outcomes: dict[str, LoggedOutcome] = {}
    for entry in entries:
        if isinstance(entry, LoggedDecision):
            decisions[entry.decision_id] = entry
        else:
            outcomes[entry.decision_id] = entry
    ordered = sorted(decisions.values(), key=lambda decision: decision.received_unix_ms)
    return [Joined(decision, outcomes.get(decision.decision_id)) for decision in ordered]
