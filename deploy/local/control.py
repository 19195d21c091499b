"""The two control interfaces a demo turns: the router's admin HTTP and the simulated servers' control API.

An edge: each call raises ControlError with the address and the answer when it isn't what was asked for.
"""

from dataclasses import dataclass
from typing import Any

import aiohttp


class ControlError(RuntimeError):
    """A control call wasn't answered as it should be."""


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Of the router's `/v1/stats`, since its last reset: decisions by rung, decisions by bundle version."""

    served_by: dict[str, int]
    bundles: dict[str, int]
    inflight_requests: int


class RouterControl:
    """The router's admin HTTP."""

    __slots__ = ("_http", "_url")

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def choose_profile(self, name: str) -> None:
        """Another policy, from the next request on."""
        await call(self._http, "PUT", f"{self._url}/v1/profile", {"name": name})

    async def forget_prefixes(self) -> None:
        """The servers' caches were emptied: what the router believes of them is void."""
        await call(self._http, "POST", f"{self._url}/v1/forget")

    async def reset_stats(self) -> None:
        await call(self._http, "POST", f"{self._url}/v1/stats/reset")

    async def stats(self) -> RouterStats:
        answer = await call(self._http, "GET", f"{self._url}/v1/stats")
        return RouterStats(
            served_by=dict(answer["served_by"]),
            bundles=dict(answer["bundles"]),
            inflight_requests=int(answer["inflight_requests"]),
        )


@dataclass(frozen=True, slots=True)
class SimulatorStats:
    """How late the simulated servers' steps ended, since the last reset."""

    lateness_mean_ms: float
    lateness_p99_ms: float


class SimulatorControl:
    """The simulated servers' control API."""

    __slots__ = ("_http", "_url")

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def reset(self) -> None:
        """Empty every server's prefix cache and its statistics."""
        await call(self._http, "POST", f"{self._url}/control/reset-caches")
        await call(self._http, "POST", f"{self._url}/control/stats/reset")

    async def stats(self) -> SimulatorStats:
        lateness = (await call(self._http, "GET", f"{self._url}/control/stats"))["lateness"]
        return SimulatorStats(float(lateness["mean_ms"]), float(lateness["p99_ms"]))


async def call(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    """One call → its decoded JSON answer; raises ControlError for everything but a 2xx."""
    try:
        async with http.request(method, url, json=body) as response:
            if not 200 <= response.status < 300:
                text = (await response.text(errors="replace"))[:300]
                raise ControlError(f"{method} {url} answers {response.status}: {text}")
            return await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ControlError(f"{method} {url} isn't answered ({type(error).__name__}: {error})") from error
