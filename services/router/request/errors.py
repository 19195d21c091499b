"""Why the router answers a request itself instead of letting it pass.

LeadtimeError
└── RequestRejected         one request can't be routed: status, OpenAI-shaped error, reason for the counter
    ├── InvalidRequest      400: the body or a header; names the field
    ├── UnsupportedEncoding 415: a content encoding that isn't read here
    ├── BodyTooLarge        413
    ├── UnroutableRequest   the request is sound, but no endpoint can take it (raised by `services.router.state`)
    └── Shed                429: refused now, may be tried again after a time that is told

No message carries text of the request: fields are named by their path, values by their kind. No I/O.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import orjson

from shared.errors import LeadtimeError
from shared.names import DROPPED_REASON


class RejectReason(StrEnum):
    """The closed list by which rejections are counted and that `x-leadtime-reason` carries."""

    BODY_NOT_JSON = "body_not_json"
    BODY_NOT_OBJECT = "body_not_object"
    BODY_TOO_COMPLEX = "body_too_complex"
    BODY_TOO_LARGE = "body_too_large"
    CONTENT_ENCODING = "content_encoding"
    MODEL_INVALID = "model_invalid"
    PROMPT_INVALID = "prompt_invalid"
    FIELD_INVALID = "field_invalid"
    HEADER_INVALID = "header_invalid"
    PATH_UNKNOWN = "path_unknown"
    MODEL_NOT_FOUND = "model_not_found"
    NO_ENDPOINT = "no_endpoint"
    SUBSET_EMPTY = "subset_empty"
    SLO_UNREACHABLE = "slo_unreachable"
    WAITING_ROOM_FULL = "waiting_room_full"
    WAITED_TOO_LONG = "waited_too_long"
    PUSHED_OUT = "pushed_out"


_DROPPED: Final[Mapping[RejectReason, str]] = {
    RejectReason.NO_ENDPOINT: "rejected-no-endpoints",
    RejectReason.SUBSET_EMPTY: "rejected-no-endpoints",
    RejectReason.SLO_UNREACHABLE: "rejected-saturated",
    RejectReason.WAITING_ROOM_FULL: "rejected-saturated",
    RejectReason.WAITED_TOO_LONG: "rejected-ttl-expired",
    RejectReason.PUSHED_OUT: "rejected-saturated",
}
"""The published words for the same, which clients and dashboards of the incumbent know."""
MAX_RETRY_AFTER_S: Final = 600


class RequestRejected(LeadtimeError):
    """One request that the router answers itself.

    `status`: HTTP. `error_type`, `code`, `param`: as in OpenAI's error object. `reason`: for counting.
    """

    status = 400
    error_type = "invalid_request_error"

    def __init__(
        self, message: str, reason: RejectReason, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.param = param
        self.code = code

    def headers(self) -> dict[str, str]:
        """Response headers beside the reason's own."""
        dropped = _DROPPED.get(self.reason)
        return {} if dropped is None else {DROPPED_REASON: dropped}

    def body(self) -> bytes:
        """The JSON answer in OpenAI's shape."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


class InvalidRequest(RequestRejected):
    """The body or a header breaks the interface; `param` names the field or header."""


class UnsupportedEncoding(RequestRejected):
    """The body is encoded in a way that isn't read here. The caller may let it pass unread instead."""

    status = 415


class BodyTooLarge(RequestRejected):
    """The body, or what a compressed one unpacks to, is over the limit."""

    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the request body exceeds {limit_bytes} bytes", RejectReason.BODY_TOO_LARGE, code="body_too_large"
        )


class UnroutableRequest(RequestRejected):
    """The request is sound, but no endpoint can take it."""


class Shed(RequestRejected):
    """Refused for now: no endpoint can serve it as it asks, and its priority allows to say so."""

    status = 429
    error_type = "rate_limit_error"

    def __init__(self, reason: RejectReason, retry_after_ms: float) -> None:
        """`retry_after_ms`: when it may fare better, as predicted."""
        self.retry_after_s = min(max(math.ceil(retry_after_ms / 1e3), 1), MAX_RETRY_AFTER_S)
        super().__init__(
            f"no endpoint can serve this request as it asks at present; try again in {self.retry_after_s} s",
            reason,
            code=reason.value,
        )

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "retry-after": str(self.retry_after_s)}
