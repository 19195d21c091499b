"""Composition root of the predictor: settings → slots → batchers → HTTP, with the bundle watch beside them.

Several predictors on one host are several processes; each runs its model on its own threads.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import structlog
from prometheus_client import CollectorRegistry

from services.predictor.app import build_app
from services.predictor.batcher import Batcher, BatchLimits
from services.predictor.bundles import BundleWatch, condition
from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import PredictorSettings
from services.predictor.slot import Slot
from shared.clock import SystemClock
from shared.lifecycle import Readiness, background, run, serve_http
from shared.redis_connection import connect


async def serve(settings: PredictorSettings, stop: asyncio.Event) -> None:
    """Run the service until `stop` is set."""
    clock = SystemClock()
    registry = CollectorRegistry()
    metrics = PredictorMetrics(registry, clock)
    readiness = Readiness(*(condition(pool) for pool in settings.served_pools))
    slots = [Slot(pool) for pool in settings.served_pools]
    limits = BatchLimits(
        window_ms=settings.coalesce_window_ms,
        max_rows=settings.batch_max_rows,
        inline_max_rows=settings.inline_max_rows,
        max_waiting_rows=settings.max_waiting_rows,
    )
    worker = ThreadPoolExecutor(1, thread_name_prefix="model")
    batchers = {slot.pool: Batcher(slot, limits, worker, metrics, clock) for slot in slots}
    for pool, batcher in batchers.items():
        metrics.watch_pool(pool, batcher.waiting_rows)
    # The watch has its own pace of reconnecting; a retry inside a call would only hide a failure from its counter.
    redis = connect(settings.redis, retries=0)
    watch = BundleWatch(
        redis,
        slots,
        settings.redis.key,
        device=settings.device,
        policy=settings.device_policy,
        threads=settings.threads,
        poll_ms=settings.bundle_poll_ms,
        metrics=metrics,
        readiness=readiness,
        clock=clock,
    )
    app = build_app(settings, batchers, metrics, readiness, registry, clock)
    async with (
        serve_http(app, settings.http_host, settings.http_port) as (host, port),
        background(stop, watch.run()),
    ):
        structlog.get_logger().info("predictor listening", host=host, port=port, pools=settings.served_pools)
        await stop.wait()
        readiness.stopping = True
    for batcher in batchers.values():
        await batcher.close()
    worker.shutdown()
    await redis.aclose()


def main() -> int:
    return run("predictor", PredictorSettings, serve)
