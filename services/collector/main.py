"""Composition root of the collector: access logs and posted samples in, JetStream out.

Flow: `intake` (gRPC) → `envoy_log` (plain entry) → `validate` (sample or reason) → `publisher` (JetStream). It serves
from the first moment, whether NATS is there or not. On a stop: intake first, then HTTP, then what is left goes out, or
to the spool.
"""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from services.collector.api import add_sample_routes
from services.collector.entry import AccessLogEntry
from services.collector.intake import AccessLogIntake, serve_access_logs
from services.collector.metrics import CollectorMetrics
from services.collector.publisher import READY_CONDITION, Publisher
from services.collector.settings import CollectorSettings
from services.collector.spooling import Spooling
from services.collector.validate import Probes, judge, unsampled
from shared.clock import SystemClock
from shared.lifecycle import Readiness, probe_app, run, serve_http


def main() -> int:
    """Run the service; returns its exit status."""
    return run("collector", CollectorSettings, build)


async def build(settings: CollectorSettings, stop: asyncio.Event) -> None:
    """Build every part, serve until `stop`, and deliver what is left."""
    clock = SystemClock()
    registry = CollectorRegistry()
    metrics = CollectorMetrics(registry, settings.pool)
    spooling = await Spooling.open(settings, metrics, clock)
    readiness = Readiness(READY_CONDITION)
    if spooling is not None:
        readiness.met(READY_CONDITION)
        readiness.degraded(READY_CONDITION, "not yet")
    publisher = Publisher(settings, metrics, readiness, clock, spooling)
    probes = Probes(_listed(settings.probe_user_agents), frozenset(_listed(settings.probe_paths)))

    def take(entry: AccessLogEntry) -> None:
        verdict = judge(entry, settings.pool, probes)
        metrics.count_entry(verdict.reason)
        if verdict.sample is not None:
            metrics.observe(verdict.sample, verdict.notes)
            publisher.offer(verdict.sample)
        elif (end := unsampled(entry, verdict.reason)) is not None:
            publisher.tell(end)

    app = probe_app("collector", readiness, registry)
    add_sample_routes(app, publisher, metrics, settings)
    intake = AccessLogIntake(take, settings, metrics, clock)
    drain = asyncio.Event()
    publishing = asyncio.create_task(publisher.run(drain), name="publisher")
    try:
        async with (
            serve_http(app, settings.http_host, settings.http_port) as (host, port),
            serve_access_logs(intake, settings) as als_port,
        ):
            log = structlog.get_logger()
            log.info("collector serves", http=f"{host}:{port}", als=f"{settings.als_host}:{als_port}")
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({stopping, publishing}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            readiness.stopping = True
    finally:
        drain.set()
        await publishing


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
