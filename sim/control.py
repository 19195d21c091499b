"""The control API of a process of simulated servers: caches, faults, statistics, stop and start.

An edge of its own on loopback, for the process that started the simulation and for tests; it has no authentication and
must not be bound elsewhere. Not part of what a model server offers.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import ValidationError

from shared.faults import in_words
from sim.http_edge import DateClock, Exchange, HttpProtocol, HttpRequest, ListenError
from sim.model_server import ModelServer
from sim.openai_api import error_body
from sim.real_time import LatenessRecorder
from sim.spec import Faults

CONTROL_HOST = "127.0.0.1"


class ControlApi:
    def __init__(self, servers: Mapping[str, ModelServer], loop: asyncio.AbstractEventLoop) -> None:
        self._servers = servers
        self._loop = loop
        self._connections: set[HttpProtocol] = set()
        self._clock = DateClock()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._cpu_base_s = time.process_time()
        self._since_s = time.monotonic()
        self.port = 0

    async def start(self, port: int) -> None:
        try:
            self._listener = await self._loop.create_server(
                lambda: HttpProtocol(self._handle, self._clock, self._connections), CONTROL_HOST, port
            )
        except OSError as error:
            raise ListenError("the control API", CONTROL_HOST, port, error) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    def _handle(self, request: HttpRequest, exchange: Exchange) -> None:
        parts = request.path.strip("/").split("/")
        match request.method, parts:
            case "GET", ["control", "stats"]:
                exchange.respond(200, orjson.dumps(self._stats()))
            case "POST", ["control", "stats", "reset"]:
                self._reset_stats()
                exchange.respond(200, b"{}")
            case "POST", ["control", "reset-caches"]:
                for server in self._servers.values():
                    server.reset_caches()
                exchange.respond(200, orjson.dumps({"reset": list(self._servers)}))
            case "POST", ["control", "faults", name] if name in self._servers:
                self._set_faults(self._servers[name], request.body, exchange)
            case "POST", ["control", "stop", name] if name in self._servers:
                self._run(self._servers[name].stop, exchange)
            case "POST", ["control", "start", name] if name in self._servers:
                self._run(self._servers[name].start, exchange)
            case _:
                exchange.respond(404, error_body(404, "NotFoundError", "no such server or control endpoint"))

    def _set_faults(self, server: ModelServer, body: bytes, exchange: Exchange) -> None:
        try:
            faults = Faults.model_validate_json(body or b"{}")
        except ValidationError as error:
            problems = in_words(error.errors(), Faults)
            told = "; ".join(f"{field}: {problem}" for field, problem in problems)
            exchange.respond(400, error_body(400, "BadRequestError", told, problems[0][0]))
            return
        server.set_faults(faults)
        self._run(server.apply_listening, exchange)

    def _run(self, action: Callable[[], Coroutine[Any, Any, None]], exchange: Exchange) -> None:
        async def run() -> None:
            try:
                await action()
            except OSError as error:
                exchange.respond(500, error_body(500, "InternalServerError", str(error)))
            else:
                exchange.respond(200, b"{}")

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stats(self) -> dict[str, Any]:
        return {
            "cpu_s": time.process_time() - self._cpu_base_s,
            "elapsed_s": time.monotonic() - self._since_s,
            "lateness": asdict(LatenessRecorder.summary([server.lateness for server in self._servers.values()])),
            "servers": {name: server.stats() for name, server in self._servers.items()},
        }

    def _reset_stats(self) -> None:
        self._cpu_base_s = time.process_time()
        self._since_s = time.monotonic()
        for server in self._servers.values():
            server.reset_stats()
