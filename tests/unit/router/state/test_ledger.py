import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.state.ledger import Ledger
from services.router.state.table import EndpointTable
from services.router.state.vllm_metrics import Engine, EngineMetrics


class Bed:
    """A ledger over a few ready endpoints, and what a decision would see of them."""

    def __init__(self, endpoints: int = 1, **options):
        self.table = EndpointTable(scrape_limit_ms=1e12)
        self.slots = []
        for number in range(endpoints):
            endpoint = self.table.add(f"10.0.0.{number}:1", hardware_class=0, now_ms=0.0)
            self.table.set_ready(endpoint, ready=True)
            self.slots.append(endpoint.slot)
        self.ledger = Ledger(self.table, **options)

    def add(self, decision_id: str, now_ms: float, *, tokens=100, ttft_ms: float | None = 50.0, endpoint=0) -> bool:
        return self.ledger.add(
            decision_id,
            self.slots[endpoint],
            input_tokens=tokens,
            uncached_tokens=tokens,
            expected_output_tokens=None,
            predicted_ttft_ms=ttft_ms,
            now_ms=now_ms,
        )

    def seen(self, now_ms: float, endpoint=0) -> tuple[float, float, float, float]:
        """Pending requests, pending tokens, age of the oldest, decoding requests."""
        view = self.table.view(self.slots[endpoint], now_ms)
        assert self.ledger.faults() == []
        return tuple(
            float(column[0])
            for column in (
                view.pending_requests, view.pending_uncached_tokens, view.oldest_pending_age_ms, view.decoding_requests,
            )
        )  # fmt: skip

    def scrape(self, now_ms: float, waiting: float, running: float, first_tokens: float | None = None, **more) -> None:
        metrics = EngineMetrics(Engine.VLLM, waiting, running, 0.0, first_tokens=first_tokens, **more)
        self.ledger.correct(self.slots[0], metrics, now_ms)
        assert self.ledger.faults() == []


def test_a_request_is_counted_from_its_dispatch_to_its_end():
    bed = Bed()
    bed.add("a", 1_000.0, tokens=300)
    bed.add("b", 1_010.0, tokens=200, ttft_ms=500.0)
    assert bed.seen(1_000.0) == (2, 500, 0, 0)
    # 20 of the 50 ms that the first is due in are over, and 120 of its tokens computed.
    assert bed.seen(1_020.0) == (2, 380, 20, 0)
    bed.ledger.advance(1_050.0)
    assert bed.seen(1_050.0) == (1, 200, 40, 1)
    assert bed.ledger.in_flight_tokens(bed.slots[0]) == 500
    assert bed.ledger.remove("b", 1_060.0)
    assert bed.ledger.remove("a", 1_070.0)
    assert bed.seen(1_080.0) == (0, 0, 0, 0)
    assert len(bed.ledger) == 0


def test_an_end_counts_once_and_unknown_ends_are_counted_as_such():
    bed = Bed()
    bed.add("a", 0.0)
    assert bed.ledger.remove("a", 1.0)
    assert not bed.ledger.remove("a", 2.0)
    assert not bed.ledger.remove("never seen", 3.0)
    assert (bed.ledger.counts.removed, bed.ledger.counts.unknown) == (1, 2)
    assert bed.seen(4.0) == (0, 0, 0, 0)


def test_the_same_decision_is_counted_in_once():
    bed = Bed()
    assert bed.add("a", 0.0)
    assert not bed.add("a", 1.0)
    assert bed.ledger.counts.duplicates == 1
    assert bed.seen(1.0)[0] == 1


def test_a_first_token_that_was_seen_beats_the_timer():
    bed = Bed()
    bed.add("a", 0.0, ttft_ms=1_000.0)
    assert bed.ledger.observe_first_token("a", 10.0)
    assert bed.seen(10.0) == (0, 0, 0, 1)
    assert bed.ledger.observe_first_token("a", 20.0)
    assert not bed.ledger.observe_first_token("unknown", 20.0)


def test_the_timer_moves_nobody_before_those_ahead_of_it():
    bed = Bed()
    bed.add("slow", 0.0, ttft_ms=200.0)
    bed.add("quick", 1.0, ttft_ms=50.0)
    bed.ledger.advance(100.0)
    assert bed.seen(100.0)[0] == 2
    bed.ledger.advance(200.0)
    assert bed.seen(200.0)[0] == 0


@pytest.mark.parametrize("ttft_ms", [math.nan, -1.0])
def test_a_prediction_that_is_no_duration_counts_as_none(ttft_ms):
    bed = Bed()
    bed.add("a", 0.0, tokens=1_000, ttft_ms=ttft_ms)
    bed.ledger.advance(1e6)
    assert bed.seen(1e6)[0] == 0


def test_without_a_prediction_the_timer_takes_the_pace_that_was_learned():
    bed = Bed()
    for _ in range(100):
        bed.add("warm", 0.0)
        bed.ledger.learn_ttft(bed.slots[0], 936.0, 2_000.0)
        bed.ledger.remove("warm", 0.0)
    bed.add("a", 0.0, tokens=1_000, ttft_ms=None)
    bed.ledger.advance(1_900.0)
    assert bed.seen(1_900.0)[0] == 1
    bed.ledger.advance(2_100.0)
    assert bed.seen(2_100.0)[0] == 0


def test_a_finished_request_says_that_those_before_it_have_had_their_first_token():
    bed = Bed()
    for name in ("a", "b", "c"):
        bed.add(name, 0.0, ttft_ms=300.0)
    bed.ledger.remove("b", 100.0, completed=True)
    assert bed.seen(100.0)[0] == 1
    bed.add("d", 100.0, ttft_ms=10_000.0)
    bed.ledger.remove("d", 110.0, completed=False)
    assert bed.seen(110.0)[0] == 1


def test_an_end_that_comes_far_too_early_is_an_error_and_says_nothing_about_those_before_it():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    for name in "abc":
        bed.add(name, 0.0, ttft_ms=1_000.0)
    bed.ledger.remove("c", 5.0, completed=True)
    assert bed.seen(5.0)[0] == 2
    bed.scrape(250.0, waiting=0, running=2, first_tokens=2)
    assert bed.seen(250.0)[0] == 0


def test_the_servers_first_token_counter_tells_who_is_in_prefill():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=500)
    for name in "abcd":
        bed.add(name, 0.0, ttft_ms=10_000.0)
    bed.scrape(250.0, waiting=1, running=3, first_tokens=502)
    assert bed.seen(250.0)[0] == 2
    bed.scrape(500.0, waiting=0, running=4, first_tokens=504)
    assert bed.seen(500.0) == (0, 0, 0, 4)


def test_a_timer_that_ran_too_fast_is_put_back():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    for name in "abc":
        bed.add(name, 0.0, ttft_ms=10.0)
    bed.ledger.advance(200.0)
    assert bed.seen(200.0)[0] == 0
    bed.scrape(250.0, waiting=2, running=1, first_tokens=1)
    # The first of the two is overdue: all but a twentieth of it is believed computed.
    assert bed.seen(250.0) == (2, 105, 250, 1)
    assert bed.ledger.counts.moved_back == 2
    bed.ledger.advance(250.1)
    assert bed.seen(250.1)[0] == 2


def test_a_request_aborted_in_prefill_is_not_awaited_in_the_counter():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    for name in "abc":
        bed.add(name, 0.0, ttft_ms=10_000.0)
    bed.ledger.remove("b", 100.0, completed=False)
    bed.scrape(250.0, waiting=0, running=2, first_tokens=1)
    assert bed.seen(250.0)[0] == 1
    bed.scrape(500.0, waiting=0, running=2, first_tokens=2)
    assert bed.seen(500.0)[0] == 0


def test_without_a_first_token_counter_prompt_tokens_tell():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, prompt_tokens=1_000.0)
    for name in "abc":
        bed.add(name, 0.0, tokens=100, ttft_ms=10_000.0)
    bed.scrape(250.0, waiting=1, running=2, prompt_tokens=1_110.0)
    assert bed.seen(250.0)[0] == 2
    bed.scrape(500.0, waiting=0, running=3, prompt_tokens=1_290.0)
    assert bed.seen(500.0)[0] == 0


def test_without_any_counter_the_waiting_count_is_a_lower_bound():
    bed = Bed()
    for name in "abcd":
        bed.add(name, 0.0, ttft_ms=10.0)
    bed.ledger.advance(100.0)
    bed.scrape(250.0, waiting=3, running=1)
    assert bed.seen(250.0)[0] == 3
    bed.scrape(260.0, waiting=1, running=3)
    assert bed.seen(260.0)[0] == 3


def test_an_idle_server_has_nothing_in_prefill_but_what_is_under_way_to_it():
    bed = Bed()
    bed.add("old", 0.0, ttft_ms=10_000.0)
    bed.add("new", 990.0, ttft_ms=10_000.0)
    bed.scrape(1_000.0, waiting=0, running=0)
    assert bed.seen(1_000.0)[0] == 1


def test_traffic_of_others_is_not_taken_for_ours():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    for number in range(4):
        bed.add(str(number), 0.0, ttft_ms=10_000.0)
    # Three quarters of the requests on the server, and of its first tokens, are somebody else's.
    bed.scrape(250.0, waiting=8, running=8, first_tokens=8)
    assert bed.seen(250.0)[0] == 2


def test_a_counter_that_starts_again_is_a_new_base():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=1_000)
    bed.add("a", 0.0, ttft_ms=10_000.0)
    bed.scrape(250.0, waiting=1, running=0, first_tokens=3)
    assert bed.seen(250.0)[0] == 1
    bed.scrape(500.0, waiting=0, running=1, first_tokens=4)
    assert bed.seen(500.0)[0] == 0


def test_a_request_heard_of_after_the_scrape_that_counted_its_first_token_is_not_awaited_again():
    bed = Bed()
    bed.scrape(0.0, 0, 0, first_tokens=10)
    bed.scrape(100.0, 0, 1, first_tokens=11)  # a peer's, dispatched at 30 and not known here yet
    bed.add("late", 30.0)
    assert bed.seen(110.0)[0] == 0
    bed.add("b", 150.0, ttft_ms=1_000.0)
    bed.scrape(300.0, 0, 2, first_tokens=11)
    assert bed.seen(300.0)[0] == 1
    bed.scrape(500.0, 0, 2, first_tokens=12)
    assert bed.seen(500.0)[0] == 0


def test_a_request_heard_of_after_the_scrape_that_saw_it_wait_is_awaited_once():
    bed = Bed()
    bed.scrape(0.0, 0, 0, first_tokens=10)
    bed.add("a", 10.0, ttft_ms=90.0)
    bed.scrape(100.0, 1, 1, first_tokens=11)  # a's first token; who waits is a peer's, dispatched at 50
    bed.add("late", 50.0, ttft_ms=200.0)
    bed.scrape(200.0, 0, 2, first_tokens=11)
    assert bed.seen(200.0)[0] == 1
    bed.scrape(300.0, 0, 2, first_tokens=12)
    assert bed.seen(300.0)[0] == 0


def test_requests_that_a_joining_router_hears_of_are_where_their_time_says():
    bed = Bed()
    bed.scrape(5_000.0, 0, 3, first_tokens=902)
    for number in range(2):
        bed.add(f"decoding {number}", 1_000.0 + number)
    bed.add("in prefill", 4_000.0, ttft_ms=4_000.0)
    assert bed.seen(5_010.0)[0] == 1
    bed.scrape(5_200.0, 0, 3, first_tokens=902)
    assert bed.seen(5_200.0)[0] == 1
    bed.scrape(5_400.0, 0, 3, first_tokens=903)
    assert bed.seen(5_400.0)[0] == 0


def test_a_first_token_too_many_is_not_kept_in_mind_for_long():
    bed = Bed()
    bed.scrape(0.0, 0, 0, first_tokens=10)
    bed.scrape(100.0, 0, 1, first_tokens=11)  # somebody else's
    bed.scrape(700.0, 0, 1, first_tokens=11)
    bed.add("a peer's", 690.0, ttft_ms=300.0)
    bed.scrape(800.0, 0, 2, first_tokens=11)
    assert bed.seen(800.0)[0] == 1


def test_an_older_scrape_that_is_told_after_a_newer_one_changes_nothing():
    bed = Bed()
    bed.scrape(0.0, 0, 0, first_tokens=10)
    bed.add("a", 10.0, ttft_ms=500.0)
    bed.scrape(200.0, 0, 1, first_tokens=11)
    bed.scrape(90.0, 0, 1, first_tokens=10)
    bed.scrape(300.0, 0, 1, first_tokens=11)
    assert bed.seen(300.0)[0] == 0


def test_scrapes_probes_and_lists_leave_the_in_flight_count_alone():
    bed = Bed()
    for number in range(10):
        bed.add(str(number), 0.0)
    bed.scrape(1.0, waiting=0, running=0, first_tokens=0)
    bed.scrape(2.0, waiting=3, running=7, first_tokens=0)
    bed.table.add("10.0.0.0:1", hardware_class=0, now_ms=3.0)
    assert bed.ledger.in_flight(bed.slots[0]) == 10


def test_a_new_process_drops_its_endpoints_entries_and_their_ends_are_late_not_unknown():
    bed = Bed(endpoints=2)
    bed.add("a", 0.0)
    bed.add("b", 0.0, endpoint=1)
    assert bed.ledger.drop(bed.slots[0]) == 1
    assert bed.seen(1.0) == (0, 0, 0, 0)
    assert bed.seen(1.0, endpoint=1)[0] == 1
    bed.add("c", 2.0)
    bed.ledger.advance(1_000.0)
    assert not bed.ledger.remove("a", 1_001.0)
    assert (bed.ledger.counts.late, bed.ledger.counts.unknown, bed.ledger.counts.dropped) == (1, 0, 1)
    assert bed.seen(1_001.0) == (0, 0, 0, 1)


def test_an_entry_whose_end_never_comes_is_given_up_after_the_limit():
    bed = Bed(max_age_ms=1_000.0)
    bed.add("a", 0.0)
    bed.add("b", 500.0)
    bed.ledger.advance(1_200.0)
    assert (len(bed.ledger), bed.ledger.counts.expired) == (1, 1)
    assert bed.seen(1_200.0) == (0, 0, 0, 1)


def test_what_the_request_at_the_head_has_had_computed_is_not_pending():
    bed = Bed()
    bed.add("a", 0.0, tokens=1_000, ttft_ms=100.0)
    bed.add("b", 10.0, tokens=500, ttft_ms=140.0)
    assert bed.seen(50.0)[1] == 1_000
    # At most 95 % before its first token, however late it is; then it is the next one's turn.
    assert bed.seen(99.0)[1] == 550
    bed.ledger.observe_first_token("a", 110.0)
    assert bed.seen(110.0)[1] == 500
    assert bed.seen(130.0)[1] == 250


def test_a_scrape_that_shows_what_was_believed_moves_no_timer():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    bed.add("a", 0.0, ttft_ms=400.0)
    bed.add("b", 0.0, ttft_ms=800.0)
    bed.scrape(250.0, waiting=1, running=1, first_tokens=0)
    bed.ledger.advance(399.0)
    assert bed.seen(399.0)[0] == 2
    bed.ledger.advance(401.0)
    assert bed.seen(401.0)[0] == 1
    bed.ledger.advance(801.0)
    assert bed.seen(801.0)[0] == 0


def test_one_that_is_done_early_brings_those_behind_it_forward_by_half_as_much():
    bed = Bed()
    bed.scrape(0.0, waiting=0, running=0, first_tokens=0)
    bed.add("a", 0.0, ttft_ms=450.0)
    bed.add("b", 0.0, ttft_ms=900.0)
    bed.scrape(250.0, waiting=0, running=2, first_tokens=1)
    bed.ledger.advance(799.0)
    assert bed.seen(799.0)[0] == 1
    bed.ledger.advance(801.0)
    assert bed.seen(801.0)[0] == 0


def test_the_timers_do_not_pile_up():
    bed = Bed()
    for number in range(5_000):
        bed.add(str(number), float(number), ttft_ms=1e9)
        bed.ledger.remove(str(number), float(number))
    assert len(bed.ledger._timers) <= 70


def test_a_request_that_another_endpoint_serves_is_counted_there_and_leaves_no_trace_behind():
    bed = Bed(endpoints=2)
    bed.scrape(0.0, 0, 0, first_tokens=7)
    bed.add("a", 1.0, tokens=300)
    bed.add("b", 2.0, tokens=200)
    assert bed.ledger.move("a", bed.slots[1], uncached_tokens=250, predicted_ttft_ms=40.0, now_ms=100.0)
    assert bed.seen(110.0) == (1, 10, 108, 0)  # overdue since 52
    assert bed.seen(110.0, 1) == (1, 187.5, 10, 0)  # a quarter of its 40 ms is over
    bed.scrape(120.0, 0, 1, first_tokens=8)  # one first token is all that the first endpoint will ever show
    assert bed.seen(120.0) == (0, 0, 0, 1)
    bed.ledger.advance(140.0)
    assert bed.seen(140.0, 1) == (0, 0, 0, 1)
    assert not bed.ledger.move("a", bed.slots[1], uncached_tokens=1, predicted_ttft_ms=None, now_ms=150.0)
    assert not bed.ledger.move("nobody", bed.slots[1], uncached_tokens=1, predicted_ttft_ms=None, now_ms=150.0)
    assert bed.ledger.remove("a", 160.0)
    assert bed.ledger.remove("b", 160.0)
    assert bed.ledger.counts.moved_elsewhere == 1


class Orders(RuleBasedStateMachine):
    """Whatever the order of events, the sums equal a recount and the end leaves nothing behind."""

    def __init__(self):
        super().__init__()
        self.bed = Bed(endpoints=3, max_age_ms=50_000.0)
        self.now = 0.0
        self.next = 0
        self.known: list[str] = []

    @rule(
        endpoint=st.integers(0, 2),
        tokens=st.integers(0, 5_000),
        ttft_ms=st.none() | st.floats(0.0, 3_000.0) | st.just(math.inf),
    )
    def dispatch(self, endpoint, tokens, ttft_ms):
        self.next += 1
        self.known.append(str(self.next))
        assert self.bed.add(str(self.next), self.now, tokens=tokens, ttft_ms=ttft_ms, endpoint=endpoint)

    @rule(which=st.integers(0, 50), completed=st.booleans())
    def end(self, which, completed):
        name = self.known[which % len(self.known)] if self.known else "nobody"
        was_in = name in self.bed.ledger
        assert self.bed.ledger.remove(name, self.now, completed=completed) is was_in

    @rule(which=st.integers(0, 50))
    def first_token(self, which):
        name = self.known[which % len(self.known)] if self.known else "nobody"
        assert self.bed.ledger.observe_first_token(name, self.now) is (name in self.bed.ledger)

    @rule(which=st.integers(0, 50), endpoint=st.integers(0, 2), tokens=st.integers(0, 5_000))
    def another_endpoint_serves(self, which, endpoint, tokens):
        name = self.known[which % len(self.known)] if self.known else "nobody"
        before = len(self.bed.ledger)
        self.bed.ledger.move(
            name, self.bed.slots[endpoint], uncached_tokens=tokens, predicted_ttft_ms=None, now_ms=self.now
        )
        assert len(self.bed.ledger) == before

    @rule(ms=st.floats(0.0, 2_000.0))
    def time_passes(self, ms):
        self.now += ms
        self.bed.ledger.advance(self.now)

    @rule(
        endpoint=st.integers(0, 2),
        waiting=st.integers(0, 10),
        running=st.integers(0, 10),
        first_tokens=st.none() | st.integers(0, 40),
        prompt_tokens=st.none() | st.integers(0, 40_000),
    )
    def scrape(self, endpoint, waiting, running, first_tokens, prompt_tokens):
        metrics = EngineMetrics(
            Engine.VLLM, waiting, running, 0.5, first_tokens=first_tokens, prompt_tokens=prompt_tokens
        )
        before = self.bed.ledger.in_flight(self.bed.slots[endpoint])
        self.bed.ledger.correct(self.bed.slots[endpoint], metrics, self.now)
        assert self.bed.ledger.in_flight(self.bed.slots[endpoint]) == before

    @rule(endpoint=st.integers(0, 2))
    def restart(self, endpoint):
        self.bed.ledger.drop(self.bed.slots[endpoint])

    @invariant()
    def sums_equal_a_recount(self):
        assert self.bed.ledger.faults() == []
        for slot in self.bed.slots:
            view = self.bed.table.view(slot, self.now)
            count, tokens = self.bed.ledger.pending(slot)
            assert view.pending_requests[0] == count
            assert 0 <= view.pending_uncached_tokens[0] <= tokens
            assert view.decoding_requests[0] == self.bed.ledger.in_flight(slot) - count
            assert all(np.isfinite(column).all() for column in view.columns().values())

    def teardown(self):
        for name in self.known:
            self.bed.ledger.remove(name, self.now)
        assert len(self.bed.ledger) == 0
        for endpoint in range(3):
            assert self.bed.seen(self.now, endpoint) == (0, 0, 0, 0)


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_thousand_random_orders_return_to_the_start():
    """Every way a stream can end, in every phase: counters come back to zero each time."""
    rng = np.random.default_rng(5)
    bed = Bed(endpoints=4)
    for _ in range(1_000):
        names = [f"{i}" for i in range(8)]
        now_ms = 0.0
        events = [(name, "add") for name in names] + [(name, "end") for name in names] * 2
        events += [(name, "first") for name in names] + [("", "scrape"), ("", "advance")] * 4
        order = rng.permutation(len(events))
        for place in order:
            name, what = events[place]
            now_ms += float(rng.integers(0, 30))
            if what == "add":
                bed.add(name, now_ms, endpoint=int(rng.integers(4)), ttft_ms=float(rng.integers(1, 200)))
            elif what == "end":
                bed.ledger.remove(name, now_ms, completed=bool(rng.integers(2)))
            elif what == "first":
                bed.ledger.observe_first_token(name, now_ms)
            elif what == "scrape":
                bed.scrape(now_ms, *rng.integers(0, 5, 2).tolist(), first_tokens=float(rng.integers(0, 30)))
            else:
                bed.ledger.advance(now_ms)
        for name in names:
            bed.ledger.remove(name, now_ms)
        assert bed.ledger.faults() == []
        assert len(bed.ledger) == 0
        assert all(bed.seen(now_ms, endpoint) == (0, 0, 0, 0) for endpoint in range(4))


@pytest.mark.parametrize("count", [1, 200])
def test_pending_entries_leave_in_any_order_at_constant_cost(count):
    bed = Bed()
    for number in range(count):
        bed.add(str(number), float(number), ttft_ms=1e6)
    for number in range(count):
        assert bed.seen(float(count))[2] == count - number
        bed.ledger.remove(str(number), float(count), completed=False)
    assert bed.seen(float(count)) == (0, 0, 0, 0)
