"""The judgement of the watchdog, and what it does about a loop that really stands still."""

import asyncio
import sys
import threading
import time

import pytest

from shared.watchdog import Look, Watchdog, judge, under_debugger


@pytest.mark.parametrize(
    ("silent_s", "overslept_s", "debugged", "look"),
    [
        (0.1, 0.0, False, Look.ALIVE),
        (10.0, 0.0, False, Look.ALIVE),
        (10.1, 0.0, False, Look.FROZEN),
        (10.1, 0.9, False, Look.FROZEN),
        (10.1, 9.0, False, Look.EXCUSED),
        (0.1, 9.0, False, Look.EXCUSED),
        (99.0, 0.0, True, Look.EXCUSED),
    ],
)
def test_a_loop_is_frozen_when_it_is_silent_and_the_process_is_not(silent_s, overslept_s, debugged, look):
    assert judge(silent_s=silent_s, overslept_s=overslept_s, limit_s=10.0, debugged=debugged) is look


async def test_a_blocked_loop_is_seen_and_a_running_one_is_not():
    frozen = threading.Event()
    watchdog = Watchdog(0.4, on_frozen=lambda _: frozen.set(), debugged=lambda: False)
    watchdog.start()
    await asyncio.sleep(0.8)
    assert not frozen.is_set()
    began_s = time.monotonic()
    assert frozen.wait(10)  # blocks this loop, as a fault would
    assert time.monotonic() - began_s > 0.3
    watchdog.stop()


async def test_nobody_is_ended_under_a_debugger_or_without_a_limit():
    ended = []
    for limit_s, debugged in ((0.2, True), (0.0, False)):
        watchdog = Watchdog(limit_s, on_frozen=ended.append, debugged=lambda debugged=debugged: debugged)
        watchdog.start()
        threading.Event().wait(0.6)
        watchdog.stop()
    assert ended == []


def test_a_tracer_is_a_debugger():
    before = sys.gettrace()
    assert under_debugger() is (before is not None)
    sys.settrace(lambda *_: None)
    try:
        assert under_debugger()
    finally:
        sys.settrace(before)
