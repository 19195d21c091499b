"""Composition root of the trainer: settings → Redis, lease, store → conductor, with HTTP beside it.

Run one per pool, and as many on standby as wanted: the lease in Redis makes one of them active.
"""

import asyncio
import uuid

import structlog
from prometheus_client import CollectorRegistry

from services.trainer.app import build_app
from services.trainer.lease import Lease
from services.trainer.metrics import TrainerMetrics
from services.trainer.publish import BundleStore
from services.trainer.settings import TensorRendering, TrainerSettings
from services.trainer.tensor import Hummingbird, load_hummingbird
from services.trainer.trainer import STORE, WINDOW, Trainer
from shared.clock import SystemClock
from shared.errors import ConfigurationError
from shared.lifecycle import Readiness, background, run, serve_http
from shared.names import trainer_lease_key
from shared.redis_connection import connect


async def serve(settings: TrainerSettings, stop: asyncio.Event) -> None:
    """Run the service until `stop` is set."""
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    readiness = Readiness(STORE, WINDOW)
    # One immediate retry covers a pooled connection that the server closed; the conductor has its own pace beyond it.
    redis = connect(settings.redis, retries=1)
    lease = Lease(redis, trainer_lease_key(settings.pool), uuid.uuid4().hex, settings.lease_ttl_ms)
    store = BundleStore(redis, settings.pool, settings.redis.key, lease)
    tensor = find_tensor(settings.tensor_rendering, settings.threads)
    trainer = Trainer(settings, lease, store, metrics, readiness, SystemClock(), tensor)
    app = build_app(settings, readiness, registry, trainer)
    async with (
        serve_http(app, settings.http_host, settings.http_port) as (host, port),
        background(stop, trainer.run()),
    ):
        structlog.get_logger().info("trainer listening", host=host, port=port, pool=settings.pool)
        await stop.wait()
        readiness.stopping = True
    await redis.aclose()


def find_tensor(wanted: TensorRendering, threads: int) -> Hummingbird | None:
    """What makes the tensor rendering, told once; raises ConfigurationError where it is required and missing."""
    log = structlog.get_logger()
    if wanted is TensorRendering.OFF:
        return None
    try:
        found = load_hummingbird(threads)
    except ImportError as error:
        if wanted is TensorRendering.REQUIRE:
            raise ConfigurationError(
                f"LEADTIME_TRAINER_TENSOR_RENDERING: require, but {error.name or error} can't be imported"
            ) from None
        log.info("no tensor rendering: bundles have the CPU rendering only", missing=error.name or str(error))
        return None
    log.info("bundles get a tensor rendering", converter=found.name)
    return found


def main() -> int:
    return run("trainer", TrainerSettings, serve)
