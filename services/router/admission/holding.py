"""The waiting room's asynchronous side: requests that are held wait here, and one task looks at whose turn it is.

What may have freed an endpoint (a request's end, an outcome) wakes the task; while somebody waits it also looks every
20 ms, since the ledger's own timers tell nobody, but asks for a prediction only where enough of the backlog may be
done. Each look decides anew, with fresh state and a fresh prediction, and what goes is counted into the ledger before
the next one is looked at. One request is looked at at a time, so that an endpoint's free moment isn't given to two.

A request that can't be decided any more (no endpoint is left, a fault) leaves the room with that error.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from services.router.admission.waiting_room import Answer, Outlook, Verdict, Waiter, WaitingRoom, WaitingRoomConfig
from services.router.request.errors import RejectReason, Shed
from shared.clock import Clock

LOOK_EVERY_MS: Final = 20.0
LOOKS: Final = 3
"""Requests looked at whose turn it isn't yet, before the rest is left to the next look."""
AT_ONCE: Final = Outlook(0.0, 0.0, 0.0, in_time=True, drain_ms=1.0, candidates=1)
"""Nothing is predicted: nothing to hold for."""

Ticket = TypeVar("Ticket")
Asked_contra = TypeVar("Asked_contra", contravariant=True)
Considered = TypeVar("Considered")
Result = TypeVar("Result")


class Conductor(Protocol[Asked_contra, Considered, Result]):
    """What the holder needs of the one who decides."""

    async def consider(self, ticket: Asked_contra) -> Considered:
        """Snapshot, prediction and policy for a request as things are now; raises RequestRejected."""
        ...

    def outlook(self, ticket: Asked_contra, considered: Considered, config: WaitingRoomConfig) -> Outlook | None: ...

    def commit(self, ticket: Asked_contra, considered: Considered, queue_ms: float) -> Result:
        """Count the request in at its endpoint, and the answer for it."""
        ...

    def undo(self, result: Result) -> None:
        """The client left between `commit` and its answer."""
        ...


@dataclass(slots=True)
class _Held(Generic[Ticket, Result]):
    ticket: Ticket
    since_ms: float
    future: "asyncio.Future[Result]"


class Holding(Generic[Ticket, Considered, Result]):
    """See the module. `run` must run while anything may be held."""

    def __init__(
        self,
        room: WaitingRoom,
        conductor: Conductor[Ticket, Considered, Result],
        clock: Clock,
        waited: Callable[[float], None],
    ) -> None:
        """`waited` is told how long a request that went was held, ms."""
        self.room = room
        self._conductor = conductor
        self._clock = clock
        self._waited = waited
        self._held: dict[Waiter, _Held[Ticket, Result]] = {}
        self._wake = asyncio.Event()

    def configure(self, config: WaitingRoomConfig | None) -> None:
        """By these rules from now on; None: whoever waits goes."""
        self.room.config = config
        if config is None or len(self.room):
            self.wake()

    def wake(self) -> None:
        """Something may have become free."""
        if len(self.room):
            self._wake.set()

    async def pass_or_wait(
        self,
        waiter: Waiter,
        ticket: Ticket,
        considered: Considered,
        on_hold: Callable[[float], Awaitable[None]] | None,
    ) -> Result:
        """Commit at once, or when its turn has come. `on_hold` is awaited first, with the longest time it may take, ms.

        Raises Shed for what is refused, and what `consider` raises.
        """
        now_ms = self._clock.monotonic_ms()
        config = self.room.config
        outlook = None if config is None else self._conductor.outlook(ticket, considered, config)
        if config is None or outlook is None:
            return self._conductor.commit(ticket, considered, 0.0)
        answer = self.room.offer(waiter, outlook, now_ms)
        for other in answer.pushed_out:
            self._refuse(other, RejectReason.PUSHED_OUT, self.room.retry_after_ms(outlook))
        if answer.verdict is Verdict.GO:
            return self._conductor.commit(ticket, considered, 0.0)
        if answer.verdict is Verdict.REFUSE:
            raise _shed(answer)
        held = self._held[waiter] = _Held(ticket, now_ms, asyncio.get_running_loop().create_future())
        try:
            self._wake.set()  # the task must know of its last moment
            if on_hold is not None:
                await on_hold(config.ttl_ms)
            return await held.future
        except asyncio.CancelledError:
            self.room.leave(waiter)
            if held.future.done() and not held.future.cancelled() and held.future.exception() is None:
                self._conductor.undo(held.future.result())
            raise
        except BaseException:
            self.room.leave(waiter)
            raise
        finally:
            self._held.pop(waiter, None)

    async def run(self) -> None:
        """Look at whose turn it is, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            woken = self._wake.is_set()
            self._wake.clear()
            await self.look(woken=woken)

    def _pause_s(self) -> float | None:
        due_ms = self.room.next_due_ms()
        if due_ms is None:
            return None
        return min(max(due_ms - self._clock.monotonic_ms(), 0.0), LOOK_EVERY_MS) / 1e3

    async def look(self, *, woken: bool = True) -> None:
        """Once: those whose last moment has come, then those whose turn it is. `woken`: something may have become free;
        else only time has gone by.
        """
        for waiter in self.room.due(self._clock.monotonic_ms()):
            await self._reconsider(waiter, is_next=False)
        if self.room.config is None:
            for waiter in self.room.everyone():
                await self._reconsider(waiter, is_next=True)
        seen: set[Waiter] = set()
        while len(seen) < LOOKS and (next_up := self.room.next_up(self._clock.monotonic_ms(), seen)) is not None:
            if not woken and not self.room.worth_a_look(next_up, self._clock.monotonic_ms()):
                return
            if await self._reconsider(next_up, is_next=not seen):
                seen.add(next_up)

    async def _reconsider(self, waiter: Waiter, *, is_next: bool) -> bool:
        """Whether it goes on waiting."""
        held = self._held.get(waiter)
        if held is None or not self.room.holds(waiter):
            self.room.leave(waiter)
            return False
        try:
            considered = await self._conductor.consider(held.ticket)
            if not self.room.holds(waiter):  # its client left meanwhile
                return False
            return self._settle(waiter, held, considered, is_next=is_next)
        except Exception as error:  # this request's alone: it gets it, and answers for itself
            if isinstance(error, Shed):
                self.room.refuse(waiter)
            self.room.leave(waiter)
            if not held.future.done():
                held.future.set_exception(error)
            return False

    def _settle(self, waiter: Waiter, held: "_Held[Ticket, Result]", considered: Considered, *, is_next: bool) -> bool:
        now_ms = self._clock.monotonic_ms()
        config = self.room.config
        outlook = None if config is None else self._conductor.outlook(held.ticket, considered, config)
        answer = self.room.reconsider(waiter, outlook or AT_ONCE, now_ms, is_next=is_next or outlook is None)
        if answer.verdict is Verdict.HOLD:
            return True
        if answer.verdict is Verdict.REFUSE:
            held.future.set_exception(_shed(answer))
            return False
        self._waited(now_ms - held.since_ms)
        held.future.set_result(self._conductor.commit(held.ticket, considered, now_ms - held.since_ms))
        return False

    def _refuse(self, waiter: Waiter, reason: RejectReason, retry_after_ms: float) -> None:
        held = self._held.get(waiter)
        if held is not None and not held.future.done():
            held.future.set_exception(Shed(reason, retry_after_ms))


def _shed(answer: Answer) -> Shed:
    reason: Any = answer.reason
    return Shed(RejectReason(reason.value), answer.retry_after_ms)
