"""Child processes: started into their own process groups, awaited until ready, stopped in order, never left behind.

`Supervisor` is the one owner of children in `deploy/local`. Each child has its log in the run directory; a child that
isn't ready in time, or ends by itself, is reported with its name and its last log lines. Stopping sends SIGTERM to the
child's group and SIGKILL after its grace. On Linux the kernel kills a child whose parent has died, so that even a
killed `leadtime` leaves nothing.

Limits: children of children share their parent's group and end with it; one that makes a group of its own escapes.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

Probe = Callable[[], Awaitable[str | None]]
"""Asks a child whether it is ready: None when it is, else why it isn't."""

READY_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.05
_LOG_TAIL_BYTES: Final = 3_000
_TIED: Final = Path(__file__).with_name("tied.py")


class ChildError(RuntimeError):
    """A child didn't start, wasn't ready in time, or ended by itself. The text names it and shows its last lines."""

    def __init__(self, name: str, what: str, log_tail: str) -> None:
        self.name = name
        self.what = what
        self.log_tail = log_tail
        super().__init__(f"{name}: {what}" + (f"\nits last lines:\n{log_tail}" if log_tail else "\nits log is empty"))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child, and when to stop it: the lowest `stop_tier` first, each tier together."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own."""
    nice: int = 0
    stop_tier: int = 0
    grace_s: float = 5.0
    """Between SIGTERM and SIGKILL."""


class Child:
    """One process and its log."""

    __slots__ = ("_environment", "_group_ended", "_process", "log_file", "spec", "stopping")

    def __init__(self, spec: ChildSpec, log_file: Path, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.log_file = log_file
        self.stopping = False
        """True once it was told to stop: its end is no fault."""
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._group_ended = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """None while it runs, and before its start; negative for the signal that ended it."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def log_tail(self) -> str:
        """The end of its log, whole lines."""
        try:
            with self.log_file.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _LOG_TAIL_BYTES))
                tail = log.read().decode(errors="replace")
        except OSError:
            return ""
        return tail.partition("\n")[2] if size > _LOG_TAIL_BYTES else tail

    async def start(self) -> None:
        """Start the process; when cancelled meanwhile, the process that may have come into being is known."""
        self.stopping = self._group_ended = False
        starting = asyncio.ensure_future(self._spawn())
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._process = await starting
            raise
        except OSError as error:
            raise ChildError(self.name, f"can't be started: {error}", "") from None

    async def _spawn(self) -> asyncio.subprocess.Process:
        log = await asyncio.to_thread(self.log_file.open, "ab")
        with log:
            return await asyncio.create_subprocess_exec(
                *tied(self.spec.command, self.spec.nice),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._environment),
                start_new_session=True,
            )

    async def ready(self, probe: Probe, deadline_s: float) -> None:
        """Poll until the probe is content; ChildError when the child ends first or the deadline passes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        while True:
            if not self.running:
                raise ChildError(self.name, f"ended while starting, {self.describe_exit()}", self.log_tail())
            reason = await probe()
            if reason is None:
                return
            if loop.time() > until:
                raise ChildError(self.name, f"not ready within {deadline_s:g} s: {reason}", self.log_tail())
            await asyncio.sleep(_POLL_S)

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        if self._process is None:
            raise ChildError(self.name, "was never started", "")
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after the grace; returns when the process has ended."""
        self.stopping = True
        if self._process is None:
            return
        if self.running:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self.spec.grace_s)
        self.kill()
        await self._process.wait()
        self._group_ended = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's whole group; nothing once the group has ended: its number may be another's."""
        if self._process is not None and not self._group_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End what is left of the group at once."""
        self.stopping = True
        self.signal(signal.SIGKILL)
        self._group_ended = not self.running

    def describe_exit(self) -> str:
        status = self.exit_status
        if status is None:
            return "still running"
        return f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def tied(command: Sequence[str | Path], nice: int = 0) -> tuple[str, ...]:
    """The command by way of `tied.py`: the kernel ends it when this process dies. OSError where it isn't there.

    To be started by a thread that lives as long as the process: the kernel counts the starting thread's end as well.
    """
    words = [str(part) for part in command]
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
    return (sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), str(nice), *words)


class Supervisor:
    """Owns children from start to end; leaving the context stops them all, however it is left."""

    __slots__ = ("_children", "_environment", "_run_dir")

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._environment = dict(environment)
        self._children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def runs(self, name: str) -> bool:
        """Whether a child of that name was started and hasn't ended."""
        return name in self._children and self._children[name].running

    @property
    def children(self) -> tuple[Child, ...]:
        """In the order of their start."""
        return tuple(self._children.values())

    async def start(self, children: Iterable[tuple[ChildSpec, Probe]], *, deadline_s: float = READY_DEADLINE_S) -> None:
        """Start several at once and await them all; the first that fails is raised, as ChildError."""
        waiting: list[tuple[Child, Probe]] = []
        for spec, probe in children:
            if spec.name in self._children:
                raise ValueError(f"two children are called {spec.name}")
            child = Child(spec, self._run_dir / f"{spec.name}.log", {**self._environment, **spec.environment})
            self._children[spec.name] = child
            await child.start()
            waiting.append((child, probe))
        try:
            async with asyncio.TaskGroup() as group:
                for child, probe in waiting:
                    group.create_task(child.ready(probe, deadline_s), name=f"await {child.name}")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def restart(self, name: str, probe: Probe, *, deadline_s: float = READY_DEADLINE_S) -> None:
        """Stop a child if it runs, start it again, await it."""
        child = self._children[name]
        await child.stop()
        await child.start()
        await child.ready(probe, deadline_s)

    async def ended(self, name: str | None = None) -> Child:
        """Wait for a child that ends without having been told to, and return it. `name`: that child alone."""
        watched = self._children.values() if name is None else (self._children[name],)
        waits = {
            asyncio.ensure_future(child.wait()): child
            for child in watched
            if not child.stopping and child.pid is not None
        }
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    child = waits.pop(wait)
                    if not child.stopping:
                        return child
        finally:
            for wait in waits:
                wait.cancel()

    def fault(self, child: Child) -> ChildError:
        """The error that tells of a child's unasked end."""
        return ChildError(child.name, f"ended by itself, {child.describe_exit()}", child.log_tail())

    async def stop(self) -> None:
        """Stop all, tier by tier; a cancellation meanwhile kills the rest at once and is raised afterwards."""
        try:
            for tier in sorted({child.spec.stop_tier for child in self._children.values()}):
                await asyncio.gather(
                    *(child.stop() for child in reversed(self.children) if child.spec.stop_tier == tier)
                )
        finally:
            self.kill()

    def kill(self) -> None:
        """End all at once, without waiting."""
        for child in self._children.values():
            child.kill()
