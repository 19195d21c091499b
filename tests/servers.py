"""Real servers for tests: nats-server, a Redis-protocol server and Envoy, each on free loopback ports.

Each is an async context manager that yields a handle once the server answers, and ends the process however the block
is left. A handle can `kill`, `stop`, `start` and `restart` its process on the same address and data, which is what
failure tests need. A server that doesn't come up fails with the tail of its own log. Readiness is polled from the
server itself; nothing sleeps for luck.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from deploy.local.binaries import find_binaries
from deploy.local.ports import LOWEST_PORT, outgoing_range
from deploy.local.processes import tied

START_TIMEOUT_S = 20.0
POLL_S = 0.01


def _port_candidates() -> Iterator[int]:
    """Each port below the kernel's range for outgoing connections once, in an order of this process's own.

    A port from that range is free now and somebody's connection a moment later: a server that binds it then, or again
    after a restart, fails for nothing. Parallel test workers take disjoint shares.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(LOWEST_PORT, outgoing_range()[0]))[worker::workers]
    random.Random(os.getpid()).shuffle(ports)
    return itertools.cycle(ports)


_PORTS = _port_candidates()


def free_port() -> int:
    """A loopback port that nobody has, and that neither this process nor the kernel hands out soon again."""
    for port in itertools.islice(_PORTS, 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("1,000 loopback ports in a row were taken")


async def until(
    condition: Callable[[], Any | Awaitable[Any]],
    what: str,
    *,
    timeout_s: float = START_TIMEOUT_S,
    poll_s: float = POLL_S,
) -> Any:
    """Poll until `condition` (plain or async) gives something true and return that; fail naming `what` otherwise."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        outcome = condition()
        if isinstance(outcome, Awaitable):
            outcome = await outcome
        if outcome:
            return outcome
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(poll_s)


async def fetch(url: str, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """GET without a client library: (status, body); status 0 when nobody answers."""

    def get() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    return await asyncio.to_thread(get)


class ServerProcess:
    """One child process with its log in a file; started and ended by its own pid only, and with the tests' process."""

    def __init__(self, name: str, log_file: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log_file = log_file
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def spawn(self, command: Sequence[str | Path]) -> None:
        assert not self.running, f"{self.name} runs already"
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                tied(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self._env} if self._env else None,
            )

    async def ready(self, condition: Callable[[], Any | Awaitable[Any]]) -> Any:
        """Await `condition`; a process that has ended meanwhile fails at once with its log."""

        async def alive_and_ready() -> Any:
            if not self.running:
                raise AssertionError(f"{self.name} ended while starting:\n{self.log()[-4000:]}")
            outcome = condition()
            return await outcome if isinstance(outcome, Awaitable) else outcome

        try:
            return await until(alive_and_ready, f"{self.name} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-4000:]}") from None

    def send(self, number: int) -> None:
        """Send a signal and go on, as for a reload of a config."""
        assert self._process is not None, f"{self.name} was never started"
        self._process.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM, *, grace_s: float = 10.0) -> int:
        """Signal the process, await its end, and return its status; SIGKILL if it outlives the grace."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
            try:
                await asyncio.to_thread(process.wait, grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        return int(process.wait())

    async def kill(self) -> None:
        """End the process as a crash would."""
        await self.stop(signal.SIGKILL)


class NatsServer(ServerProcess):
    """nats-server with JetStream. `url` stays the same over restarts, and so does what it stored."""

    def __init__(self, store_dir: Path, extra: Sequence[str] = ()) -> None:
        super().__init__("nats-server", store_dir / "nats.log")
        self.store_dir = store_dir
        self.extra = tuple(extra)
        self._port = free_port()
        self._monitor_port = free_port()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self._monitor_port}"

    def launch(self) -> None:
        """Start it without waiting: a member of a cluster is healthy only with the others."""
        self.store_dir.mkdir(exist_ok=True, parents=True)
        self.spawn(
            [find_binaries().nats_server, "-a", "127.0.0.1", "-p", str(self._port), "-m", str(self._monitor_port),
             "-js", "-sd", self.store_dir, *self.extra]
        )  # fmt: skip

    async def healthy(self) -> bool:
        return (await fetch(f"{self.monitor_url}/healthz"))[0] == 200

    async def start(self) -> None:
        self.launch()
        await self.ready(self.healthy)

    async def restart(self) -> None:
        await self.stop()
        await self.start()


class RedisServer(ServerProcess):
    """A Redis-protocol server (Valkey). A restart comes back empty, unless it is `persistent`."""

    def __init__(self, data_dir: Path, *, persistent: bool = False, extra: Sequence[str] = ()) -> None:
        super().__init__("valkey-server", data_dir / "redis.log")
        self._data_dir = data_dir
        self._extra = tuple(extra)
        self._persistent = persistent
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self.spawn(
            [find_binaries().redis_server, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", self._data_dir,
             "--save", "", "--appendonly", "yes" if self._persistent else "no", *self._extra]
        )  # fmt: skip

        async def answers() -> bool:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            try:
                writer.write(b"PING\r\n")
                return (await asyncio.wait_for(reader.readline(), 5)).startswith((b"+PONG", b"-NOAUTH"))
            except (OSError, TimeoutError):
                return False
            finally:
                writer.close()

        await self.ready(answers)

    async def restart(self) -> None:
        await self.stop()
        await self.start()


class EnvoyProxy(ServerProcess):
    """Envoy on a bootstrap whose ports may be 0: the addresses are read back from its admin interface."""

    def __init__(self, bootstrap: Mapping[str, Any], run_dir: Path, *, workers: int = 1) -> None:
        super().__init__("envoy", run_dir / "envoy.log")
        self._workers = workers
        self.config_file = run_dir / "envoy.json"
        self._admin_file = run_dir / "envoy-admin.txt"
        self.config_file.write_text(json.dumps(bootstrap))
        self.admin_url = ""
        self.url = ""
        """Base URL of the first listener."""
        self.listeners: dict[str, str] = {}
        """`ip:port` of each listener by its name."""

    async def start(self) -> None:
        self._admin_file.unlink(missing_ok=True)
        self.spawn(
            [find_binaries().envoy, "-c", self.config_file, "--admin-address-path", self._admin_file,
             "--concurrency", str(self._workers), "--disable-hot-restart", "--log-level", "warning"]
        )  # fmt: skip
        await self.ready(lambda: self._admin_file.exists() and self._admin_file.read_text().strip())
        self.admin_url = f"http://{self._admin_file.read_text().strip()}"

        async def live() -> bool:
            return (await fetch(f"{self.admin_url}/ready"))[0] == 200

        await self.ready(live)
        _, body = await fetch(f"{self.admin_url}/listeners?format=json")
        for listener in json.loads(body)["listener_statuses"]:
            address = listener["local_address"]["socket_address"]
            self.listeners[listener["name"]] = f"{address['address']}:{address['port_value']}"
        self.url = f"http://{next(iter(self.listeners.values()))}"

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names match the regular expression."""
        _, body = await fetch(f"{self.admin_url}/stats?format=json&filter={pattern}")
        return {stat["name"]: stat["value"] for stat in json.loads(body)["stats"] if "value" in stat}


Server = TypeVar("Server", NatsServer, RedisServer, EnvoyProxy)


@contextlib.asynccontextmanager
async def nats_server(store_dir: Path | None = None, *, extra: Sequence[str] = ()) -> AsyncIterator[NatsServer]:
    """A running nats-server with JetStream; `extra` is appended to its command line (as `["--user", "a"]`)."""
    async with _directory(store_dir) as directory, _running(NatsServer(directory, extra)) as server:
        yield server


@contextlib.asynccontextmanager
async def redis_server(
    data_dir: Path | None = None, *, persistent: bool = False, extra: Sequence[str] = ()
) -> AsyncIterator[RedisServer]:
    """A running Redis-protocol server; `extra` is appended to its command line."""
    async with (
        _directory(data_dir) as directory,
        _running(RedisServer(directory, persistent=persistent, extra=extra)) as server,
    ):
        yield server


class RedisSentinel(ServerProcess):
    """The same binary as a sentinel that watches one master, alone: its word is enough."""

    def __init__(self, directory: Path, master: RedisServer, name: str = "leadtime") -> None:
        super().__init__("valkey-sentinel", directory / "sentinel.log")
        self._config = directory / "sentinel.conf"
        self.port = free_port()
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 2000\n"
        )

    async def start(self) -> None:
        self.spawn([find_binaries().redis_server, self._config, "--sentinel"])
        await self.ready(lambda: "+monitor" in self.log())


@contextlib.asynccontextmanager
async def envoy(
    bootstrap: Mapping[str, Any], run_dir: Path | None = None, *, workers: int = 1
) -> AsyncIterator[EnvoyProxy]:
    """A running Envoy with this bootstrap."""
    async with _directory(run_dir) as directory, _running(EnvoyProxy(bootstrap, directory, workers=workers)) as server:
        yield server


@contextlib.asynccontextmanager
async def _directory(given: Path | None) -> AsyncIterator[Path]:
    if given is not None:
        await asyncio.to_thread(given.mkdir, parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="leadtime-test-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextlib.asynccontextmanager
async def _running(server: Server) -> AsyncIterator[Server]:
    try:
        await server.start()
        yield server
    finally:
        await server.stop(grace_s=5.0)
