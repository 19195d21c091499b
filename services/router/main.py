"""The router's composition root: everything is built here, once, and handed in."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import grpc
import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from services.router.admin import admin_app
from services.router.director import Director, DirectorOptions
from services.router.extproc.server import ExtProcServer
from services.router.metrics import RouterMetrics
from services.router.outcomes import OutcomeSubscriber
from services.router.predict.bundles import BundleWatcher
from services.router.predict.client import PredictorClient
from services.router.predict.ladder import Ladder
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.pipeline import Pipeline
from services.router.scheduling.profile import Profiles, load_presets, load_profile_file
from services.router.scheduling.registry import Registry
from services.router.settings import RouterSettings
from services.router.state.discovery import Discovery, DiscoveryConfig, parse_endpoints
from services.router.state.exposition import EndpointCollector
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import ScrapeConfig, Scraper
from shared.clock import Clock, SystemClock
from shared.lifecycle import Readiness, run, serve_http

_TICK_S: Final = 0.1
_ENDPOINT: Final = "endpoint"


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    return run("router", RouterSettings, build)


async def build(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Wire the router together, run it until `stop`, then let running requests end."""
    log = structlog.get_logger()
    clock = SystemClock()
    registry = CollectorRegistry()
    readiness = Readiness(_ENDPOINT)
    pipeline = _profiles(settings).pipeline
    rng = random.Random(secrets.randbits(64))  # noqa: S311 - jitter

    salt = settings.prefix_salt.get_secret_value().encode() if settings.prefix_salt else secrets.token_bytes(32)
    state = PoolState(PoolConfig(scrape_limit_ms=settings.scrape_stale_ms), salt=salt, tokens=TokenEstimator())
    registry.register(EndpointCollector(state, clock))
    discovery = Discovery(
        state,
        parse_endpoints(settings.endpoints),
        clock=clock,
        registry=registry,
        rng=rng,
        config=DiscoveryConfig(resolve_interval_ms=settings.resolve_interval_s * 1e3),
    )
    scraper = Scraper(
        state,
        clock=clock,
        registry=registry,
        rng=rng,
        config=ScrapeConfig(timeout_ms=settings.scrape_timeout_ms),
    )
    metrics = RouterMetrics(registry)
    async with _predictions(settings, state, registry, clock) as ladder:
        director = Director(
            DirectorOptions(
                pool=settings.pool,
                listed_endpoints=settings.listed_endpoints,
                predict_deadline_ms=min(settings.predict_deadline_ms, settings.decision_budget_ms),
                parsing=ParseConfig(
                    trust_request_headers=settings.trust_request_headers, max_body_bytes=settings.max_body_bytes
                ),
            ),
            state,
            ladder,
            pipeline(settings.profile),
            metrics,
            clock,
            np.random.default_rng(),
        )
        outcomes = OutcomeSubscriber(settings.pool, settings.nats.connect_options(), director.observe, registry)
        extproc = ExtProcServer(director, registry, max_body_bytes=settings.max_body_bytes)
        app = admin_app(settings, readiness, registry, director, state, ladder, metrics, clock, pipeline)
        ports = await extproc.start(
            settings.extproc_host, settings.extproc_port, settings.health_port, _credentials(settings)
        )
        async with (
            serve_http(app, settings.http_host, settings.http_port) as http,
            _tasks(discovery.run(), scraper.run(), outcomes.run(), _tick(state, readiness, extproc, clock)),
        ):
            log.info("router serving", extproc_port=ports[0], health_port=ports[1], http_port=http[1])
            await stop.wait()
            readiness.stopping = True
            await extproc.stop(settings.drain_s)


def _profiles(settings: RouterSettings) -> Profiles:
    registry = Registry()
    own = [load_profile_file(settings.profile_file, registry)] if settings.profile_file else []
    return Profiles([*load_presets(registry), *own])


def _credentials(settings: RouterSettings) -> grpc.ServerCredentials | None:
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    pair = (settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes())
    if settings.tls_client_ca_file is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], settings.tls_client_ca_file.read_bytes(), require_client_auth=True)


async def _tick(state: PoolState, readiness: Readiness, extproc: ExtProcServer, clock: Clock) -> None:
    """Let the ledger's timers run in a quiet pool, and tell probes whether there is an endpoint."""
    serving: bool | None = None
    while True:
        state.advance(clock.monotonic_ms())
        if state.ready_endpoints:
            readiness.met(_ENDPOINT)
        else:
            readiness.unmet(_ENDPOINT, "none is ready")
        if serving is not readiness.ready:
            serving = readiness.ready
            await extproc.set_serving(serving)
        await asyncio.sleep(_TICK_S)


@contextlib.asynccontextmanager
async def _tasks(*runs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run background work while the context is open. One that fails is logged and ends the process with a fault."""
    tasks = [asyncio.create_task(run) for run in runs]
    for task in tasks:
        task.add_done_callback(_report)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        structlog.get_logger().error("background task failed", exc_info=error)
