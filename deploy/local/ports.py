"""Loopback ports for servers that must know their port before they start.

A port is chosen outside the range from which the kernel takes ports for outgoing connections, and its socket stays
bound until `release`, called just before the server binds it itself: neither another run nor one of our own outgoing
connections can take it while it is held, and outgoing connections can't take it afterwards either, so a server that is
restarted finds its port free.

Limits: between `release` and the server's own bind another program that looks for free ports may still win; the server
then fails at start, which the stack reports with the server's log.
"""

import errno
import random
import socket
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
LOWEST_PORT: Final = 10_240
_HIGHEST: Final = 65_535
_OUTGOING_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES: Final = 200


class Ports:
    """Holds ports until they are released. `rng` decides where the search begins."""

    __slots__ = ("_candidates", "_held", "_rng")

    def __init__(self, rng: random.Random, outgoing: tuple[int, int] | None = None) -> None:
        low, high = outgoing or outgoing_range()
        below, above = range(LOWEST_PORT, low), range(high + 1, _HIGHEST + 1)
        self._candidates = below if len(below) >= len(above) else above
        self._rng = rng
        self._held: dict[int, socket.socket] = {}

    def reserve(self) -> int:
        """Bind a free port, keep it, return its number; raises OSError when `_TRIES` ports were all taken."""
        for _ in range(_TRIES):
            port = self._rng.choice(self._candidates) if self._candidates else 0
            holder = socket.socket()
            try:
                holder.bind((LOOPBACK, port))
            except OSError as error:
                holder.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            number = int(holder.getsockname()[1])
            self._held[number] = holder
            return number
        raise OSError(errno.EADDRINUSE, f"{_TRIES} loopback ports in a row were taken")

    def release(self, port: int) -> int:
        """Let go of a port, for the server that binds it next; returns it. A port that isn't held stays as it is."""
        holder = self._held.pop(port, None)
        if holder is not None:
            holder.close()
        return port

    def close(self) -> None:
        """Let go of all."""
        for port in list(self._held):
            self.release(port)


def check_free(host: str, port: int) -> None:
    """Raise OSError where nobody could listen on this IP address and port now; port 0 is always free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As Envoy does: connections of an earlier run that aren't quite over don't matter. A listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def outgoing_range(file: Path = _OUTGOING_RANGE) -> tuple[int, int]:
    """(lowest, highest) port of outgoing connections; the usual one where the system doesn't say."""
    try:
        low, high = file.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999
