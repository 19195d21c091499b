"""Laws of the step engine: blocks are conserved, time moves on, order is kept, prefix hits are the true ones."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import (
    Engine,
    EngineError,
    EngineLimits,
    EngineRequest,
    FinishReason,
    RequestState,
    RequestTooLongError,
    StepResult,
)
from sim.hardware import PROFILES

H100 = PROFILES["llama-8b-h100"]
BLOCK = 4


def make_engine(*, num_blocks: int = 64, noise: float = 0.0, seed: int = 1, **limits: int | bool) -> Engine:
    values: dict[str, int | bool] = {
        "block_tokens": BLOCK,
        "max_num_seqs": 8,
        "max_batched_tokens": 32,
        "max_model_tokens": min(128, num_blocks * BLOCK),
    }
    return Engine(H100, EngineLimits(num_blocks=num_blocks, **{**values, **limits}), random.Random(seed), noise)


def chain(group: int, own: int, shared_blocks: int, blocks: int) -> tuple[int, ...]:
    """Block hashes of a prompt whose first blocks are its group's and whose rest is its own."""
    return tuple(hash((group, index, -1 if index < shared_blocks else own)) for index in range(blocks))


def run_to_end(engine: Engine, now_ms: float = 0.0, limit: int = 20_000) -> list[StepResult]:
    results: list[StepResult] = []
    for _ in range(limit):
        result = engine.step(now_ms)
        if result is None:
            assert engine.is_idle
            return results
        results.append(result)
        now_ms = result.step.end_ms
    raise AssertionError("the engine does not come to an end")


def check_blocks(engine: Engine) -> None:
    pool = engine.pool
    held = [state for state in engine.states() if state.held_blocks]
    distinct = {id(block) for state in held for block in state.blocks}
    assert pool.free_blocks + pool.idle_blocks + pool.pinned_blocks + pool.private_blocks == pool.total_blocks
    assert min(pool.free_blocks, pool.idle_blocks, pool.pinned_blocks, pool.private_blocks) >= 0
    assert pool.private_blocks == sum(state.private_blocks for state in held)
    assert pool.pinned_blocks == len(distinct)
    for state in held:
        assert state.held_blocks == len(state.blocks) + state.private_blocks
        assert state.held_blocks * BLOCK >= state.computed_tokens


@dataclass(frozen=True)
class Arrival:
    at_step: int
    group: int
    shared_blocks: int
    prompt_tokens: int
    output_tokens: int
    hash_outputs: bool
    abort_after: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 30),
        group=st.integers(0, 2),
        shared_blocks=st.integers(0, 8),
        prompt_tokens=st.integers(1, 60),
        output_tokens=st.integers(1, 30),
        hash_outputs=st.booleans(),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
    ),
    min_size=1,
    max_size=14,
)


def request_of(index: int, arrival: Arrival) -> EngineRequest:
    tokens = arrival.prompt_tokens + (arrival.output_tokens if arrival.hash_outputs else 0)
    return EngineRequest(
        str(index),
        arrival.prompt_tokens,
        arrival.output_tokens,
        chain(arrival.group, index, arrival.shared_blocks, tokens // BLOCK),
        FinishReason.STOP,
    )


@settings(max_examples=200, deadline=None)
@given(
    plan=arrivals,
    num_blocks=st.integers(23, 60),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    caching=st.booleans(),
    resets=st.sets(st.integers(0, 60), max_size=3),
)
def test_whatever_happens_blocks_time_limits_and_tokens_add_up(plan, num_blocks, seqs, budget, caching, resets):
    engine = make_engine(
        num_blocks=num_blocks, max_num_seqs=seqs, max_batched_tokens=budget, max_model_tokens=92, prefix_caching=caching
    )
    states: dict[int, RequestState] = {}
    aborts: dict[int, list[int]] = {}
    emitted: dict[str, int] = {}
    now_ms, number = 0.0, 0
    while number <= 31 or not engine.is_idle:
        for index, arrival in enumerate(plan):
            if arrival.at_step == number:
                states[index] = engine.submit(request_of(index, arrival), now_ms)
                if arrival.abort_after is not None:
                    aborts.setdefault(number + arrival.abort_after, []).append(index)
        if number in resets:
            engine.reset_cache()
        step = engine.start_step(now_ms)
        check_blocks(engine)
        for index in aborts.pop(number, ()):
            engine.abort(str(index), now_ms)
            check_blocks(engine)
        number += 1
        assert number < 20_000, "the engine does not come to an end"
        if step is None:
            now_ms += 1
            continue
        assert step.start_ms == now_ms
        assert step.duration_ms > 0
        assert step.prefill_tokens + step.decode_sequences <= budget
        assert engine.running_requests <= seqs
        result = engine.finish_step()
        check_blocks(engine)
        now_ms = step.end_ms
        for state in result.emitted:
            emitted[state.request.request_id] = emitted.get(state.request.request_id, 0) + 1
            assert state.last_token_ms == now_ms
    for index, state in states.items():
        assert emitted.get(str(index), 0) == state.generated_tokens
        assert state.token_times_ms == sorted(set(state.token_times_ms))
        if state.finish_reason is FinishReason.STOP:
            assert state.generated_tokens == plan[index].output_tokens
            assert state.finished_ms == state.last_token_ms
            assert state.arrival_ms <= state.scheduled_ms < state.first_token_ms
        else:
            assert state.finish_reason is FinishReason.ABORT
    metrics = engine.metrics()
    assert sum(metrics.finished_requests.values()) == len(plan)
    assert metrics.generated_tokens == sum(emitted.values())
    assert metrics.kv_used_ratio == 0
    assert engine.pool.available_blocks == num_blocks


@settings(max_examples=100, deadline=None)
@given(plan=arrivals)
def test_requests_are_admitted_first_come_first_served(plan):
    engine = make_engine(num_blocks=400, max_num_seqs=3)
    states = [engine.submit(request_of(index, arrival), float(index)) for index, arrival in enumerate(plan)]
    run_to_end(engine, now_ms=float(len(plan)))
    scheduled = [state.scheduled_ms for state in states]
    assert scheduled == sorted(scheduled)


@settings(max_examples=100, deadline=None)
@given(plan=arrivals, budget=st.integers(4, 40))
def test_prefix_hits_are_exactly_what_earlier_steps_left_when_nothing_is_evicted(plan, budget):
    engine = make_engine(num_blocks=2000, max_batched_tokens=budget)
    states: list[RequestState] = []
    known: set[int] = set()
    published: dict[str, int] = {}
    now_ms, number = 0.0, 0
    while number <= 31 or not engine.is_idle:
        for index, arrival in enumerate(plan):
            if arrival.at_step == number:
                states.append(engine.submit(request_of(index, arrival), now_ms))
        waiting = [state for state in states if state.scheduled_ms is None]
        step = engine.start_step(now_ms)
        number += 1
        running_before = [state for state in engine.states() if state.scheduled_ms not in {None, now_ms}]
        for state in running_before:
            # In this step or an earlier one it was given tokens; those blocks are findable from then on.
            full = (state.computed_tokens + state.step_tokens) // BLOCK
            published[state.request.request_id] = full
            known.update(state.block_hashes[:full])
        for state in waiting:
            if state.scheduled_ms != now_ms:
                continue
            expected = 0
            for block_hash in state.block_hashes[: (state.request.prompt_tokens - 1) // BLOCK]:
                if block_hash not in known:
                    break
                expected += 1
            assert state.cached_tokens == expected * BLOCK
            known.update(state.block_hashes[: (state.computed_tokens + state.step_tokens) // BLOCK])
        if step is None:
            now_ms += 1
            continue
        for state in engine.finish_step().emitted:
            state.step_tokens = 0  # it keeps its last value while the state is not scheduled
        now_ms = step.end_ms
    assert engine.metrics().prefix_hit_tokens == sum(state.cached_tokens for state in states)


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 40), st.integers(1, 12)), max_size=25
    )
)
def test_the_prefix_cache_evicts_the_least_recently_used_chain_ends_first(requests):
    """Requests one after the other in a small cache hit what a plain list, kept in order of use, would hold."""
    total = 14
    engine = make_engine(num_blocks=total, max_batched_tokens=1000, max_model_tokens=56)
    cached: list[int] = []  # hashes that no request holds, least recently used first
    now_ms = 0.0
    for index, (group, shared, prompt, output) in enumerate(requests):
        hashes = chain(group, index, shared, prompt // BLOCK)
        state = engine.submit(EngineRequest(str(index), prompt, output, hashes), now_ms)
        now_ms = run_to_end(engine, now_ms)[-1].step.end_ms

        hits: list[int] = []
        for block_hash in hashes[: (prompt - 1) // BLOCK]:
            if block_hash not in cached:
                break
            hits.append(block_hash)
        assert state.cached_tokens == len(hits) * BLOCK
        cached = [block_hash for block_hash in cached if block_hash not in hits]
        own = list(hits)
        held = len(hits)
        for tokens in (prompt, *range(prompt + 1, prompt + output)):  # one chunk, then token by token
            needed = -(-tokens // BLOCK)
            while held < needed:
                if held + len(cached) == total:
                    cached.pop(0)
                held += 1
            own += hashes[len(own) : tokens // BLOCK]
            cached = [block_hash for block_hash in cached if block_hash not in own]
        cached += reversed(own)
        assert engine.pool.idle_blocks == len(cached)


def test_a_prompt_is_prefilled_in_chunks_that_cost_what_the_whole_costs_but_for_the_base():
    engine = make_engine(num_blocks=64, max_batched_tokens=32)
    engine.submit(EngineRequest("a", 100, 1), 0.0)
    results = run_to_end(engine)
    assert [result.step.prefill_tokens for result in results] == [32, 32, 32, 4]
    total = sum(result.step.duration_ms for result in results)
    assert total == pytest.approx(H100.prefill_ms(100) + 3 * H100.prefill_base_ms)


def test_a_decode_step_costs_its_batch_and_its_context():
    engine = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.submit(EngineRequest("a", 10, 3), 0.0)
    engine.submit(EngineRequest("b", 20, 3), 0.0)
    results = run_to_end(engine)
    assert results[0].step.duration_ms == pytest.approx(
        H100.prefill_base_ms + H100.prefill_ms_per_token * 30 + H100.prefill_ms_per_square_token * (10 * 10 + 20 * 20)
    )
    assert results[1].step.duration_ms == pytest.approx(H100.decode_ms(2, 30))
    assert results[2].step.duration_ms == pytest.approx(H100.decode_ms(2, 32))


def test_a_cached_prefix_shortens_the_prefill():
    engine = make_engine(num_blocks=64, max_batched_tokens=128)
    hashes = chain(0, 0, 100, 25)
    cold = engine.submit(EngineRequest("a", 100, 1, hashes), 0.0)
    end_ms = run_to_end(engine)[-1].step.end_ms
    warm = engine.submit(EngineRequest("b", 100, 1, hashes), end_ms)
    run_to_end(engine, end_ms)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)  # the last block holds the token to compute
    assert warm.first_token_ms - warm.arrival_ms == pytest.approx(H100.prefill_ms(4, context_tokens=96))
    assert cold.first_token_ms == pytest.approx(H100.prefill_ms(100))


def test_generated_blocks_can_be_found_by_the_next_turn():
    engine = make_engine(num_blocks=64, max_batched_tokens=128)
    hashes = chain(0, 0, 100, 10)
    engine.submit(EngineRequest("a", 20, 21, hashes), 0.0)
    end_ms = run_to_end(engine)[-1].step.end_ms
    follow_up = engine.submit(EngineRequest("b", 60, 1, hashes), end_ms)
    run_to_end(engine, end_ms)
    assert follow_up.cached_tokens == 40


def test_the_youngest_is_preempted_when_blocks_run_out_and_finishes_later():
    engine = make_engine(num_blocks=12, max_batched_tokens=64, max_model_tokens=48)
    first = engine.submit(EngineRequest("a", 20, 20), 0.0)
    second = engine.submit(EngineRequest("b", 20, 20), 0.0)
    run_to_end(engine)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert engine.metrics().preemptions == 1
    assert first.generated_tokens == second.generated_tokens == 20
    assert first.finished_ms < second.finished_ms


def test_a_request_does_not_join_a_step_that_begins_before_it_arrives():
    engine = make_engine()
    engine.submit(EngineRequest("a", 8, 1), 100.0)
    assert engine.step(99.0) is None
    assert engine.step(100.0) is not None


def test_aborting_in_a_running_step_frees_the_blocks_and_emits_nothing():
    engine = make_engine()
    engine.submit(EngineRequest("a", 8, 5), 0.0)
    engine.start_step(0.0)
    state = engine.abort("a", 1.0)
    assert state is not None
    assert state.finish_reason is FinishReason.ABORT
    assert engine.finish_step().emitted == []
    assert engine.is_idle
    assert engine.pool.available_blocks == engine.pool.total_blocks
    assert engine.abort("a", 2.0) is None


def test_after_a_reset_nothing_is_hit_though_requests_still_run():
    engine = make_engine(max_batched_tokens=128)
    hashes = chain(0, 0, 100, 10)
    engine.submit(EngineRequest("a", 40, 3, hashes), 0.0)
    end_ms = engine.step(0.0).step.end_ms
    engine.reset_cache()
    late = engine.submit(EngineRequest("b", 40, 3, hashes), end_ms)
    run_to_end(engine, end_ms)
    assert late.cached_tokens == 0
    check_blocks(engine)


def test_noise_is_reproducible_centred_and_off_by_default():
    def durations(seed: int, noise: float) -> list[float]:
        engine = make_engine(noise=noise, seed=seed)
        engine.submit(EngineRequest("a", 1, 100), 0.0)
        return [result.step.duration_ms for result in run_to_end(engine)]

    assert durations(1, 0.1) == durations(1, 0.1)
    assert durations(1, 0.1) != durations(2, 0.1)
    plain = durations(1, 0.0)
    ratios = [noisy / exact for noisy, exact in zip(durations(3, 0.1), plain, strict=True)]
    assert 0.97 < sum(ratios) / len(ratios) < 1.03
    assert min(ratios) < 0.9
    assert max(ratios) > 1.1


def test_metrics_count_tokens_when_the_real_server_does():
    engine = make_engine(max_batched_tokens=16)
    hashes = chain(0, 0, 100, 6)
    engine.submit(EngineRequest("a", 24, 2, hashes), 0.0)
    now_ms = engine.step(0.0).step.end_ms
    half = engine.metrics()
    assert (half.prefix_queried_tokens, half.prompt_tokens, half.generated_tokens) == (24, 0, 0)
    assert (half.running_requests, half.waiting_requests) == (1, 0)
    now_ms = engine.step(now_ms).step.end_ms
    assert engine.metrics().prompt_tokens == 24
    engine.submit(EngineRequest("b", 24, 1, hashes), now_ms)
    run_to_end(engine, now_ms)
    done = engine.metrics()
    assert (done.prompt_tokens, done.cached_prompt_tokens, done.prefix_hit_tokens) == (48, 20, 20)
    assert done.generated_tokens == 3
    assert done.finished_requests == {FinishReason.STOP: 0, FinishReason.LENGTH: 2, FinishReason.ABORT: 0}


def test_misuse_is_refused_and_named():
    engine = make_engine()
    with pytest.raises(RequestTooLongError, match="128 tokens"):
        engine.submit(EngineRequest("long", 100, 29), 0.0)
    with pytest.raises(EngineError, match="must be >= 1, got 0 and 3"):
        engine.submit(EngineRequest("empty", 0, 3), 0.0)
    engine.submit(EngineRequest("a", 4, 3), 0.0)
    with pytest.raises(EngineError, match="'a' is already"):
        engine.submit(EngineRequest("a", 4, 3), 0.0)
    with pytest.raises(EngineError, match="no step has begun"):
        engine.finish_step()
    engine.start_step(5.0)
    with pytest.raises(EngineError, match="has not ended"):
        engine.start_step(6.0)
    engine.finish_step()
    with pytest.raises(EngineError, match="time must not go back"):
        engine.start_step(5.0)
    with pytest.raises(EngineError, match="noise must be in"):
        make_engine(noise=1.0)
    with pytest.raises(EngineError, match="max_num_seqs must be >= 1, got 0"):
        make_engine(max_num_seqs=0)
    with pytest.raises(EngineError, match="must fit an empty cache"):
        EngineLimits(num_blocks=2, block_tokens=16, max_model_tokens=33)
