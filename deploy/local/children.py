"""What each child is: its command, what its environment tells it, and how one sees that it is ready.

Made of the layout alone; `stack.py` starts and stops what is described here, in three steps: stores (and simulated
servers), services, Envoy.
"""

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deploy.local.binaries import Binaries
from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, of_router
from deploy.local.layout import Addresses, StackConfig, endpoint_address, http_url
from deploy.local.ports import LOOPBACK
from deploy.local.probes import redis_probe, tcp_probe
from deploy.local.processes import ChildSpec, Probe
from sim.spec import ProcessSpec

TRAINER_NICE: Final = 10
"""On two cores a fit would otherwise take time slices from requests under way."""
_PREFIXES: Final = tuple(
    f"LEADTIME_{block}_" for block in ("ROUTER", "COLLECTOR", "TRAINER", "PREDICTOR", "NATS", "STREAM", "REDIS", "LOG")
)
_OTHERS: Final = frozenset(
    {"LEADTIME_DATA", "LEADTIME_CRDS", "LEADTIME_FUZZ_CASES", "LEADTIME_STANDIN_IMAGES", "LEADTIME_SECRETS_DIR"}
)
"""Of benchmarks, checks and all services' secrets: no service's own, and no typo."""
# Stopped in this order: first what takes requests in, last what the others write to.
_TIER_EDGE, _TIER_SERVICES, _TIER_STORES = 0, 1, 2


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


Described = tuple[ChildSpec, Probe]


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """All children of one start."""

    config: StackConfig
    addresses: Addresses
    endpoints: tuple[str, ...]
    simulated: ProcessSpec | None
    """Placed: every server has its port."""
    binaries: Binaries
    store_dir: Path
    http_probe: Callable[[str], Probe]
    """Ready when GET answers 200."""

    def stores(self) -> tuple[Described, ...]:
        at = self.addresses
        nats = ChildSpec(
            name="nats",
            command=(
                str(self.binaries.nats_server),
                *("--addr", LOOPBACK, "--port", str(at.nats), "--http_port", str(at.nats_monitor)),
                *("--jetstream", "--store_dir", str(self.store_dir / "nats")),
            ),
            stop_tier=_TIER_STORES,
        )
        redis = ChildSpec(
            name="redis",
            command=(
                str(self.binaries.redis_server),
                *("--bind", LOOPBACK, "--port", str(at.redis), "--dir", str(self.store_dir / "redis")),
                *("--save", "", "--appendonly", "yes" if self.config.state_dir else "no"),
            ),
            stop_tier=_TIER_STORES,
        )
        started: list[Described] = [
            (nats, self.http_probe(f"{http_url(at.nats_monitor)}/healthz")),
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
            started.append((sim, self.http_probe(f"{at.sim_control_url}/control/stats")))
        return self._overridden(started)

    def services(self) -> tuple[Described, ...]:
        at = self.addresses
        predictors = [
            (
                service("predictor", {"HTTP_PORT": port}, instance=f"-{number}" if self.config.predictors > 1 else ""),
                # Without a first bundle a predictor is alive but not ready, and the router does without it.
                self.http_probe(f"{http_url(port)}/healthz"),
            )
            for number, port in enumerate(at.predictors_http, start=1)
        ]
        collector = service(
            "collector",
            {"ALS_PORT": at.collector_als, "HTTP_PORT": at.collector_http, "SPOOL_DIR": self.store_dir / "spool"},
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
                self.http_probe(f"{http_url(ports.http)}/readyz") if self.simulated else tcp_probe(ports.extproc),
            )
            for name, ports in zip(self.config.router_names, at.routers, strict=True)
        ]
        return self._overridden(
            (
                *predictors,
                (collector, self.http_probe(f"{at.collector_url}/readyz")),
                (trainer, self.http_probe(f"{at.trainer_url}/readyz")),
                *routers,
            )
        )

    def envoy(self) -> Described:
        command = (
            *(str(self.binaries.envoy), "--config-path", str(self.config.run_dir / "envoy.json")),
            *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
        )
        spec = ChildSpec(name="envoy", command=command, stop_tier=_TIER_EDGE)
        (described,) = self._overridden([(spec, self.http_probe(f"{self.addresses.envoy_admin_url}/ready"))])
        return described

    def ports_of(self, name: str) -> tuple[int, ...]:
        """Those that a child listens on; a predictor's are all predictors'."""
        at = self.addresses
        simulated = tuple(server.port for server in self.simulated.servers) if self.simulated else ()
        return {
            "nats": (at.nats, at.nats_monitor),
            "redis": (at.redis,),
            "sim": (*simulated, at.sim_control or 0),
            **{
                name: (router.extproc, router.health, router.http)
                for name, router in zip(self.config.router_names, at.routers, strict=True)
            },
            "collector": (at.collector_als, at.collector_http),
            "trainer": (at.trainer_http,),
            "envoy": (at.gateway.port, at.envoy_admin),
        }.get(name, at.predictors_http)

    def _overridden(self, children: Iterable[Described]) -> tuple[Described, ...]:
        own = self.config.overrides
        return tuple(
            (replace(spec, environment={**spec.environment, **own.get(spec.name, {})}), probe)
            for spec, probe in children
        )
