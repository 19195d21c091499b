"""Endpoints from the setting: addresses as they are, names looked up again and again. Edge: DNS.

`http://name:port` is the system's resolver on a thread (`loop.getaddrinfo`), at a set interval: it knows hosts files
and whatever else the machine has. `dns://` and `srv://` ask DNS itself (dnspython) and ask again when the TTL of the
answer is over. Of SRV records those of the lowest priority count; their weights don't, since the router weighs for
itself.

Limits: a resolver that fails keeps the last answer for ever; one that says "no such name" keeps it for `gone_after`
answers, since a headless service without a ready pod looks like that for a moment.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
from prometheus_client import CollectorRegistry, Counter

from services.router.discovery.endpoints import EndpointSpec, Listed, Listing, Lookup, one_family
from shared.clock import Clock

Resolve = Callable[[str, int], Awaitable[list[str]]]
_NO_SUCH_NAME: Final = frozenset(
    code for name in ("EAI_NONAME", "EAI_NODATA") if (code := getattr(socket, name, None)) is not None
)
_JITTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class NamesConfig:
    """`gone_after`: how many answers "no such name" in a row take a name's endpoints away.

    `resolve_interval_ms`: of names that the system resolves, and after a failure. TTLs are kept between the two bounds.
    """

    resolve_interval_ms: float = 10_000.0
    resolve_timeout_ms: float = 5_000.0
    shortest_ttl_ms: float = 1_000.0
    longest_ttl_ms: float = 300_000.0
    gone_after: int = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """Addresses (`ip:port`) of a name, and for how long they hold; None: as long as the interval says."""

    addresses: tuple[str, ...]
    ttl_ms: float | None = None


class NoSuchName(Exception):
    """The name isn't there, or has no such record."""


class LookupFailed(Exception):
    """Nobody could say."""


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name as `ip:port`, by the system's resolver; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return one_family([str(entry[4][0]) for entry in found], port)


class Dns:
    """Asks DNS servers directly. `servers`: `ip` or `ip:port`; none: those of the machine's resolv.conf."""

    def __init__(self, servers: Sequence[str] = (), *, timeout_ms: float = 5_000.0) -> None:
        self._resolver = dns.asyncresolver.Resolver(configure=not servers)
        if servers:
            split = [_server(server) for server in servers]
            self._resolver.nameservers = [ip for ip, _ in split]
            self._resolver.nameserver_ports = dict(split)
        self._resolver.lifetime = timeout_ms / 1e3

    async def addresses(self, host: str, port: int) -> Answer:
        """A records, or AAAA where there is none. Raises NoSuchName or LookupFailed."""
        try:
            hosts, ttl_ms = await self._ask(host, "A")
        except NoSuchName:
            hosts, ttl_ms = await self._ask(host, "AAAA")
        return Answer(tuple(one_family(hosts, port)), ttl_ms)

    async def services(self, name: str) -> Answer:
        """Targets of the SRV records of the lowest priority. Raises NoSuchName or LookupFailed."""
        answer = await self._query(name, "SRV")
        lowest = min(record.priority for record in answer)
        wanted = [(record.target.to_text(), record.port) for record in answer if record.priority == lowest]
        parts = await asyncio.gather(*(self.addresses(target, port) for target, port in wanted), return_exceptions=True)
        addresses: set[str] = set()
        ttl_ms = _ttl_ms(answer)
        for part in parts:
            if isinstance(part, Answer):
                addresses.update(part.addresses)
                ttl_ms = min(ttl_ms, part.ttl_ms or ttl_ms)
            elif isinstance(part, LookupFailed):
                raise part  # a part of the answer would take the others' endpoints away
            elif not isinstance(part, NoSuchName):
                raise part
        if not addresses:
            raise NoSuchName(name)
        return Answer(tuple(sorted(addresses)), ttl_ms)

    async def _ask(self, host: str, kind: str) -> tuple[list[str], float]:
        answer = await self._query(host, kind)
        return [record.address for record in answer], _ttl_ms(answer)

    async def _query(self, name: str, kind: str) -> dns.resolver.Answer:
        try:
            return await self._resolver.resolve(name, kind, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            raise NoSuchName(name) from None
        except (dns.exception.DNSException, OSError, UnicodeError) as error:
            raise LookupFailed(type(error).__name__) from None


def _server(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return text.strip("[]"), 53


def _ttl_ms(answer: dns.resolver.Answer) -> float:
    return 1e3 * float(answer.rrset.ttl) if answer.rrset is not None else 0.0


class NamesSource:
    """The endpoints that the entries of the setting stand for. `run` until cancelled."""

    name = "names"

    def __init__(
        self,
        specs: Sequence[EndpointSpec],
        *,
        clock: Clock,
        registry: CollectorRegistry,
        rng: random.Random,
        config: NamesConfig | None = None,
        resolver: Resolve = resolve,
        dns: Dns | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._config = config or NamesConfig()
        self._resolver = resolver
        self._dns = dns
        self._specs = tuple(specs)
        self._names = [spec for spec in self._specs if spec.literal is None]
        self._answers: dict[EndpointSpec, tuple[str, ...]] = {}
        self._absent: dict[EndpointSpec, int] = {}
        self._due_ms: dict[EndpointSpec, float] = {}
        self._confirmed_ms: dict[EndpointSpec, float] = {}
        self._lookups = Counter(
            "leadtime_router_name_lookups", "Lookups of endpoint names by result.", ["result"], registry=registry
        )

    @property
    def listing(self) -> Listing:
        listed: dict[str, Listed] = {}
        for spec in self._specs:
            literal = spec.literal
            for address in [literal] if literal else self._answers.get(spec, ()):
                listed.setdefault(address, spec.listed)
        return listed

    @property
    def confirmed_ms(self) -> float | None:
        """When the oldest of the names was last answered; None: one never was. Addresses alone are always right."""
        if not self._names:
            return self._clock.monotonic_ms()
        known = [self._confirmed_ms.get(spec) for spec in self._names]
        return None if None in known else min(instant for instant in known if instant is not None)

    async def run(self, changed: Callable[[], None]) -> None:
        """Look names up when they are due, until cancelled."""
        while True:
            await self.look_up_due()
            changed()
            if not self._names:
                await asyncio.Event().wait()
            left_ms = min(self._due_ms[spec] for spec in self._names) - self._clock.monotonic_ms()
            await asyncio.sleep(max(left_ms, 50.0) / 1e3)

    async def look_up_due(self) -> None:
        """Look up every name whose answer no longer holds."""
        now_ms = self._clock.monotonic_ms()
        due = [spec for spec in self._names if self._due_ms.get(spec, now_ms) <= now_ms]
        await asyncio.gather(*(self._look_up(spec) for spec in due))

    async def _look_up(self, spec: EndpointSpec) -> None:
        interval_ms = self._config.resolve_interval_ms
        try:
            async with asyncio.timeout(self._config.resolve_timeout_ms / 1e3):
                answer = await self._answer(spec)
            if not answer.addresses:
                raise NoSuchName(spec.host)
        except NoSuchName:
            self._lookups.labels("no_such_name").inc()
            self._confirmed_ms[spec] = self._clock.monotonic_ms()
            self._absent[spec] = self._absent.get(spec, 0) + 1
            if self._absent[spec] >= self._config.gone_after:
                self._answers[spec] = ()
        except (LookupFailed, OSError, TimeoutError, UnicodeError):
            self._lookups.labels("failed").inc()
        else:
            self._lookups.labels("ok").inc()
            self._confirmed_ms[spec] = self._clock.monotonic_ms()
            self._absent[spec] = 0
            self._answers[spec] = answer.addresses
            if answer.ttl_ms is not None:
                interval_ms = min(max(answer.ttl_ms, self._config.shortest_ttl_ms), self._config.longest_ttl_ms)
        jitter = self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        self._due_ms[spec] = self._clock.monotonic_ms() + interval_ms * jitter

    async def _answer(self, spec: EndpointSpec) -> Answer:
        if spec.lookup is not Lookup.SYSTEM and self._dns is not None:
            if spec.lookup is Lookup.SRV:
                return await self._dns.services(spec.host)
            return await self._dns.addresses(spec.host, spec.port)
        try:
            return Answer(tuple(await self._resolver(spec.host, spec.port)))
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                raise NoSuchName(spec.host) from None
            raise
