"""Why a step of the ladder gave no prediction: a closed set, each a label of a counter and a field of the error."""

from enum import StrEnum

from shared.errors import LeadtimeError


class FailureReason(StrEnum):
    """What went wrong with one call or one step."""

    NO_REPLICA = "no_replica"
    """None is known, or none may be called."""
    REFUSED = "refused"
    """The connection could not be made."""
    RESET = "reset"
    """The connection ended before the answer."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """503 for another reason than `no_bundle`: too many rows wait, or a gateway has nobody behind it."""
    STATUS = "status"
    """Another status than 200: wrong pool, schema or token, or a fault of the predictor."""
    REJECTED = "rejected"
    """400 or 413: the rows are at fault, every replica would say the same."""
    BAD_ANSWER = "bad_answer"
    """Not n × K finite numbers with a bundle's version and K names."""
    OVERLOADED = "overloaded"
    """Too many rows wait here."""
    NO_BUNDLE = "no_bundle"
    """No verified bundle: in this process, or, as it says, in the predictor."""
    FAULT = "fault"
    """Anything else: a fault of ours, logged with its traceback."""


class PredictError(LeadtimeError):
    """A call that gave no prediction."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
