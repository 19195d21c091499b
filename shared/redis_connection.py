"""The one way to Redis: a server, a socket, a master that sentinels name, or a cluster, by the settings' URL.

Edge. It is in `shared` because three services must connect alike: one that follows a failover while another doesn't
would publish where nobody reads. The only client here; whoever doesn't import this module needs no `redis` installed.

Clients connect when they are first used, and again after every failure; nothing here waits or raises for a server that
is away. RESP2 is explicit (`RedisSettings.client_options`).
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from shared.settings import RedisKind, RedisSettings

_FAULTS: Final = (RedisClusterException, AttributeError)


class _Cluster(RedisCluster):
    """A cluster whose absence is a RedisError as everywhere else, and whose notices may be asked for before all else.

    redis-py 8.1 raises an exception of another kind when no node answers, a KeyError when the first thing that a client
    does is to subscribe, and an AttributeError when one task sends on a connection that another has just given up: each
    would end a service that only has to wait.
    """

    async def initialize(self, *args: Any, **kwargs: Any) -> Any:
        try:
            await super().initialize(*args, **kwargs)
        except _FAULTS as error:
            raise RedisConnectionError(f"no node of the cluster answers: {type(error).__name__}") from None
        return self

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(*args, **kwargs)
        except _FAULTS as error:
            raise RedisConnectionError(f"the cluster can't be reached: {type(error).__name__}") from None

    def pubsub(self, *_: Any, **options: Any) -> Any:
        return self._notices(options)

    @contextlib.asynccontextmanager
    async def _notices(self, options: dict[str, Any]) -> AsyncIterator[Any]:
        await self.initialize()
        async with super().pubsub(**options) as notices:
            yield notices


def connect(settings: RedisSettings, *, retries: int) -> Redis:
    """A client; `retries`: of a call whose connection breaks, at once. More is left to the caller's own pace."""
    target, options = settings.target, settings.client_options()
    retry = Retry(NoBackoff(), retries)
    if target.kind is RedisKind.SENTINEL:
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            list(target.nodes), sentinel_kwargs=_sentinel_options(settings), **options
        )
        found: Redis = sentinel.master_for(target.master, db=target.database, retry=retry, **options)
        return found
    if target.kind is RedisKind.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in target.nodes]
        # It has every command that is used here; all keys of a pool lie in one slot.
        return cast("Redis", _Cluster(startup_nodes=nodes, retry=Retry(NoBackoff(), max(retries, 1)), **options))
    return Redis.from_url(settings.url, retry=retry, **options)


def _sentinel_options(settings: RedisSettings) -> dict[str, Any]:
    """How the sentinels themselves are asked: by their own credentials, and quickly, since there are several."""
    options = {**settings.client_options(), "socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    for name in ("username", "password"):
        options.pop(name, None)
    if settings.sentinel_username:
        options["username"] = settings.sentinel_username
    if settings.sentinel_password:
        options["password"] = settings.sentinel_password.get_secret_value()
    return options
