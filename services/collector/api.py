"""The HTTP edge: `POST /v1/samples` for completions that no access log reports (routers that see the response, other
gateways), beside the probes that every service has.

The body is one sample or a list of them, as JSON (shared/samples.py). A 2xx is sent after JetStream's acknowledgement
and not before. A list is taken whole or not at all where a sample breaks the interface; where NATS fails midway the
caller repeats the list, and the dedup id takes out what was stored. Sound samples that teach nothing (validate.py) are
left out and counted by their reason; no repetition would make them better, so the answer is still a 2xx.
"""

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from services.collector.metrics import CollectorMetrics
from services.collector.outbox import Fate
from services.collector.publisher import NotDeliveredError, Publisher
from services.collector.settings import CollectorSettings
from services.collector.validate import judge_posted
from shared.errors import FieldError
from shared.lifecycle import require_token
from shared.samples import decode_sample
from shared.streams import MAX_SAMPLE_BYTES
from shared.verdicts import Verdict

RETRY_AFTER_S: Final = "1"
# What of a sound sample isn't new to the stream, by its fate there.
_COUNTED_AS: Final = {Fate.DUPLICATE: "duplicate", Fate.DEAD_LETTER: "dead_letter"}


class BodyTooLargeError(Exception):
    """A body over a limit; names which."""


def add_sample_routes(
    app: FastAPI, publisher: Publisher, metrics: CollectorMetrics, settings: CollectorSettings
) -> None:
    """Add `POST /v1/samples` to the service's app."""

    @app.post("/v1/samples", dependencies=[require_token(settings)], response_model=None)
    async def post_samples(request: Request) -> JSONResponse:
        try:
            verdicts = read_verdicts(
                await _body(request, settings.max_post_bytes), settings.pool, settings.max_post_samples
            )
        except BodyTooLargeError as error:
            metrics.count_posted("too_large")
            return _error(413, str(error), "too_large", None)
        except FieldError as error:
            metrics.count_posted("invalid")
            return _error(400, str(error), "invalid_sample", error.field)
        accepted = [verdict for verdict in verdicts if verdict.sample is not None]
        try:
            stored = await publisher.deliver([verdict.sample for verdict in accepted if verdict.sample is not None])
        except NotDeliveredError as error:
            metrics.count_posted("undelivered", len(accepted))
            return _error(503, str(error), "not_stored", None, {"retry-after": RETRY_AFTER_S})
        for verdict in verdicts:  # after the delivery: a list that is sent again would count twice
            if verdict.sample is None:
                metrics.count_posted(verdict.reason.value)
        for verdict, fate in zip(accepted, stored, strict=True):
            metrics.count_posted(_COUNTED_AS.get(fate, "accepted"))
            if fate not in _COUNTED_AS and verdict.sample is not None:
                metrics.observe(verdict.sample, verdict.notes)
        duplicates, dead = stored.count(Fate.DUPLICATE), stored.count(Fate.DEAD_LETTER)
        return JSONResponse(
            {
                "published": len(stored) - duplicates - dead,
                "duplicates": duplicates,
                "rejected": len(verdicts) - len(accepted) + dead,
            }
        )


def read_verdicts(body: bytes, pool: str, limit: int) -> list[Verdict]:
    """Judged samples of a body; raises FieldError that names the first fault, with its index in a list."""
    if body.lstrip()[:1] != b"[":
        return [_judged(body, pool)]
    try:
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("samples", f"{len(body)} bytes that are not JSON ({error})", "a list of samples") from None
    if not items:
        raise FieldError("samples", "an empty list", "at least one sample")
    if len(items) > limit:
        raise BodyTooLargeError(f"{len(items)} samples; allowed: {limit}")
    verdicts = []
    for index, item in enumerate(items):
        try:
            verdicts.append(_judged(bytes(item), pool))
        except FieldError as error:
            raise FieldError(f"samples[{index}].{error.field}", error.found, error.allowed) from None
    return verdicts


def _judged(body: bytes, pool: str) -> Verdict:
    if len(body) > MAX_SAMPLE_BYTES:
        raise BodyTooLargeError(f"a sample of {len(body)} bytes; allowed: {MAX_SAMPLE_BYTES}")
    return judge_posted(decode_sample(body), pool)


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
