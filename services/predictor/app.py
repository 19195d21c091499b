"""The HTTP edge: `POST /v1/predict` in JSON and raw float32, `GET /v1/status`, and the probes of every service.

`/v1/predict` is a plain ASGI endpoint on the FastAPI app: the body goes from the socket into numpy with no object per
row, and `Edge` leads it past the app's middleware. All of a request is checked before its rows are queued; every
refusal names what was found and what is allowed. Bodies of errors: `{"error": {"reason", "message", "field", "found",
"allowed"}}`, the last three where one field is at fault.
"""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.predictor.batcher import Answer, Batcher, ModelFaultError, NoBundleError
from services.predictor.metrics import PredictorMetrics, Reason
from services.predictor.settings import PredictorSettings
from services.predictor.slot import Served, Slot
from shared.clock import Clock
from shared.coalescing import OverloadedError
from shared.errors import FieldError
from shared.features import SCHEMA, SCHEMA_HASH, FloatMatrix
from shared.lifecycle import Readiness, probe_app, require_token
from shared.names import HEADER_BUNDLE, HEADER_OUTPUTS, HEADER_POOL, HEADER_SCHEMA, PREDICT_PATH, ROWS_CONTENT_TYPE
from shared.prediction import check_header, decode_request, rows_from_bytes, rows_from_json

JSON_CONTENT_TYPE: Final = "application/json"
_RAW: Final = ROWS_CONTENT_TYPE.encode()
_JSON: Final = JSON_CONTENT_TYPE.encode()
_POOL: Final = HEADER_POOL.encode()
_SCHEMA: Final = HEADER_SCHEMA.encode()
# A client that asks again sooner meets the same answer: bundles come every few seconds.
_RETRY_AFTER_S: Final = b"1"

Headers = list[tuple[bytes, bytes]]


class ErrorAnswer(Exception):
    """An answer other than 200, with the facts its body tells."""

    def __init__(self, status: int, reason: Reason, message: str, fault: FieldError | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.fault = fault

    def body(self) -> bytes:
        error: dict[str, str] = {"reason": self.reason.value, "message": str(self)}
        if self.fault is not None:
            error |= {"field": self.fault.field, "found": self.fault.found, "allowed": self.fault.allowed}
        return orjson.dumps({"error": error})


class PredictEndpoint:
    """`POST /v1/predict` as an ASGI application."""

    def __init__(self, settings: PredictorSettings, batchers: Mapping[str, Batcher], metrics: PredictorMetrics) -> None:
        self._batchers = batchers
        self._metrics = metrics
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_ms / 1e3
        token = settings.http_token
        self._authorization = f"Bearer {token.get_secret_value()}".encode() if token else None
        # What a raw answer's headers say of a bundle; made once per bundle.
        self._heads: dict[str, tuple[Served, Headers]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            content_type, pool, schema, length = self._head(scope["headers"])
            body = await self._body(receive, length)
            if body is None:
                self._metrics.failed(499, Reason.DISCONNECTED)
                return
            if content_type == _RAW:
                answer = await self._predict(*_raw_rows(body, pool, schema, self._batchers))
                payload: bytes = np.ascontiguousarray(answer.values, "<f4").tobytes()
                headers = self._raw_head(answer.served)
            elif content_type == _JSON:
                answer = await self._predict(*_json_rows(body, self._batchers))
                payload = orjson.dumps(
                    {
                        "bundle": answer.served.model.bundle_version,
                        "outputs": answer.served.model.outputs,
                        "predictions": np.ascontiguousarray(answer.values),
                    },
                    option=orjson.OPT_SERIALIZE_NUMPY,
                )
                headers = [(b"content-type", _JSON)]
            else:
                allowed = f"{JSON_CONTENT_TYPE} or {ROWS_CONTENT_TYPE}"
                found = content_type.decode("latin-1")[:64] or "none"
                fault = FieldError("content-type", found, allowed)
                raise ErrorAnswer(415, Reason.CONTENT_TYPE, str(fault), fault)
        except ErrorAnswer as refusal:
            self._metrics.failed(refusal.status, refusal.reason)
            headers = [(b"content-type", _JSON)]
            if refusal.status == 503:
                headers.append((b"retry-after", _RETRY_AFTER_S))
            if refusal.reason in _UNREAD_BODY:
                headers.append((b"connection", b"close"))
            await _respond(send, refusal.status, headers, refusal.body())
        else:
            self._metrics.answered(len(answer.values), answer.queue_ms)
            await _respond(send, 200, headers, payload)

    def _head(self, headers: Headers) -> tuple[bytes, str, str, int | None]:
        """(content type without parameters, pool, schema, content length); raises ErrorAnswer."""
        content_type = pool = schema = authorization = b""
        length: int | None = None
        for name, value in headers:
            if name == b"content-type":
                content_type = value.partition(b";")[0].strip().lower()
            elif name == _POOL:
                pool = value
            elif name == _SCHEMA:
                schema = value
            elif name == b"content-length":
                length = int(value)
            elif name == b"authorization":
                authorization = value
        if self._authorization is not None and not hmac.compare_digest(authorization, self._authorization):
            raise ErrorAnswer(401, Reason.UNAUTHORIZED, "a bearer token is needed")
        if length is not None and length > self._max_body_bytes:
            raise self._too_large(length)
        return content_type, pool.decode("latin-1"), schema.decode("latin-1"), length

    def _too_large(self, size: int) -> ErrorAnswer:
        fault = FieldError("body", f"{size} bytes or more", f"at most {self._max_body_bytes} bytes")
        return ErrorAnswer(413, Reason.TOO_LARGE, str(fault), fault)

    async def _body(self, receive: Receive, length: int | None) -> bytes | None:
        """The whole body, or None when the client went away; raises ErrorAnswer."""
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            whole: bytes = message.get("body", b"")
            if len(whole) > self._max_body_bytes:
                raise self._too_large(len(whole))
            return whole
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_body_bytes:
                        raise self._too_large(size)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    message = await receive()
        except TimeoutError:
            expected = "a body" if length is None else f"{length} bytes"
            fault = FieldError("body", f"{size} bytes", f"{expected} within {self._body_timeout_s:g} s")
            raise ErrorAnswer(408, Reason.BODY_TIMEOUT, str(fault), fault) from None

    async def _predict(self, batcher: Batcher, rows: FloatMatrix) -> Answer:
        try:
            return await batcher.predict(rows)
        except NoBundleError as error:
            raise ErrorAnswer(503, Reason.NO_BUNDLE, str(error)) from None
        except OverloadedError as error:
            raise ErrorAnswer(503, Reason.OVERLOADED, str(error)) from None
        except ModelFaultError as error:
            raise ErrorAnswer(500, Reason.MODEL_FAULT, str(error)) from None

    def _raw_head(self, served: Served) -> Headers:
        known = self._heads.get(served.manifest.pool)
        if known is None or known[0] is not served:
            outputs = ",".join(served.model.outputs)
            known = (
                served,
                [
                    (b"content-type", _RAW),
                    (HEADER_BUNDLE.encode(), served.model.bundle_version.encode()),
                    (HEADER_OUTPUTS.encode(), outputs.encode()),
                ],
            )
            self._heads[served.manifest.pool] = known
        return known[1]


# The rest of the body may still be on its way: the connection can't be used again.
_UNREAD_BODY: Final = frozenset({Reason.TOO_LARGE, Reason.BODY_TIMEOUT, Reason.UNAUTHORIZED})


def _raw_rows(body: bytes, pool: str, schema: str, batchers: Mapping[str, Batcher]) -> tuple[Batcher, FloatMatrix]:
    try:
        check_header(pool, schema)
    except FieldError as fault:
        message = f"{HEADER_POOL} and {HEADER_SCHEMA} headers are needed: {fault}"
        raise ErrorAnswer(400, Reason.MALFORMED, message, fault) from None
    batcher = _batcher(pool, schema, batchers)
    try:
        rows = rows_from_bytes(body, len(SCHEMA))
    except FieldError as fault:
        raise ErrorAnswer(400, Reason.SHAPE, str(fault), fault) from None
    return batcher, _checked(rows)


def _json_rows(body: bytes, batchers: Mapping[str, Batcher]) -> tuple[Batcher, FloatMatrix]:
    try:
        request = decode_request(body)
    except FieldError as fault:
        raise ErrorAnswer(400, Reason.MALFORMED, str(fault), fault) from None
    batcher = _batcher(request.pool, request.schema, batchers)
    try:
        rows = rows_from_json(request.rows, len(SCHEMA))
    except FieldError as fault:
        raise ErrorAnswer(400, Reason.SHAPE, str(fault), fault) from None
    return batcher, _checked(rows)


def _batcher(pool: str, schema: str, batchers: Mapping[str, Batcher]) -> Batcher:
    batcher = batchers.get(pool)
    if batcher is None:
        fault = FieldError("pool", pool, ", ".join(batchers))
        raise ErrorAnswer(404, Reason.POOL, str(fault), fault)
    if schema != SCHEMA_HASH:
        fault = FieldError("schema", schema, SCHEMA_HASH)
        raise ErrorAnswer(409, Reason.SCHEMA, str(fault), fault)
    return batcher


def _checked(rows: FloatMatrix) -> FloatMatrix:
    try:
        SCHEMA.check(rows)
    except FieldError as fault:
        raise ErrorAnswer(400, Reason.VALUE, str(fault), fault) from None
    return rows


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


class Edge:
    """The ASGI application that is served: predictions go straight to their endpoint, all else through FastAPI.

    FastAPI's middleware and route matching cost 28 µs a call (measured, 100 rows, raw), which is a third of what a
    call costs without its model.
    """

    def __init__(self, app: FastAPI, predict: PredictEndpoint) -> None:
        self.app = app
        self._predict = predict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PREDICT_PATH and scope["method"] == "POST":
            await self._predict(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def build_app(
    settings: PredictorSettings,
    batchers: Mapping[str, Batcher],
    metrics: PredictorMetrics,
    readiness: Readiness,
    registry: CollectorRegistry,
    clock: Clock,
) -> Edge:
    """The service's routes."""
    app = probe_app("predictor", readiness, registry)
    predict = PredictEndpoint(settings, batchers, metrics)
    app.router.routes.append(Route(PREDICT_PATH, predict, methods=["POST"]))

    @app.get("/v1/status", dependencies=[require_token(settings)])
    async def status() -> dict[str, Any]:
        return {
            "service": "predictor",
            "schema": SCHEMA_HASH,
            "ready": readiness.report(),
            "device": {"asked": settings.device.value, "policy": settings.device_policy.value},
            "store_errors": metrics.store.errors,
            "pools": {
                pool: {**_pool_status(batcher.slot, clock), "waiting_rows": batcher.waiting_rows()}
                for pool, batcher in batchers.items()
            },
        }

    return Edge(app, predict)


def _pool_status(slot: Slot, clock: Clock) -> dict[str, Any]:
    now_ms = clock.unix_ms()
    refused = slot.last_refused
    report: dict[str, Any] = {"bundle": None, "last_refused": None}
    if refused is not None:
        report["last_refused"] = {
            "version": refused.version,
            "reason": refused.reason.value,
            "detail": refused.detail,
            "age_s": round((now_ms - refused.at_unix_ms) / 1e3, 3),
        }
    if (served := slot.current) is not None:
        manifest = served.manifest
        report["bundle"] = {
            "version": manifest.version,
            "outputs": manifest.outputs,
            "renderings": {model.rendering: model.provider for model in served.models},
            "crossover_rows": served.crossover_rows,
            "timings_ms": {
                str(rows): {"cpu": round(cpu, 3), "device": round(device, 3)}
                for rows, (cpu, device) in served.timings_ms.items()
            },
            "device_fallback": served.fallback,
            "window_samples": manifest.window_samples,
            "trained_age_s": round((now_ms - manifest.created_unix_ms) / 1e3, 3),
            "served_s": round((now_ms - served.since_unix_ms) / 1e3, 3),
        }
    return report
