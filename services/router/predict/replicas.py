"""Which predictor gets the next call: least outstanding among those that are live. No I/O, time as an argument.

A replica that can't be connected to or that says it can't serve is ejected at once, one that is slow or breaks off
after a few failures in a row; only a successful probe brings it back. A probe costs no request its deadline, and the
interval between probes doubles while they fail. One that has no model yet doesn't fail: it is probed at the shortest
interval, however long that takes, and comes back as one that never failed.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from services.router.predict.errors import FailureReason

# Proof enough by itself that the next call would fail too.
_DECISIVE = frozenset({FailureReason.REFUSED, FailureReason.UNAVAILABLE, FailureReason.STATUS})


class Probe(Enum):
    """What a probe found."""

    READY = auto()
    NO_MODEL = auto()
    """It answers, and says that it waits for a bundle."""
    FAILED = auto()


class Address(NamedTuple):
    """Where a replica listens. `origin` is its URL's scheme and authority: TLS name and Host header."""

    host: str
    port: int
    origin: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class CircuitConfig:
    """When a replica is ejected and how it is probed."""

    max_failures: int = 3
    """In a row, of those that aren't decisive by themselves."""
    probe_ms: float = 500.0
    max_probe_ms: float = 5_000.0


@dataclass(slots=True)
class Replica:
    """One predictor's state. `probe_at_ms` is None while it takes calls.

    `without_model`: it takes none only since it has no bundle yet.
    """

    address: Address
    outstanding: int = 0
    failures: int = 0
    calls: int = 0
    probe_at_ms: float | None = None
    probe_interval_ms: float = 0.0
    without_model: bool = False
    last_failure: FailureReason | None = field(default=None)

    @property
    def live(self) -> bool:
        return self.probe_at_ms is None


class ReplicaSet:
    """All known replicas."""

    __slots__ = ("_config", "_replicas", "_turn")

    def __init__(self, config: CircuitConfig) -> None:
        self._config = config
        self._replicas: dict[Address, Replica] = {}
        self._turn = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def live_count(self) -> int:
        return sum(replica.live for replica in self._replicas.values())

    def without_model_count(self) -> int:
        return sum(replica.without_model for replica in self._replicas.values())

    def ejected_count(self) -> int:
        return len(self._replicas) - self.live_count() - self.without_model_count()

    def update(self, addresses: Iterable[Address]) -> list[Replica]:
        """Take these addresses as all there are; the state of those that stay is kept. Returns those that left."""
        wanted = dict.fromkeys(addresses)
        gone = [replica for address, replica in self._replicas.items() if address not in wanted]
        self._replicas = {address: self._replicas.get(address) or Replica(address) for address in wanted}
        return gone

    def choose(self, tried: Container[Address] = ()) -> Replica | None:
        """The live replica with the fewest calls outstanding that wasn't tried; in turn where several have."""
        best: Replica | None = None
        replicas = list(self._replicas.values())
        for i in range(len(replicas)):
            replica = replicas[(self._turn + i) % len(replicas)]
            if replica.probe_at_ms is not None or replica.address in tried:
                continue
            if best is None or replica.outstanding < best.outstanding:
                best = replica
        self._turn += 1
        return best

    def others(self, tried: Container[Address]) -> int:
        """How many live replicas weren't tried."""
        return sum(replica.live and replica.address not in tried for replica in self._replicas.values())

    def succeeded(self, replica: Replica) -> None:
        replica.failures = 0
        replica.probe_interval_ms = 0.0

    def failed(self, replica: Replica, reason: FailureReason, now_ms: float) -> bool:
        """Count a failure; True if the replica is ejected by it."""
        replica.last_failure = reason
        if reason is FailureReason.NO_BUNDLE:
            if replica.live:
                self._await_model(replica, now_ms)
            return False
        replica.failures += 1
        if not replica.live or (reason not in _DECISIVE and replica.failures < self._config.max_failures):
            return False
        self._put_off(replica, now_ms)
        return True

    def due_probes(self, now_ms: float) -> list[Replica]:
        """Replicas that take no calls and whose probe is due."""
        return [r for r in self._replicas.values() if r.probe_at_ms is not None and r.probe_at_ms <= now_ms]

    def probed(self, replica: Replica, found: Probe, now_ms: float) -> bool:
        """A probe came back; True if the replica is ejected by it.

        After a good one the next failure of a replica that was ejected ejects it again, whatever its kind.
        """
        waited = replica.without_model
        if found is Probe.NO_MODEL:
            self._await_model(replica, now_ms)
            return False
        replica.without_model = False
        if found is Probe.READY:
            replica.probe_at_ms = None
            replica.failures = 0 if waited else self._config.max_failures - 1
            return False
        self._put_off(replica, now_ms)
        return waited

    def _await_model(self, replica: Replica, now_ms: float) -> None:
        replica.without_model = True
        replica.failures = 0
        replica.probe_interval_ms = 0.0
        replica.probe_at_ms = now_ms + self._config.probe_ms

    def _put_off(self, replica: Replica, now_ms: float) -> None:
        doubled = 2 * replica.probe_interval_ms
        replica.probe_interval_ms = min(max(self._config.probe_ms, doubled), self._config.max_probe_ms)
        replica.probe_at_ms = now_ms + replica.probe_interval_ms
