"""Accepts a finished request as a sample, or says why not. Pure; never raises for anything an entry holds.

A sample teaches only if it is true, so each way in which an entry isn't a completed request of a known endpoint has
its own reason, counted. Requests that broke off after their dispatch (client abort, reset, timeout) are kept with
their outcome: their latency is at least this, which the evaluator uses and the fit doesn't. The features and the
prediction are those of the endpoint that really served.

Limits: one entry at a time, no memory. Doubles are JetStream's to find, by decision id.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from services.collector.entry import AccessLogEntry
from services.collector.labels import ClockJumpError, Latencies, latencies
from shared.errors import FieldError
from shared.labels import MIN_TPOT_MS, estimated_output_tokens
from shared.samples import (
    MAX_ROUTE_CHARACTERS,
    TEXT_LIMITS,
    DecisionMetadata,
    LatencySample,
    ListedEndpoint,
    Outcome,
    TtftSource,
    check_sample,
    completed_sample,
    decode_decision,
)
from shared.verdicts import MAX_ATTEMPTS, Note, Reason, Unsampled, Verdict

DECISION_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""A decision id stands in a NATS header."""
PRIORITY_LIMIT: Final = 2**31 - 1

_ABORTS: Final = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
_TIMEOUTS: Final = frozenset(
    {"upstream_request_timeout", "stream_idle_timeout", "duration_timeout", "upstream_max_stream_duration_reached"}
)
_RESETS: Final = frozenset(
    {"upstream_remote_reset", "upstream_connection_termination", "local_reset", "upstream_protocol_error"}
)
_NOT_SENT: Final = frozenset({"upstream_connection_failure", "no_healthy_upstream", "upstream_overflow"})


@dataclass(frozen=True, slots=True)
class Probes:
    """How synthetic requests are known: they run on the same servers but are nobody's traffic."""

    user_agent_prefixes: tuple[str, ...] = ("kube-probe/", "GoogleHC/", "ELB-HealthChecker/", "Prometheus/")
    paths: frozenset[str] = frozenset({"/health", "/healthz", "/readyz", "/ping", "/version", "/metrics", "/v1/models"})

    def match(self, entry: AccessLogEntry) -> bool:
        return (
            entry.probe_marked
            or entry.path in self.paths
            or entry.method in {"GET", "HEAD", "OPTIONS"}
            or entry.user_agent.startswith(self.user_agent_prefixes)
        )


def judge(entry: AccessLogEntry, pool: str, probes: Probes) -> Verdict:
    """The verdict on one entry, for the collector of `pool`."""
    if entry.intermediate:
        return Verdict(Reason.INTERMEDIATE)
    if probes.match(entry):
        return Verdict(Reason.PROBE)
    if entry.upstream_address is None or entry.flags & _NOT_SENT:
        return Verdict(_undispatched(entry))
    if entry.decision is None:
        return Verdict(Reason.NO_METADATA)
    try:
        decision = decode_decision(entry.decision)
        _check_told("decision", decision)
    except FieldError:
        return Verdict(Reason.BAD_METADATA)
    if decision.pool != pool:
        return Verdict(Reason.WRONG_POOL)
    served = next((listed for listed in decision.endpoints if listed.address == entry.upstream_address), None)
    if served is None:
        return Verdict(Reason.UNLISTED_ENDPOINT)
    return _judge_outcome(entry, decision, served)


def unsampled(entry: AccessLogEntry, reason: Reason) -> Unsampled | None:
    """What the router that decided is told of an entry without a sample; None where it decided nothing, or goes on."""
    if entry.decision is None or reason in {Reason.INTERMEDIATE, Reason.BAD_METADATA, Reason.WRONG_POOL}:
        return None
    try:
        decision = decode_decision(entry.decision)
        _check_told("decision", decision)
    except FieldError:
        return None
    return Unsampled(
        decision_id=decision.decision_id,
        reason=reason,
        status=entry.status,
        endpoint=entry.upstream_address,
        attempts=min(entry.attempts, MAX_ATTEMPTS),
        bodiless=reason is Reason.EMPTY and entry.response_bytes == 0,
    )


def _undispatched(entry: AccessLogEntry) -> Reason:
    """Why a request reached no endpoint, or is not known to have."""
    if entry.flags & _ABORTS or entry.status == 0:
        return Reason.ABORTED_BEFORE_DISPATCH
    if entry.flags:
        return Reason.NO_ENDPOINT
    if entry.attempts > 1:
        return Reason.RETRIED_WITHOUT_SERVER
    # No flag of Envoy's: the answer is the picker's own.
    return Reason.SHED if entry.status in {429, 503} else Reason.NOT_SUCCESS


def _judge_outcome(entry: AccessLogEntry, decision: DecisionMetadata, served: ListedEndpoint) -> Verdict:
    outcome, closed_after_usage = _outcome(entry)
    if outcome is None:
        return Verdict(Reason.NOT_SUCCESS)
    complete = outcome is Outcome.OK
    if complete and (entry.response_bytes == 0 or entry.output_tokens == 0):
        return Verdict(Reason.EMPTY)
    if entry.tx_end_us is None:
        return Verdict(Reason.ABORTED_BEFORE_DISPATCH if outcome is Outcome.CLIENT_ABORT else Reason.NO_TIMING)
    streamed = decision.streamed if entry.event_stream is None else entry.event_stream
    try:
        measured = latencies(entry, streamed=streamed, ended=complete)
    except ClockJumpError:
        return Verdict(Reason.CLOCK_JUMP)
    if measured is None:
        return Verdict(Reason.NO_TIMING)
    try:
        sample = _sample(entry, decision, served, outcome, measured, streamed=streamed)
        check_sample(sample)
    except FieldError as error:
        of_the_row = error.field.startswith(("features", "rows", "prediction"))
        return Verdict(Reason.BAD_FEATURES if of_the_row else Reason.IMPLAUSIBLE)
    notes = []
    if complete and streamed and measured.ttft_ms is None:
        notes.append(Note.NO_FIRST_CONTENT)
    if complete and entry.output_tokens is None:
        notes.append(Note.NO_USAGE)
    if measured.held_back:
        notes.append(Note.HELD_BACK)
    if closed_after_usage:
        notes.append(Note.CLOSED_AFTER_USAGE)
    return Verdict(Reason.ACCEPTED, sample, tuple(notes))


def _outcome(entry: AccessLogEntry) -> tuple[Outcome | None, bool]:
    """How a dispatched request ended; None for a complete answer that isn't a 2xx.

    The second value marks an answer whose client left after the usage: many clients close at `[DONE]` without reading
    the end of the body. Usage comes last, so the generation is complete.
    """
    success = 200 <= entry.status < 300
    if entry.flags & _ABORTS or entry.status == 0 or "downstream_remote_disconnect" in entry.details:
        if success and entry.output_tokens and entry.first_content_unix_us is not None:
            return Outcome.OK, True
        return Outcome.CLIENT_ABORT, False
    if entry.flags & _TIMEOUTS:
        return Outcome.TIMEOUT, False
    if entry.flags & _RESETS or "upstream_reset_after_response_started" in entry.details:
        return Outcome.UPSTREAM_RESET, False
    return (Outcome.OK if success else None), False


def _sample(
    entry: AccessLogEntry,
    decision: DecisionMetadata,
    served: ListedEndpoint,
    outcome: Outcome,
    measured: Latencies,
    *,
    streamed: bool,
) -> LatencySample:
    estimated = entry.output_tokens is None and entry.response_bytes > 0
    sample = completed_sample(
        decision,
        served,
        outcome=outcome,
        status=entry.status,
        streamed=streamed,
        completed_unix_ms=(entry.start_unix_us + entry.duration_us) / 1e3,
        ttft_ms=measured.ttft_ms,
        tpot_ms=measured.tpot_ms,
        e2e_ms=measured.e2e_ms,
        ttft_source=TtftSource.ACCESS_LOG if measured.ttft_ms is not None else None,
        input_tokens=entry.input_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=(
            estimated_output_tokens(entry.response_bytes, streamed=streamed) if estimated else entry.output_tokens
        ),
        output_tokens_estimated=estimated,
        attempts=entry.attempts,
    )
    _check_finite("features", *sample.features)
    _check_finite("prediction", *(sample.prediction or {}).values())
    return sample


_REASONS_AGAINST: Final = {
    Outcome.SHED: Reason.SHED,
    Outcome.NO_ENDPOINT: Reason.NO_ENDPOINT,
    Outcome.CLIENT_ERROR: Reason.NOT_SUCCESS,
    Outcome.UPSTREAM_ERROR: Reason.NOT_SUCCESS,
}


def judge_posted(sample: LatencySample, pool: str) -> Verdict:
    """The verdict on one posted sample, for the collector of `pool`: the same rules as for entries.

    Raises FieldError for one that breaks the interface; its values were checked as it was read.
    """
    check_posted(sample, pool)
    against = _REASONS_AGAINST.get(sample.outcome)
    if against is not None:
        return Verdict(against)
    if sample.outcome is Outcome.OK:
        if not 200 <= sample.status < 300:
            return Verdict(Reason.NOT_SUCCESS)
        if sample.output_tokens == 0:
            return Verdict(Reason.EMPTY)
        if sample.e2e_ms is None and sample.ttft_ms is None and sample.tpot_ms is None:
            return Verdict(Reason.NO_TIMING)
    elif sample.e2e_ms is None and sample.ttft_ms is None:
        return Verdict(Reason.NO_TIMING)
    counted = not sample.output_tokens_estimated and (sample.output_tokens or 0) >= 2
    if sample.tpot_ms is not None and (sample.outcome is not Outcome.OK or not sample.streamed or not counted):
        return Verdict(Reason.IMPLAUSIBLE)
    notes = []
    if sample.outcome is Outcome.OK and sample.streamed and sample.ttft_ms is None and sample.attempts == 1:
        notes.append(Note.NO_FIRST_CONTENT)
    if sample.outcome is Outcome.OK and (sample.output_tokens is None or sample.output_tokens_estimated):
        notes.append(Note.NO_USAGE)
    if sample.tpot_ms is not None and sample.tpot_ms < MIN_TPOT_MS:
        sample = msgspec.structs.replace(sample, tpot_ms=None)
        notes.append(Note.HELD_BACK)
    return Verdict(Reason.ACCEPTED, sample, tuple(notes))


def check_posted(sample: LatencySample, pool: str) -> None:
    """Raise FieldError for a posted sample that no sender should make, or not for this collector."""
    _check_told("sample", sample)
    if sample.pool != pool:
        raise FieldError("sample.pool", f"'{sample.pool[:63]}'", f"'{pool}', the pool of this collector")
    if sample.ttft_ms is not None and not sample.streamed:
        raise FieldError("sample.ttft_ms", "a value for an answer that wasn't streamed", "absent")
    if sample.ttft_ms is not None and sample.e2e_ms is not None and sample.ttft_ms > sample.e2e_ms:
        raise FieldError("sample.ttft_ms", str(sample.ttft_ms), f"at most e2e_ms ({sample.e2e_ms})")
    _check_finite("sample.completed_unix_ms", sample.completed_unix_ms)
    _check_finite("sample.features", *sample.features)
    _check_finite("sample.prediction", *(sample.prediction or {}).values())


def _check_told(message: str, told: DecisionMetadata | LatencySample) -> None:
    """Check what a router says of a request: both messages carry it, and readers must be able to read it as JSON."""
    if DECISION_ID_PATTERN.fullmatch(told.decision_id) is None:
        raise FieldError(
            f"{message}.decision_id", f"text of {len(told.decision_id)} characters", "1 to 64 of A-Z a-z 0-9 . _ : -"
        )
    limit = TEXT_LIMITS["model"]
    if not 0 < len(told.model) <= limit:
        raise FieldError(f"{message}.model", f"text of {len(told.model)} characters", f"1 to {limit} characters")
    if len(told.route) > MAX_ROUTE_CHARACTERS:
        raise FieldError(
            f"{message}.route", f"text of {len(told.route)} characters", f"at most {MAX_ROUTE_CHARACTERS} characters"
        )
    if not abs(told.priority) <= PRIORITY_LIMIT:
        raise FieldError(f"{message}.priority", "a number beyond 32 bits", f"-{PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    for name in ("received_unix_ms", "queue_ms", "decision_ms", "propensity", "ttft_slo_ms", "tpot_slo_ms"):
        value = getattr(told, name)
        if value is not None:
            _check_finite(f"{message}.{name}", value)


def _check_finite(field: str, *values: float) -> None:
    """JSON has no word for NaN and infinity."""
    if not all(map(math.isfinite, values)):
        raise FieldError(field, "NaN or infinity", "finite numbers")
