"""Fixtures of every test: the real servers, and the check that the code under test is this checkout's."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import shared
from tests import servers

REPOSITORY = Path(__file__).resolve().parent.parent
# A plain folder called `shared` that lies on sys.path would be imported in silence in place of ours.
assert Path(shared.__file__).resolve().parent == REPOSITORY / "shared", f"shared was imported from {shared.__file__}"


# The slowest test takes 20 s on two busy cores.
TEST_LIMIT_S: Final = 120.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """An asynchronous test that hangs fails by itself and leaves its worker to the others."""
    if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
        item.obj = _limited(item.obj)


def _limited(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def within_the_limit(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(TEST_LIMIT_S):
            await test(*args, **kwargs)

    return within_the_limit


@pytest.fixture(autouse=True)
def _log_of_its_own() -> Iterator[None]:
    """A service that a test starts in this process sends its log to the captured output, which is closed after it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


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
