"""How every service starts, answers probes and stops: the same in all four.

`run` reads the settings, configures logging, runs the service's composition root on uvloop and hands it a stop event
that SIGTERM or SIGINT sets; a second signal ends the process at once, and so does a watchdog when the loop is frozen.
`probe_app` gives `/healthz`, `/readyz` and `/metrics`; a service adds its routes to it. `serve_http` serves an app on a
socket that is bound first, so that port 0 works and a taken port stops the start. `background` runs what goes on beside
the server.
"""

import asyncio
import contextlib
import gc
import hmac
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import structlog
import uvicorn
import uvloop
from fastapi import Depends, FastAPI, HTTPException, Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route

from shared import settings as settings_module
from shared.errors import ConfigurationError, reason_of
from shared.faults import in_words
from shared.settings import ServiceSettings, is_loopback
from shared.telemetry import configure_logging
from shared.watchdog import Watchdog

Settings = TypeVar("Settings", bound=ServiceSettings)
EXIT_CONFIGURATION = 78  # EX_CONFIG of sysexits.h


class Readiness:
    """Named conditions a service waits for. Ready when none is unmet; each says why.

    What a service can do without for a while is reported beside them as degraded, and doesn't make it unready.
    """

    __slots__ = ("_degraded", "_unmet", "stopping")

    def __init__(self, *conditions: str) -> None:
        self._unmet = dict.fromkeys(conditions, "not yet")
        self._degraded: dict[str, str] = {}
        self.stopping = False

    def met(self, condition: str) -> None:
        self._unmet.pop(condition, None)

    def unmet(self, condition: str, reason: str) -> None:
        self._unmet[condition] = reason

    def degraded(self, part: str, reason: str | None) -> None:
        """Say what works less well at the moment, and why; None: it works again."""
        if reason is None:
            self._degraded.pop(part, None)
        else:
            self._degraded[part] = reason

    @property
    def ready(self) -> bool:
        return not self._unmet and not self.stopping

    def report(self) -> dict[str, Any]:
        waiting = dict(self._unmet)
        if self.stopping:
            waiting["service"] = "stopping"
        report: dict[str, Any] = {"ready": self.ready, "waiting_for": waiting}
        if self._degraded:
            report["degraded"] = dict(self._degraded)
        return report


def run(
    service: str, settings_type: type[Settings], build: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> int:
    """Run a service until it is told to stop; returns its exit status."""
    try:
        settings = settings_module.load(settings_type)
        if not is_loopback(settings.http_host) and settings.http_token is None:
            prefix = settings_type.model_config.get("env_prefix", "")
            raise ConfigurationError(f"{prefix}HTTP_TOKEN: needed, since {prefix}HTTP_HOST isn't loopback")
        configure_logging(service, settings.telemetry)
        # What a setting names (a profile, a file) is looked at while the service is built.
        uvloop.run(_run(service, settings, build))
        # All that is left goes with the process: walking over it took 0.2 to 0.4 s of a core at each stop.
        gc.freeze()
    except ConfigurationError as error:
        sys.stderr.write(f"leadtime {service}: the configuration can't work\n{error}\n")
        return EXIT_CONFIGURATION
    return 0


async def _run(service: str, settings: Settings, build: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    log.info("service starting", service=service, pool=settings.pool)
    watchdog = Watchdog(settings.watchdog_s)
    watchdog.start()
    try:
        await build(settings, stop)
    finally:
        watchdog.stop()
    log.info("service stopped", service=service)


def probe_app(service: str, readiness: Readiness, registry: CollectorRegistry) -> FastAPI:
    """A FastAPI app with the three routes that every service has."""
    # No page of its own for the schema: every route that is served has a place in a README.
    app = FastAPI(title=f"leadtime {service}", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        return JSONResponse(readiness.report(), status_code=200 if readiness.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> JSONResponse:
        path = request.url.path
        routes = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        detail = f"method: found {request.method[:16]}; allowed: {allowed}"
        return JSONResponse({"detail": detail}, status_code=405, headers={"allow": allowed})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own answer repeats what was sent, and fails (500) where that isn't text.
        found = error.errors()
        if any(tuple(fault["loc"]) == ("body",) and fault["type"] != "missing" for fault in found):
            # A body of another type isn't read: a browser sends those to loopback for any page that asks it to.
            kind = request.headers.get("content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                message = f"found {kind[:64] or 'none'}; allowed: application/json"
                return JSONResponse({"detail": [{"field": "content-type", "message": message}]}, status_code=415)
        body = getattr(request.scope.get("route"), "body_field", None)
        model = getattr(getattr(body, "field_info", None), "annotation", None)
        faults = [{"field": field, "message": message} for field, message in in_words(found, model, skip=1)]
        return JSONResponse({"detail": faults}, status_code=422)

    return app


def require_token(settings: ServiceSettings) -> params.Depends:
    """A FastAPI dependency: the bearer token of the settings where one is set."""
    expected = settings.http_token.get_secret_value() if settings.http_token else None

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if expected and not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            raise HTTPException(401, "a bearer token is needed", headers={"www-authenticate": "Bearer"})

    return Depends(check)  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def background(stop: asyncio.Event, *runs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work while the context is open. It ends only by a fault of ours: then `stop` is set and it is raised,
    so that a service ends visibly rather than go on without a part of itself.
    """
    tasks = [asyncio.create_task(run) for run in runs]

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("background task failed", exc_info=error)
            stop.set()

    for task in tasks:
        task.add_done_callback(on_done)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the service has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_http(app: Any, host: str, port: int, *, grace_s: float = 3.0) -> AsyncIterator[tuple[str, int]]:
    """Serve an ASGI app while the context is open; yields the bound (host, port).

    Raises ConfigurationError where nobody can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    except OSError as error:
        reason = reason_of(error) if error.errno and error.errno > 0 else error
        raise ConfigurationError(f"HTTP_HOST, HTTP_PORT: can't listen on {host}, port {port}: {reason}") from None
    bound: tuple[str, int] = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nobody's word for where a call comes from
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(grace_s)),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield bound
    finally:
        server.should_exit = True
        await task
        listener.close()


__all__ = ["Readiness", "background", "probe_app", "require_token", "run", "serve_http"]
