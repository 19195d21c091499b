"""The waiting room: who is held, in which order they go, what bounds it, and books that always add up."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import services.router.admission as package
from services.router.admission.waiting_room import (
    MAX_TTL_MS,
    Outlook,
    RefusalReason,
    Verdict,
    Waiter,
    WaitingRoom,
    WaitingRoomConfig,
)
from services.router.request.errors import RejectReason

BUSY = 1_000.0


def waiter(deadline_ms=math.inf, *, priority=0, fairness="", size=1000.0, arrived_ms=0.0):
    return Waiter(priority, fairness, deadline_ms, size, arrived_ms)


def outlook(start_ms=BUSY, *, service_ms=100.0, ttft_ms=None, in_time=False, drain_ms=500.0, candidates=2):
    ttft_ms = start_ms + service_ms if ttft_ms is None else ttft_ms
    return Outlook(start_ms, service_ms, ttft_ms, in_time, drain_ms, candidates)


def room(mode="overload", **config):
    return WaitingRoom(WaitingRoomConfig(mode=mode, **config))


def hold(held, *waiters, now_ms=0.0, **facts):
    for one in waiters:
        assert held.offer(one, outlook(**facts), now_ms).verdict is Verdict.HOLD


def order(held, now_ms=0.0):
    """Who goes, one after the other, as endpoints become free."""
    found = []
    while (one := held.next_up(now_ms)) is not None:
        assert held.reconsider(one, outlook(0.0, service_ms=one.service_ms), now_ms, is_next=True).verdict is Verdict.GO
        found.append(one)
    assert held.check() == []
    return found


# --- overload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_ms", [0.0, BUSY])
def test_a_request_that_an_endpoint_can_serve_in_time_is_never_held(start_ms):
    held = room()
    hold(held, waiter(500.0))
    assert held.offer(waiter(5_000.0), outlook(start_ms, in_time=True), 0.0).verdict is Verdict.GO


def test_a_request_that_nobody_can_serve_in_time_waits_until_an_endpoint_wants_work():
    held, late = room(enough_work_ms=150), waiter(500.0)
    hold(held, late)
    assert held.reconsider(late, outlook(151.0), 10.0, is_next=True).verdict is Verdict.HOLD
    assert held.reconsider(late, outlook(150.0), 20.0, is_next=True).verdict is Verdict.GO
    assert (held.counts.held, held.counts.released, len(held)) == (1, 1, 0)


def test_it_goes_as_soon_as_it_can_be_in_time_after_all():
    held, late = room(), waiter(500.0)
    hold(held, late)
    assert held.reconsider(late, outlook(in_time=True), 10.0, is_next=False).verdict is Verdict.GO


def test_without_an_objective_a_request_passes_unless_others_wait_before_it():
    held = room()
    assert held.offer(waiter(), outlook(), 0.0).verdict is Verdict.GO
    hold(held, waiter(500.0))
    assert held.offer(waiter(), outlook(), 0.0).verdict is Verdict.HOLD
    assert held.offer(waiter(priority=1), outlook(), 0.0).verdict is Verdict.GO
    assert held.offer(waiter(), outlook(0.0), 0.0).verdict is Verdict.GO


# --- late binding -----------------------------------------------------------------------------------------------


def test_late_binding_holds_what_has_slack_while_every_endpoint_has_work():
    held, one = room("late-binding"), waiter(10_000.0)
    assert held.offer(waiter(10_000.0), outlook(100.0, in_time=True), 0.0).verdict is Verdict.GO
    hold(held, one, in_time=True)
    assert held.next_due_ms() == pytest.approx(10_000 - 1_100 - 50)


def test_it_is_bound_at_the_last_useful_moment_and_not_before():
    held, one = room("late-binding", margin_ms=50), waiter(5_000.0)
    hold(held, one, in_time=True)
    due = held.next_due_ms()
    assert held.due(due - 0.01) == []
    assert held.due(due) == [one]
    assert held.reconsider(one, outlook(in_time=True), due, is_next=False).verdict is Verdict.GO
    assert held.counts.last_moment == 1


def test_a_last_moment_that_moves_is_waited_for_again():
    held, one = room("late-binding", margin_ms=50), waiter(5_000.0)
    hold(held, one, in_time=True)
    due = held.next_due_ms()
    held.due(due)
    assert held.reconsider(one, outlook(500.0, in_time=True), due, is_next=False).verdict is Verdict.HOLD
    assert held.next_due_ms() == pytest.approx(5_000 - 600 - 50)


def test_what_would_miss_anyway_waits_for_a_free_endpoint():
    held, one = room("late-binding"), waiter(500.0)
    hold(held, one, in_time=False)
    assert held.next_due_ms() == 30_000.0, "its TTL alone"


# --- smallest first ---------------------------------------------------------------------------------------------


def test_while_nobody_waits_whatever_can_be_in_time_goes_and_what_cannot_is_held():
    held = room("smallest-first")
    assert held.offer(waiter(500.0), outlook(in_time=True), 0.0).verdict is Verdict.GO
    assert held.offer(waiter(500.0), outlook(0.0), 0.0).verdict is Verdict.GO, "an endpoint wants work"
    assert held.offer(waiter(500.0), outlook(), 0.0).verdict is Verdict.HOLD


def test_a_request_that_could_be_in_time_waits_behind_a_smaller_one_and_passes_larger_ones():
    held = room("smallest-first")
    hold(held, waiter(500.0, size=1_000.0))
    assert held.offer(waiter(5_000.0, size=1_001.0), outlook(in_time=True), 0.0).verdict is Verdict.HOLD
    assert held.offer(waiter(5_000.0, size=999.0), outlook(in_time=True), 0.0).verdict is Verdict.GO


def test_the_smallest_goes_first_whatever_its_deadline_and_the_largest_at_its_ttl():
    held = room("smallest-first", ttl_ms=3_000)
    large, small, middle = waiter(9_000.0, size=9_000.0), waiter(100.0, size=100.0), waiter(math.inf, size=500.0)
    hold(held, large, small, middle)
    assert held.next_up(0.0) is small
    assert held.reconsider(large, outlook(0.0, in_time=True), 0.0, is_next=False).verdict is Verdict.HOLD
    for one in (small, middle):
        assert held.next_up(2_000.0) is one
        assert held.reconsider(one, outlook(0.0), 2_000.0, is_next=True).verdict is Verdict.GO
    assert held.due(3_000.0) == [large]
    assert held.reconsider(large, outlook(), 3_000.0, is_next=False).verdict is Verdict.GO
    assert held.counts.outlived == 1


def test_a_higher_priority_goes_before_smaller_ones():
    held = room("smallest-first")
    small, urgent = waiter(500.0, size=1.0), waiter(500.0, priority=1, size=9_000.0)
    hold(held, small)
    assert held.offer(urgent, outlook(in_time=True), 0.0).verdict is Verdict.GO


def test_a_risky_one_goes_at_once():
    held = room("late-binding")
    assert held.offer(waiter(1_000.0), outlook(ttft_ms=1_000.0, in_time=True), 0.0).verdict is Verdict.GO


# --- order ------------------------------------------------------------------------------------------------------


def test_the_earliest_feasible_deadline_goes_first_and_the_lost_ones_last_smallest_first():
    held = room()
    lost_big, lost_small = waiter(50.0, size=9_000), waiter(10.0, size=10)
    near, far, none = waiter(2_000.0), waiter(3_000.0), waiter(arrived_ms=0.0)
    hold(held, lost_big, far, near, none, lost_small)
    assert order(held) == [near, far, none, lost_small, lost_big]


def test_a_big_request_must_start_before_a_small_one_with_the_same_deadline():
    held, small, big = room(), waiter(2_000.0), waiter(2_000.0)
    hold(held, small, service_ms=10.0)
    hold(held, big, service_ms=900.0)
    assert order(held) == [big, small]


def test_time_makes_feasible_requests_late():
    held = room()
    tight, loose = waiter(1_000.0, size=5), waiter(9_000.0, size=50)
    hold(held, tight, loose)
    assert held.next_up(0.0) is tight
    assert held.next_up(950.0) is loose, "what can be saved goes before what can't"


def test_priority_goes_before_everything():
    held = room()
    low, high = waiter(600.0, priority=-1), waiter(9_000.0, priority=3)
    hold(held, low, high)
    assert order(held) == [high, low]


def test_fairness_ids_take_turns_by_tokens():
    held = room()
    hog = [waiter(500.0 + i, fairness="hog", size=1000) for i in range(4)]
    other = [waiter(5_000.0 + i, fairness="other", size=1000) for i in range(2)]
    hold(held, *hog, *other)
    assert [one.fairness_id for one in order(held)] == ["hog", "other", "hog", "other", "hog", "hog"]


def test_who_comes_back_has_no_claim_on_the_time_before():
    held = room()
    hold(held, *[waiter(500.0, fairness="a") for _ in range(3)])
    order(held)
    hold(held, waiter(500.0, fairness="b"), waiter(500.0, fairness="a"), waiter(500.0, fairness="b"))
    assert next(one.fairness_id for one in order(held)) == "b"


def test_skipped_heads_let_the_next_be_looked_at():
    held = room()
    first, second = waiter(600.0), waiter(700.0)
    hold(held, first, second)
    assert held.next_up(0.0, {first}) is second
    assert held.next_up(0.0, {first, second}) is None


def test_a_look_is_worth_it_when_half_of_the_backlog_may_be_done():
    held, one = room(enough_work_ms=100), waiter(500.0)
    hold(held, one, start_ms=900.0)
    assert not held.worth_a_look(one, 399.0)
    assert held.worth_a_look(one, 400.0)
    held.reconsider(one, outlook(500.0), 400.0, is_next=True)
    assert not held.worth_a_look(one, 599.0)
    assert held.worth_a_look(one, 600.0)


# --- bounds -----------------------------------------------------------------------------------------------------


def test_a_full_priority_refuses_what_may_be_shed_and_lets_the_others_pass():
    held = room(max_waiting_per_priority=1)
    hold(held, waiter(500.0, priority=-1), waiter(500.0))
    answer = held.offer(waiter(500.0, priority=-1), outlook(drain_ms=500.0), 0.0)
    assert (answer.verdict, answer.reason) == (Verdict.REFUSE, RefusalReason.FULL)
    assert answer.retry_after_ms == pytest.approx(500 + (100 + 100) / 2)
    assert held.offer(waiter(500.0), outlook(), 0.0).verdict is Verdict.GO
    assert held.check() == []


def test_in_a_full_room_the_youngest_of_the_lowest_that_may_be_shed_gives_way():
    held = room(max_waiting=2)
    old, young = waiter(500.0, priority=-5), waiter(500.0, priority=-5, arrived_ms=1.0)
    hold(held, old, young)
    answer = held.offer(waiter(500.0), outlook(), 2.0)
    assert answer.verdict is Verdict.HOLD
    assert answer.pushed_out == (young,)
    assert held.offer(waiter(500.0, priority=-5), outlook(), 2.0).verdict is Verdict.REFUSE
    assert held.check() == []


def test_nobody_who_may_not_be_shed_is_pushed_out():
    held = room(max_waiting=1)
    hold(held, waiter(500.0))
    assert held.offer(waiter(500.0, priority=9), outlook(), 0.0).verdict is Verdict.GO
    assert held.counts.bypassed == 1


@pytest.mark.parametrize(("priority", "verdict"), [(-1, Verdict.REFUSE), (0, Verdict.GO)])
def test_at_its_ttl_a_request_goes_or_is_refused(priority, verdict):
    held, one = room(ttl_ms=1_000), waiter(500.0, priority=priority)
    hold(held, one)
    assert held.next_due_ms() == 1_000.0
    assert held.due(1_000.0) == [one]
    answer = held.reconsider(one, outlook(), 1_000.0, is_next=False)
    assert answer.verdict is verdict
    assert held.check() == []


def test_a_client_that_leaves_is_forgotten():
    held, one = room(), waiter(500.0)
    hold(held, one)
    held.leave(one)
    held.leave(one)
    assert (len(held), held.counts.left, held.next_up(0.0), held.next_due_ms()) == (0, 1, None, None)


def test_a_room_that_is_closed_lets_everyone_go():
    held, one = room(), waiter(500.0, priority=-1)
    hold(held, one)
    held.config = None
    assert held.reconsider(one, outlook(), 1.0, is_next=False).verdict is Verdict.GO
    assert held.offer(waiter(1.0), outlook(), 1.0).verdict is Verdict.GO
    assert held.check() == []


def test_one_who_does_not_wait_can_not_be_reconsidered():
    with pytest.raises(ValueError, match="doesn't wait"):
        room().reconsider(waiter(), outlook(), 0.0, is_next=True)


def test_the_ttl_stays_below_what_envoy_grants():
    with pytest.raises(ValueError, match="ttl_ms"):
        WaitingRoomConfig(ttl_ms=MAX_TTL_MS + 1)


def test_every_reason_is_one_that_clients_are_told():
    assert {reason.value for reason in RefusalReason} <= {reason.value for reason in RejectReason}


# --- laws -------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["offer", "next", "due", "leave", "refuse", "wait"]),
        st.integers(-2, 2),
        st.sampled_from(["", "a", "b"]),
        st.one_of(st.just(math.inf), st.floats(0, 5_000)),
        st.floats(0, 2_000),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(mode=st.sampled_from(["overload", "late-binding", "smallest-first"]), played=steps)
def test_the_books_add_up_whatever_happens(mode, played):
    held = room(mode, max_waiting=8, max_waiting_per_priority=4, ttl_ms=3_000)
    inside, now_ms = [], 0.0
    for what, priority, fairness, deadline_ms, number, in_time in played:
        facts = outlook(number, service_ms=number / 10, in_time=in_time)
        if what == "offer":
            one = waiter(now_ms + deadline_ms, priority=priority, fairness=fairness, size=number, arrived_ms=now_ms)
            answer = held.offer(one, facts, now_ms)
            inside = [other for other in inside if other not in answer.pushed_out]
            assert all(other.priority < min(priority, 0) for other in answer.pushed_out)
            if answer.verdict is Verdict.HOLD:
                inside.append(one)
                assert mode != "overload" or not (in_time and math.isfinite(deadline_ms)), (
                    "held, though it could be in time"
                )
            if answer.verdict is Verdict.REFUSE:
                assert priority < 0
        elif what == "wait":
            now_ms += number
        elif what in {"next", "due"}:
            looked = [held.next_up(now_ms)] if what == "next" else held.due(now_ms)
            for one in filter(None, looked):
                answer = held.reconsider(one, facts, now_ms, is_next=what == "next")
                if answer.verdict is not Verdict.HOLD:
                    inside.remove(one)
                if answer.verdict is Verdict.REFUSE:
                    assert one.priority < 0
                    assert now_ms >= one.expires_ms
        elif inside:
            one = inside.pop(0)
            (held.leave if what == "leave" else held.refuse)(one)
        assert held.check() == []
        assert sorted(map(id, inside)) == sorted(map(id, held.everyone()))
        assert len(held) <= 8
    now_ms += 3_000.0
    for one in held.due(now_ms):  # nobody is forgotten: at the TTL the last are gone
        assert held.reconsider(one, outlook(), now_ms, is_next=False).verdict is not Verdict.HOLD
    assert len(held) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.floats(0, 5_000), st.floats(1, 500), st.floats(1, 1e5)),
        min_size=1,
        max_size=20,
    ),
    st.floats(0, 3_000),
)
def test_with_one_fairness_id_the_order_is_priority_then_feasible_by_latest_start_then_size(requests, now_ms):
    held = room("late-binding", enough_work_ms=0.0)
    for priority, deadline_ms, service_ms, size in requests:
        held.offer(waiter(deadline_ms, priority=priority, size=size), outlook(1.0, service_ms=service_ms), 0.0)
    keys = []
    while (one := held.next_up(now_ms)) is not None:
        start_by = one.deadline_ms - one.service_ms
        late = start_by < now_ms
        keys.append((-one.priority, late, one.size_tokens if late else start_by))
        held.leave(one)
    assert keys == sorted(keys)


def test_every_key_stands_in_the_readme_with_its_default():
    readme = (Path(package.__file__).parent / "README.md").read_text("utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    for key, field_ in WaitingRoomConfig.model_fields.items():
        value = field_.default
        shown = f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
        assert any(f"`{key}`" in row and shown in row.split("|")[3] for row in rows), key
