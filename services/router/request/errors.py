"""Why the router answers a request itself instead of letting it pass.

LeadtimeError
└── RequestRejected         one request can't be routed: status, OpenAI-shaped error, reason for the counter
    ├── InvalidRequest      400: the body or a header; names the field
    ├── UnsupportedEncoding 415: a content encoding that isn't read here
    ├── BodyTooLarge        413
    └── UnroutableRequest   the request is sound, but no endpoint can take it (raised by `services.router.state`)

No message carries text of the request: fields are named by their path, values by their kind. No I/O.
"""

from enum import StrEnum

import orjson

from shared.errors import LeadtimeError


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
