"""Fixtures of the collector's integration tests."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.collector.running import RunningCollector, running_collector
from tests.servers import NatsServer


@pytest.fixture
async def collector(nats: NatsServer) -> AsyncIterator[RunningCollector]:
    """A collector with default settings that is connected."""
    async with running_collector(nats.url) as running:
        yield running
