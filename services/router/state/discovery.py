"""Which endpoints there are: addresses from the settings, and names that are resolved again and again.

Names are looked up with the system's resolver on a thread (`loop.getaddrinfo`); the difference to the last answer is
told to the pool. The router starts with none of them up, and with none of them known to DNS.

A name with A and AAAA records stands for its IPv4 addresses alone: a server with two addresses would be two endpoints,
and Envoy (`V4_PREFERRED`) has to know the addresses that a pick names, or it passes the pick over.

Limits: no SRV records and no TTLs. A resolver that fails keeps the last answer for ever; one that says "no such name"
keeps it for `gone_after` answers, since a headless service without a ready pod looks like that for a moment.
"""

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.errors import FieldError
from shared.features import hardware_code

Resolve = Callable[[str, int], Awaitable[list[str]]]
_NO_SUCH_NAME: Final = frozenset(
    code for name in ("EAI_NONAME", "EAI_NODATA") if (code := getattr(socket, name, None)) is not None
)
_JITTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One entry of the setting: a host (name or address), its port, and the hardware behind it (code, 0 unknown)."""

    host: str
    port: int
    hardware_class: int = 0

    @property
    def literal(self) -> str | None:
        """`ip:port` where the host is an address already."""
        try:
            return address_of(self.host, self.port)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """`gone_after`: how many answers "no such name" in a row take a name's endpoints away."""

    resolve_interval_ms: float = 10_000.0
    resolve_timeout_ms: float = 5_000.0
    gone_after: int = 3


def address_of(host: str, port: int) -> str:
    """`ip:port`, IPv6 in brackets and in its short form; ValueError if `host` is no address."""
    address = ipaddress.ip_address(host.strip("[]"))
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def parse_endpoints(text: str) -> tuple[EndpointSpec, ...]:
    """Read the setting: comma-separated `host:port` or `http://host:port`, each with `;hardware_class=NAME` if known.

    Raises FieldError that says which entry is wrong. An empty text is no endpoint.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(_spec(entry, place) for place, entry in enumerate(entries, 1) if entry)


def _spec(entry: str, place: int) -> EndpointSpec:
    where = f"endpoints, entry {place}"
    url, *options = (part.strip() for part in entry.split(";"))
    scheme, found, rest = url.partition("://")
    if found and scheme != "http":
        raise FieldError(where, f"'{scheme[:16]}://'", "host:port or http://host:port")
    host, colon, port = (rest if found else url).rstrip("/").rpartition(":")
    bare = host.strip("[]")
    if not colon or not bare or (":" in bare and not host.startswith("[")) or "/" in host:
        raise FieldError(where, f"'{url[:64]}'", "host:port, an IPv6 address in brackets")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise FieldError(where, f"port '{port[:16]}'", "1 to 65535")
    hardware = 0
    for option in options:
        name, _, value = option.partition("=")
        if name.strip() != "hardware_class":
            raise FieldError(where, f"option '{name[:32]}'", "hardware_class=NAME")
        hardware = hardware_code(value.strip())
    return EndpointSpec(bare, int(port), hardware)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name as `ip:port`; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return one_family([str(entry[4][0]) for entry in found], port)


def one_family(hosts: Sequence[str], port: int) -> list[str]:
    """The IPv4 hosts as `ip:port`, or the IPv6 ones where there is none; each once, in order."""
    # A scope (`fe80::1%eth0`) can't be routed to by Envoy.
    usable = {host for host in hosts if "%" not in host}
    ipv4 = {host for host in usable if ":" not in host}
    return sorted(address_of(host, port) for host in ipv4 or usable)


class Discovery:
    """Keeps the pool's endpoints equal to what the entries stand for; `run` until cancelled."""

    def __init__(
        self,
        pool: PoolState,
        specs: Sequence[EndpointSpec],
        *,
        clock: Clock,
        registry: CollectorRegistry,
        rng: random.Random,
        config: DiscoveryConfig | None = None,
        resolver: Resolve = resolve,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._config = config or DiscoveryConfig()
        self._resolver = resolver
        self._specs = tuple(specs)
        self._answers: dict[EndpointSpec, list[str]] = {}
        self._absent: dict[EndpointSpec, int] = {}
        self._listed: dict[str, int] = {}
        self._log = structlog.get_logger()
        self._lookups = Counter(
            "leadtime_router_name_lookups", "Lookups of endpoint names by result.", ["result"], registry=registry
        )

    async def run(self) -> None:
        """Resolve at once, then at the interval, until cancelled."""
        while True:
            await self.resolve_once()
            interval_ms = self._config.resolve_interval_ms * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
            await asyncio.sleep(interval_ms / 1e3)

    async def resolve_once(self) -> None:
        """Look every name up and tell the pool the difference."""
        names = [spec for spec in self._specs if spec.literal is None]
        await asyncio.gather(*(self._look_up(spec) for spec in names))
        listed: dict[str, int] = {}
        for spec in self._specs:
            literal = spec.literal
            for address in [literal] if literal else self._answers.get(spec, []):
                listed.setdefault(address, spec.hardware_class)
        now_ms = self._clock.monotonic_ms()
        for address, hardware_class in listed.items():
            if self._listed.get(address) != hardware_class:
                self._pool.add_endpoint(address, hardware_class=hardware_class, now_ms=now_ms)
                self._log.info("endpoint listed", endpoint=address)
        for address in self._listed.keys() - listed.keys():
            self._pool.remove_endpoint(address)
            self._log.info("endpoint no longer listed", endpoint=address)
        self._listed = listed

    async def _look_up(self, spec: EndpointSpec) -> None:
        try:
            async with asyncio.timeout(self._config.resolve_timeout_ms / 1e3):
                answer = await self._resolver(spec.host, spec.port)
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                self._lookups.labels("no_such_name").inc()
                self._miss(spec)
            else:
                self._lookups.labels("failed").inc()
            return
        except (OSError, TimeoutError, UnicodeError):
            self._lookups.labels("failed").inc()
            return
        if not answer:
            self._lookups.labels("no_such_name").inc()
            self._miss(spec)
            return
        self._lookups.labels("ok").inc()
        self._absent[spec] = 0
        self._answers[spec] = answer

    def _miss(self, spec: EndpointSpec) -> None:
        self._absent[spec] = self._absent.get(spec, 0) + 1
        if self._absent[spec] >= self._config.gone_after:
            self._answers[spec] = []
