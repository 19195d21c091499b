"""What discovery agrees on: an entry of the setting, and an endpoint as a source lists it. Pure.

Entries: `http://host:port` (an address, or a name that the system resolves), `dns://name:port` (A and AAAA records,
asked again when their TTL is over), `srv://_service._proto.name` (SRV records, likewise), each with
`;hardware_class=NAME` and `;role=NAME` where known.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.router.state.roles import Role
from shared.errors import FieldError
from shared.features import hardware_code


class Lookup(StrEnum):
    """How an entry's host becomes addresses."""

    SYSTEM = "http"
    DNS = "dns"
    SRV = "srv"


@dataclass(frozen=True, slots=True)
class Listed:
    """An endpoint as a source lists it: what is known of it beside its address.

    `identity`: of what stands behind the address (a pod's uid), "" where the source has none: another one at the same
    address is another endpoint. `hardware_class`: code, 0 unknown.
    """

    hardware_class: int = 0
    role: Role = Role.BOTH
    identity: str = ""


Listing = Mapping[str, Listed]
"""Endpoints by `ip:port`."""


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One entry of the setting: a host (name or address), its port (0 for SRV, which tells it), and what is known."""

    host: str
    port: int
    hardware_class: int = 0
    role: Role = Role.BOTH
    lookup: Lookup = Lookup.SYSTEM

    @property
    def literal(self) -> str | None:
        """`ip:port` where the host is an address already."""
        if self.lookup is Lookup.SRV:
            return None
        try:
            return address_of(self.host, self.port)
        except ValueError:
            return None

    @property
    def listed(self) -> Listed:
        return Listed(self.hardware_class, self.role)


def address_of(host: str, port: int) -> str:
    """`ip:port`, IPv6 in brackets and in its short form; ValueError if `host` is no address."""
    address = ipaddress.ip_address(host.strip("[]"))
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def one_family(hosts: Sequence[str], port: int) -> list[str]:
    """The IPv4 hosts as `ip:port`, or the IPv6 ones where there is none; each once, in order.

    A server with two addresses would be two endpoints, and Envoy (`V4_PREFERRED`) has to know the addresses that a pick
    names, or it passes the pick over.
    """
    # A scope (`fe80::1%eth0`) can't be routed to by Envoy.
    usable = {host for host in hosts if "%" not in host}
    ipv4 = {host for host in usable if ":" not in host}
    return sorted(address_of(host, port) for host in ipv4 or usable)


def parse_endpoints(text: str) -> tuple[EndpointSpec, ...]:
    """Read the setting: comma-separated entries, see the module. An empty text is no endpoint.

    Raises FieldError that says which entry is wrong.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(_spec(entry, place) for place, entry in enumerate(entries, 1) if entry)


def parse_ports(text: str) -> tuple[int, ...]:
    """Comma-separated port numbers; raises FieldError."""
    ports = [part.strip() for part in text.split(",") if part.strip()]
    for port in ports:
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
            raise FieldError("ports", f"'{port[:16]}'", "1 to 65535, separated by commas")
    return tuple(dict.fromkeys(int(port) for port in ports))


_ALLOWED: Final = "host:port, http://host:port, dns://name:port or srv://_service._proto.name"


def _spec(entry: str, place: int) -> EndpointSpec:
    where = f"endpoints, entry {place}"
    url, *options = (part.strip() for part in entry.split(";"))
    scheme, found, rest = url.partition("://")
    if found and scheme not in set(Lookup):
        raise FieldError(where, f"'{scheme[:16]}://'", _ALLOWED)
    lookup = Lookup(scheme) if found else Lookup.SYSTEM
    hardware, role = _options(options, where)
    if lookup is Lookup.SRV:
        name = rest.rstrip("/")
        if not name or ":" in name or "/" in name:
            raise FieldError(where, f"'{url[:64]}'", "srv://_service._proto.name, without a port")
        return EndpointSpec(name, 0, hardware, role, lookup)
    host, colon, port = (rest if found else url).rstrip("/").rpartition(":")
    bare = host.strip("[]")
    if not colon or not bare or (":" in bare and not host.startswith("[")) or "/" in host:
        raise FieldError(where, f"'{url[:64]}'", "host:port, an IPv6 address in brackets")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise FieldError(where, f"port '{port[:16]}'", "1 to 65535")
    return EndpointSpec(bare, int(port), hardware, role, lookup)


def _options(options: Sequence[str], where: str) -> tuple[int, Role]:
    hardware, role = 0, Role.BOTH
    for option in options:
        name, _, value = option.partition("=")
        match name.strip():
            case "hardware_class":
                hardware = hardware_code(value.strip())
            case "role":
                role = Role.of(value.strip())
            case other:
                raise FieldError(where, f"option '{other[:32]}'", "hardware_class=NAME, role=NAME")
    return hardware, role
