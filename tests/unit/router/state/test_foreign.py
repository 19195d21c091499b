"""Requests on the servers that no router dispatched, as far as scrapes and ledger can tell."""

from services.router.request.tokens import TokenEstimator
from services.router.state.foreign import ForeignRequests
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.vllm_metrics import Engine, EngineMetrics

A = "10.0.0.1:8000"


def test_a_server_that_is_ahead_of_the_ledger_for_a_moment_has_no_foreign_requests():
    foreign = ForeignRequests()
    for number in range(100):
        foreign.seen(0, 3.0 if number % 7 else 0.0, number * 250.0)
    assert foreign.requests(0) == 0


def test_what_it_was_ahead_by_all_the_time_is_foreign_and_gone_soon_after_its_end():
    foreign = ForeignRequests()
    for number in range(20):
        foreign.seen(0, 4.0 + number % 3, number * 250.0)
        assert foreign.requests(0) == 0, "too early to say"
    for number in range(20, 60):
        foreign.seen(0, 4.0 + number % 3, number * 250.0)
    assert foreign.requests(0) == 4
    foreign.seen(0, -1.0, 15_000.0)
    assert foreign.requests(0) == 0
    foreign.forget(0)
    assert foreign.requests(0) == 0


def test_the_pool_holds_each_scrape_against_its_ledger():
    pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
    pool.add_endpoint(A, now_ms=0.0)
    for number in range(60):
        pool.observe_scrape(A, EngineMetrics(Engine.VLLM, 1.0, 2.0, 0.1), number * 250.0)
    assert pool.foreign_requests == 3
    assert pool.endpoints(15_000.0)[0].foreign_requests == 3
    pool.remove_endpoint(A)
    assert pool.foreign_requests == 0
