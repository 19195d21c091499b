"""The engine's clockwork on a hand-moved clock: steps are planned from planned ends, and lateness is told."""

import random
from collections.abc import Callable

import pytest

from sim.engine import Engine, EngineLimits, EngineRequest, StepResult
from sim.hardware import PROFILES, HardwareProfile
from sim.real_time import LatenessRecorder, RealTimeEngine

TEN_MS = HardwareProfile("even", "even", 10.0, 0.0, 0.0, 10.0, 0.0, 0.0, 1000)


class Handle:
    def __init__(self, at_ms: float, callback: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """Timers that fire when the test says, as late as the test says."""

    def __init__(self) -> None:
        self.now_ms = 1000.0
        self.timers: list[Handle] = []

    def call_soon(self, callback: Callable[[], None]) -> Handle:
        return self.call_later(0.0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Handle:
        handle = Handle(self.now_ms + delay_s * 1000, callback)
        self.timers.append(handle)
        return handle

    def fire(self, *, late_ms: float = 0.0) -> None:
        """Go to the next timer, and a given time beyond, and run it."""
        handle = self.timers.pop(0)
        self.now_ms = max(self.now_ms, handle.at_ms + late_ms)
        if not handle.cancelled:
            handle.callback()


class Rig:
    def __init__(self, profile: HardwareProfile = TEN_MS) -> None:
        self.loop = ManualLoop()
        self.steps: list[StepResult] = []
        self.flushes: list[float] = []
        self.on_flush: Callable[[], None] | None = None
        limits = EngineLimits(num_blocks=100, max_model_tokens=1600)
        self.runner = RealTimeEngine(
            Engine(profile, limits, random.Random(1)),
            self.loop,
            self.steps.append,
            self.flush,
            lambda: self.loop.now_ms,
        )

    def flush(self) -> None:
        self.flushes.append(self.loop.now_ms)
        if self.on_flush is not None:
            self.on_flush()

    def submit(self, name: str, tokens: int) -> None:
        self.runner.submit(EngineRequest(name, 16, tokens))


def test_a_request_starts_the_clockwork_and_its_end_stops_it():
    rig = Rig()
    rig.submit("a", 2)
    rig.loop.fire()
    assert rig.steps == []
    rig.loop.fire()
    rig.loop.fire()
    assert [result.step.start_ms for result in rig.steps] == [1000.0, 1010.0]
    assert rig.flushes == [1010.0, 1020.0]
    assert rig.loop.timers == []


def test_late_timers_do_not_slow_the_server_down():
    rig = Rig()
    rig.submit("a", 4)
    rig.loop.fire()
    for _ in range(4):
        rig.loop.fire(late_ms=3.0)
    assert [result.step.end_ms for result in rig.steps] == [1010.0, 1020.0, 1030.0, 1040.0]
    assert rig.flushes == [1013.0, 1023.0, 1033.0, 1043.0]
    summary = LatenessRecorder.summary([rig.runner.lateness])
    assert (summary.steps, summary.p50_ms, summary.max_ms) == (4, 3.0, 3.0)


def test_missed_steps_run_at_once_and_flush_once():
    rig = Rig()
    rig.submit("a", 5)
    rig.loop.fire()
    rig.loop.fire(late_ms=25.0)
    assert [result.step.end_ms for result in rig.steps] == [1010.0, 1020.0, 1030.0]
    assert rig.flushes == [1035.0]


def test_a_request_that_arrives_while_the_timer_is_late_waits_for_a_step_that_begins_after_it():
    rig = Rig()
    rig.submit("a", 3)
    rig.loop.fire()
    rig.loop.now_ms = 1012.0
    rig.submit("b", 1)
    rig.loop.fire()
    states = {state.request.request_id: state for state in rig.runner.engine.states()}
    assert states["a"].generated_tokens == 1
    assert states["b"].scheduled_ms is None
    rig.loop.fire()
    assert states["b"].scheduled_ms == 1020.0


def test_when_only_late_arrivals_wait_the_next_step_begins_at_the_present():
    rig = Rig()
    rig.submit("a", 1)
    rig.loop.fire()
    rig.loop.now_ms = 1012.0
    rig.submit("b", 1)
    rig.loop.fire()
    rig.loop.fire()
    assert [result.step.start_ms for result in rig.steps] == [1000.0, 1012.0]


def test_a_timer_half_a_tick_early_still_ends_its_step_and_the_next_request_is_served():
    rig = Rig()
    rig.submit("a", 1)
    rig.loop.fire()
    rig.loop.timers[0].at_ms -= 0.4
    rig.loop.fire()
    assert len(rig.steps) == 1
    rig.submit("b", 1)
    rig.loop.fire()
    rig.loop.fire()
    assert rig.steps[1].step.start_ms == 1010.0


def test_an_abort_leaves_an_idle_clockwork():
    rig = Rig(PROFILES["llama-8b-h100"])
    rig.submit("a", 100)
    rig.loop.fire()
    rig.runner.abort("a")
    rig.loop.fire()
    assert rig.loop.timers == []
    assert [result.emitted for result in rig.steps] == [[]]


def test_a_request_submitted_while_the_last_tokens_go_out_is_served():
    rig = Rig()
    rig.submit("a", 1)
    rig.on_flush = lambda: rig.submit("b", 1)
    rig.loop.fire()
    rig.loop.fire()
    rig.on_flush = None
    rig.loop.fire()
    rig.loop.fire()
    assert [result.emitted[0].request.request_id for result in rig.steps] == ["a", "b"]


def test_stopping_cancels_the_timer():
    rig = Rig()
    rig.submit("a", 2)
    rig.runner.stop()
    rig.loop.fire()
    assert rig.runner.engine.current_step is None


def test_lateness_of_several_engines_is_summed_up_together():
    one, other = LatenessRecorder(), LatenessRecorder()
    for value in range(50):
        one.record(float(value))
        other.record(float(50 + value))
    summary = LatenessRecorder.summary([one, other])
    assert (summary.steps, summary.mean_ms, summary.max_ms) == (100, pytest.approx(49.5), 99.0)
    assert (summary.p50_ms, summary.p99_ms) == (50.0, 98.0)
    assert LatenessRecorder.summary([]).steps == 0


def test_lateness_percentiles_are_of_the_latest_steps_and_memory_is_bounded():
    recorder = LatenessRecorder()
    for value in range(100_000):
        recorder.record(float(value))
    assert len(recorder.ring) == 32_768
    assert LatenessRecorder.summary([recorder]).steps == 100_000
    assert min(recorder.ring) == 100_000 - 32_768
