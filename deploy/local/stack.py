"""Everything on one machine, without containers: NATS, a Redis-protocol server, the four services, Envoy.

`Stack` starts them as child processes on free loopback ports, in front of simulated model servers or a user's own, and
stops them in order. Its place: under `leadtime demo`, `leadtime up` and the end-to-end tests. `layout.py` says where
everything listens, `children.py` what each child is told, `processes.py` runs them.

Limits: one collector, one trainer; plain HTTP on loopback; Linux for the guarantee that a killed parent
leaves no child.
"""

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self

import aiohttp

from deploy.local.binaries import Binaries, find_binaries
from deploy.local.children import Children, Described, common_environment, envoy_config, overridden
from deploy.local.envoy import render
from deploy.local.layout import StackConfig, place_simulated, reserve_addresses, simulated_endpoints
from deploy.local.ports import Ports
from deploy.local.probes import PROBE_TIMEOUT_S, http_probe
from deploy.local.processes import ChildError, Supervisor
from deploy.local.run_dir import came_up
from deploy.local.words import counted

_STARTS: Final = 3
_TAKEN: Final = ("address already in use", "can't listen on")
"""What our children say of a port that somebody else has."""
_DRAIN_POLL_S: Final = 0.05


class Stack:
    """A running stack; leaving the context stops it, however it is left."""

    def __init__(
        self,
        config: StackConfig,
        *,
        rng: random.Random,
        hardware_classes: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`rng` chooses ports; `hardware_classes` are those of simulated servers, by name; `report` is told in one line
        what goes on.
        """
        self.config = config
        self._report = report
        self._rng = rng
        self._hardware_classes = hardware_classes or {}
        self._binaries: Binaries = find_binaries()
        self._store_dir = config.state_dir or config.run_dir / "state"
        self._http: aiohttp.ClientSession | None = None
        self._reserve()

    def _reserve(self) -> None:
        """Take ports, and plan the children that will have them."""
        config = self.config
        self._ports = Ports(self._rng)
        self.addresses = reserve_addresses(config, self._ports)
        self.simulated = (
            place_simulated(config.simulated, self.addresses.sim_control, self._ports)
            if config.simulated and self.addresses.sim_control
            else None
        )
        self.endpoints = (
            simulated_endpoints(self.simulated, self._hardware_classes) if self.simulated else config.endpoints
        )
        self.supervisor = Supervisor(
            config.run_dir, {**config.environment, **common_environment(self.addresses, config.pool)}
        )
        self._children: dict[str, Described] = {}

    async def __aenter__(self) -> Self:
        """Start all; on failure or cancellation whatever was started is stopped before the error goes on.

        A port may be lost between its release here and its child's grasp, to anybody: then all is started anew, on
        other ports.
        """
        for attempt in range(1, _STARTS + 1):
            try:
                await self._start()
            except ChildError as error:
                await self._stop()
                said = error.log_tail.lower()
                if attempt == _STARTS or not any(words in said for words in _TAKEN):
                    raise
                self._report(f"{error.name}: its port was taken meanwhile; starting anew")
                self._reserve()
            except BaseException:
                await self._stop()
                raise
            else:
                break
        came_up(self.config.run_dir)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def router_names(self) -> tuple[str, ...]:
        return self.config.router_names

    def _routers_in_words(self) -> str:
        return "router" if self.config.routers == 1 else f"{self.config.routers} routers"

    @property
    def http(self) -> aiohttp.ClientSession:
        """The session for probes and for whoever looks at the running stack."""
        if self._http is None:
            raise RuntimeError("the stack isn't running")
        return self._http

    async def restart(self, name: str) -> None:
        """End a child if it runs, start it again on the same address, await its readiness."""
        await self.supervisor.restart(name, self._children[name][1])

    async def kill(self, name: str) -> None:
        """End a child as a crash would."""
        child = self.supervisor[name]
        child.kill()
        await child.wait()

    async def ended(self, name: str | None = None) -> None:
        """Wait; raises ChildError once a child ends without having been told to. `name`: that child alone."""
        raise self.supervisor.fault(await self.supervisor.ended(name))

    async def _start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S))
        await asyncio.to_thread(self._write_files)
        children = Children(
            config=self.config,
            addresses=self.addresses,
            endpoints=self.endpoints,
            simulated=self.simulated,
            binaries=self._binaries,
            store_dir=self._store_dir,
            http_probe=partial(http_probe, self._http),
        )
        stores, services, envoy = children.stores(), children.services(), children.envoy()
        self._children = {spec.name: (spec, probe) for spec, probe in (*stores, *services, envoy)}
        own = [spec.environment for spec, _ in self._children.values()]
        for variable in overridden(self.config.environment, common_environment(self.addresses, self.config.pool), *own):
            self._report(f"{variable}: yours isn't used, this command sets it itself")
        self._report("starting NATS" + (", Redis and the simulated servers" if self.simulated else " and Redis"))
        await self._start_children(children, stores)
        self._report(f"starting {self._routers_in_words()}, collector, trainer and predictor")
        await self._start_children(children, services)
        self._report("starting Envoy")
        await self._start_children(children, (envoy,))

    async def _start_children(self, children: Children, started: tuple[Described, ...]) -> None:
        for spec, _ in started:
            for port in children.ports_of(spec.name):
                self._ports.release(port)
        await self.supervisor.start(started)

    async def _drain(self) -> None:
        """Take no new connection, let the old ones go with their next answer, and wait for the requests under way."""
        if self.config.drain_s <= 0 or not self.supervisor.runs("envoy"):
            return
        admin = self.addresses.envoy_admin_url
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(self.config.drain_s):
                for path in ("/drain_listeners", "/healthcheck/fail"):
                    async with self.http.post(admin + path):
                        pass
                told = False
                while under_way := await self._requests_under_way(admin):
                    if not told:
                        self._report(f"{counted(under_way, 'request')} may go on for {self.config.drain_s:g} s")
                        told = True
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def _requests_under_way(self, admin: str) -> int:
        async with self.http.get(f"{admin}/stats?format=json&filter=^http.ingress.downstream_rq_active$") as response:
            return sum(int(stat["value"]) for stat in (await response.json())["stats"])

    async def _stop(self) -> None:
        try:
            await self._drain()
            await self.supervisor.stop()
        finally:
            self._ports.close()
            if self._http is not None:
                http, self._http = self._http, None
                await http.close()
            if self.config.state_dir is None:
                shutil.rmtree(self._store_dir, ignore_errors=True)

    def _write_files(self) -> None:
        for folder in ("nats", "redis"):
            (self._store_dir / folder).mkdir(parents=True, exist_ok=True)
        config = envoy_config(
            self.addresses, self.endpoints, self.config.api, self.config.shape, self.config.environment
        )
        (self.config.run_dir / "envoy.json").write_text(json.dumps(render(config), indent=1))
        if self.simulated:
            (self.config.run_dir / "sim.json").write_text(self.simulated.model_dump_json(indent=1))
