"""Ends a process whose event loop is frozen: alive to the kernel, dead to everybody who waits for it.

The loop leaves a mark a few times within the limit; a thread looks whether the marks still come, and ends the process
with every thread's stack on standard error when they don't. Envoy in full duplex waits for a frozen router without end,
and only an end of its connections helps; a supervisor starts another.

A thread that itself woke far too late says nothing about the loop: the whole process was stopped (SIGSTOP, a suspended
machine), and gets a new limit. Under a debugger nobody is ended.

Limits: code that holds the interpreter's lock for ever stops this thread too; a liveness probe sees that.
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

EXIT_FROZEN: Final = 70  # EX_SOFTWARE of sysexits.h
_LOOKS: Final = 8
# How late the thread itself may wake before it is the process that stood still.
_LATE_S: Final = 1.0
_DEBUGGERS: Final = frozenset({"pydevd", "debugpy", "_pydevd_bundle"})


class Look(StrEnum):
    """What one look of the thread found."""

    ALIVE = "alive"
    EXCUSED = "excused"
    FROZEN = "frozen"


def judge(*, silent_s: float, overslept_s: float, limit_s: float, debugged: bool) -> Look:
    """`silent_s`: since the loop's last mark; `overslept_s`: how much later than planned this look comes."""
    if debugged or overslept_s > _LATE_S:
        return Look.EXCUSED
    return Look.FROZEN if silent_s > limit_s else Look.ALIVE


def under_debugger() -> bool:
    """Whether somebody steps through this process, as far as Python knows."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    stepped = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return sys.gettrace() is not None or stepped or not _DEBUGGERS.isdisjoint(sys.modules)


def end_frozen(limit_s: float) -> None:
    """Say where every thread is, and end the process at once: nothing can be closed in an orderly way any more."""
    sys.stderr.write(f"leadtime: the event loop has been frozen for {limit_s:g} s; ending. Every thread's stack:\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(EXIT_FROZEN)


class Watchdog:
    """Start it on the loop that is to be watched; `limit_s` 0 watches nothing."""

    def __init__(
        self,
        limit_s: float,
        *,
        on_frozen: Callable[[float], None] = end_frozen,
        debugged: Callable[[], bool] = under_debugger,
    ) -> None:
        self._limit_s = limit_s
        self._on_frozen = on_frozen
        self._debugged = debugged
        self._marked_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watchdog", daemon=True)
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._limit_s > 0:
            self._mark(asyncio.get_running_loop())
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._handle is not None:
            self._handle.cancel()

    def _mark(self, loop: asyncio.AbstractEventLoop) -> None:
        self._marked_s = time.monotonic()
        self._handle = loop.call_later(self._limit_s / _LOOKS, self._mark, loop)

    def _look_on(self) -> None:
        pause_s = self._limit_s / _LOOKS
        began_s = time.monotonic()
        while not self._ended.wait(pause_s):
            now_s = time.monotonic()
            found = judge(
                silent_s=now_s - self._marked_s,
                overslept_s=now_s - began_s - pause_s,
                limit_s=self._limit_s,
                debugged=self._debugged(),
            )
            if found is Look.EXCUSED:
                self._marked_s = now_s
            elif found is Look.FROZEN:
                self._on_frozen(self._limit_s)
                return
            began_s = time.monotonic()
