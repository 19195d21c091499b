"""Everything on one machine, without containers: NATS, a Redis-protocol server, the four services, Envoy.

`Stack` starts them as child processes on free loopback ports, in front of simulated model servers or a user's own, and
stops them in order. Its place: under `leadtime demo`, `leadtime up` and the end-to-end tests. The commands and the
environment of each child are built by pure functions of the addresses; `processes.py` runs them.

Limits: one collector, one trainer; plain HTTP on loopback; Linux for the guarantee that a killed parent
leaves no child.
"""

import asyncio
import contextlib
import json
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp

from deploy.local.binaries import Binaries, find_binaries
from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, of_router, parse_endpoint, render
from deploy.local.ports import LOOPBACK, Ports
from deploy.local.processes import ChildError, ChildSpec, Probe, Supervisor
from shared.errors import ConfigurationError
from sim.spec import ProcessSpec

TRAINER_NICE: Final = 10
"""On two cores a fit would otherwise take time slices from requests under way."""
_PROBE_TIMEOUT_S: Final = 2.0
_STARTS: Final = 3
_TAKEN: Final = ("address already in use", "can't listen on")
"""What our children say of a port that somebody else has."""
_DRAIN_POLL_S: Final = 0.05
_PREFIXES: Final = tuple(
    f"LEADTIME_{block}_" for block in ("ROUTER", "COLLECTOR", "TRAINER", "PREDICTOR", "NATS", "STREAM", "REDIS", "LOG")
)
_OTHERS: Final = frozenset(
    {"LEADTIME_DATA", "LEADTIME_CRDS", "LEADTIME_FUZZ_CASES", "LEADTIME_STANDIN_IMAGES", "LEADTIME_SECRETS_DIR"}
)
"""Of benchmarks, checks and all services' secrets: no service's own, and no typo."""
# Stopped in this order: first what takes requests in, last what the others write to.
_TIER_EDGE, _TIER_SERVICES, _TIER_STORES = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What to start, and where. Either `endpoints` or `simulated` says which model servers there are."""

    run_dir: Path
    """Logs, and the files that children read; made anew by the caller."""
    endpoints: tuple[str, ...] = ()
    """`http://host:port;hardware_class=h100`, as the router takes them."""
    simulated: ProcessSpec | None = None
    """Servers to simulate; those with port 0 get one."""
    listen: Address = field(default_factory=lambda: Address(LOOPBACK, 0))
    """Where Envoy takes requests; port 0: a free one."""
    api: Address | None = None
    """An ordinary service under `/api`."""
    shape: Shape = "buffered"
    """How Envoy shows bodies to the router."""
    profile: str | None = "leadtime"
    """None: that of the environment's `LEADTIME_ROUTER_PROFILE_FILE`, else the router's default."""
    predictors: int = 1
    routers: int = 1
    """All active, each an endpoint of Envoy's picker cluster; they share their ledger over NATS."""
    pool: str = "default"
    state_dir: Path | None = None
    """Where samples and bundles outlive the stack; None: in the run directory, removed at the end."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of every child, under what the stack itself sets."""
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment of single children by their name, over everything else."""
    drain_s: float = 0.0
    """How long requests under way may go on at the stop, while no new connection is taken."""

    def __post_init__(self) -> None:
        if bool(self.endpoints) == (self.simulated is not None):
            raise ValueError("either endpoints or simulated must be given")
        if self.predictors < 0:
            raise ValueError(f"predictors must be 0 or more, got {self.predictors}")
        if self.routers < 1:
            raise ValueError(f"routers must be 1 or more, got {self.routers}")


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where one router listens."""

    extproc: int
    health: int
    http: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where everything listens, all on loopback but perhaps the gateway."""

    gateway: Address
    envoy_admin: int
    nats: int
    nats_monitor: int
    redis: int
    routers: tuple[RouterPorts, ...]
    collector_als: int
    collector_http: int
    trainer_http: int
    predictors_http: tuple[int, ...]
    sim_control: int | None = None

    @property
    def gateway_url(self) -> str:
        """Where to send requests; a wildcard address is reached over loopback."""
        host = LOOPBACK if self.gateway.host in {"0.0.0.0", "::"} else self.gateway.host
        return f"http://{Address(host, self.gateway.port)}"

    @property
    def nats_url(self) -> str:
        return f"nats://{LOOPBACK}:{self.nats}"

    @property
    def redis_url(self) -> str:
        return f"redis://{LOOPBACK}:{self.redis}/0"

    @property
    def router_extproc(self) -> int:
        """The first router's."""
        return self.routers[0].extproc

    @property
    def router_url(self) -> str:
        """The first router's."""
        return http_url(self.routers[0].http)

    @property
    def router_urls(self) -> tuple[str, ...]:
        return tuple(http_url(router.http) for router in self.routers)

    @property
    def collector_url(self) -> str:
        return http_url(self.collector_http)

    @property
    def trainer_url(self) -> str:
        return http_url(self.trainer_http)

    @property
    def predictor_urls(self) -> tuple[str, ...]:
        return tuple(http_url(port) for port in self.predictors_http)

    @property
    def envoy_admin_url(self) -> str:
        return http_url(self.envoy_admin)

    @property
    def sim_control_url(self) -> str | None:
        return None if self.sim_control is None else http_url(self.sim_control)


def http_url(port: int) -> str:
    """A loopback URL."""
    return f"http://{LOOPBACK}:{port}"


def reserve_addresses(config: StackConfig, ports: Ports) -> Addresses:
    """A held port for every listener; one that the user chose, for the gateway or a service's HTTP, is taken as it is.

    Raises ConfigurationError for a chosen one that is none.
    """
    listen = config.listen

    def http_ports(service_name: str, count: int) -> tuple[int, ...]:
        chosen = _chosen_port(config, service_name) if count == 1 else 0  # several can't have one port
        return tuple(chosen or ports.reserve() for _ in range(count))

    return Addresses(
        gateway=listen if listen.port else Address(listen.host, ports.reserve()),
        envoy_admin=ports.reserve(),
        nats=ports.reserve(),
        nats_monitor=ports.reserve(),
        redis=ports.reserve(),
        routers=tuple(
            RouterPorts(ports.reserve(), ports.reserve(), http) for http in http_ports("ROUTER", config.routers)
        ),
        collector_als=ports.reserve(),
        collector_http=_chosen_port(config, "COLLECTOR") or ports.reserve(),
        trainer_http=_chosen_port(config, "TRAINER") or ports.reserve(),
        predictors_http=http_ports("PREDICTOR", config.predictors),
        sim_control=ports.reserve() if config.simulated else None,
    )


def _chosen_port(config: StackConfig, service_name: str) -> int:
    """The user's own for a service's HTTP, so that a scrape finds it after the next start too; 0: none."""
    variable = f"LEADTIME_{service_name}_HTTP_PORT"
    text = config.environment.get(variable, "0")
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise ConfigurationError(f"{variable}: found '{text[:16]}'; allowed: 0 to 65535")
    return int(text)


def place_simulated(spec: ProcessSpec, control_port: int, ports: Ports) -> ProcessSpec:
    """The spec with a port for each server that has none, and for the control API."""
    servers = tuple(
        server if server.port else server.model_copy(update={"port": ports.reserve()}) for server in spec.servers
    )
    return spec.model_copy(update={"servers": servers, "control_port": control_port})


def simulated_endpoints(spec: ProcessSpec, hardware_classes: Mapping[str, str]) -> tuple[str, ...]:
    """Placed servers as the router takes endpoints; `hardware_classes` by server name, none where it has no entry."""
    return tuple(
        f"http://{server.host}:{server.port}"
        + (f";hardware_class={hardware_classes[server.name]}" if server.name in hardware_classes else "")
        for server in spec.servers
    )


def endpoint_address(endpoint: str) -> Address:
    """`http://host:port;key=value…` → address; raises FieldError for what Envoy would not reach as written."""
    return parse_endpoint(endpoint.split(";", 1)[0])


def envoy_config(
    addresses: Addresses,
    endpoints: tuple[str, ...],
    api: Address | None,
    shape: Shape = "buffered",
    router_environment: Mapping[str, str] | None = None,
) -> EnvoyConfig:
    """What the one Envoy is told; some of it follows from the settings that the router is given. Raises FieldError."""
    return EnvoyConfig(
        endpoints=tuple(endpoint_address(endpoint) for endpoint in endpoints),
        routers=tuple(RouterAddress(Address(LOOPBACK, router.extproc), router.health) for router in addresses.routers),
        collectors=(Address(LOOPBACK, addresses.collector_als),),
        api=(api,) if api else (),
        listen=addresses.gateway,
        admin=Address(LOOPBACK, addresses.envoy_admin),
        shape=shape,
        **of_router(router_environment or {}),
    )


def common_environment(addresses: Addresses, pool: str) -> dict[str, str]:
    """What all services are told, and that no child starts threads or telemetry of its own accord."""
    return {
        "LEADTIME_NATS_SERVERS": addresses.nats_url,
        "LEADTIME_REDIS_URL": addresses.redis_url,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        **{f"LEADTIME_{service}_POOL": pool for service in ("ROUTER", "COLLECTOR", "TRAINER", "PREDICTOR")},
    }


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One fault for each variable that looks like ours and that no service would read: a typo must not be silence."""
    return [
        f"{variable}: no such setting; allowed: {', '.join(f'{prefix}…' for prefix in _PREFIXES)}"
        for variable in sorted(environment)
        if variable.upper().startswith("LEADTIME_")
        and not variable.upper().startswith(_PREFIXES)
        and variable.upper() not in _OTHERS
    ]


def overridden(given: Mapping[str, str], *own: Mapping[str, str]) -> list[str]:
    """Settings of the user's that no child gets to see, since the stack has a value of its own for them."""
    return sorted(
        {
            variable
            for part in own
            for variable, value in part.items()
            if variable.startswith("LEADTIME_") and given.get(variable, value) != value
        }
    )


def service(name: str, settings: Mapping[str, object], *, instance: str = "", nice: int = 0) -> ChildSpec:
    """One of the four services. `-P` keeps the working directory off the import path: it may hold a `shared` too."""
    prefix = f"LEADTIME_{name.upper()}_"
    return ChildSpec(
        name=name + instance,
        command=(sys.executable, "-P", "-m", f"services.{name}"),
        environment={prefix + key: str(value) for key, value in settings.items()},
        nice=nice,
        stop_tier=_TIER_SERVICES,
    )


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
        self._children: dict[str, tuple[ChildSpec, Probe]] = {}

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
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def router_names(self) -> tuple[str, ...]:
        """Of the children that are routers."""
        count = self.config.routers
        return ("router",) if count == 1 else tuple(f"router-{number}" for number in range(1, count + 1))

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

    async def ended(self) -> None:
        """Wait; raises ChildError once a child ends without having been told to."""
        raise self.supervisor.fault(await self.supervisor.ended())

    async def _start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S))
        await asyncio.to_thread(self._write_files)
        stores = self._stores()
        services = self._services()
        envoy = self._envoy()
        stores, services, (envoy,) = (self._overridden(each) for each in (stores, services, (envoy,)))
        self._children = {spec.name: (spec, probe) for spec, probe in (*stores, *services, envoy)}
        own = [spec.environment for spec, _ in self._children.values()]
        for variable in overridden(self.config.environment, common_environment(self.addresses, self.config.pool), *own):
            self._report(f"{variable}: yours isn't used, this command sets it itself")
        self._report("starting NATS" + (", Redis and the simulated servers" if self.simulated else " and Redis"))
        await self._start_children(*stores)
        self._report(f"starting {self._routers_in_words()}, collector, trainer and predictor")
        await self._start_children(*services)
        self._report("starting Envoy")
        await self._start_children(envoy)

    def _overridden(self, children: tuple[tuple[ChildSpec, Probe], ...]) -> tuple[tuple[ChildSpec, Probe], ...]:
        own = self.config.overrides
        return tuple(
            (replace(spec, environment={**spec.environment, **own.get(spec.name, {})}), probe)
            for spec, probe in children
        )

    async def _start_children(self, *children: tuple[ChildSpec, Probe]) -> None:
        for spec, _ in children:
            for port in self._ports_of(spec.name):
                self._ports.release(port)
        await self.supervisor.start(children)

    def _ports_of(self, name: str) -> tuple[int, ...]:
        at = self.addresses
        simulated = tuple(server.port for server in self.simulated.servers) if self.simulated else ()
        return {
            "nats": (at.nats, at.nats_monitor),
            "redis": (at.redis,),
            "sim": (*simulated, at.sim_control or 0),
            **{
                name: (router.extproc, router.health, router.http)
                for name, router in zip(self.router_names, at.routers, strict=True)
            },
            "collector": (at.collector_als, at.collector_http),
            "trainer": (at.trainer_http,),
            "envoy": (at.gateway.port, at.envoy_admin),
        }.get(name, at.predictors_http)

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
                        self._report(f"{under_way} requests may go on for {self.config.drain_s:g} s")
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

    def _stores(self) -> tuple[tuple[ChildSpec, Probe], ...]:
        at = self.addresses
        nats = ChildSpec(
            name="nats",
            command=(
                str(self._binaries.nats_server),
                *("--addr", LOOPBACK, "--port", str(at.nats), "--http_port", str(at.nats_monitor)),
                *("--jetstream", "--store_dir", str(self._store_dir / "nats")),
            ),
            stop_tier=_TIER_STORES,
        )
        redis = ChildSpec(
            name="redis",
            command=(
                str(self._binaries.redis_server),
                *("--bind", LOOPBACK, "--port", str(at.redis), "--dir", str(self._store_dir / "redis")),
                *("--save", "", "--appendonly", "yes" if self.config.state_dir else "no"),
            ),
            stop_tier=_TIER_STORES,
        )
        started: list[tuple[ChildSpec, Probe]] = [
            (nats, self._http_probe(f"{http_url(at.nats_monitor)}/healthz")),
            (redis, redis_probe(at.redis)),
        ]
        if self.simulated:
            sim = ChildSpec(
                name="sim",
                command=(
                    sys.executable,
                    *("-P", "-m", "sim.server", "--spec", str(self.config.run_dir / "sim.json")),
                ),
                stop_tier=_TIER_STORES,
            )
            started.append((sim, self._http_probe(f"{at.sim_control_url}/control/stats")))
        return tuple(started)

    def _services(self) -> tuple[tuple[ChildSpec, Probe], ...]:
        at = self.addresses
        predictors = [
            (
                service("predictor", {"HTTP_PORT": port}, instance=f"-{number}" if self.config.predictors > 1 else ""),
                # Without a first bundle a predictor is alive but not ready, and the router does without it.
                self._http_probe(f"{http_url(port)}/healthz"),
            )
            for number, port in enumerate(at.predictors_http, start=1)
        ]
        collector = service(
            "collector",
            {"ALS_PORT": at.collector_als, "HTTP_PORT": at.collector_http, "SPOOL_DIR": self._store_dir / "spool"},
        )
        trainer = service("trainer", {"HTTP_PORT": at.trainer_http}, nice=TRAINER_NICE)
        # One salt for all, or they couldn't share what they know of prefix caches.
        salt = self.config.environment.get("LEADTIME_ROUTER_PREFIX_SALT") or secrets.token_hex(16)
        routers = [
            (
                service(
                    "router",
                    {
                        "EXTPROC_PORT": ports.extproc,
                        "HEALTH_PORT": ports.health,
                        "HTTP_PORT": ports.http,
                        "ENDPOINTS": ",".join(self.endpoints),
                        "PREDICTORS": ",".join(at.predictor_urls),
                        "PREFIX_SALT": salt,
                        **({} if self.config.profile is None else {"PROFILE": self.config.profile}),
                    },
                    instance=name.removeprefix("router"),
                ),
                # A user's servers may come up later than this; without any the router listens, and isn't ready.
                self._http_probe(f"{http_url(ports.http)}/readyz") if self.simulated else tcp_probe(ports.extproc),
            )
            for name, ports in zip(self.router_names, at.routers, strict=True)
        ]
        return (
            *predictors,
            (collector, self._http_probe(f"{at.collector_url}/readyz")),
            (trainer, self._http_probe(f"{at.trainer_url}/readyz")),
            *routers,
        )

    def _envoy(self) -> tuple[ChildSpec, Probe]:
        command = (
            *(str(self._binaries.envoy), "--config-path", str(self.config.run_dir / "envoy.json")),
            *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
        )
        spec = ChildSpec(name="envoy", command=command, stop_tier=_TIER_EDGE)
        return spec, self._http_probe(f"{self.addresses.envoy_admin_url}/ready")

    def _http_probe(self, url: str) -> Probe:
        """Ready when GET answers 200; else why not, with the start of the body."""

        async def probe() -> str | None:
            try:
                async with self.http.get(url) as response:
                    if response.status == 200:
                        return None
                    body = (await response.text(errors="replace"))[:300]
                    return f"{urlsplit(url).path} answers {response.status} {body}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"{urlsplit(url).path} doesn't answer ({type(error).__name__})"

        return probe


def tcp_probe(port: int) -> Probe:
    """Ready when a connection is taken."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
        except (OSError, TimeoutError) as error:
            return f"port {port} takes no connection ({type(error).__name__})"
        writer.close()
        return None

    return probe


def redis_probe(port: int) -> Probe:
    """Ready when PING is answered with PONG."""

    async def probe() -> str | None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.write(b"PING\r\n")
                answer = await reader.readline()
            return None if answer.startswith(b"+PONG") else f"PING is answered with {answer[:80]!r}"
        except (OSError, TimeoutError) as error:
            return f"PING isn't answered ({type(error).__name__})"
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    return probe
