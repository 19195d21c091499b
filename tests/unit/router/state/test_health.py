"""Who is set aside for failing, and who is tried again when: the tables and the laws of `health.py`."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.state.health import (
    Change,
    EndpointHealth,
    Event,
    FailureKind,
    HealthConfig,
    Standing,
    failure_of_status,
)

ERROR = FailureKind.ERROR
CONFIG = HealthConfig(jitter=0.0)


class Pool:
    """Endpoints by slot, a clock, and what a caller does with each change."""

    def __init__(self, size: int, config: HealthConfig = CONFIG, seed: int = 1) -> None:
        self.slots = list(range(size))
        self.health = EndpointHealth(config, random.Random(seed), lambda: self.slots)
        self.now_ms = 0.0
        self.changes: list[Change] = []
        self._ids = iter(range(1_000_000))

    def outcome(self, slot: int, failure: FailureKind | None = ERROR, times: int = 1, **more) -> Change | None:
        change = None
        for _ in range(times):
            self.now_ms += 1.0
            change = self._kept(self.health.observe(slot, failure, self.now_ms, **more))
        return change

    def send(self, slot: int) -> str:
        decision_id = str(next(self._ids))
        self._kept(self.health.dispatched(slot, decision_id, self.now_ms))
        return decision_id

    def heard(self, sent_ms: float) -> None:
        """Another router has sent a request to the first endpoint."""
        self._kept(self.health.dispatched(0, str(next(self._ids)), sent_ms))

    def _kept(self, change: Change | None) -> Change | None:
        if change is not None:
            self.changes.append(change)
        return change

    def standing(self, slot: int) -> Standing:
        case = self.health.case(slot)
        return Standing.IN_USE if case is None else case.standing(self.now_ms)

    def free(self, slot: int) -> bool:
        """Whether it may be sent a request now."""
        return self.health.held_until_ms(slot, self.now_ms) <= self.now_ms

    def aside(self) -> list[int]:
        return [slot for slot in self.slots if self.standing(slot) is not Standing.IN_USE]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None),
        (302, None),
        (400, None),
        (401, None),
        (404, None),
        (499, None),
        (429, FailureKind.OVERLOADED),
        (500, ERROR),
        (502, ERROR),
        (503, FailureKind.OVERLOADED),
        (504, ERROR),
        (0, None),
    ],
)
def test_a_server_is_to_blame_for_its_errors_and_for_having_too_much_to_do(status: int, kind: FailureKind | None):
    assert failure_of_status(status) is kind


def test_five_failures_in_a_row_set_an_endpoint_aside_and_four_do_not():
    pool = Pool(4)
    assert pool.outcome(0, times=4) is None
    change = pool.outcome(0)
    assert change == Change(Event.SET_ASIDE, (0,), ERROR, pool.now_ms + 2_000.0)
    assert pool.standing(0) is Standing.SET_ASIDE


def test_an_answer_in_between_starts_the_row_anew():
    pool = Pool(4)
    for _ in range(3):
        pool.outcome(0, times=2)
        pool.outcome(0, None)
    assert not pool.changes


def test_half_of_all_failing_is_found_within_a_few_windows():
    rng = random.Random(7)
    found = []
    for _ in range(200):
        pool = Pool(4)
        while not pool.changes:
            pool.outcome(0, ERROR if rng.random() < 0.5 else None)
        found.append(pool.now_ms)
    assert sum(found) / len(found) < 25
    assert max(found) < 100


def test_a_few_failures_everywhere_set_hardly_anyone_aside():
    rng = random.Random(7)
    pool = Pool(10)
    for _ in range(20_000):
        pool.outcome(rng.randrange(10), ERROR if rng.random() < 0.05 else None)
        if pool.changes:
            break
    assert not pool.changes


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 1.0])
def test_a_prompt_that_fails_everywhere_sets_nobody_aside_for_long(share: float):
    """Requests with it come to everyone alike: what is usual in the pool is nobody's fault."""
    rng = random.Random(3)
    pool = Pool(8)
    worst = 0
    for _ in range(8_000):
        pool.outcome(rng.randrange(8), ERROR if rng.random() < share else None)
        worst = max(worst, len(pool.aside()))
    assert worst <= 1


def test_of_a_pool_whose_greater_half_fails_nobody_is_set_aside():
    pool = Pool(4)
    for _ in range(100):
        for slot in (0, 1, 2):
            pool.outcome(slot)
        pool.outcome(3, None)
    assert not pool.aside()


def test_two_of_four_are_set_aside_and_given_back_when_a_third_fails():
    pool = Pool(4)
    pool.outcome(0, times=5)
    pool.outcome(1, times=5)
    assert pool.aside() == [0, 1]
    change = pool.outcome(2, times=5)
    assert change is not None
    assert (change.event, sorted(change.slots)) == (Event.SPARED, [0, 1])
    assert not pool.aside()


def test_the_broken_are_set_aside_again_when_the_others_are_well():
    pool = Pool(4)
    for slot in (0, 1, 2):
        pool.outcome(slot, times=5)
    for _ in range(20):
        pool.outcome(2, None)
        pool.outcome(3, None)
    pool.outcome(0)
    pool.outcome(1)
    assert pool.aside() == [0, 1]


def drawn(pool: Pool, failing: int, rng: random.Random, *, at_most: int = 1_000) -> int:
    """How many requests fail until it is set aside, where an endpoint that fails at once draws nine of ten."""
    well = [slot for slot in pool.slots if slot != failing]
    failed = 0
    while failing not in pool.aside() and failed < at_most:
        if rng.random() < 0.9:
            pool.outcome(failing)
            failed += 1
        else:
            pool.outcome(rng.choice(well), None)
    return failed


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_that_still_fails_when_all_others_are_well_again_is_found_though_it_draws_nearly_everything(size: int):
    """What failed while all did is over as soon as answers show it, not when 20 of them pushed it out."""
    found = []
    for seed in range(40):
        pool = Pool(size)
        for _ in range(20):
            for slot in pool.slots:
                pool.outcome(slot)
        assert not pool.aside()
        found.append(drawn(pool, size - 1, random.Random(seed)))
    assert sum(found) / len(found) < 25 * size
    assert max(found) < 80 * size


def test_one_that_fails_after_another_is_well_again_is_found_though_it_draws_nearly_everything():
    for seed in range(40):
        pool = Pool(3)
        pool.outcome(0, times=20)
        assert pool.aside() == [0]
        pool.outcome(1, times=20)
        assert not pool.aside()  # two of three are more than may be
        assert drawn(pool, 1, random.Random(seed)) < 150


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_answers_among_failures_take_nothing_back(share: float):
    """A run of them that chance may bring is no sign of a change."""
    rng = random.Random(5)
    pool = Pool(1)
    failures = []
    for _ in range(4_000):
        pool.outcome(0, ERROR if rng.random() < share else None)
        case = pool.health.case(0)
        failures.append(case.failures / case.outcomes if case is not None and case.outcomes else 0.0)
    assert abs(sum(failures) / len(failures) - share) < 0.02


@pytest.mark.parametrize(("size", "allowed"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (100, 50)])
def test_at_most_half_and_never_the_last(size: int, allowed: int):
    assert CONFIG.allowed(size) == allowed


def test_a_small_share_allows_one_and_none_judges_nobody():
    assert HealthConfig(max_set_aside_share=0.01).allowed(4) == 1
    pool = Pool(4, HealthConfig(max_set_aside_share=0.0))
    assert pool.outcome(0, times=50) is None
    assert pool.health.failures[ERROR] == 50


def test_an_endpoint_alone_is_never_set_aside():
    pool = Pool(1)
    assert pool.outcome(0, times=100) is None


def test_the_time_aside_doubles_up_to_its_limit():
    pool = Pool(4)
    pool.outcome(0, times=5)
    stays = []
    for _ in range(8):
        case = pool.health.case(0)
        assert case is not None
        stays.append(case.until_ms - pool.now_ms)
        pool.now_ms = case.until_ms
        pool.send(0)
        pool.outcome(0)
    assert stays == [2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]


def test_jitter_stays_within_its_bounds_and_differs():
    stays = set()
    for seed in range(50):
        pool = Pool(4, HealthConfig(), seed)
        pool.outcome(0, times=5)
        stays.add(pool.health.held_until_ms(0, pool.now_ms) - pool.now_ms)
    assert len(stays) == 50
    assert min(stays) >= 1_600
    assert max(stays) <= 2_400


def test_one_request_at_a_time_tries_it_and_three_good_ones_bring_it_back():
    pool = Pool(4)
    pool.outcome(0, times=5)
    assert not pool.free(0)
    pool.now_ms += 2_001.0
    for number in range(3):
        assert (pool.standing(0), pool.free(0)) == (Standing.PROBING, True)
        decision_id = pool.send(0)
        assert not pool.free(0)
        sent_ms = pool.now_ms
        pool.now_ms += 100.0
        pool.health.ended(0, decision_id, pool.now_ms)
        assert not pool.free(0)
        change = pool.outcome(0, None, dispatched_ms=sent_ms)
        assert (change is not None) == (number == 2)
    assert pool.changes[-1] == Change(Event.RETURNED, (0,))
    assert pool.standing(0) is Standing.IN_USE


def test_the_router_whose_time_is_up_first_tries_it_for_all():
    pool = Pool(4)
    pool.outcome(0, times=5)
    aside_ms = pool.now_ms
    pool.now_ms = aside_ms + 999.0
    pool.send(0)  # by a router that hasn't heard
    assert pool.health.held_until_ms(0, pool.now_ms) == aside_ms + 2_000.0
    pool.now_ms = sent_ms = aside_ms + 1_700.0
    pool.send(0)
    assert (pool.standing(0), pool.free(0)) == (Standing.PROBING, False)
    change = pool.outcome(0, dispatched_ms=sent_ms)
    assert change is not None
    assert (change.event, change.held_until_ms) == (Event.PROBE_FAILED, pool.now_ms + 4_000.0)


@pytest.mark.parametrize("routers", [1, 2, 4])
def test_several_routers_try_a_dead_endpoint_hardly_oftener_than_one(routers: int):
    """Each hears of the others' requests after 30 ms and of every outcome after 150."""
    pools = [Pool(4, HealthConfig(), seed) for seed in range(routers)]
    for pool in pools:
        pool.outcome(0, times=5)
    due: list[tuple[float, Callable[[Pool], object], Pool]] = []
    trials = 0
    for now_ms in range(10, 120_000, 10):
        for pool in pools:
            pool.now_ms = float(now_ms)
        for _, act, pool in [each for each in due if each[0] <= now_ms]:
            act(pool)
        due = [each for each in due if each[0] > now_ms]
        for pool in pools:
            if pool.free(0):
                trials += 1
                pool.send(0)
                heard = partial(Pool.heard, sent_ms=float(now_ms))
                due += [(now_ms + 30.0, heard, other) for other in pools if other is not pool]
                ended = partial(Pool.outcome, slot=0, dispatched_ms=float(now_ms))
                due += [(now_ms + 150.0, ended, each) for each in pools]
    assert 5 <= trials <= 8


def test_requests_sent_before_say_nothing_of_how_it_is_now():
    pool = Pool(4)
    pool.outcome(0, times=5, dispatched_ms=0.0)
    case = pool.health.case(0)
    assert case is not None
    until_ms = case.until_ms
    pool.outcome(0, times=30, dispatched_ms=0.0)
    pool.now_ms = until_ms + 1.0
    pool.outcome(0, times=5, dispatched_ms=until_ms - 500.0)
    pool.outcome(0, None, times=5, dispatched_ms=until_ms - 500.0)
    assert (pool.standing(0), case.until_ms, case.level) == (Standing.PROBING, until_ms, 1)


def test_without_word_of_how_trials_ended_it_is_in_use_again_all_the_same():
    """NATS is away: nothing is known, so nobody may be kept out."""
    pool = Pool(4)
    pool.outcome(0, times=5)
    pool.now_ms += 2_001.0
    for _ in range(3):
        assert pool.free(0)
        pool.health.ended(0, pool.send(0), pool.now_ms)
        assert not pool.free(0)
        pool.now_ms += 5_000.0
    pool.send(0)
    assert pool.changes[-1].event is Event.RETURNED


def test_a_trial_that_hangs_keeps_others_out_for_half_a_minute():
    pool = Pool(4)
    pool.outcome(0, times=5)
    pool.now_ms += 2_001.0
    pool.send(0)
    sent_ms = pool.now_ms
    pool.now_ms += 29_000.0
    assert not pool.free(0)
    pool.now_ms = sent_ms + 30_000.0
    assert pool.free(0)


def test_who_was_set_aside_often_starts_again_from_the_beginning_after_a_good_while():
    pool = Pool(4)
    for stay_ms in (2_000.0, 4_000.0):
        pool.outcome(0, times=5)
        assert pool.changes[-1].held_until_ms == pool.now_ms + stay_ms
        pool.now_ms += stay_ms + 1.0
        pool.outcome(0, None, times=3)
    pool.outcome(0, None, times=20)
    pool.outcome(0, times=5)
    assert pool.changes[-1].held_until_ms == pool.now_ms + 2_000.0


def test_another_process_has_a_clean_slate():
    pool = Pool(4)
    pool.outcome(0, times=5)
    pool.health.forget(0)
    assert (pool.standing(0), pool.free(0), pool.health.watching) == (Standing.IN_USE, True, False)


def test_failures_are_counted_by_kind_whatever_comes_of_them():
    pool = Pool(2)
    kinds = [*FailureKind, ERROR]
    for kind in kinds:
        pool.outcome(0, kind)
    case = pool.health.case(0)
    assert case is not None
    assert case.counts == Counter(kinds)
    assert pool.health.failures == Counter(kinds)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["fail", "fail", "fail", "answer", "send", "end", "wait", "long wait"]),
    ),
    max_size=300,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), STEPS)
def test_whatever_happens_the_pool_keeps_at_least_half_and_nobody_is_kept_out_for_ever(size: int, steps):
    config = HealthConfig()
    pool = Pool(size, config)
    newest: dict[int, str] = {}
    for number, what in steps:
        slot = number % size
        if what in {"fail", "answer"}:
            pool.outcome(slot, ERROR if what == "fail" else None)
        elif what == "send" and pool.free(slot):
            newest[slot] = pool.send(slot)
        elif what == "end" and slot in newest:
            pool.health.ended(slot, newest[slot], pool.now_ms)
        else:
            pool.now_ms += 500.0 if what == "wait" else 20_000.0
        aside = pool.aside()
        assert len(aside) <= config.allowed(size) < max(size, 1)
        for other in pool.slots:
            held_ms = pool.health.held_until_ms(other, pool.now_ms) - pool.now_ms
            assert held_ms <= config.longest_ms * (1.0 + config.jitter)
            assert other in aside or held_ms <= 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(5, 60))
def test_whoever_is_well_again_is_in_use_again(size: int, failures: int):
    pool = Pool(size, HealthConfig())
    for _ in range(failures):
        if pool.free(0):
            pool.send(0)
            pool.outcome(0)
        pool.now_ms += 1_000.0
    waited_ms = 0.0
    while pool.standing(0) is not Standing.IN_USE:
        if pool.free(0):
            pool.send(0)
            pool.outcome(0, None)
        pool.now_ms += 1_000.0
        waited_ms += 1_000.0
        assert waited_ms < 60_000.0 * 1.2 + 5_000.0
