"""The room's README names its files and its metrics."""

import random
from pathlib import Path

from prometheus_client import CollectorRegistry

import services.router.discovery as package
from services.router.discovery.file import FileSource
from services.router.discovery.follow import Discovery
from services.router.discovery.kube_client import event_counter
from services.router.discovery.names import NamesSource
from services.router.request.tokens import TokenEstimator
from services.router.state.pool import PoolConfig, PoolState
from shared.lifecycle import Readiness
from tests.fakes.manual_clock import ManualClock

ROOM = Path(package.__file__).parent
README = (ROOM / "README.md").read_text("utf-8")


def test_every_file_stands_in_it():
    files = [path.name for path in ROOM.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in sorted(files) if f"`{name}`" not in README] == []


async def test_every_metric_stands_in_it():
    registry, clock = CollectorRegistry(), ManualClock()
    names = NamesSource((), clock=clock, registry=registry, rng=random.Random(1))
    FileSource(Path("none"), clock=clock, registry=registry)
    event_counter(registry)
    pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
    Discovery(pool, [names], clock=clock, registry=registry, readiness=Readiness())
    found = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    assert [name for name in sorted(found) if name not in README] == []
