"""Why a request is answered by the router itself. The edge turns a Rejection into Envoy's immediate response.

Rejection
├── (client)   its request can't be routed: 400, 404, 413
└── (pool)     nothing can take it now: 503, 429
"""

from enum import StrEnum
from typing import Final

import orjson

from shared.errors import LeadtimeError


class Reason(StrEnum):
    """The closed list by which answers without an endpoint are counted and told to the client (H02)."""

    NOT_JSON = "not_json"
    INVALID_FIELD = "invalid_field"
    MODEL_MISSING = "model_missing"
    PROMPT_MISSING = "prompt_missing"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_SLO = "invalid_slo"
    BODY_TOO_LARGE = "body_too_large"
    NO_ENDPOINT = "no_endpoint"
    SUBSET_EMPTY = "subset_empty"


_TYPES: Final = {
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class Rejection(LeadtimeError):
    """An answer without an endpoint. `param` names the offending field; `message` never quotes the request's text."""

    def __init__(
        self, status: int, reason: Reason, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error as OpenAI's API shapes it."""
        return orjson.dumps(
            {
                "error": {
                    "message": str(self),
                    "type": _TYPES.get(self.status, "invalid_request_error"),
                    "param": self.param,
                    "code": self.reason.value,
                }
            }
        )
