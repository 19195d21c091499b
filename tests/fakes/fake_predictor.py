"""A predictor behind the real protocol, on a free port, that can be told to misbehave.

It answers the raw encoding of `POST /v1/predict` and `GET /readyz`. Answers are `tests.bundles.expected` of the rows,
so a row's answer tells which row it came from.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from shared.features import SCHEMA, SCHEMA_HASH
from tests.bundles import OUTPUTS, expected
from tests.servers import free_port

VERSION = "1700000000000-fa4efa4e"


class Behaviour(Enum):
    ANSWER = auto()
    HANG = auto()
    """Reads the request and never answers; probes hang too."""
    RESET = auto()
    """Ends the connection in place of an answer."""
    CUT = auto()
    """Ends the connection in the middle of the answer."""
    UNAVAILABLE = auto()
    """503 to predictions and probes."""
    NESTED = auto()
    """503 likewise, with JSON that is nested thousands deep."""
    NO_MODEL = auto()
    """A predictor of the pools `default` and `other`, without a bundle of either."""
    NO_OTHER_MODEL = auto()
    """It lacks that of `other` alone: not ready, and answers."""
    REDIRECT = auto()
    """307 to itself, again and again."""
    REJECT = auto()
    """400 to predictions."""
    WRONG_SCHEMA = auto()
    """409 to predictions, ready to probes."""
    SHORT = auto()
    """One row too few."""
    NOT_A_NUMBER = auto()
    NEGATIVE = auto()
    UNKNOWN_OUTPUTS = auto()
    """Names columns that don't exist, in the right number."""
    TWICE = auto()
    """Names one column twice."""
    ENDLESS_VERSION = auto()
    NO_HEADERS = auto()
    NOT_HTTP = auto()
    CLOSE_AFTER = auto()
    """Answers, then ends the connection without having said so."""


_NESTED = b'{"a":' * 9_000 + b"1" + b"}" * 9_000
_WAITS = {
    Behaviour.UNAVAILABLE: b"{}",
    Behaviour.NESTED: _NESTED,
    Behaviour.NO_MODEL: b'{"ready": false, "waiting_for": {"bundle:default": "not yet", "bundle:other": "not yet"}}',
    Behaviour.NO_OTHER_MODEL: b'{"ready": false, "waiting_for": {"bundle:other": "none published yet"}}',
}


@dataclass
class FakePredictor:
    behaviour: Behaviour = Behaviour.ANSWER
    offset: float = 1.0
    version: str = VERSION
    outputs: tuple[str, ...] = OUTPUTS
    token: str | None = None
    port: int = 0
    calls: list[int] = field(default_factory=list)
    """Rows of each prediction that arrived."""
    probes: int = 0
    connections: int = 0
    gate: asyncio.Event | None = None
    """Predictions wait for it."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port or free_port())
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Connections end and new ones are refused."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        behaviour = self.behaviour
        if behaviour is Behaviour.HANG:
            await reader.read()
            return False
        if first == "GET /readyz HTTP/1.1":
            self.probes += 1
            waits = _WAITS.get(behaviour)
            writer.write(_http(200 if waits is None else 503, {}, waits or b"{}"))
            return True
        if first != "POST /v1/predict HTTP/1.1" or headers.get("content-type") != "application/octet-stream":
            writer.write(_http(404, {}, b""))
            return True
        rows = np.frombuffer(body, "<f4").reshape(-1, len(SCHEMA))
        self.calls.append(len(rows))
        if self.gate is not None:
            await self.gate.wait()
        return self._predict(headers, rows, behaviour, writer)

    def _predict(
        self, headers: dict[str, str], rows: np.ndarray, behaviour: Behaviour, writer: asyncio.StreamWriter
    ) -> bool:
        if behaviour is Behaviour.RESET:
            writer.transport.abort()
            return False
        if behaviour is Behaviour.NOT_HTTP:
            writer.write(b"hello\r\n\r\n")
            return False
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            writer.write(_http(401, {}, b"{}"))
            return True
        if behaviour is Behaviour.NO_MODEL:
            writer.write(_http(503, {}, b'{"error": {"reason": "no_bundle", "message": "none yet"}}'))
            return True
        if behaviour is Behaviour.NESTED:
            writer.write(_http(503, {}, _NESTED))
            return True
        if behaviour is Behaviour.REDIRECT:
            writer.write(_http(307, {"location": "/v1/predict"}, b""))
            return True
        status = {Behaviour.UNAVAILABLE: 503, Behaviour.REJECT: 400, Behaviour.WRONG_SCHEMA: 409}.get(behaviour, 200)
        if headers.get("leadtime-schema") != SCHEMA_HASH:
            status = 409
        if status != 200:
            writer.write(_http(status, {}, b"{}"))
            return True
        values = expected(rows, offset=self.offset, outputs=len(self.outputs))
        if behaviour is Behaviour.NOT_A_NUMBER:
            values[0, 0] = np.nan
        if behaviour is Behaviour.NEGATIVE:
            values[-1, 0] = -1.0
        if behaviour is Behaviour.SHORT:
            values = values[:-1]
        version, outputs = self.version, self.outputs
        if behaviour is Behaviour.UNKNOWN_OUTPUTS:
            outputs = tuple(f"latency_{k}" for k in range(len(outputs)))
        if behaviour is Behaviour.TWICE:
            outputs = (outputs[1], *outputs[1:])
        if behaviour is Behaviour.ENDLESS_VERSION:
            version = "v" * 4_096
        named = {"leadtime-bundle": version, "leadtime-outputs": ",".join(outputs)}
        answer = _http(200, {} if behaviour is Behaviour.NO_HEADERS else named, values.astype("<f4").tobytes())
        writer.write(answer[:-5] if behaviour is Behaviour.CUT else answer)
        return behaviour not in {Behaviour.CUT, Behaviour.CLOSE_AFTER}


def _http(status: int, headers: dict[str, str], body: bytes) -> bytes:
    kind = "application/octet-stream" if status == 200 else "application/json"
    lines = [f"HTTP/1.1 {status} -", f"content-type: {kind}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def fake_predictor(behaviour: Behaviour = Behaviour.ANSWER, **facts: object) -> AsyncIterator[FakePredictor]:
    """A running fake."""
    fake = FakePredictor(behaviour, **facts)  # type: ignore[arg-type]
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()
