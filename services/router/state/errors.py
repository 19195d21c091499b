"""Why no endpoint can take a request.

RequestRejected
└── UnroutableRequest
    ├── NoEndpoint      503: no ready endpoint serves the model, or none lies in the subset hint
    └── ModelNotFound   404: every known endpoint has told its models, and this one isn't among them

No I/O.
"""

from services.router.request.errors import RejectReason, UnroutableRequest


class NoEndpoint(UnroutableRequest):
    """Nobody can answer at this moment; a retry may succeed."""

    status = 503
    error_type = "server_error"

    def __init__(self, reason: RejectReason = RejectReason.NO_ENDPOINT) -> None:
        text = (
            "no endpoint of the subset hint is ready for this model"
            if reason is RejectReason.SUBSET_EMPTY
            else "no endpoint is ready for this model"
        )
        super().__init__(text, reason, code="no_endpoint")


class ModelNotFound(UnroutableRequest):
    """Nobody serves the model. Its name is the client's own text: it is answered to the client, never logged."""

    status = 404

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model[:200]}' does not exist.",
            RejectReason.MODEL_NOT_FOUND,
            param="model",
            code="model_not_found",
        )
