"""Fixtures of every test: the real servers, and the check that the code under test is this checkout's."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import shared
from tests import servers

REPOSITORY = Path(__file__).resolve().parent.parent
# A plain folder called `shared` that lies on sys.path would be imported in silence in place of ours.
assert Path(shared.__file__).resolve().parent == REPOSITORY / "shared", f"shared was imported from {shared.__file__}"


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[servers.NatsServer]:
    """A real nats-server with JetStream, its own store, on a free port."""
    async with servers.nats_server(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[servers.RedisServer]:
    """A real Redis-protocol server on a free port."""
    async with servers.redis_server(tmp_path / "redis") as server:
        yield server
