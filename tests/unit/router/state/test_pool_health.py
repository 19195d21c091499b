"""What comes of requests decides who may be sent the next: `PoolState` with its health, and what peers tell of it."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.tokens import TokenEstimator
from services.router.state.health import Event, HealthConfig
from services.router.state.pool import PoolConfig, PoolState
from shared.samples import Outcome
from tests.samples import make_sample
from tests.unit.router.state.test_pool import make_request, metrics, send

ADDRESSES = tuple(f"10.0.0.{number}:8000" for number in range(1, 5))
A, B, C, D = ADDRESSES
QUIET = HealthConfig(jitter=0.0)


def make_pool(*addresses: str, models: dict[str, str] | None = None, config: HealthConfig = QUIET) -> PoolState:
    pool = PoolState(PoolConfig(), salt=b"salt", tokens=TokenEstimator(), health=config)
    for address in addresses:
        pool.add_endpoint(address, now_ms=0.0)
        pool.set_models(address, frozenset({(models or {}).get(address, "m")}))
        pool.set_ready(address, ready=True)
    return pool


def candidates(pool: PoolState, now_ms: float) -> tuple[str, ...]:
    return pool.snapshot(make_request(), None, now_ms)[0].addresses


def fail(pool: PoolState, address: str, times: int = 5, *, now_ms: float = 0.0, status: int = 500, **more) -> None:
    for number in range(times):
        decision_id = f"{address} {now_ms} {number}"
        send(pool, decision_id, address, now_ms=now_ms)
        pool.finish(decision_id, now_ms)
        pool.observe_end(decision_id, now_ms, endpoint=address, status=status, **more)


def answer(pool: PoolState, decision_id: str, address: str, now_ms: float) -> None:
    send(pool, decision_id, address, now_ms=now_ms)
    pool.finish(decision_id, now_ms)
    pool.observe_outcome(make_sample(decision_id, endpoint=address), now_ms)


def standing(pool: PoolState, address: str, now_ms: float) -> str:
    return next(s.health.standing for s in pool.endpoints(now_ms) if s.address == address)


def test_who_answers_500_is_no_candidate_until_it_is_tried_and_comes_back_by_and_by():
    pool = make_pool(*ADDRESSES)
    told = []
    pool.on_health = lambda addresses, change: told.append((addresses, change.event))
    fail(pool, A, 4)
    assert candidates(pool, 1.0) == ADDRESSES
    fail(pool, A, 1, now_ms=2.0)
    assert candidates(pool, 3.0) == (B, C, D)
    assert candidates(pool, 2_003.0) == ADDRESSES
    send(pool, "trial", A, now_ms=2_003.0)
    assert candidates(pool, 2_004.0) == (B, C, D)
    pool.finish("trial", 2_100.0)
    assert candidates(pool, 2_101.0) == (B, C, D)
    pool.observe_outcome(make_sample("trial", endpoint=A), 2_200.0)
    assert candidates(pool, 2_201.0) == ADDRESSES
    for number in range(2):
        answer(pool, f"more {number}", A, 2_300.0)
    assert told == [((A,), Event.SET_ASIDE), ((A,), Event.RETURNED)]
    for number in range(3):
        send(pool, f"ramp {number}", A, now_ms=2_400.0)
    assert candidates(pool, 2_401.0) == (B, C, D)  # it ramps up like one that was not ready
    assert candidates(pool, 3_500.0) == ADDRESSES


def test_a_trial_that_fails_doubles_the_time():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    fail(pool, A, 1, now_ms=2_001.0)
    assert candidates(pool, 6_000.0) == (B, C, D)
    assert candidates(pool, 6_002.0) == ADDRESSES


@pytest.mark.parametrize(
    ("outcome", "status"), [(Outcome.UPSTREAM_RESET, 200), (Outcome.UPSTREAM_RESET, 503), (Outcome.TIMEOUT, 504)]
)
def test_resets_and_the_gateways_timeouts_are_the_endpoints(outcome: Outcome, status: int):
    pool = make_pool(*ADDRESSES)
    for number in range(5):
        send(pool, str(number), A)
        pool.finish(str(number), 1.0, completed=False)
        pool.observe_outcome(make_sample(str(number), endpoint=A, outcome=outcome, status=status), 2.0)
    assert candidates(pool, 3.0) == (B, C, D)


@pytest.mark.parametrize(("outcome", "status"), [(Outcome.CLIENT_ABORT, 0), (Outcome.TIMEOUT, 200)])
def test_clients_that_leave_or_do_not_read_are_nobodys_fault(outcome: Outcome, status: int):
    pool = make_pool(*ADDRESSES)
    for number in range(50):
        send(pool, str(number), A)
        pool.finish(str(number), 1.0, completed=False)
        pool.observe_outcome(make_sample(str(number), endpoint=A, outcome=outcome, status=status), 2.0)
    assert candidates(pool, 3.0) == ADDRESSES


@pytest.mark.parametrize("status", [0, 200, 400, 401, 404, 422, 499])
def test_what_the_client_did_wrong_is_not_the_endpoints(status: int):
    pool = make_pool(*ADDRESSES)
    fail(pool, A, 50, status=status)
    assert candidates(pool, 1.0) == ADDRESSES
    assert pool.endpoints(1.0)[0].health.failures == {}


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_the_server_says_of_itself_is(status: int):
    pool = make_pool(*ADDRESSES)
    fail(pool, A, status=status)
    assert candidates(pool, 1.0) == (B, C, D)


def test_a_good_status_without_a_byte_is_a_failure_and_one_without_a_token_an_answer():
    pool = make_pool(*ADDRESSES)
    fail(pool, A, 4, status=200, bodiless=True)
    fail(pool, A, 1, now_ms=1.0, status=200)
    fail(pool, A, 3, now_ms=2.0, status=200, bodiless=True)
    assert candidates(pool, 3.0) == ADDRESSES
    fail(pool, A, 1, now_ms=4.0, status=200, bodiless=True)
    assert candidates(pool, 5.0) == (B, C, D)
    assert pool.endpoints(5.0)[0].health.failures == {"empty": 8}


def test_what_a_gateway_could_not_reach_is():
    pool = make_pool(*ADDRESSES)
    fail(pool, A, status=503, reached=False)
    assert pool.endpoints(1.0)[0].health.failures == {"unreachable": 5}
    assert candidates(pool, 1.0) == (B, C, D)


def test_the_first_of_the_list_is_to_blame_where_another_served_at_the_second_try():
    pool = make_pool(*ADDRESSES)
    for number in range(5):
        send(pool, str(number), A)
        pool.observe_served(str(number), B, 1.0)
        pool.finish(str(number), 1.0)
        pool.observe_outcome(make_sample(str(number), endpoint=B, attempts=2, e2e_ms=100.0), 2.0)
    assert pool.endpoints(2.0)[0].health.failures == {"retried": 5}
    assert candidates(pool, 3.0) == (B, C, D)


def test_one_that_the_gateway_passed_over_is_not():
    pool = make_pool(*ADDRESSES)
    for number in range(20):
        send(pool, str(number), A)
        pool.finish(str(number), 1.0)
        pool.observe_outcome(make_sample(str(number), endpoint=B, attempts=1), 2.0)
    assert candidates(pool, 3.0) == ADDRESSES


def test_where_the_response_passes_through_a_second_attempt_may_be_none():
    """It is told for any other endpoint than the first listed one, whatever the reason, with its times unknown."""
    pool = make_pool(*ADDRESSES)
    for number in range(20):
        send(pool, str(number), A)
        pool.finish(str(number), 1.0)
        pool.observe_outcome(make_sample(str(number), endpoint=B, attempts=2, ttft_ms=None, e2e_ms=None), 2.0)
    assert candidates(pool, 3.0) == ADDRESSES


def test_a_status_that_passes_counts_at_once_and_its_end_not_again():
    pool = make_pool(*ADDRESSES)
    for number in range(5):
        send(pool, str(number), A)
        pool.observe_answer(str(number), A, 500, 1.0)
        pool.observe_answer(str(number), A, 500, 1.0)
    assert candidates(pool, 2.0) == (B, C, D)
    for number in range(5):
        pool.finish(str(number), 2.0)
        pool.observe_end(str(number), 3.0, endpoint=A, status=500)
    assert pool.endpoints(4.0)[0].health.failures == {"error": 5}


def test_a_good_status_is_no_word_of_how_the_answer_ends():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    for number in range(10):
        send(pool, str(number), A, now_ms=2_001.0)
        pool.observe_answer(str(number), A, 200, 2_001.0)
    assert standing(pool, A, 2_002.0) == "probing"


def test_a_peers_request_tries_an_endpoint_for_all_routers():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    count_in = partial(
        pool.count_in,
        process_start_s=None,
        model="m",
        text_bytes=10,
        input_tokens=4.0,
        uncached_tokens=4.0,
        expected_output_tokens=None,
        predicted_ttft_ms=None,
        names=[],
    )
    assert count_in("peer's", A, dispatched_ms=2_001.0, now_ms=2_002.0)
    assert candidates(pool, 2_003.0) == (B, C, D)
    pool.count_out("peer's", 2_010.0, completed=True)
    pool.observe_end("peer's", 2_020.0, endpoint=A, status=500)
    assert candidates(pool, 6_000.0) == (B, C, D)


def test_a_model_that_only_the_failing_serve_keeps_them():
    pool = make_pool(*ADDRESSES, models={C: "n", D: "n"})
    fail(pool, A)
    fail(pool, B)
    assert [standing(pool, address, 1.0) for address in ADDRESSES] == ["set_aside", "set_aside", "in_use", "in_use"]
    assert candidates(pool, 1.0) == (A, B)


def test_a_subset_that_names_only_the_failing_keeps_them():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    assert pool.snapshot(make_request(), frozenset({A}), 1.0)[0].addresses == (A,)
    assert pool.snapshot(make_request(), frozenset({A, B}), 1.0)[0].addresses == (B,)


def test_requests_of_which_nothing_is_learned_try_nobody():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    assert pool.any_candidates(None, 2_500.0).addresses == (B, C, D)


def test_another_process_is_a_candidate_at_once():
    pool = make_pool(*ADDRESSES)
    pool.observe_scrape(A, metrics(100.0), 0.0)
    fail(pool, A)
    pool.observe_scrape(A, metrics(160.0), 10.0)
    pool.set_models(A, frozenset({"m"}))
    assert candidates(pool, 11.0) == ADDRESSES
    assert standing(pool, A, 11.0) == "in_use"


def test_what_the_process_before_had_in_hand_says_nothing_of_the_new_one():
    pool = make_pool(*ADDRESSES)
    pool.observe_scrape(A, metrics(100.0), 0.0)
    for number in range(20):
        send(pool, str(number), A)
    pool.observe_scrape(A, metrics(160.0), 10.0)
    pool.set_models(A, frozenset({"m"}))
    for number in range(20):
        pool.observe_outcome(make_sample(str(number), endpoint=A, outcome=Outcome.UPSTREAM_RESET, status=503), 11.0)
    assert candidates(pool, 12.0) == ADDRESSES


def test_an_endpoint_that_left_is_forgotten_with_what_it_did():
    pool = make_pool(*ADDRESSES)
    fail(pool, A)
    pool.remove_endpoint(A)
    pool.observe_end("late", 1.0, endpoint=A, status=500)
    pool.add_endpoint(A, now_ms=2.0)
    pool.set_models(A, frozenset({"m"}))
    pool.set_ready(A, ready=True)
    assert candidates(pool, 3.0) == ADDRESSES


def test_two_errors_in_a_row_have_the_endpoints_health_asked_and_a_hundred_do_not_ask_it_a_hundred_times():
    pool = make_pool(*ADDRESSES)
    doubted = []
    pool.on_upstream_failure = doubted.append
    fail(pool, A, 1)
    assert doubted == []
    fail(pool, A, 100, now_ms=1.0)
    assert doubted == [A] * 4


def test_a_failed_request_leaves_nothing_in_the_prefix_index():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.finish("1", 1.0)
    pool.observe_end("1", 2.0, endpoint=A, status=500)
    assert pool.snapshot(make_request(), None, 3.0)[0].uncached_tokens.tolist() == [2_048, 2_048]


def test_people_see_since_when_until_when_and_why():
    pool = make_pool(*ADDRESSES)
    fail(pool, A, status=503)
    health = pool.endpoints(500.0)[0].health
    assert (health.standing, health.reason, health.failures) == ("set_aside", "overloaded", {"overloaded": 5})
    assert (health.set_aside_ms, health.tried_in_ms, health.failures_in_a_row) == (500.0, 1_500.0, 5)
    assert pool.endpoints(500.0)[1].health.standing == "in_use"


OUTCOMES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([200, 500, 500, 503, 404]), st.floats(0.0, 3_000.0)), max_size=150
)


@settings(max_examples=100, deadline=None)
@given(OUTCOMES, st.integers(1, 4))
def test_there_is_always_a_candidate_and_never_fewer_than_half(steps, size: int):
    pool = make_pool(*ADDRESSES[:size], config=HealthConfig())
    now_ms = 0.0
    for number, (place, status, wait_ms) in enumerate(steps):
        now_ms += wait_ms
        there = candidates(pool, now_ms)
        assert len(there) >= size - HealthConfig().allowed(size) >= 1
        address = there[place % len(there)]
        send(pool, str(number), address, now_ms=now_ms)
        pool.finish(str(number), now_ms)
        if status == 200:
            pool.observe_outcome(make_sample(str(number), endpoint=address), now_ms)
        else:
            pool.observe_end(str(number), now_ms, endpoint=address, status=status)
    assert candidates(pool, now_ms + 100_000.0) == ADDRESSES[:size]
