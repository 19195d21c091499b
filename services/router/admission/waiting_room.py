"""Requests that are held on purpose before they are bound to an endpoint. Pure: time and predictions are arguments.

Three modes. `overload` never holds a request that an endpoint is predicted to serve in time: it holds the others while
every endpoint has enough work, so that what can still be saved goes first. `late-binding` holds whatever has slack
while every endpoint has enough work, and binds it at the last useful moment: later than that it would miss its
objective, earlier it would give away the choice. `smallest-first` has everybody wait in one line by size as soon as
somebody can't be served in time: beyond capacity somebody must be late, and the fewest are where the largest wait.

Order of those who wait: priority; then whose fairness id has been given the fewest tokens; then who can still be in
time, by the latest moment to start (deadline − own prefill); then the others, smallest first. A request without a TTFT
objective has `default_deadline_ms` for its place in the order, and no last moment.

The caller offers a request with what is predicted for it now (`Outlook`); is told to go, to hold or to refuse; and
comes back with a fresh outlook for `next_up` after whatever may have freed an endpoint (and as time goes by, where that
is `worth_a_look`), and for those in `due`. Bounded in number, per priority and in time; everything is counted, and
`check` recounts.

Refused is only what may be shed (priority below 0): others go at once where the room is full, and at their TTL.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Final, Literal

from pydantic import Field

from services.router.scheduling.config import StrictConfig

MAX_TTL_MS: Final = 240_000.0
"""Below what Envoy grants a picker at most (`max_message_timeout`, 300 s in the config that is rendered here)."""
_LEAST_STEP_MS: Final = 5.0
"""A request whose last moment has moved isn't looked at again sooner: predictions are never that exact."""
_MAX_LEVELS: Final = 64
"""Priorities whose books are kept while nobody waits there."""
_MAX_REMEMBERED: Final = 4_096
"""Fairness ids whose share is remembered while none of their requests waits."""


class WaitingRoomConfig(StrictConfig):
    """When requests are held, for how long, and how many."""

    mode: Literal["overload", "late-binding", "smallest-first"] = "overload"
    """Hold only what nobody can serve in time; or whatever has slack; or what a smaller one waits before, too."""
    enough_work_ms: Annotated[float, Field(ge=0, le=60_000)] = 150.0
    """An endpoint that would begin on the request within this time has too little work to hold anything back."""
    hungry: Literal["any", "chosen"] = "any"
    """Whose work counts: that of the least busy candidate, or of the one that the policy would choose."""
    tpot_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How far a predicted TPOT may be over its objective and still be taken to meet it, as a share of the objective."""
    margin_ms: Annotated[float, Field(ge=0, le=60_000)] = 50.0
    """How long before the last useful moment a request is bound."""
    ttl_ms: Annotated[float, Field(gt=0, le=MAX_TTL_MS)] = 30_000.0
    """Longest time that a request is held."""
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """Requests held at once."""
    max_waiting_per_priority: Annotated[int, Field(ge=1, le=100_000)] = 500
    """The same, of one priority."""
    default_deadline_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 10_000.0
    """What a request without a TTFT objective has in the order of those who wait."""


class Verdict(Enum):
    """What becomes of a request now."""

    GO = auto()
    HOLD = auto()
    REFUSE = auto()


class RefusalReason(Enum):
    """Why a sheddable request is refused here; the words of `RejectReason`."""

    FULL = "waiting_room_full"
    PUSHED_OUT = "pushed_out"
    TTL = "waited_too_long"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted for one request at this instant, in ms from now.

    `start_ms`: until an endpoint would begin on it (whose: `hungry`). `service_ms`: its own prefill there. `ttft_ms`:
    its first token where the policy would send it. `in_time`: some candidate is predicted to meet every objective it
    states. `drain_ms`: until one may be again. `candidates`: how many there are.
    """

    start_ms: float
    service_ms: float
    ttft_ms: float
    in_time: bool
    drain_ms: float
    candidates: int


@dataclass(slots=True, eq=False)
class Waiter:
    """One request. `deadline_ms`: monotonic, when its first token is due; inf without an objective.

    `size_tokens`: what it has to have computed. The rest belongs to the room.
    """

    priority: int
    fairness_id: str
    deadline_ms: float
    size_tokens: float
    arrived_ms: float
    service_ms: float = 0.0
    bind_by_ms: float = math.inf
    expires_ms: float = math.inf
    look_ms: float = -math.inf
    waiting: bool = False
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """To an offer, or to a second look. `pushed_out`: who has to be refused to make room, with `PUSHED_OUT`."""

    verdict: Verdict
    reason: RefusalReason | None = None
    retry_after_ms: float = 0.0
    pushed_out: tuple[Waiter, ...] = ()


_GO: Final = Answer(Verdict.GO)
_HOLD: Final = Answer(Verdict.HOLD)


@dataclass(slots=True)
class Counts:
    """Since the start. `offered` = `passed` + `bypassed` + `refused_full` + `held`."""

    offered: int = 0
    passed: int = 0
    """Went at once."""
    bypassed: int = 0
    """Went at once because the room was full and they can't be shed."""
    refused_full: int = 0
    held: int = 0
    released: int = 0
    """Of those held: an endpoint wanted work, or could serve it in time."""
    last_moment: int = 0
    """Of those held: bound because waiting any longer would have cost their objective."""
    outlived: int = 0
    """Of those held: went at their TTL, since they can't be shed."""
    refused_ttl: int = 0
    pushed_out: int = 0
    refused_late: int = 0
    """Of those held: refused by an admitter at a second look."""
    left: int = 0
    """Of those held: the client gave up."""


@dataclass(slots=True)
class _Queue:
    """One fairness id at one priority. Entries of the heaps are (key, sequence, stamp, waiter), gone by stamp."""

    tag: float
    """Tokens given to this id so far, in the priority's virtual time."""
    feasible: list[tuple[float, int, int, Waiter]] = field(default_factory=list)
    late: list[tuple[float, int, int, Waiter]] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True)
class _Level:
    """One priority."""

    queues: dict[str, _Queue] = field(default_factory=dict)
    remembered: OrderedDict[str, float] = field(default_factory=OrderedDict)
    floor: float = 0.0
    count: int = 0


class WaitingRoom:
    """See the module. Belongs to one event loop. `config` may be exchanged; None: nothing is held any more."""

    def __init__(self, config: WaitingRoomConfig | None) -> None:
        self.config = config
        self.counts = Counts()
        self._levels: dict[int, _Level] = {}
        self._alarms: list[tuple[float, int, int, Waiter]] = []
        self._sequence = itertools.count()
        self._service_ms = 0.0
        """Sum over those who wait."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def holds(waiter: Waiter) -> bool:
        """Whether it waits."""
        return waiter.waiting

    def waiting_by_priority(self) -> dict[int, int]:
        """How many wait, by priority; without those where nobody does."""
        return {priority: level.count for priority, level in self._levels.items() if level.count}

    # --- requests -----------------------------------------------------------------------------------------------

    def offer(self, waiter: Waiter, outlook: Outlook, now_ms: float) -> Answer:
        """A request that has just been understood."""
        counts, config = self.counts, self.config
        counts.offered += 1
        waiter.service_ms = outlook.service_ms
        if config is None or self._opens(config, waiter, outlook, now_ms, is_next=self._would_be_next(waiter, now_ms)):
            counts.passed += 1
            return _GO
        pushed_out: tuple[Waiter, ...] = ()
        level = self._levels.get(waiter.priority)
        if level is not None and level.count >= config.max_waiting_per_priority:
            return self._no_room(waiter, outlook)
        if self._count >= config.max_waiting:
            victim = self._least()
            if victim is None or victim.priority >= waiter.priority:
                return self._no_room(waiter, outlook)
            self._take_out(victim)
            counts.pushed_out += 1
            pushed_out = (victim,)
        counts.held += 1
        waiter.expires_ms = now_ms + config.ttl_ms
        self._put_in(config, waiter, outlook, now_ms)
        return Answer(Verdict.HOLD, pushed_out=pushed_out) if pushed_out else _HOLD

    def reconsider(self, waiter: Waiter, outlook: Outlook, now_ms: float, *, is_next: bool) -> Answer:
        """One who waits, with a fresh outlook. `is_next`: it was given by `next_up`. Its stay ends unless it holds."""
        if not waiter.waiting:
            raise ValueError("this request doesn't wait")
        config = self.config
        if config is None or now_ms >= waiter.expires_ms:
            return self._expire(waiter, outlook, now_ms)
        self._rekey(config, waiter, outlook, now_ms)
        if not self._opens(config, waiter, outlook, now_ms, is_next=is_next):
            return _HOLD
        hungry = outlook.start_ms <= config.enough_work_ms
        if hungry or config.mode != "late-binding":
            self.counts.released += 1
        else:
            self.counts.last_moment += 1
        self._serve(waiter)
        return _GO

    def leave(self, waiter: Waiter) -> None:
        """Its client is gone. Nothing happens to one who doesn't wait."""
        if waiter.waiting:
            self._take_out(waiter)
            self.counts.left += 1

    def refuse(self, waiter: Waiter) -> None:
        """An admitter refused it at a second look."""
        if waiter.waiting:
            self._take_out(waiter)
            self.counts.refused_late += 1

    # --- who is to be looked at ---------------------------------------------------------------------------------

    def next_up(self, now_ms: float, skip: frozenset[Waiter] | set[Waiter] = frozenset()) -> Waiter | None:
        """Whom the next free endpoint is for, but for those in `skip` (who were looked at, and hold)."""
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            if not level.count:
                continue
            for queue in sorted(level.queues.values(), key=lambda queue: queue.tag):
                waiter = _head(queue, now_ms, skip)
                if waiter is not None:
                    return waiter
        return None

    def worth_a_look(self, waiter: Waiter, now_ms: float) -> bool:
        """Whether an endpoint may want work by now, if nothing else has happened than that time went by."""
        return self.config is None or now_ms >= waiter.look_ms

    def due(self, now_ms: float) -> list[Waiter]:
        """Whose last moment or TTL has come: to be looked at once."""
        found: list[Waiter] = []
        while self._alarms and self._alarms[0][0] <= now_ms:
            _, _, stamp, waiter = heapq.heappop(self._alarms)
            if waiter.waiting and waiter.stamp == stamp:
                found.append(waiter)
        return found

    def next_due_ms(self) -> float | None:
        """When `due` will have someone; None while nobody waits."""
        while self._alarms:
            at_ms, _, stamp, waiter = self._alarms[0]
            if waiter.waiting and waiter.stamp == stamp:
                return at_ms
            heapq.heappop(self._alarms)
        return None

    def everyone(self) -> list[Waiter]:
        """Who waits, in no order."""
        return [
            waiter
            for level in self._levels.values()
            for queue in level.queues.values()
            for _, _, stamp, waiter in (*queue.feasible, *queue.late)
            if waiter.waiting and waiter.stamp == stamp
        ]

    def check(self) -> list[str]:
        """Recount everything; what doesn't add up, in words. For tests."""
        counts, waiting = self.counts, self.everyone()
        found = []
        if counts.offered != counts.passed + counts.bypassed + counts.refused_full + counts.held:
            found.append(f"{counts}: not every offer was answered")
        gone = counts.released + counts.last_moment + counts.outlived + counts.refused_ttl
        gone += counts.pushed_out + counts.refused_late + counts.left
        if counts.held != gone + len(waiting):
            found.append(f"{counts}: {len(waiting)} wait")
        if len(waiting) != self._count or len(set(map(id, waiting))) != len(waiting):
            found.append(f"{len(waiting)} found, {self._count} counted")
        if any(level.count != sum(q.count for q in level.queues.values()) for level in self._levels.values()):
            found.append("a priority's count is wrong")
        if abs(self._service_ms - sum(waiter.service_ms for waiter in waiting)) > 1e-6 * (1.0 + self._service_ms):
            found.append("the sum of service times is wrong")
        return found

    # --- rules --------------------------------------------------------------------------------------------------

    @staticmethod
    def _opens(config: WaitingRoomConfig, waiter: Waiter, outlook: Outlook, now_ms: float, *, is_next: bool) -> bool:
        hungry = outlook.start_ms <= config.enough_work_ms
        if config.mode == "overload":
            if math.isinf(waiter.deadline_ms):  # any time is in time: it doesn't pass those who are late, though
                return is_next or hungry
            return outlook.in_time or (hungry and is_next)
        if config.mode == "smallest-first":
            return is_next and (outlook.in_time or hungry)
        if hungry and is_next:
            return True
        return outlook.in_time and now_ms >= _bind_by(config, waiter, outlook, now_ms)

    def _would_be_next(self, waiter: Waiter, now_ms: float) -> bool:
        if not self._count:
            return True
        head = self.next_up(now_ms)
        if head is None or waiter.priority != head.priority:
            return head is None or waiter.priority > head.priority
        level = self._levels[head.priority]
        if waiter.fairness_id != head.fairness_id:
            return self._tag(level, waiter.fairness_id) < level.queues[head.fairness_id].tag
        return self._rank(waiter, now_ms) < self._rank(head, now_ms)

    def _rank(self, waiter: Waiter, now_ms: float) -> tuple[bool, float]:
        if self.config is not None and self.config.mode == "smallest-first":
            return True, waiter.size_tokens
        start_by = self._start_by(waiter)
        late = start_by < now_ms
        return late, waiter.size_tokens if late else start_by

    def _start_by(self, waiter: Waiter) -> float:
        """Latest moment at which its prefill has to begin."""
        deadline_ms = waiter.deadline_ms
        if math.isinf(deadline_ms):
            default_ms = 0.0 if self.config is None else self.config.default_deadline_ms
            deadline_ms = waiter.arrived_ms + default_ms
        return deadline_ms - waiter.service_ms

    def _no_room(self, waiter: Waiter, outlook: Outlook) -> Answer:
        if waiter.priority >= 0:
            self.counts.bypassed += 1
            return _GO
        self.counts.refused_full += 1
        return Answer(Verdict.REFUSE, RefusalReason.FULL, self.retry_after_ms(outlook))

    def retry_after_ms(self, outlook: Outlook) -> float:
        """When a refused request may fare better: an endpoint's drain, and the work of those who wait before it."""
        return outlook.drain_ms + self._service_ms / max(outlook.candidates, 1)

    def _expire(self, waiter: Waiter, outlook: Outlook, now_ms: float) -> Answer:
        if self.config is not None and waiter.priority < 0 and now_ms >= waiter.expires_ms:
            self._take_out(waiter)
            self.counts.refused_ttl += 1
            return Answer(Verdict.REFUSE, RefusalReason.TTL, self.retry_after_ms(outlook))
        self._serve(waiter)
        self.counts.outlived += 1
        return _GO

    def _least(self) -> Waiter | None:
        """Who is pushed out first: of the lowest priority that may be shed, the last in order of arrival."""
        for priority in sorted(self._levels):
            if priority >= 0:
                return None
            if self._levels[priority].count:
                there = [waiter for waiter in self.everyone() if waiter.priority == priority]
                return max(there, key=lambda waiter: waiter.arrived_ms)
        return None

    # --- books --------------------------------------------------------------------------------------------------

    @staticmethod
    def _tag(level: _Level, fairness_id: str) -> float:
        queue = level.queues.get(fairness_id)
        if queue is not None:
            return queue.tag
        # Who comes back, or comes first, has no claim on the time in which it asked for nothing.
        return max(level.remembered.get(fairness_id, 0.0), level.floor)

    def _put_in(self, config: WaitingRoomConfig, waiter: Waiter, outlook: Outlook, now_ms: float) -> None:
        level = self._levels.setdefault(waiter.priority, _Level())
        queue = level.queues.get(waiter.fairness_id)
        if queue is None:
            queue = level.queues[waiter.fairness_id] = _Queue(self._tag(level, waiter.fairness_id))
            level.remembered.pop(waiter.fairness_id, None)
        waiter.waiting = True
        queue.count += 1
        level.count += 1
        self._count += 1
        self._service_ms += waiter.service_ms
        self._enter(config, queue, waiter, outlook, now_ms)

    def _rekey(self, config: WaitingRoomConfig, waiter: Waiter, outlook: Outlook, now_ms: float) -> None:
        queue = self._levels[waiter.priority].queues[waiter.fairness_id]
        self._service_ms += outlook.service_ms - waiter.service_ms
        waiter.service_ms = outlook.service_ms
        self._enter(config, queue, waiter, outlook, now_ms)

    def _enter(self, config: WaitingRoomConfig, queue: _Queue, waiter: Waiter, outlook: Outlook, now_ms: float) -> None:
        """Into the heaps; earlier entries are gone by their stamp."""
        waiter.stamp += 1
        sequence = next(self._sequence)
        late, key = self._rank(waiter, now_ms)
        heapq.heappush(queue.late if late else queue.feasible, (key, sequence, waiter.stamp, waiter))
        # A backlog drains by a millisecond a millisecond, as far as is predicted; half the way is where to look again.
        waiter.look_ms = now_ms + max((outlook.start_ms - config.enough_work_ms) / 2.0, _LEAST_STEP_MS)
        waiter.bind_by_ms = math.inf
        if config.mode == "late-binding" and outlook.in_time:
            waiter.bind_by_ms = max(_bind_by(config, waiter, outlook, now_ms), now_ms + _LEAST_STEP_MS)
        heapq.heappush(self._alarms, (min(waiter.bind_by_ms, waiter.expires_ms), sequence, waiter.stamp, waiter))
        if len(self._alarms) > 64 + 4 * self._count:
            self._alarms = [alarm for alarm in self._alarms if alarm[3].waiting and alarm[3].stamp == alarm[2]]
            heapq.heapify(self._alarms)
        for heap in (queue.feasible, queue.late):
            if len(heap) > 64 + 4 * queue.count:
                heap[:] = [entry for entry in heap if entry[3].waiting and entry[3].stamp == entry[2]]
                heapq.heapify(heap)

    def _serve(self, waiter: Waiter) -> None:
        """It goes: its id has been given that much."""
        level = self._levels[waiter.priority]
        queue = level.queues[waiter.fairness_id]
        level.floor = max(level.floor, min(other.tag for other in level.queues.values()))
        queue.tag += max(waiter.size_tokens, 1.0)
        self._take_out(waiter)

    def _take_out(self, waiter: Waiter) -> None:
        level = self._levels[waiter.priority]
        queue = level.queues[waiter.fairness_id]
        waiter.waiting = False
        queue.count -= 1
        level.count -= 1
        self._count -= 1
        self._service_ms -= waiter.service_ms
        if not self._count:
            self._service_ms = 0.0  # sums of floats drift
        if not queue.count:
            del level.queues[waiter.fairness_id]
            level.remembered[waiter.fairness_id] = queue.tag
            if len(level.remembered) > _MAX_REMEMBERED:
                level.remembered.popitem(last=False)
        if not level.count and len(self._levels) > _MAX_LEVELS:
            del self._levels[waiter.priority]


def _bind_by(config: WaitingRoomConfig, waiter: Waiter, outlook: Outlook, now_ms: float) -> float:
    """The last useful moment: bound later, it would miss. As if the queue there stayed as long as it is."""
    del now_ms
    return waiter.deadline_ms - outlook.ttft_ms - config.margin_ms


def _head(queue: _Queue, now_ms: float, skip: frozenset[Waiter] | set[Waiter]) -> Waiter | None:
    """The first of a queue that isn't in `skip`; those whose time to start has passed move to the late ones."""
    while queue.feasible:
        key, sequence, stamp, waiter = queue.feasible[0]
        gone = not waiter.waiting or waiter.stamp != stamp
        if not gone and key >= now_ms:
            break
        heapq.heappop(queue.feasible)
        if not gone:
            heapq.heappush(queue.late, (waiter.size_tokens, sequence, stamp, waiter))
    for heap in (queue.feasible, queue.late):
        while heap and (not heap[0][3].waiting or heap[0][3].stamp != heap[0][2]):
            heapq.heappop(heap)
        if heap and heap[0][3] not in skip:
            return heap[0][3]
        if heap and skip:
            there = [
                entry for entry in heap if entry[3].waiting and entry[3].stamp == entry[2] and entry[3] not in skip
            ]
            if there:
                return min(there)[3]
    return None
