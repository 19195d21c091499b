"""Which endpoints are set aside, since requests sent to them fail. Pure: time and random numbers are handed in.

An endpoint that accepts connections and answers 500 at once looks idle and fast, so every policy likes it best. What
counts here is what came of requests, each once, where the endpoint is to blame (`FailureKind`); a client that leaves
and an answer of 4xx say nothing of it, but for 429.

It is set aside after some failures in a row, or many among its newest outcomes, if others fail less: a prompt that
every server answers with 500 is nobody's fault. Where more than the allowed share of the pool fails, nobody is set
aside. The time that it stays so doubles, up to a limit, with jitter. Then it is tried: a request at a time, until
enough in a row went well. An end of which no word comes counts as well: where outcomes are lost, too, nobody is set
aside for ever.

Limits: knows slots, not addresses; who is a candidate is the table's to say (`table.py`), which sees to it, too, that
of those who can serve a request no more than the allowed share is left out.
"""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

_NEVER: Final = float("-inf")


class FailureKind(StrEnum):
    """What an endpoint is to blame for; a closed list for counting.

    `error`: a 5xx; `overloaded`: 429 or 503; `reset`: the connection ended before the answer did; `unreachable`: there
    was none; `timeout`: of the gateway; `retried`: the gateway tried another, and doesn't say after what; `empty`: an
    answer of 2xx without a byte.
    """

    ERROR = "error"
    OVERLOADED = "overloaded"
    RESET = "reset"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    RETRIED = "retried"
    EMPTY = "empty"


def failure_of_status(status: int) -> FailureKind | None:
    """Whose status it is, of an answer that an endpoint gave; None where it isn't to blame."""
    if status in {429, 503}:
        return FailureKind.OVERLOADED
    return FailureKind.ERROR if status >= 500 else None


class Standing(StrEnum):
    """Of an endpoint: a candidate as any other; none; one that takes a request at a time."""

    IN_USE = "in_use"
    SET_ASIDE = "set_aside"
    PROBING = "probing"


class Event(StrEnum):
    """What happened to an endpoint. `spared`: all are in use again, since too many fail."""

    SET_ASIDE = "set_aside"
    PROBE_FAILED = "probe_failed"
    RETURNED = "returned"
    SPARED = "spared"


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """`max_set_aside_share`: of the pool, at least one endpoint, never the last; 0: nobody is judged.

    Five failures in a row or 8 of the newest 20, each where at the pool's usual share that is less than one in a
    million by chance. One that fails half of its requests gives 8 of 20 in 7 of 8 cases. `lost_word_ms`: after a
    trial's end, from when on no word of it is a good one. `trial_ms`: one under way for longer doesn't keep the next
    off. `old_after_ms`: what an endpoint did so long ago says nothing of what is usual. `over_by_chance`: nor does
    what failed before a run of answers less likely than that, were it still as before: two after 18 failures, ten
    where half fails.
    """

    max_set_aside_share: float = 0.5
    failures_in_a_row: int = 5
    by_chance: float = 1e-6
    over_by_chance: float = 1e-3
    outcomes: int = 20
    failures: int = 8
    first_ms: float = 2_000.0
    longest_ms: float = 60_000.0
    jitter: float = 0.2
    trials: int = 3
    lost_word_ms: float = 5_000.0
    trial_ms: float = 30_000.0
    old_after_ms: float = 60_000.0

    def allowed(self, endpoints: int) -> int:
        """How many of so many may be set aside at once."""
        if self.max_set_aside_share <= 0.0 or endpoints < 2:
            return 0
        return max(1, int(self.max_set_aside_share * endpoints))


@dataclass(frozen=True, slots=True)
class Change:
    """What to do, and what to tell: the slots it is about, and until when they are set aside (`held_until_ms`)."""

    event: Event
    slots: tuple[int, ...]
    kind: FailureKind | None = None
    held_until_ms: float = _NEVER


@dataclass(slots=True)
class Case:
    """What is known of one endpoint to which a request has failed."""

    counts: dict[FailureKind, int] = field(default_factory=dict)
    newest: int = 0
    """Outcomes as bits, the newest the lowest; 1 is a failure."""
    outcomes: int = 0
    """How many of those bits there are."""
    in_a_row: int = 0
    last_ms: float = _NEVER
    reason: FailureKind | None = None
    """Of the newest failure."""
    since_ms: float | None = None
    """When it was set aside; None: it is in use."""
    again_ms: float = _NEVER
    """When it was set aside the last time, by a trial that failed."""
    until_ms: float = _NEVER
    level: int = 0
    """How often it was set aside without having been well for long in between."""
    trial: str | None = None
    """Id of the newest request that tries it, until there is word of it."""
    trial_sent_ms: float = _NEVER
    trial_ended_ms: float | None = None
    passed: int = 0

    @property
    def failures(self) -> int:
        return self.newest.bit_count()

    def standing(self, now_ms: float) -> Standing:
        if self.since_ms is None:
            return Standing.IN_USE
        return Standing.SET_ASIDE if now_ms < self.until_ms else Standing.PROBING

    def note(self, failure: FailureKind | None, now_ms: float, config: HealthConfig) -> None:
        self.newest = (self.newest << 1 | (failure is not None)) & ((1 << config.outcomes) - 1)
        self.outcomes = min(self.outcomes + 1, config.outcomes)
        self.last_ms = now_ms
        if failure is None:
            self.in_a_row = 0
            self._forget_what_is_over(config.over_by_chance)
            return
        self.in_a_row += 1
        self.reason = failure

    def _forget_what_is_over(self, chance: float) -> None:
        """One that goes on failing where all did draws the requests; the others get few to show that they are well."""
        if self.newest == 0:
            return
        answered = (self.newest & -self.newest).bit_length() - 1
        # Half a failure and half an answer more, since even where nothing but failures was seen an answer can come.
        usual = (self.failures + 0.5) / (self.outcomes - answered + 1.0)
        if (1.0 - usual) ** answered <= chance:
            self.newest, self.outcomes = 0, answered


class EndpointHealth:
    """See the module. Every `Change` that is returned is the caller's to carry out."""

    def __init__(self, config: HealthConfig, rng: random.Random, usable: Callable[[], Collection[int]]) -> None:
        """`usable`: the slots of the endpoints that could be candidates, those set aside among them."""
        self.config = config
        self.failures: dict[FailureKind, int] = dict.fromkeys(FailureKind, 0)
        self.events: dict[Event, int] = dict.fromkeys(Event, 0)
        self._rng = rng
        self._usable = usable
        self._cases: dict[int, Case] = {}

    @property
    def watching(self) -> bool:
        """Whether anything has failed anywhere."""
        return bool(self._cases)

    def case(self, slot: int) -> Case | None:
        """What is known of an endpoint; None of one to which no request has failed."""
        return self._cases.get(slot)

    def in_a_row(self, slot: int) -> int:
        """How many of its newest outcomes are failures without one that isn't."""
        case = self._cases.get(slot)
        return 0 if case is None else case.in_a_row

    def forget(self, slot: int) -> None:
        """Another process, or another endpoint, is there."""
        self._cases.pop(slot, None)

    def observe(
        self, slot: int, failure: FailureKind | None, now_ms: float, *, dispatched_ms: float | None = None
    ) -> Change | None:
        """What came of a request; None as `failure`: it was answered. `dispatched_ms`: where that is known.

        Each request once.
        """
        case = self._cases.get(slot)
        if failure is not None:
            self.failures[failure] += 1
            if case is None:
                case = self._cases[slot] = Case()
            case.counts[failure] = case.counts.get(failure, 0) + 1
        if case is None:
            return None
        case.note(failure, now_ms, self.config)
        if case.since_ms is None:
            return self._of_one_in_use(slot, case, failure, now_ms)
        if now_ms < case.until_ms or (dispatched_ms is not None and dispatched_ms < case.until_ms):
            return None  # sent before
        if failure is not None:
            too_many = self._too_many(slot, now_ms)
            return self._spare(slot, case) if too_many else self._set_aside(slot, case, Event.PROBE_FAILED, now_ms)
        return self._passed(slot, case)

    def dispatched(self, slot: int, decision_id: str, now_ms: float) -> Change | None:
        """A request goes to an endpoint. One that is tried is to get no other: `held_until_ms` says for how long.

        Each router draws its own time; the first that is up is everybody's. What is sent in the first half of it is of
        a router that hasn't heard yet.
        """
        case = self._cases.get(slot)
        if case is None or case.since_ms is None or now_ms < (case.again_ms + case.until_ms) / 2.0:
            return None
        case.until_ms = min(case.until_ms, now_ms)
        change = None
        if case.trial_ended_ms is not None and now_ms >= case.trial_ended_ms + self.config.lost_word_ms:
            change = self._passed(slot, case)
        if case.since_ms is not None:
            case.trial, case.trial_sent_ms, case.trial_ended_ms = decision_id, now_ms, None
        return change

    def ended(self, slot: int, decision_id: str, now_ms: float) -> bool:
        """A request is over, with or without word of it. True if it was one that tries the endpoint."""
        case = self._cases.get(slot)
        if case is None or case.trial != decision_id:
            return False
        case.trial_ended_ms = now_ms
        return True

    def held_until_ms(self, slot: int, now_ms: float) -> float:
        """Until when an endpoint gets nothing, as things are; past for one that may be sent a request."""
        case = self._cases.get(slot)
        if case is None or case.since_ms is None:
            return _NEVER
        if now_ms < case.until_ms or case.trial is None:
            return case.until_ms
        if case.trial_ended_ms is not None:
            return case.trial_ended_ms + self.config.lost_word_ms
        return case.trial_sent_ms + self.config.trial_ms

    # --- judging ------------------------------------------------------------------------------------------------

    def _of_one_in_use(self, slot: int, case: Case, failure: FailureKind | None, now_ms: float) -> Change | None:
        if failure is None:
            if case.level and case.outcomes == self.config.outcomes and case.newest == 0:
                case.level = 0
            return None
        config = self.config
        if not self._suspicious(case) or config.max_set_aside_share <= 0.0:
            return None
        if self._too_many(slot, now_ms):
            return self._spare(slot, case)
        usual = self._usual_share(slot, now_ms)
        row = case.in_a_row >= config.failures_in_a_row and usual**case.in_a_row <= config.by_chance
        many = case.failures >= config.failures and _chance(case.failures, case.outcomes, usual) <= config.by_chance
        return self._set_aside(slot, case, Event.SET_ASIDE, now_ms) if row or many else None

    def _suspicious(self, case: Case) -> bool:
        return case.in_a_row >= self.config.failures_in_a_row or case.failures >= self.config.failures

    def _usual_share(self, slot: int, now_ms: float) -> float:
        """What share of its newest outcomes fails at the other endpoints: the median, the lower one of two."""
        others = [other for other in self._usable() if other != slot]
        shares = sorted(self._share(other, now_ms) for other in others)
        return shares[(len(shares) - 1) // 2] if shares else 1.0

    def _share(self, slot: int, now_ms: float) -> float:
        case = self._cases.get(slot)
        if case is None or now_ms - case.last_ms > self.config.old_after_ms:
            return 0.0
        return case.failures / max(case.outcomes, self.config.failures_in_a_row)

    def _too_many(self, slot: int, now_ms: float) -> bool:
        """Whether more endpoints fail, this one among them, than may be set aside."""
        usable = self._usable()
        others = [self._cases[other] for other in usable if other != slot and other in self._cases]
        failing = 1 + sum(
            case.since_ms is not None or (self._suspicious(case) and now_ms - case.last_ms <= self.config.old_after_ms)
            for case in others
        )
        return failing > self.config.allowed(len(usable))

    def _spare(self, slot: int, case: Case) -> Change | None:
        """Everyone is in use again; None, where everyone was."""
        numbers = {slot, *self._usable()}
        out = [
            number for number in sorted(numbers) if (found := self._cases.get(number)) and found.since_ms is not None
        ]
        for number in out:
            self._into_use(self._cases[number])
        return self._told(Change(Event.SPARED, tuple(out), case.reason)) if out else None

    def _set_aside(self, slot: int, case: Case, event: Event, now_ms: float) -> Change:
        config = self.config
        stay_ms = min(config.first_ms * 2.0 ** min(case.level, 32), config.longest_ms)
        case.since_ms = now_ms if case.since_ms is None else case.since_ms
        case.again_ms = now_ms
        case.until_ms = now_ms + stay_ms * self._rng.uniform(1.0 - config.jitter, 1.0 + config.jitter)
        case.level += 1
        case.passed = 0
        case.trial = case.trial_ended_ms = None
        return self._told(Change(event, (slot,), case.reason, case.until_ms))

    def _passed(self, slot: int, case: Case) -> Change | None:
        case.passed += 1
        case.trial = case.trial_ended_ms = None
        if case.passed < self.config.trials:
            return None
        self._into_use(case)
        case.newest = case.outcomes = case.in_a_row = 0
        return self._told(Change(Event.RETURNED, (slot,)))

    @staticmethod
    def _into_use(case: Case) -> None:
        case.since_ms, case.until_ms, case.passed = None, _NEVER, 0
        case.trial = case.trial_ended_ms = None

    def _told(self, change: Change) -> Change:
        self.events[change.event] += len(change.slots)
        return change


def _chance(failures: int, outcomes: int, share: float) -> float:
    """Of so many failures or more where each outcome is one with this probability."""
    return sum(
        math.comb(outcomes, count) * share**count * (1.0 - share) ** (outcomes - count)
        for count in range(failures, outcomes + 1)
    )
