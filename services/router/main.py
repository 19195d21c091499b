"""The router's composition root: everything is built here, once, and handed in."""

import asyncio
import contextlib
import datetime as dt
import random
import secrets
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, Final

import grpc
import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from services.router.admin import admin_app
from services.router.admission.exposition import WaitingRoomCollector
from services.router.alias_file import alias_table
from services.router.allocator import keep_freed_memory
from services.router.director import Director, DirectorOptions
from services.router.discovery.build import feed, sources
from services.router.discovery.follow import Discovery
from services.router.extproc.server import ExtProcServer
from services.router.extproc.tls import TlsFiles, from_files, self_signed
from services.router.metrics import RouterMetrics
from services.router.nats_link import NatsLink
from services.router.offpolicy.log_file import DecisionLogFile
from services.router.outcomes import OutcomeSubscriber
from services.router.policies import Policies, PolicySettings
from services.router.predict.bundles import BundleWatcher
from services.router.predict.client import ClientConfig, PredictorClient
from services.router.predict.ladder import Ladder, LadderConfig
from services.router.predict.metrics import PredictMetrics
from services.router.request.aliases import ModelAliases
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.restored_name import parse_routes
from services.router.sample_sink import SampleSink, parse_collectors
from services.router.settings import RouterSettings
from services.router.sharing.bus import LedgerBus
from services.router.sharing.share import LedgerShare
from services.router.state.exposition import EndpointCollector
from services.router.state.health import Change, Event, HealthConfig
from services.router.state.kv_listener import KvListener, KvListenerConfig
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import ScrapeConfig, Scraper
from shared.clock import Clock, SystemClock
from shared.errors import ConfigurationError, FieldError
from shared.lifecycle import Readiness, background, run, serve_http
from shared.prior import PriorModel
from shared.redis_connection import connect
from shared.telemetry import seconds

_FIRST_ENDPOINT_S: Final = 2.0
_TICK_S: Final = 0.1
_ENDPOINT: Final = "endpoint"


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    keep_freed_memory()
    return run("router", RouterSettings, build)


async def build(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Wire the router together, run it until `stop`, then let running requests end."""
    log = structlog.get_logger()
    clock = SystemClock()
    registry = CollectorRegistry()
    readiness = Readiness(_ENDPOINT)
    policies = Policies(
        PolicySettings(
            settings.profile,
            settings.profile_file,
            settings.objectives,
            settings.model_objectives,
            settings.objectives_file,
        ),
        registry,
        clock,
    )
    rng = random.Random(secrets.randbits(64))  # noqa: S311 - jitter

    salt = settings.prefix_salt.get_secret_value().encode() if settings.prefix_salt else secrets.token_bytes(32)
    state = PoolState(
        PoolConfig(scrape_limit_ms=settings.scrape_stale_ms, max_candidates=settings.max_candidates),
        salt=salt,
        tokens=TokenEstimator(),
        health=HealthConfig(
            max_set_aside_share=settings.max_set_aside_share, longest_ms=settings.max_set_aside_s * 1e3
        ),
        rng=rng,
    )
    state.on_health = partial(_tell_health, log, clock)
    registry.register(EndpointCollector(state, clock))
    listed, kubernetes = sources(settings, clock, registry, rng)
    discovery = Discovery(state, listed, clock=clock, registry=registry, readiness=readiness)
    scraper = Scraper(
        state,
        clock=clock,
        registry=registry,
        rng=rng,
        config=ScrapeConfig(timeout_ms=settings.scrape_timeout_ms),
    )
    metrics = RouterMetrics(registry)
    aliases = ModelAliases(alias_table(settings.model_aliases, settings.model_aliases_file))
    decision_log = (
        DecisionLogFile(settings.decision_log, int(settings.decision_log_max_mb * 1e6), registry)
        if settings.decision_log
        else None
    )
    async with (
        _sink(settings, registry, rng) as sink,
        _predictions(settings, state, registry, clock, stop, readiness) as ladder,
    ):
        director = Director(
            DirectorOptions(
                pool=settings.pool,
                listed_endpoints=settings.listed_endpoints,
                decision_budget_ms=settings.decision_budget_ms,
                parsing=ParseConfig(
                    trust_request_headers=bool(settings.trust_request_headers),
                    objectives=policies.objectives,
                    max_body_bytes=settings.max_body_bytes,
                ),
                trust_by_profile=settings.trust_request_headers is None,
                aliases=aliases,
                forward_control_headers=settings.forward_control_headers,
                restored_routes=parse_routes(settings.restored_routes),
                probe_user_agents=tuple(filter(None, map(str.strip, settings.probe_user_agents.split(",")))),
            ),
            state,
            ladder,
            policies.pipeline(),
            metrics,
            clock,
            np.random.default_rng(),
            sink.offer if sink else None,
            decision_log.offer if decision_log else None,
        )
        registry.register(WaitingRoomCollector(director.waiting_room))
        policies.on_pipeline = director.use_pipeline
        policies.on_objectives = director.use_objectives
        if kubernetes is not None:
            feed(kubernetes, director, policies, settings)
        link = NatsLink(settings.nats.connect_options(), registry)
        OutcomeSubscriber(settings.pool, link, director.observe, registry, director.observe_end)
        share, bus = _sharing(settings, state, link, clock, registry)
        scraper.share = share
        token = settings.extproc_token
        extproc = ExtProcServer(
            director,
            registry,
            clock,
            max_body_bytes=settings.max_body_bytes,
            token=token.get_secret_value() if token else None,
        )
        app = admin_app(settings, readiness, registry, director, state, ladder, metrics, clock, policies, share)
        async with (
            serve_http(app, settings.http_host, settings.http_port) as http,
            background(
                stop,
                discovery.run(),
                scraper.run(),
                link.run(),
                policies.run(),
                director.holding.run(),
                *([bus.run()] if bus else []),
                *_kv_events(settings, state, clock, registry),
                *([decision_log.run()] if decision_log else []),
            ),
        ):
            await _first_endpoint(state, stop)
            ports = await extproc.start(
                settings.extproc_host, settings.extproc_port, settings.health_port, _credentials(settings)
            )
            async with background(stop, _tick(state, readiness, extproc, clock, link)):
                log.info("router serving", extproc_port=ports[0], health_port=ports[1], http_port=http[1])
                await stop.wait()
                readiness.stopping = True
                director.let_all_go()
                await extproc.stop(settings.drain_s, lame_duck_s=settings.lame_duck_s)
                if bus is not None:
                    await bus.leave()


def _tell_health(log: Any, clock: Clock, addresses: tuple[str, ...], change: Change) -> None:
    """One line for each change: operators ask why an endpoint gets nothing."""
    match change.event:
        case Event.SET_ASIDE | Event.PROBE_FAILED:
            log.warning(
                "endpoint set aside",
                endpoint=addresses[0],
                reason=change.kind,
                tried=change.event is Event.PROBE_FAILED,
                seconds=round(seconds(change.held_until_ms - clock.monotonic_ms()), 1),
            )
        case Event.RETURNED:
            log.info("endpoint in use again", endpoint=addresses[0])
        case Event.SPARED:
            log.warning("too many endpoints fail: none is set aside", endpoints=list(addresses))


def _sharing(
    settings: RouterSettings, state: PoolState, link: NatsLink, clock: Clock, registry: CollectorRegistry
) -> tuple[LedgerShare | None, LedgerBus | None]:
    """What makes the ledger one with the other routers', where it is to be."""
    if not settings.share_ledger:
        return None, None
    salt = settings.prefix_salt.get_secret_value().encode() if settings.prefix_salt else None
    share = LedgerShare(secrets.token_hex(8), state, salt=salt)
    return share, LedgerBus(settings.pool, share, link, clock, registry, checks=settings.ledger_checks)


@contextlib.asynccontextmanager
async def _sink(
    settings: RouterSettings, registry: CollectorRegistry, rng: random.Random
) -> AsyncIterator[SampleSink | None]:
    """The way to the collectors, where any are named; it ends after everything that fills it."""
    urls = parse_collectors(settings.collectors)
    if not urls:
        yield None
        return
    token = settings.collector_token.get_secret_value() if settings.collector_token else None
    async with SampleSink(urls, registry, rng, token=token) as sink:
        yield sink


@contextlib.asynccontextmanager
async def _predictions(
    settings: RouterSettings,
    state: PoolState,
    registry: CollectorRegistry,
    clock: Clock,
    stop: asyncio.Event,
    readiness: Readiness,
) -> AsyncIterator[Ladder]:
    """The ladder with its two steps: the remote predictors, where any are named, and the router's own bundle."""
    metrics = PredictMetrics(registry, clock)
    token = settings.predictor_token.get_secret_value() if settings.predictor_token else None
    urls = [url.strip() for url in settings.predictors.split(",") if url.strip()]
    # The watch has its own pace of reconnecting; a retry inside a call would hide a failure from its counter.
    redis = connect(settings.redis, retries=0)
    async with contextlib.AsyncExitStack() as open_until_end:
        open_until_end.push_async_callback(redis.aclose)
        client = PredictorClient(
            urls, settings.pool, metrics, clock, config=ClientConfig(call_ms=settings.predict_deadline_ms), token=token
        )
        bundles = BundleWatcher(redis, settings.pool, settings.redis.key, metrics, clock)
        await open_until_end.enter_async_context(
            background(stop, bundles.run(), _read_store(state, bundles, readiness))
        )
        if urls:
            await open_until_end.enter_async_context(client)
        yield Ladder(
            client if urls else None,
            bundles,
            metrics,
            clock,
            prior=None if settings.prior == "off" else PriorModel(settings.prior),
            config=LadderConfig(first=settings.ladder, remote_ms=settings.predict_deadline_ms),
        )


def _kv_events(
    settings: RouterSettings, state: PoolState, clock: Clock, registry: CollectorRegistry
) -> list[Coroutine[Any, Any, None]]:
    """The listener for what servers say of their KV caches, where one is asked for."""
    if settings.kv_events is None and settings.kv_events_port is None:
        return []
    listener = KvListener(
        state,
        clock,
        registry,
        KvListenerConfig(settings.kv_events, settings.kv_events_replay_port, settings.kv_events_port),
    )
    listener.start()
    return [listener.run()]


def _credentials(settings: RouterSettings) -> grpc.ServerCredentials | None:
    if settings.tls == "self-signed":
        return self_signed(dt.datetime.now(dt.UTC))
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    try:
        return from_files(TlsFiles(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file))
    except FieldError as error:
        raise ConfigurationError(str(error)) from None


async def _first_endpoint(state: PoolState, stop: asyncio.Event) -> None:
    """Wait for an endpoint to be ready, or for the limit: a restarted router that takes requests before it has seen its
    endpoints refuses them, where Envoy without it would have served them.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_ENDPOINT_S):
            while not (state.ready_endpoints or stop.is_set()):  # noqa: ASYNC110 - the table has no event to await
                await asyncio.sleep(_TICK_S)


async def _tick(state: PoolState, readiness: Readiness, extproc: ExtProcServer, clock: Clock, link: NatsLink) -> None:
    """Let the ledger's timers run in a quiet pool, and tell probes whether there is an endpoint."""
    ready: bool | None = None
    passed_by = False
    log = structlog.get_logger()
    while True:
        state.advance(clock.monotonic_ms())
        foreign = state.foreign_requests
        if passed_by is not (foreign > 0):
            passed_by = foreign > 0
            if passed_by:
                log.warning("endpoints have requests that no router dispatched", requests=foreign)
            else:
                log.info("endpoints have no requests but the routers' own")
        if state.ready_endpoints:
            readiness.met(_ENDPOINT)
        else:
            readiness.unmet(_ENDPOINT, "none is ready")
        readiness.degraded("nats", None if link.connected else "not connected: no outcomes, no word of other routers")
        if ready is not readiness.ready:
            ready = readiness.ready
            await extproc.set_ready(ready)
        await asyncio.sleep(_TICK_S)


async def _read_store(state: PoolState, bundles: BundleWatcher, readiness: Readiness) -> None:
    """Hand the calibration's answer lengths on to the state, and tell probes where Redis is away."""
    while True:
        readiness.degraded("redis", None if bundles.connected else "not connected: bundle and calibration in use stay")
        if bundles.calibration is not None:
            state.set_expected_output_tokens(bundles.calibration.expected_output_tokens)
        await asyncio.sleep(1.0)
