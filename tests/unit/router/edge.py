"""The router's edge, conductor and state without sockets: a fake gRPC context plays messages into them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
import numpy as np
import structlog.testing
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from prometheus_client import CollectorRegistry

from services.router.director import Director, DirectorOptions
from services.router.extproc.server import ExtProcServer
from services.router.extproc.stream import ResponseObserver
from services.router.metrics import RouterMetrics
from services.router.predict.types import Prediction
from services.router.request.aliases import ModelAliases
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from shared.clock import SystemClock
from shared.samples import Rung

ALIAS = "alias"
ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "[::1]:3")
PROFILES = Profiles(load_presets(Registry()))


class Fault(Enum):
    """What goes wrong beside the messages."""

    NONE = auto()
    PREDICTOR_RAISES = auto()
    PREDICTOR_HANGS = auto()
    RESET_WHILE_DECIDING = auto()
    WRITE_FAILS = auto()
    OBSERVER_RAISES = auto()


class FakeLadder:
    fault = Fault.NONE

    async def predict(self, rows: Any, addresses: Any, backlog: Any, deadline_ms: float) -> Prediction | None:
        if self.fault is Fault.PREDICTOR_RAISES:
            raise ZeroDivisionError
        if self.fault is Fault.PREDICTOR_HANGS:
            await asyncio.Event().wait()
        if self.fault is Fault.RESET_WHILE_DECIDING:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(0)
        return Prediction({"ttft_p50": np.arange(len(rows), dtype=np.float32) + 1}, "v", Rung.PREDICTOR)


@dataclass
class Watcher:
    """An observer that checks the order in which it is called."""

    raises: bool
    calls: list[str] = field(default_factory=list)
    seen: bytes = b""

    def headers(self, status: int, headers: Mapping[str, str], served: str | None, now_ms: float) -> None:
        self.calls.append("headers")
        if self.raises:
            raise ValueError

    def body(self, chunk: bytes, now_ms: float) -> None:
        assert chunk
        assert "end" not in self.calls
        self.seen += chunk

    def end(self, now_ms: float) -> None:
        assert "end" not in self.calls
        self.calls.append("end")


class WatchedDirector(Director):
    """The conductor, with an observer of responses."""

    fault = Fault.NONE

    def response_observer(self, decision_id: str) -> ResponseObserver | None:
        return Watcher(raises=self.fault is Fault.OBSERVER_RAISES)


class FakeContext:
    """A gRPC context that plays messages, then the stream's end or a reset."""

    def __init__(self, script: Sequence[Any], *, reset: bool = False, write_fails_at: int | None = None) -> None:
        self._script = iter(script)
        self._reset = reset
        self._write_fails_at = write_fails_at
        self.received: list[Any] = []
        self.written: list[Any] = []
        self.aborted: str | None = None

    async def read(self) -> Any:
        message = next(self._script, None)
        if message is not None:
            self.received.append(message)
            return message
        if self._reset:
            raise asyncio.CancelledError
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        if self._write_fails_at is not None and len(self.written) >= self._write_fails_at:
            raise grpc.aio.UsageError("the stream is over")
        assert ep.ProcessingResponse.FromString(message.SerializeToString()) == message
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted = details
        raise grpc.aio.AbortError


class Edge:
    """One edge for many streams: what one leaves behind would show in the next."""

    def __init__(self, max_body_bytes: int, *, decision_budget_ms: float = 0.5) -> None:
        state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
        for address in ADDRESSES:
            state.add_endpoint(address, hardware_class=2, now_ms=0.0)
            state.set_models(address, frozenset({"m"}))
            state.set_ready(address, ready=True)
        self.state = state
        self.ladder = FakeLadder()
        registry = CollectorRegistry()
        self.director = WatchedDirector(
            DirectorOptions(
                pool="default",
                listed_endpoints=3,
                decision_budget_ms=decision_budget_ms,
                parsing=ParseConfig(),
                aliases=ModelAliases({ALIAS: "m"}),
                restored_routes=("/",),
            ),
            state,
            self.ladder,  # type: ignore[arg-type]
            PROFILES.pipeline("leadtime"),
            RouterMetrics(registry),
            SystemClock(),
            np.random.default_rng(1),
        )
        self.server = ExtProcServer(self.director, registry, SystemClock(), max_body_bytes=max_body_bytes)

    async def play(self, context: FakeContext, fault: Fault = Fault.NONE) -> None:
        """One stream, and the checks that nothing of it is left."""
        self.ladder.fault = self.director.fault = fault
        task = asyncio.ensure_future(self.server._process(None, context))
        with structlog.testing.capture_logs():
            done, _ = await asyncio.wait({task}, timeout=5.0)
        assert done, "the stream hangs"
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
        if not task.cancelled():
            error = task.exception()
            assert error is None or isinstance(error, grpc.aio.AbortError), error
        assert self.state.in_flight == 0
        assert self.state.ledger.faults() == []
        assert self.server.open_streams == 0
