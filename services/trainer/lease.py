"""The lease that makes one trainer of a pool the active one. Edge: Redis.

One script claims: it takes a free lease, renews one's own, and leaves another's alone. A holder that dies is replaced
after the lease's lifetime at the latest plus a standby's look (a third of it). While Redis is away nobody can take the
lease over, so a holder goes on; when Redis comes back empty, the first to claim holds it.
"""

from typing import Final

from redis.asyncio import Redis

_CLAIM: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseLostError(Exception):
    """Another trainer holds the lease."""


class Lease:
    """One process's claim; `token` tells it from every other."""

    __slots__ = ("_redis", "_ttl_ms", "key", "token")

    def __init__(self, redis: Redis, key: str, token: str, ttl_ms: float) -> None:
        self._redis = redis
        self._ttl_ms = int(ttl_ms)
        self.key = key
        self.token = token

    @property
    def interval_s(self) -> float:
        """How often to claim."""
        return self._ttl_ms / 3e3

    async def claim(self) -> bool:
        """Take or renew it; False when another holds it. Raises RedisError."""
        return bool(await self._redis.eval(_CLAIM, 1, self.key, self.token, self._ttl_ms))

    async def release(self) -> None:
        """Give it up, so that a standby need not wait. Raises RedisError."""
        await self._redis.eval(_RELEASE, 1, self.key, self.token)
