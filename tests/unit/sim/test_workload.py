"""Workloads: the same seed asks the same, scenarios share what they say, traces keep their sharing."""

import itertools
from collections import Counter

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.openai_api import parse_chat, parse_completion
from sim.tokens import block_chain, render_text, token_count
from sim.workload import (
    LLM_D_SCENARIOS,
    Phase,
    PrefixScenario,
    TraceScale,
    load_azure,
    load_mooncake,
    on_off_phases,
    poisson_arrivals,
    prefix_sharing,
    seeded_text,
)

SMALL = PrefixScenario("S", 3, 4, 40, 12, 4, 10, 3)


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    def requests(seed: int) -> list:
        return list(prefix_sharing(SMALL, poisson_arrivals([Phase(20, 3)], seed), seed))

    assert requests(1) == requests(1)
    assert requests(1) != requests(2)


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), rate=st.floats(0.1, 200), seconds=st.floats(0.1, 5))
def test_arrivals_ascend_within_their_phase(seed, rate, seconds):
    arrivals = poisson_arrivals([Phase(0, 1), Phase(rate, seconds)], seed)
    assert arrivals == sorted(arrivals)
    assert all(1000 <= at_ms < 1000 + seconds * 1000 for at_ms in arrivals)


def test_arrivals_come_at_the_rate_asked_for():
    assert len(poisson_arrivals([Phase(50, 200)], 3)) == pytest.approx(10_000, rel=0.05)


def test_bursts_alternate_and_end_on_time():
    phases = on_off_phases(on_rate_per_s=9, off_rate_per_s=1, on_s=2, off_s=3, total_s=8)
    assert phases == [Phase(9, 2), Phase(1, 3), Phase(9, 2), Phase(1, 1)]
    with pytest.raises(ValueError, match="must be > 0"):
        on_off_phases(on_rate_per_s=9, off_rate_per_s=1, on_s=0, off_s=0, total_s=8)


@given(tokens=st.integers(0, 300), key=st.text(max_size=10))
def test_a_seeded_text_has_the_tokens_asked_for(tokens, key):
    text = seeded_text(tokens, key)
    assert token_count(render_text(text)) == tokens
    assert text == seeded_text(tokens, key)


def test_groups_share_their_system_prompt_and_questions_recur():
    requests = list(prefix_sharing(SMALL, [float(at) for at in range(300)], 1))
    systems = {request.group: {r.messages[0][1] for r in requests if r.group == request.group} for request in requests}
    assert len(systems) == 3
    assert all(len(texts) == 1 for texts in systems.values())
    assert len({next(iter(texts)) for texts in systems.values()}) == 3
    assert len({request.messages for request in requests}) == 3 * 4
    assert min(Counter(request.group for request in requests).values()) > 60
    assert all(request.max_tokens >= 1 for request in requests)


def test_later_turns_of_a_session_extend_the_earlier_ones():
    scenario = PrefixScenario("T", 2, 3, 30, 12, 4, 10, 3, turns=3, turn_gap_ms=50)
    requests = list(prefix_sharing(scenario, [float(at) for at in range(0, 1000, 10)], 1))
    assert [request.arrival_ms for request in requests] == sorted(request.arrival_ms for request in requests)
    assert [request.index for request in requests] == list(range(300))
    by_session = itertools.groupby(sorted(requests, key=lambda r: (r.session, r.turn)), key=lambda r: r.session)
    for _, group in by_session:
        turns = list(group)
        assert [turn.turn for turn in turns] == [0, 1, 2]
        for earlier, later in itertools.pairwise(turns):
            assert later.messages[: len(earlier.messages)] == earlier.messages
            assert [role for role, _ in later.messages[len(earlier.messages) :]] == ["assistant", "user"]


def test_published_scenarios_scale_in_length_and_number():
    scaled = LLM_D_SCENARIOS["C"].scaled(lengths=1 / 8, groups=0.1)
    assert (scaled.groups, scaled.system_tokens, scaled.question_tokens, scaled.output_tokens) == (15, 750, 150, 125)
    assert set(LLM_D_SCENARIOS) == {"A", "B", "C", "D"}
    assert PrefixScenario("x", 1, 1, 1, 1, 0, 1, 0).scaled(lengths=0.01, groups=0.01).system_tokens == 1


def test_a_request_body_is_one_the_server_reads():
    request = next(prefix_sharing(SMALL, [0.0], 1))
    parsed = parse_chat(orjson.dumps(request.body("m")))
    assert (parsed.model, parsed.max_tokens, parsed.stream, parsed.include_usage) == (
        "m",
        request.max_tokens,
        True,
        True,
    )
    assert request.path == "/v1/chat/completions"
    assert not parse_chat(orjson.dumps(request.body("m", stream=False))).stream


def write_mooncake(path, rows):
    path.write_text("".join(orjson.dumps(row).decode() + "\n" for row in rows))
    return path


def mooncake_row(at_ms, tokens, output, ids):
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


def test_a_mooncake_trace_shares_exactly_the_blocks_whose_ids_it_shares(tmp_path):
    rows = [
        mooncake_row(0, 1500, 64, [0, 1, 2]),
        mooncake_row(3000, 1536, 32, [0, 1, 3]),
        mooncake_row(3000, 90, 3, [7]),
    ]
    path = write_mooncake(tmp_path / "m.jsonl", rows)
    first, second, third = load_mooncake(path, TraceScale())
    chains = [block_chain(render_text(request.prompt), 16) for request in (first, second, third)]
    shared = sum(1 for one, other in zip(chains[0], chains[1], strict=False) if one == other)
    assert shared == 1024 // 16
    assert not set(chains[2]) & set(chains[0])
    assert token_count(render_text(first.prompt)) == 1500
    assert (first.max_tokens, second.arrival_ms, first.group, third.group) == (64, 3000, "0", "7")
    assert parse_completion(orjson.dumps(first.body("m"))).max_tokens == 64


def test_a_trace_is_scaled_in_time_and_length_and_cut(tmp_path):
    rows = [mooncake_row(index * 3000, 5120, 160, list(range(10))) for index in range(5)]
    path = write_mooncake(tmp_path / "m.jsonl", rows)
    requests = list(load_mooncake(path, TraceScale(time=0.5, lengths=1 / 16, limit=3, jitter_ms=3000), seed=4))
    assert len(requests) == 3
    assert {request.max_tokens for request in requests} == {10}
    assert {token_count(render_text(request.prompt)) for request in requests} == {320}
    assert all(index * 1500 <= request.arrival_ms <= (index + 1) * 1500 for index, request in enumerate(requests))
    assert requests == list(load_mooncake(path, TraceScale(time=0.5, lengths=1 / 16, limit=3, jitter_ms=3000), seed=4))


def test_an_azure_trace_has_its_lengths_and_shares_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("arrival_ms,context_tokens,generated_tokens\n0.0,374,44\n4314.6,396,109\n")
    first, second = load_azure(path, TraceScale(time=2))
    assert token_count(render_text(first.prompt)) == 374
    assert (second.arrival_ms, second.max_tokens) == (8629.2, 109)
    assert not set(block_chain(render_text(first.prompt), 16)) & set(block_chain(render_text(second.prompt), 16))


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"m.jsonl line 2 is not a Mooncake row"):
        list(load_mooncake(path, TraceScale()))
    path = tmp_path / "a.csv"
    path.write_text("arrival_ms,context_tokens,generated_tokens\n0.0,x,44\n")
    with pytest.raises(ValueError, match=r"a.csv row 1 is not an Azure row"):
        list(load_azure(path, TraceScale()))
