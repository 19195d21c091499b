"""A storm: parts die, freeze and restart at random, several at a time, and afterwards nothing may have stuck.

Where the suite harms one part at a time and looks closely, this harms what it draws for a minute, up to three parts at
once, and then waits for quiet: every service ready with nothing degraded, every router following all others, nothing
under way anywhere by any count, no endpoint and no router shut out by Envoy. What is drawn follows from a seed; what it
meets doesn't.
"""

import asyncio
import random
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

from deploy.local.chaos.suite import Fault, Suite

ROUTERS: Final = 4
_STORM_S: Final = 60.0
_AT_ONCE: Final = 3
_QUIET_WITHIN_S: Final = 30.0
_HARMS: Final = ("kill", "kill", "freeze", "restart")
_NOTHING_LEFT: Final = (
    "leadtime_router_own_requests",
    "leadtime_router_orphan_requests",
    "leadtime_router_waiting_requests",
    "leadtime_router_extproc_streams",
    "leadtime_router_ledger_faults_total",
)


def storms(seconds: float, seed: int, routers: int = ROUTERS) -> list[Fault]:
    """As many storms of a minute, each with a seed of its own, as fill the time."""
    count = max(1, round(seconds / _STORM_S))
    return [_storm(min(seconds, _STORM_S), seed + number, routers) for number in range(count)]


def _storm(seconds: float, seed: int, routers: int) -> Fault:
    async def act(suite: Suite) -> None:
        await Storm(suite, random.Random(seed), routers).rage(seconds)  # noqa: S311 - what is harmed
        await calm(suite)

    return Fault(f"storm {seed}", act)


class Storm:
    """Harm at random, each part once at a time."""

    def __init__(self, suite: Suite, rng: random.Random, routers: int) -> None:
        self._stack = suite.stack
        self._pace = suite.pace
        self._rng = rng
        parts = ["nats", "nats", "redis", "collector", "trainer", "predictor-1", "predictor-2"]
        self._parts = parts + [f"router-{number}" for number in range(1, routers + 1)] * 2
        self._harmed: dict[str, asyncio.Task[None]] = {}

    async def rage(self, seconds: float) -> None:
        """Until the time is over and what was harmed runs again."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            await asyncio.sleep(self._rng.uniform(0.1, 3.0))
            for part in [part for part, task in self._harmed.items() if task.done()]:
                await self._harmed.pop(part)
            part = self._rng.choice(self._parts)
            if part not in self._harmed and len(self._harmed) < _AT_ONCE:
                harm, lasting_s = self._rng.choice(_HARMS), self._rng.uniform(0.0, self._pace.cut_s)
                self._harmed[part] = asyncio.create_task(self._harm(part, harm, lasting_s))
        for task in self._harmed.values():
            await task

    async def _harm(self, part: str, harm: str, lasting_s: float) -> None:
        child = self._stack.supervisor[part]
        if harm == "freeze":
            child.signal(signal.SIGSTOP)
            await asyncio.sleep(lasting_s * self._pace.frozen_s / self._pace.cut_s)
            child.signal(signal.SIGCONT)
            return
        if harm == "kill":
            await self._stack.kill(part)
            await asyncio.sleep(lasting_s)
        await self._stack.restart(part)


async def calm(suite: Suite) -> None:
    """Until every part answers again."""
    for part in ("router", "endpoint", "collector", "trainer", "predictors"):
        await suite.answers(part)


async def stuck(suite: Suite) -> list[str]:
    """What is not as before the storm though nothing is harmed and no request is under way; empty when all is well."""
    until_s = time.monotonic() + _QUIET_WITHIN_S
    while found := [fault for part in (_services, _routers, _envoy) for fault in await part(suite)]:
        if time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.5)
    return []


async def _services(suite: Suite) -> list[str]:
    at = suite.stack.addresses
    found = []
    for url in (*at.router_urls, at.collector_url, at.trainer_url, *at.predictor_urls):
        report = await suite.get(f"{url}/readyz", 2.0)
        if report is None or not report["ready"] or report.get("degraded"):
            found.append(f"{url}/readyz: {report or 'not ready'}")
    return found


async def _routers(suite: Suite) -> list[str]:
    urls = suite.stack.addresses.router_urls
    found = []
    for url in urls:
        answer = await suite.get(f"{url}/v1/peers", 2.0) or {"peers": []}
        live = [peer for peer in answer["peers"] if peer["live"]]
        if len(live) != len(urls) - 1 or any(peer["behind"] for peer in live):
            found.append(f"{url}: follows {len(live)} of {len(urls) - 1} others")
        found += [f"{url}: {peer['requests']} requests of {peer}" for peer in answer["peers"] if peer["requests"]]
        for name in _NOTHING_LEFT:
            if left := await suite.metric(url, name):
                found.append(f"{url}: {name} is {left:g}")
    return found


async def _envoy(suite: Suite) -> list[str]:
    answer = await suite.get(f"{suite.stack.addresses.envoy_admin_url}/clusters?format=json", 2.0)
    return ["Envoy's admin doesn't answer"] if answer is None else shut_out(answer)


def shut_out(clusters: Mapping[str, Any]) -> list[str]:
    """Hosts that Envoy holds for failed, of its admin's page."""
    return [
        f"Envoy holds {host['address']['socket_address']['port_value']} of {cluster['name']} for failed: {flags}"
        for cluster in clusters["cluster_statuses"]
        for host in cluster.get("host_statuses", [])
        if (flags := {flag for flag, on in host["health_status"].items() if on is True})
    ]
