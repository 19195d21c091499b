"""The HTTP edge: `POST /v1/samples` for completions that no access log reports (routers that see the response, other
gateways), beside the probes that every service has.

The body is one sample or a list of them, as JSON (shared/samples.py). A 2xx is sent after JetStream's acknowledgement
and not before. A list is taken whole or not at all where a sample is at fault; where NATS fails midway the caller
repeats the list, and the dedup id takes out what was stored.
"""

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from services.collector.metrics import CollectorMetrics
from services.collector.publisher import NotDeliveredError, Publisher
from services.collector.settings import CollectorSettings
from services.collector.validate import check_posted
from shared.errors import FieldError
from shared.lifecycle import require_token
from shared.samples import LatencySample, decode_sample
from shared.streams import MAX_SAMPLE_BYTES

RETRY_AFTER_S: Final = "1"


class BodyTooLargeError(Exception):
    """A body over a limit; names which."""


def add_sample_routes(
    app: FastAPI, publisher: Publisher, metrics: CollectorMetrics, settings: CollectorSettings
) -> None:
    """Add `POST /v1/samples` to the service's app."""

    @app.post("/v1/samples", dependencies=[require_token(settings)], response_model=None)
    async def post_samples(request: Request) -> JSONResponse:
        try:
            samples = read_samples(
                await _body(request, settings.max_post_bytes), settings.pool, settings.max_post_samples
            )
        except BodyTooLargeError as error:
            metrics.count_posted("too_large")
            return _error(413, str(error), "too_large", None)
        except FieldError as error:
            metrics.count_posted("invalid")
            return _error(400, str(error), "invalid_sample", error.field)
        try:
            published, duplicates = await publisher.deliver(samples)
        except NotDeliveredError as error:
            metrics.count_posted("undelivered", len(samples))
            return _error(503, str(error), "not_stored", None, {"retry-after": RETRY_AFTER_S})
        metrics.count_posted("accepted", published)
        metrics.count_posted("duplicate", duplicates)
        return JSONResponse({"published": published, "duplicates": duplicates})


def read_samples(body: bytes, pool: str, limit: int) -> list[LatencySample]:
    """Samples of a body; raises FieldError that names the first fault, with its index in a list."""
    if body.lstrip()[:1] != b"[":
        return [_checked(body, pool)]
    try:
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("samples", f"{len(body)} bytes that are not JSON ({error})", "a list of samples") from None
    if not items:
        raise FieldError("samples", "an empty list", "at least one sample")
    if len(items) > limit:
        raise BodyTooLargeError(f"{len(items)} samples; allowed: {limit}")
    samples = []
    for index, item in enumerate(items):
        try:
            samples.append(_checked(bytes(item), pool))
        except FieldError as error:
            raise FieldError(f"samples[{index}].{error.field}", error.found, error.allowed) from None
    return samples


def _checked(body: bytes, pool: str) -> LatencySample:
    if len(body) > MAX_SAMPLE_BYTES:
        raise BodyTooLargeError(f"a sample of {len(body)} bytes; allowed: {MAX_SAMPLE_BYTES}")
    sample = decode_sample(body)
    check_posted(sample, pool)
    return sample


async def _body(request: Request, limit: int) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > limit:
            raise BodyTooLargeError(f"a body over {limit} bytes")
    return bytes(parts)


def _error(
    status: int, message: str, code: str, field: str | None, headers: dict[str, str] | None = None
) -> JSONResponse:
    body: dict[str, Any] = {"error": {"message": message, "code": code, "field": field}}
    return JSONResponse(body, status_code=status, headers=headers)
