"""Endpoints from a file that is watched: YAML or JSON, replaced as a whole. Edge: files.

    endpoints:
      - address: 10.0.0.1:8000
        hardware_class: h100
        role: decode

It is looked at once a second by inode, size and time of change, so an atomic rename and the symlinks of a mounted
ConfigMap are seen alike. At the start it has to be there and right; later a file that is missing, torn or wrong keeps
the endpoints that were known, and is counted. An empty list takes them all away.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
import yaml
from prometheus_client import CollectorRegistry, Counter

from services.router.discovery.endpoints import Listed, Listing, parse_endpoints
from services.router.state.roles import Role
from shared.clock import Clock
from shared.errors import FieldError, kind_of, reason_of
from shared.features import hardware_code

_LOOK_S: Final = 1.0
_MAX_BYTES: Final = 16 * 1024 * 1024
_FIELDS: Final = {"address", "hardware_class", "role"}


def read_listing(text: str) -> dict[str, Listed]:
    """The file's endpoints; raises FieldError that names the entry."""
    try:
        document: Any = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that is none is a ValueError
        raise FieldError("endpoints file", "text that is neither YAML nor JSON", "a table with `endpoints`") from None
    entries = document.get("endpoints") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise FieldError("endpoints file", kind_of(document), "a table with a list named `endpoints`")
    listing: dict[str, Listed] = {}
    for place, entry in enumerate(entries, 1):
        where = f"endpoints file, entry {place}"
        if not isinstance(entry, dict) or not isinstance(entry.get("address"), str):
            raise FieldError(where, kind_of(entry), "a table with `address: ip:port`")
        if unknown := entry.keys() - _FIELDS:
            raise FieldError(where, f"'{str(min(unknown))[:32]}'", ", ".join(sorted(_FIELDS)))
        specs = parse_endpoints(entry["address"])
        address = specs[0].literal if len(specs) == 1 else None
        if address is None:
            raise FieldError(where, f"'{entry['address'][:64]}'", "an address, ip:port; names belong to the setting")
        hardware = entry.get("hardware_class")
        listing[address] = Listed(
            hardware_code(str(hardware)) if hardware is not None else 0, Role.of(str(entry.get("role", "")))
        )
    return listing


def load_listing(path: Path) -> dict[str, Listed]:
    """The file's endpoints; raises FieldError, or OSError where there is no such file."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FieldError("endpoints file", f"{size} bytes", f"at most {_MAX_BYTES}")
    try:
        return read_listing(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise FieldError("endpoints file", reason_of(error), "a table with `endpoints`") from None


class FileSource:
    """The endpoints of one file. `run` until cancelled."""

    name = "file"

    def __init__(self, path: Path, *, clock: Clock, registry: CollectorRegistry) -> None:
        self._path = path
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        self._reported = ""
        self.listing: Listing = {}
        self.confirmed_ms: float | None = None
        self._log = structlog.get_logger()
        self._reads = Counter(
            "leadtime_router_endpoint_file_reads",
            "Readings of the file of endpoints by result.",
            ["result"],
            registry=registry,
        )
        for result in ("ok", "missing", "invalid"):
            self._reads.labels(result)

    async def run(self, changed: Callable[[], None]) -> None:
        while True:
            if await self.look():
                changed()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> bool:
        """Read the file if it isn't the one that was read last; whether the listing is another now."""
        try:
            found = await asyncio.to_thread(self._read)
        except OSError as error:
            self._refuse("missing", str(error.strerror))
            return False
        except ValueError as error:
            self._refuse("invalid", str(error))
            return False
        self.confirmed_ms = self._clock.monotonic_ms()
        if found is None:
            return False
        self._reads.labels("ok").inc()
        self._reported = ""
        changed = found != self.listing
        self.listing = found
        return changed

    def _read(self) -> Listing | None:
        stat = os.stat(self._path)  # noqa: PTH116 - through symlinks
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if mark == self._seen:
            return None
        listing = load_listing(self._path)
        self._seen = mark
        return listing

    def _refuse(self, result: str, reason: str) -> None:
        """Counted at each look, logged once per reason."""
        self._reads.labels(result).inc()
        if reason != self._reported:
            self._reported = reason
            self._log.warning("file of endpoints can't be used; those known stay", result=result, reason=reason)
