import random

import pytest

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.state.errors import NoEndpoint
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.vllm_metrics import Engine, EngineMetrics
from shared.features import hardware_code
from shared.samples import Outcome
from tests.samples import make_sample

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def make_pool(*addresses: str, **config) -> PoolState:
    pool = PoolState(PoolConfig(**config), salt=b"salt", tokens=TokenEstimator())
    for address in addresses:
        pool.add_endpoint(address, hardware_class=hardware_code("h100"), now_ms=0.0)
        pool.set_models(address, frozenset({"m"}))
        pool.set_ready(address, ready=True)
    return pool


def make_request(seed: int = 1, size: int = 8_192, **more) -> InferenceRequest:
    prompt = random.Random(seed).randbytes(size)
    fields = {"max_tokens": 50, "streamed": True, "text_bytes": size, **more}
    return InferenceRequest(model="m", prompt=prompt, input_tokens=size / 4, **fields)


def send(pool: PoolState, decision_id: str, address: str, request=None, *, now_ms=0.0, ttft_ms=100.0) -> bool:
    request = request or make_request()
    _, match = pool.snapshot(request, None, now_ms)
    return pool.dispatch(decision_id, address, request, match, predicted_ttft_ms=ttft_ms, now_ms=now_ms)


def metrics(start: float | None = 100.0, **more) -> EngineMetrics:
    return EngineMetrics(Engine.VLLM, 0.0, 0.0, 0.25, process_start_s=start, **more)


def test_a_dispatch_is_seen_by_the_next_snapshot_and_gone_after_its_end():
    pool = make_pool(A, B)
    send(pool, "1", A)
    candidates, _ = pool.snapshot(make_request(), None, 10.0)
    assert candidates.addresses == (A, B)
    assert candidates.pending_requests.tolist() == [1, 0]
    # 10 of the 100 ms that it is due in are over: a tenth of it has been computed.
    assert candidates.pending_uncached_tokens.tolist() == pytest.approx([1_843.2, 0])
    assert candidates.uncached_tokens.tolist() == [0, 2_048]
    assert pool.in_flight == 1
    assert pool.finish("1", 20.0)
    assert not pool.finish("1", 21.0)
    candidates, _ = pool.snapshot(make_request(), None, 30.0)
    assert candidates.pending_requests.tolist() == [0, 0]


def test_a_prefix_that_an_endpoint_has_is_not_counted_as_work():
    pool = make_pool(A, B)
    send(pool, "1", A)
    send(pool, "2", A)
    assert pool.ledger.pending(0) == (2, 2_048)


def test_rejected_and_undecided_requests_leave_the_ledger_alone():
    pool = make_pool()
    for _ in range(100):
        with pytest.raises(NoEndpoint):
            pool.snapshot(make_request(), None, 0.0)
    assert pool.in_flight == 0


def test_a_dispatch_to_an_endpoint_that_is_gone_changes_nothing():
    pool = make_pool(A, B)
    request = make_request()
    _, match = pool.snapshot(request, None, 0.0)
    pool.remove_endpoint(A)
    assert not pool.dispatch("1", A, request, match, predicted_ttft_ms=None, now_ms=1.0)
    assert pool.in_flight == 0


def test_a_removed_endpoint_is_no_candidate_and_its_prefixes_do_not_draw_requests():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.remove_endpoint(A)
    candidates, _ = pool.snapshot(make_request(), None, 1.0)
    assert candidates.addresses == (B,)
    assert pool.in_flight == 1
    pool.finish("1", 2.0)
    assert [status.address for status in pool.endpoints(3.0)] == [B]
    pool.add_endpoint(A, now_ms=4.0)
    pool.set_models(A, frozenset({"m"}))
    pool.set_ready(A, ready=True)
    candidates, _ = pool.snapshot(make_request(), None, 5.0)
    uncached = dict(zip(candidates.addresses, candidates.uncached_tokens.tolist(), strict=True))
    assert uncached[A] == 2_048


def test_an_endpoint_that_is_back_before_its_requests_ended_keeps_them():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.remove_endpoint(A)
    pool.add_endpoint(A, hardware_class=0, now_ms=1.0)
    assert pool.in_flight_at(A) == 1
    assert pool.finish("1", 2.0)
    assert len(pool.endpoints(3.0)) == 2


def test_a_new_process_starts_cold_with_an_empty_ledger():
    pool = make_pool(A)
    assert not pool.observe_scrape(A, metrics(100.0), 0.0)
    send(pool, "1", A)
    assert not pool.observe_scrape(A, metrics(100.01), 1.0)
    assert not pool.observe_scrape(A, metrics(90.0), 1.0)
    assert pool.in_flight_at(A) == 1
    assert pool.observe_scrape(A, metrics(160.0), 2.0)
    assert pool.in_flight == 0
    status = pool.endpoints(3.0)[0]
    assert (status.incarnation, status.incarnations, status.models) == (160.0, 2, None)
    candidates, _ = pool.snapshot(make_request(), None, 3.0)
    assert candidates.uncached_tokens.tolist() == [2_048]
    assert not pool.finish("1", 4.0)
    assert pool.ledger.counts.late == 1


def test_scraped_values_are_features_until_they_are_old():
    pool = make_pool(A, scrape_limit_ms=1_000.0)
    pool.observe_scrape(A, metrics(), 0.0)
    candidates, _ = pool.snapshot(make_request(), None, 500.0)
    assert (candidates.kv_cache_utilization[0], candidates.scrape_known[0]) == (0.25, 1.0)
    candidates, _ = pool.snapshot(make_request(), None, 1_500.0)
    assert (candidates.kv_cache_utilization[0], candidates.scrape_known[0]) == (0.0, 0.0)


def test_a_page_without_request_counts_gives_no_scraped_values():
    pool = make_pool(A)
    pool.observe_scrape(A, EngineMetrics(Engine.UNKNOWN), 0.0)
    candidates, _ = pool.snapshot(make_request(), None, 1.0)
    assert candidates.scrape_known.tolist() == [0.0]


def test_outcomes_teach_bytes_per_token_and_step_times():
    pool = make_pool(A)
    for number in range(200):
        send(pool, str(number), A)
        pool.finish(str(number), 1.0)
        pool.observe_outcome(make_sample(str(number), input_tokens=4_096, tpot_ms=12.0), 2.0)
    assert pool.tokens.bytes_per_token("m") == pytest.approx(2.0, rel=0.01)
    candidates, _ = pool.snapshot(make_request(), None, 3.0)
    assert candidates.step_time_ms.tolist() == [12.0]


def test_token_ids_and_media_teach_no_bytes_per_token():
    pool = make_pool(A)
    send(pool, "1", A, make_request(text_bytes=0))
    pool.observe_outcome(make_sample("1", input_tokens=10), 2.0)
    assert pool.tokens.bytes_per_token("m") == 4.0


def test_outcomes_of_another_router_teach_step_times_alone():
    pool = make_pool(A)
    pool.observe_outcome(make_sample("theirs", input_tokens=1, cached_tokens=0, ttft_ms=5.0, tpot_ms=9.0), 1.0)
    pool.observe_outcome(make_sample("theirs", "10.9.9.9:1", tpot_ms=9.0), 1.0)
    assert pool.tokens.bytes_per_token("m") == 4.0
    assert pool.endpoints(1.0)[0].step_time_ms == 9.0


def test_failed_outcomes_teach_nothing_and_have_the_endpoint_probed():
    pool = make_pool(A)
    suspects = []
    pool.on_upstream_failure = suspects.append
    send(pool, "1", A)
    pool.observe_outcome(make_sample("1", outcome=Outcome.UPSTREAM_RESET, status=503, tpot_ms=1.0), 1.0)
    pool.observe_outcome(make_sample("2", outcome=Outcome.CLIENT_ABORT, status=0), 1.0)
    assert suspects == [A]
    assert pool.endpoints(1.0)[0].step_time_ms is None


def test_the_index_gets_less_room_where_the_server_finds_less_than_we_believed():
    pool = make_pool(A)
    pool.observe_scrape(A, metrics(kv_capacity_tokens=128_000), 0.0)
    assert pool.prefixes.capacity(0) == 1_000
    for number in range(12):
        send(pool, str(number), A, now_ms=float(number))
        pool.finish(str(number), number + 0.5)
        pool.observe_outcome(make_sample(str(number), cached_tokens=0), number + 0.6)
    shrunk = pool.prefixes.capacity(0)
    assert shrunk < 500
    for number in range(12, 300):
        send(pool, str(number), A, now_ms=float(number))
        pool.finish(str(number), number + 0.5)
        pool.observe_outcome(make_sample(str(number), cached_tokens=2_048), number + 0.6)
    assert pool.prefixes.capacity(0) > 900


def test_a_miss_behind_others_in_prefill_says_nothing_about_the_cache():
    pool = make_pool(A)
    pool.observe_scrape(A, metrics(kv_capacity_tokens=128_000), 0.0)
    send(pool, "first", A)
    for number in range(20):
        send(pool, str(number), A)
        pool.observe_outcome(make_sample(str(number), cached_tokens=0), 1.0)
    assert pool.prefixes.capacity(0) == 1_000


def test_the_expected_answer_is_the_cap_or_what_calibration_learned():
    pool = make_pool(A)
    assert pool.expected_output_tokens(make_request(max_tokens=None)) is None
    pool.set_expected_output_tokens({"m": 30.0})
    assert pool.expected_output_tokens(make_request(max_tokens=None)) == 30.0
    assert pool.expected_output_tokens(make_request(max_tokens=10)) == 10.0


def test_records_of_dispatches_without_an_outcome_are_bounded():
    pool = make_pool(A)
    request = make_request(size=16)
    _, match = pool.snapshot(request, None, 0.0)
    for number in range(17_000):
        pool.dispatch(str(number), A, request, match, predicted_ttft_ms=1.0, now_ms=0.0)
        pool.finish(str(number), 0.0)
    assert len(pool._records) <= 16_384


def test_requests_that_name_no_model_may_go_to_any_ready_endpoint():
    pool = make_pool(A, B)
    pool.set_ready(B, ready=False)
    assert pool.any_candidates(None, 0.0).addresses == (A,)


def test_forgotten_prefixes_match_nothing():
    pool = make_pool(A)
    send(pool, "1", A)
    pool.forget_prefixes()
    candidates, _ = pool.snapshot(make_request(), None, 1.0)
    assert candidates.uncached_tokens.tolist() == [2_048]


def test_the_status_tells_unknown_values_as_none():
    pool = make_pool(A)
    status = pool.endpoints(5.0)[0]
    assert (status.hardware_class, status.models, status.ready) == ("h100", ["m"], True)
    assert (status.waiting_requests, status.scrape_age_ms, status.step_time_ms) == (None, None, None)
    pool.observe_scrape(A, metrics(), 6.0)
    status = pool.endpoints(10.0)[0]
    assert (status.waiting_requests, status.scrape_age_ms, status.engine) == (0.0, 4.0, "vllm")
    assert pool.ready_endpoints == 1


def test_a_request_that_another_endpoint_serves_is_counted_and_cached_there():
    pool = make_pool(A, B)
    send(pool, "1", A)
    assert pool.observe_served("1", B, 50.0, predicted_ttft_ms=70.0)
    assert not pool.observe_served("1", B, 51.0), "it is told once"
    candidates, match = pool.snapshot(make_request(), None, 60.0)
    assert candidates.pending_requests.tolist() == [0, 1]
    assert match.matched_tokens[1] == 2_048
    pool.observe_outcome(make_sample("1", B, input_tokens=2_048, cached_tokens=0, ttft_ms=9.0), 70.0)
    assert pool.finish("1", 80.0)
    assert pool.in_flight == 0
    assert pool.ledger.faults() == []


def test_the_endpoint_that_was_picked_is_not_passed_over():
    pool = make_pool(A, B)
    send(pool, "1", A)
    assert not pool.observe_served("1", A, 50.0)
    assert not pool.observe_served("another router's", B, 50.0)


def test_after_its_end_a_request_s_prompt_still_follows_it_to_the_endpoint_that_served():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.finish("1", 40.0)
    assert pool.observe_served("1", B, 50.0)
    _, match = pool.snapshot(make_request(), None, 60.0)
    assert match.matched_tokens[1] == 2_048
    assert pool.in_flight == 0


def test_an_endpoint_that_nobody_knows_serves_and_the_entry_stays_until_its_end():
    pool = make_pool(A, B)
    send(pool, "1", A)
    assert pool.observe_served("1", "10.0.0.9:1", 50.0)
    assert pool.in_flight_at(A) == 1
    assert pool.finish("1", 60.0)


def test_a_retired_endpoint_goes_when_its_last_request_was_another_s():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.remove_endpoint(A)
    assert pool.observe_served("1", B, 50.0)
    assert [status.address for status in pool.endpoints(60.0)] == [B]
    assert pool.finish("1", 70.0)


def test_prompts_of_requests_without_an_outcome_are_kept_within_a_bound():
    pool = make_pool(A)
    for number in range(400):
        send(pool, str(number), A, make_request(seed=number, size=1_048_576))
        pool.finish(str(number), 0.0)
    assert pool.held_blocks <= 262_144
    for number in range(400):
        pool.observe_end(str(number), 0.0)
    assert pool.held_blocks == 0


def matched(pool: PoolState, request=None) -> list[float]:
    candidates, _ = pool.snapshot(request or make_request(), None, 50.0)
    return (2_048 - candidates.uncached_tokens).tolist()


def test_what_was_sent_and_never_computed_is_in_no_cache():
    pool = make_pool(A, B)
    send(pool, "1", A)
    assert matched(pool) == [2_048, 0]
    pool.finish("1", 20.0, completed=False)  # aborted, reset or refused before its first token
    assert matched(pool) == [0, 0]


def test_what_an_abort_left_of_an_older_prompt_stays():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.observe_first_token("1", 10.0)
    pool.finish("1", 20.0, completed=False)  # it had been computed
    longer = make_request(size=8_192)
    longer = InferenceRequest("m", longer.prompt + b"x" * 4_096, 3_072.0, 50, streamed=True, text_bytes=12_288)
    send(pool, "2", A, longer, now_ms=30.0)
    pool.finish("2", 40.0, completed=False)
    assert matched(pool) == [2_048, 0]


def test_a_server_s_error_leaves_nothing_in_its_cache():
    pool = make_pool(A, B)
    send(pool, "1", A)
    pool.finish("1", 200.0)
    pool.observe_outcome(make_sample(decision_id="1", endpoint=A, outcome=Outcome.UPSTREAM_ERROR, status=503), 210.0)
    assert matched(pool) == [0, 0]


def test_an_endpoint_s_pace_is_learned_from_its_own_outcomes_whatever_its_hardware_is_called():
    """Three prompts of 2,048 tokens on each, the second endpoint three times as slow; a step of 10 ms isn't prefill."""
    pool = make_pool(A, B)
    candidates, _ = pool.snapshot(make_request(), None, 0.0)
    assert candidates.prefill_ms_per_token.tolist() == [0.0, 0.0]
    for number in range(3):
        for address, ttft_ms in ((A, 51.0), (B, 133.0)):
            decision_id = f"{number} {address}"
            assert send(pool, decision_id, address, make_request(10 * number + len(address)), now_ms=number)
            pool.finish(decision_id, number + 0.5)
            pool.forget_prefixes()
            sample = make_sample(decision_id, address, input_tokens=2_048, ttft_ms=ttft_ms, tpot_ms=10.0)
            pool.observe_outcome(sample, number + 0.6)
    candidates, _ = pool.snapshot(make_request(), None, 9.0)
    assert candidates.prefill_ms_per_token.tolist() == pytest.approx([41 / 2_048, 123 / 2_048], rel=1e-3)


def test_arrivals_are_counted_where_they_were_dispatched_and_kv_capacity_is_what_the_server_says():
    pool = make_pool(A, B)
    for number in range(30):
        send(pool, str(number), A, make_request(number), now_ms=number * 1_000.0)
    pool.observe_scrape(B, metrics(kv_capacity_tokens=50_000, block_tokens=16), 30_000.0)
    candidates, _ = pool.snapshot(make_request(), None, 30_000.0)
    assert candidates.arrivals_per_ms.tolist() == pytest.approx([0.00062, 0.0], rel=0.05)
    assert candidates.kv_capacity_tokens.tolist() == [0.0, 50_000.0]


def test_a_limit_of_sequences_is_found_out_from_scrapes_and_forgotten_with_the_process():
    pool = make_pool(A, B)

    def limits() -> list[float]:
        candidates, _ = pool.snapshot(make_request(), None, 10_000.0)
        return candidates.sequence_limit.tolist()

    for at in range(5):
        # Nobody had a first token at the first scrape: prompts' tokens, counted before, don't stand in.
        counts = {"first_tokens": float(at), "prompt_tokens": 1e6}
        seen = EngineMetrics(Engine.VLLM, 4.0, 64.0, 0.5, process_start_s=100.0, **counts)
        pool.observe_scrape(A, seen, at * 1_000.0)
    assert limits() == [64.0, 0.0]
    assert [each.sequence_limit for each in pool.endpoints(10_000.0)] == [64, None]
    pool.observe_scrape(A, EngineMetrics(Engine.VLLM, 4.0, 64.0, 0.5, process_start_s=900.0, first_tokens=1), 9_000.0)
    pool.set_models(A, frozenset({"m"}))
    assert limits() == [0.0, 0.0]
