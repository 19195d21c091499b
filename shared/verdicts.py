"""What becomes of a finished request: a sample, or the reason against one. The words of both ways of a completion.

The collector judges access-log entries and posted samples, the router the responses that it is shown; their counters
and a contract test rest on the same words.
"""

from dataclasses import dataclass
from enum import StrEnum

from shared.samples import LatencySample


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
    """An accepted sample with its notes, or the reason against it."""

    reason: Reason
    sample: LatencySample | None = None
    notes: tuple[Note, ...] = ()
