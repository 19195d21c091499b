"""Requests that are held: they go when an endpoint is free, in order, and leave nothing behind however they end."""

import asyncio
from dataclasses import dataclass, field

import pytest

from services.router.admission.holding import Holding
from services.router.admission.waiting_room import Outlook, Waiter, WaitingRoom, WaitingRoomConfig
from services.router.request.errors import RejectReason, Shed
from tests.fakes.manual_clock import ManualClock

CONFIG = WaitingRoomConfig(ttl_ms=1_000)


@dataclass
class FakeConductor:
    """Endpoints have `start_ms` of work; what is committed is remembered."""

    start_ms: float = 1_000.0
    fails: Exception | None = None
    committed: list[tuple[str, float]] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    considered: int = 0
    gate: asyncio.Event | None = None

    async def consider(self, ticket: str) -> str:
        self.considered += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        return ticket

    def outlook(self, ticket: str, considered: str, config: WaitingRoomConfig) -> Outlook:
        return Outlook(self.start_ms, 10.0, self.start_ms + 10.0, in_time=False, drain_ms=5_000.0, candidates=1)

    def commit(self, ticket: str, considered: str, queue_ms: float) -> str:
        self.committed.append((ticket, queue_ms))
        self.start_ms = 1_000.0  # it is busy again
        return ticket

    def undo(self, result: str) -> None:
        self.undone.append(result)


class Stage:
    def __init__(self, config: WaitingRoomConfig | None = CONFIG) -> None:
        self.clock, self.conductor, self.waits = ManualClock(0.0), FakeConductor(), []
        self.room = WaitingRoom(config)
        self.holding = Holding(self.room, self.conductor, self.clock, self.waits.append)
        self.longest: list[float] = []

    async def on_hold(self, longest_ms: float) -> None:
        self.longest.append(longest_ms)

    async def send(self, name: str, deadline_ms: float = 500.0, priority: int = 0) -> "asyncio.Task[str]":
        waiter = Waiter(priority, "", deadline_ms, 100.0, self.clock.monotonic_ms())
        task = asyncio.create_task(self.holding.pass_or_wait(waiter, name, name, self.on_hold))
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def free(self, at_ms: float) -> None:
        self.clock.advance(at_ms - self.clock.monotonic_ms())
        self.conductor.start_ms = 0.0
        await self.holding.look()


async def test_a_held_request_goes_when_an_endpoint_is_free_with_its_time_told() -> None:
    stage = Stage()
    task = await stage.send("a")
    assert stage.longest == [1_000.0]
    assert not task.done()
    await stage.holding.look()
    assert not task.done()
    await stage.free(70.0)
    assert await task == "a"
    assert stage.conductor.committed == [("a", 70.0)]
    assert stage.waits == [70.0]
    assert stage.room.check() == []


async def test_one_free_moment_lets_one_go_the_most_urgent() -> None:
    stage = Stage()
    loose, tight = await stage.send("loose", 900.0), await stage.send("tight", 600.0)
    await stage.free(10.0)
    assert await tight == "tight"
    assert not loose.done()
    await stage.free(20.0)
    assert await loose == "loose"


async def test_without_a_room_everyone_goes_at_once() -> None:
    stage = Stage(None)
    assert await (await stage.send("a")) == "a"
    assert stage.longest == []


async def test_a_client_that_leaves_is_out_at_once() -> None:
    stage = Stage()
    task = await stage.send("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(stage.room), stage.room.counts.left) == (0, 1)
    await stage.free(10.0)
    assert stage.conductor.committed == []
    assert stage.room.check() == []


async def test_a_client_that_leaves_as_its_answer_is_made_is_taken_back() -> None:
    stage = Stage()
    task = await stage.send("a")
    await stage.free(10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.conductor.undone == ["a"]


async def test_a_client_that_leaves_while_it_is_looked_at_is_not_dispatched() -> None:
    stage = Stage()
    task = await stage.send("a")
    stage.conductor.gate = asyncio.Event()
    stage.conductor.start_ms = 0.0
    look = asyncio.create_task(stage.holding.look())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    stage.conductor.gate.set()
    await look
    assert stage.conductor.committed == []
    assert stage.room.check() == []


@pytest.mark.parametrize("error", [ZeroDivisionError(), Shed(RejectReason.SLO_UNREACHABLE, 5.0)])
async def test_a_fault_is_the_request_s_own(error: Exception) -> None:
    stage = Stage()
    task = await stage.send("a")
    stage.conductor.fails = error
    await stage.free(10.0)
    with pytest.raises(type(error)):
        await task
    assert len(stage.room) == 0
    assert stage.room.check() == []


async def test_a_sheddable_one_is_refused_at_its_ttl_and_another_goes() -> None:
    stage = Stage()
    batch, chat = await stage.send("batch", priority=-1), await stage.send("chat")
    stage.clock.advance(1_000.0)
    await stage.holding.look()
    with pytest.raises(Shed) as shed:
        await batch
    assert shed.value.reason is RejectReason.WAITED_TOO_LONG
    assert shed.value.retry_after_s == 6
    assert await chat == "chat"


async def test_the_one_that_gives_way_is_told() -> None:
    stage = Stage(WaitingRoomConfig(max_waiting=1))
    batch = await stage.send("batch", priority=-1)
    await stage.send("chat")
    with pytest.raises(Shed) as shed:
        await batch
    assert shed.value.reason is RejectReason.PUSHED_OUT
    late = await stage.send("late", priority=-1)
    with pytest.raises(Shed) as shed:
        await late
    assert shed.value.reason is RejectReason.WAITING_ROOM_FULL


async def test_when_the_room_closes_everyone_goes() -> None:
    stage = Stage()
    tasks = [await stage.send(name, priority=-1) for name in "ab"]
    stage.holding.configure(None)
    await stage.holding.look()
    assert [await task for task in tasks] == ["a", "b"]


async def test_while_only_time_goes_by_no_prediction_is_asked_for_in_vain() -> None:
    stage = Stage()
    await stage.send("a")
    for at_ms in (20.0, 100.0, 400.0):
        stage.clock.now_ms = at_ms
        await stage.holding.look(woken=False)
    assert stage.conductor.considered == 0
    stage.clock.now_ms = 430.0  # (1000 - 150) / 2 ms on
    await stage.holding.look(woken=False)
    assert stage.conductor.considered == 1


async def test_the_task_looks_by_itself_when_woken_and_in_time() -> None:
    stage = Stage()
    run = asyncio.create_task(stage.holding.run())
    task = await stage.send("a")
    stage.conductor.start_ms = 0.0
    stage.holding.wake()
    assert await asyncio.wait_for(task, 1.0) == "a"
    stage.conductor.start_ms = 200.0
    other = await stage.send("b")
    stage.conductor.start_ms = 0.0  # nobody says so
    stage.clock.advance(30.0)
    assert await asyncio.wait_for(other, 1.0) == "b"
    run.cancel()
