"""Where everything on one machine listens: what is asked for, and the port that each part gets. Pure but for the ports.

`stack.py` asks for a layout at each start, `children.py` tells each child its part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.envoy import Address, Shape, parse_endpoint
from deploy.local.ports import LOOPBACK, Ports
from shared.errors import ConfigurationError
from sim.spec import ProcessSpec


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

    @property
    def router_names(self) -> tuple[str, ...]:
        """Of the children that are routers."""
        return ("router",) if self.routers == 1 else tuple(f"router-{number}" for number in range(1, self.routers + 1))


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
