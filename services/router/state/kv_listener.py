"""KV-cache events over ZMQ: servers connect here, or are called on where they publish; the prefix index is corrected.
Edge.

A message has three frames: topic, sequence number (8 bytes, big-endian) and payload. The topic says whose it is:
`kv@ADDRESS` or `kv@ADDRESS@MODEL` with the endpoint's `ip:port`, or its `ip` where one endpoint alone has it.

A gap in the numbers means that events were missed (a publisher drops for a slow reader, and before it has connected).
Where `replay_port` is set the server is asked for them there; where it isn't, or has them no longer, the endpoint's
table is forgotten and fills anew. A number that goes back is another process.

Limits: no credential: ZMQ has none that vLLM speaks, so beyond loopback the port must be guarded by a network policy.
Token ids are hashed at once and never logged or passed on.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

import structlog
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry, Counter

from services.router.state.kv_events import decode_events
from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.errors import ConfigurationError, FieldError

_HIGH_WATER: Final = 20_000
"""Messages kept for us; a publisher makes some hundred a second."""
_CALL_EVERY_S: Final = 1.0
_BURST: Final = 64
"""Messages taken before others have their turn on the event loop."""
_SEQUENCE_BYTES: Final = 8
_REPLAY_END: Final = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_REPLAY_S: Final = 2.0
_MAX_FRAMES: Final = 100_000
_MAX_PUBLISHERS: Final = 10_000
_RESULTS: Final = ("ok", "malformed", "unknown_endpoint", "repeated", "gap", "replayed", "restarted")


@dataclass(frozen=True, slots=True)
class KvListenerConfig:
    """`bind`: a ZMQ address (`tcp://127.0.0.1:5557`) that servers connect to. `port`: of the servers, where they
    publish themselves. `replay_port`: of the servers, None where they have none. `bind` or `port`, or both.
    """

    bind: str | None = None
    replay_port: int | None = None
    port: int | None = None


class KvListener:
    """Listens from `start` on; `run` reads."""

    def __init__(self, state: PoolState, clock: Clock, registry: CollectorRegistry, config: KvListenerConfig) -> None:
        self._state = state
        self._clock = clock
        self._config = config
        self._log = structlog.get_logger()
        self._context = zmq.asyncio.Context()
        self._socket: Any = None
        self._last: dict[bytes, int] = {}
        """The newest number by topic."""
        self._batches = Counter(
            "leadtime_router_kv_batches_total", "Messages about KV caches.", ["result"], registry=registry
        )
        self._events = Counter(
            "leadtime_router_kv_events_total", "Events about KV caches.", ["event"], registry=registry
        )
        for result in _RESULTS:
            self._batches.labels(result)
        self._told: set[str] = set()
        self._connected: set[str] = set()

    def start(self) -> str:
        """Listen; returns the address that holds (a port of 0 or `*` takes a free one), "" where servers are called
        alone. Raises ConfigurationError.
        """
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.setsockopt(zmq.IPV6, 1)
        if self._config.bind is None:
            return ""
        try:
            self._socket.bind(self._config.bind)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"KV_EVENTS: can't listen on {self._config.bind}: {error}") from None
        bound: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return bound.decode()

    async def run(self) -> None:
        """Read for ever, and call on servers as endpoints come and go."""
        calling = asyncio.create_task(self._call()) if self._config.port is not None else None
        try:
            while True:
                for _ in range(_BURST):
                    await self._take(await self._socket.recv_multipart())
                await asyncio.sleep(0)
        finally:
            if calling is not None:
                calling.cancel()
            self.close()

    async def _call(self) -> None:
        while True:
            wanted = {
                f"tcp://{endpoint.address.rpartition(':')[0]}:{self._config.port}" for endpoint in self._state.table
            }
            for address in wanted - self._connected:
                self._socket.connect(address)
            for address in self._connected - wanted:
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.disconnect(address)
            self._connected = wanted
            await asyncio.sleep(_CALL_EVERY_S)

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
            self._count("malformed")
            return
        topic, sequence, payload = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        address = self._address(topic)
        if address is None:
            self._count("unknown_endpoint")
            return
        last = self._last.get(topic)
        if last is not None and sequence == last:
            self._count("repeated")
            return
        if last is not None and sequence < last:
            self._count("restarted")
            self._state.forget_kv_events(address)
        elif last is not None and sequence > last + 1:
            self._count("gap")
            await self._recover(address, last + 1, sequence)
        elif last is None and sequence > 0 and self._config.replay_port is not None:
            await self._recover(address, 0, sequence)
        if topic not in self._last and len(self._last) >= _MAX_PUBLISHERS:
            self._last.clear()
        self._last[topic] = sequence
        self._apply(address, payload, "ok")

    def _address(self, topic: bytes) -> str | None:
        parts = topic.decode("utf-8", "replace").split("@")
        named = parts[1] if len(parts) > 1 else ""
        if self._state.table.get(named) is not None:
            return named
        there = [endpoint.address for endpoint in self._state.table if endpoint.host == named.strip("[]")]
        return there[0] if len(there) == 1 else None

    async def _recover(self, address: str, first: int, before: int) -> None:
        """Have the events from `first` up to `before` replayed; without them what is known of the endpoint is void."""
        payloads = await self._replayed(address, first, before)
        if payloads is None:
            self._state.forget_kv_events(address)
            return
        for payload in payloads:
            self._apply(address, payload, "replayed")

    async def _replayed(self, address: str, first: int, before: int) -> list[bytes] | None:
        if self._config.replay_port is None:
            return None
        host = address.rpartition(":")[0]
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        payloads: dict[int, bytes] = {}
        try:
            socket.connect(f"tcp://{host}:{self._config.replay_port}")
            async with asyncio.timeout(_REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
                while len(payloads) < _MAX_FRAMES:
                    *_, number, payload = await socket.recv_multipart()
                    if number == _REPLAY_END or not payload:
                        break
                    payloads[int.from_bytes(number, "big")] = payload
        except (TimeoutError, zmq.ZMQError, ValueError) as error:
            self._tell(f"replay of {address}", type(error).__name__)
            return None
        finally:
            with contextlib.suppress(zmq.ZMQError):
                socket.close()
        wanted = range(first, before)
        if any(number not in payloads for number in wanted):
            return None
        return [payloads[number] for number in wanted]

    def _apply(self, address: str, payload: bytes, result: str) -> None:
        try:
            events = decode_events(payload)
        except FieldError as error:
            self._count("malformed")
            self._tell(address, str(error))
            self._state.forget_kv_events(address)  # what it said is unknown
            return
        self._state.observe_kv_events(address, events, self._clock.monotonic_ms())
        for event in events:
            self._events.labels(type(event).__name__).inc()
        self._count(result)

    def _count(self, result: str) -> None:
        self._batches.labels(result).inc()

    def _tell(self, who: str, what: str) -> None:
        """Each publisher's first fault is logged; the counter has the rest."""
        if who not in self._told and len(self._told) < _MAX_PUBLISHERS:
            self._told.add(who)
            self._log.warning("kv events can't be read", endpoint=who, error=what)
