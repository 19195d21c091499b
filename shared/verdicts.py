"""What becomes of a finished request: a sample, or the reason against one. The words of both ways of a completion.

The collector judges access-log entries and posted samples, the router the responses that it is shown; their counters
and a contract test rest on the same words. Of a request without a sample the router is told by `Unsampled`, JSON on a
plain NATS subject: for people who look at a decision, and to teach nothing.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from shared.errors import FieldError
from shared.faults import of_message
from shared.samples import TEXT_LIMITS, LatencySample

MAX_ATTEMPTS: Final = 1_000


class Reason(StrEnum):
    """What became of a finished request; all but `accepted` make no sample. Some only an access log can tell."""

    ACCEPTED = "accepted"
    INTERMEDIATE = "intermediate"
    PROBE = "probe"
    SHED = "shed"
    ABORTED_BEFORE_DISPATCH = "aborted_before_dispatch"
    NO_ENDPOINT = "no_endpoint"
    NO_METADATA = "no_metadata"
    BAD_METADATA = "bad_metadata"
    WRONG_POOL = "wrong_pool"
    RETRIED_WITHOUT_SERVER = "retried_without_server"
    UNLISTED_ENDPOINT = "unlisted_endpoint"
    BAD_FEATURES = "bad_features"
    NOT_SUCCESS = "not_success"
    EMPTY = "empty"
    NO_TIMING = "no_timing"
    CLOCK_JUMP = "clock_jump"
    IMPLAUSIBLE = "implausible"


class Note(StrEnum):
    """What an accepted sample lacks, or what was made of it."""

    NO_FIRST_CONTENT = "no_first_content"
    NO_USAGE = "no_usage"
    HELD_BACK = "held_back"
    CLOSED_AFTER_USAGE = "closed_after_usage"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An accepted sample with its notes, or the reason against it.

    `status`, `endpoint`, `bodiless`: what the router, that judges without an access log, has seen of an answer.
    """

    reason: Reason
    sample: LatencySample | None = None
    notes: tuple[Note, ...] = ()
    status: int = 0
    endpoint: str | None = None
    bodiless: bool = False


class Unsampled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a decided request ended that made no sample. `status`: the client's, 0 where it left before there was one.

    `endpoint`: the one that answered, or was tried last; None where nobody says. `attempts`: how many were tried.
    `bodiless`: a whole answer of 2xx had not one byte.
    """

    decision_id: str
    reason: Reason
    status: int = 0
    endpoint: str | None = None
    attempts: int = 1
    bodiless: bool = False


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Unsampled)


def encode_unsampled(end: Unsampled) -> bytes:
    return _encoder.encode(end)


def decode_unsampled(data: bytes) -> Unsampled:
    """JSON → message; raises FieldError that names the field."""
    try:
        end = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise of_message(error, "unsampled") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("unsampled", f"{len(data)} bytes that are not JSON ({error})", "JSON") from None
    for name, text in (("decision_id", end.decision_id), ("endpoint", "-" if end.endpoint is None else end.endpoint)):
        if not 0 < len(text) <= TEXT_LIMITS[name]:
            raise FieldError(f"unsampled.{name}", f"text of {len(text)} characters", f"1 to {TEXT_LIMITS[name]}")
    if not 1 <= end.attempts <= MAX_ATTEMPTS:
        raise FieldError("unsampled.attempts", str(end.attempts), f"1 to {MAX_ATTEMPTS}")
    if not 0 <= end.status <= 999:
        raise FieldError("unsampled.status", str(end.status), "0 to 999")
    return end
