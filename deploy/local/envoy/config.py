"""What the one Envoy is told of its surroundings: addresses, tokens, limits, how bodies are shown. Pure.

Checked when it is made; `of_router` and `parse_endpoint` are where operators' words become its fields.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from services.router.request.parse import DEFAULT_MAX_BODY_BYTES
from services.router.restored_name import parse_routes
from shared.errors import FieldError
from shared.settings import is_loopback

LOG_FLUSH_S: Final = 0.1

Shape = Literal["buffered", "full_duplex"]
"""How bodies reach the picker; the package says what each means."""

Completions = Literal["access_log", "response_stream"]
"""Who tells of finished requests: Envoy's access log, or the router that the response passes through."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or IP, IPv6 without brackets) and a port; port 0 lets Envoy's own listeners take a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """A router's ext-proc listener, and the port on the same host that answers gRPC health checks."""

    address: Address
    health_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyConfig:
    """What one Envoy needs to know of its surroundings."""

    endpoints: tuple[Address, ...]
    """The pool: model servers that serve the same models."""
    routers: tuple[RouterAddress, ...]
    collectors: tuple[Address, ...]
    api: tuple[Address, ...] = ()
    """An ordinary service under `/api`, beside the pool; none leaves `/api` to the pool."""
    listen: Address = Address("127.0.0.1", 0)
    admin: Address = Address("127.0.0.1", 0)
    """Envoy's admin interface; on loopback only, since it can stop Envoy."""
    collector_token: str | None = None
    """Bearer token of the access-log stream; collectors beyond loopback want one."""
    router_token: str | None = None
    """Bearer token of the ext-proc calls; routers beyond loopback want one."""
    collector_token_variable: str | None = None
    """In place of the token itself: the variable of Envoy's own environment that holds it, so that a rendered file is
    no secret."""
    router_token_variable: str | None = None
    """The same for the ext-proc calls."""
    body_limit_bytes: int = DEFAULT_MAX_BODY_BYTES
    """Largest request body: BUFFERED holds it whole. Above it the client gets a 413. Give it by `of_router`."""
    restored_routes: tuple[str, ...] = ()
    """Beginnings of paths whose responses go through the router for their model's name. Give them by `of_router`."""
    shape: Shape = "buffered"
    completions: Completions = "access_log"
    """`response_stream` needs `full_duplex`, no collectors here, and the router's `COLLECTORS`."""
    router_tls: bool = False
    """Speak TLS to routers without verifying them: for routers with `LEADTIME_ROUTER_TLS` self-signed or files."""
    log_flush_s: float = LOG_FLUSH_S

    def __post_init__(self) -> None:
        by_log = self.completions == "access_log"
        for field in ("endpoints", "routers", *(("collectors",) if by_log else ())):
            if not getattr(self, field):
                raise FieldError(field, "none", "at least one address")
        if not by_log and (self.shape != "full_duplex" or self.collectors):
            raise FieldError("completions", self.completions, "with the shape full_duplex and without collectors")
        if not is_loopback(self.admin.host):
            raise FieldError("admin", self.admin.host, "a loopback address")
        for service in ("router", "collector"):
            variable = getattr(self, f"{service}_token_variable")
            if variable is None:
                continue
            if getattr(self, f"{service}_token") is not None:
                raise FieldError(f"{service}_token_variable", variable, f"none beside {service}_token")
            if re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) is None:
                raise FieldError(f"{service}_token_variable", f"'{variable[:32]}'", "A-Z, 0-9 and _")
        if not 1024 <= self.body_limit_bytes < 2**32:
            raise FieldError("body_limit_bytes", str(self.body_limit_bytes), "1024 to 4294967295 bytes")


def of_router(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of EnvoyConfig that follow from the router's own settings, by the environment that it will be given:
    one place where an operator sets each. Raises FieldError.
    """
    fields: dict[str, Any] = {}
    if (limit := environment.get("LEADTIME_ROUTER_MAX_BODY_BYTES")) is not None:
        if not (limit.isascii() and limit.isdigit() and len(limit) < 12):
            raise FieldError("LEADTIME_ROUTER_MAX_BODY_BYTES", f"'{limit[:16]}'", "a number of bytes")
        fields["body_limit_bytes"] = int(limit)
    if routes := parse_routes(environment.get("LEADTIME_ROUTER_RESTORED_ROUTES", "")):
        fields["restored_routes"] = routes
    return fields


def parse_endpoint(url: str) -> Address:
    """`http://host:port` → address; raises FieldError for anything that Envoy would not reach as written."""
    allowed = "http://host:port, without path, query or credentials"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FieldError("endpoint", f"a URL with {error}", allowed) from None
    if parts.scheme != "http":
        found = f"scheme '{parts.scheme[:16]}'" if "://" in url else "no http:// in front"
        raise FieldError("endpoint", found, allowed)
    if not parts.hostname or port is None or port == 0:
        raise FieldError("endpoint", "no host or no port", allowed)
    if parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username or parts.password:
        raise FieldError("endpoint", "more than host and port", allowed)
    return Address(parts.hostname, port)
