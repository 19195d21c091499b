"""Traces: each form is read, each fault is named with its line, and made ones are fixed by their seed."""

import json
from pathlib import Path

import numpy as np
import pytest

from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung, encode_sample
from sim.replay.trace import RECORDED, Piece, TraceError, load_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 0, "input_length": 1024, "output_length": 30, "hash_ids": [1, 2]},
    {"timestamp": 3000, "input_length": 700, "output_length": 40, "hash_ids": [1, 9]},
]


def written(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_mooncake_blocks_are_shared_whole_and_a_cut_one_is_a_prompts_own(tmp_path: Path) -> None:
    trace = load_trace(str(written(tmp_path / "t.jsonl", MOONCAKE * 20)), 1, 40)
    assert len(trace.requests) == 40
    assert trace.requests[0].arrival_ms == 0.0
    long = [r for r in trace.requests if r.input_tokens == 1300]
    assert {piece.tokens for request in long for piece in request.prompt} == {512, 276}
    assert len({request.prompt[0] for request in trace.requests[:10]}) == 1
    assert len({request.prompt[-1] for request in long}) == len(long)


def test_a_second_pass_finds_nothing_of_the_first(tmp_path: Path) -> None:
    trace = load_trace(str(written(tmp_path / "t.jsonl", MOONCAKE)), 1, 6)
    assert len({request.prompt[0].id for request in trace.requests}) >= 2


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    rows: list[object] = ["arrival_ms,context_tokens,generated_tokens", "0.0,374,44", "100.5,396,109", "200,10,1"]
    trace = load_trace(str(written(tmp_path / "t.csv", rows)), 1, 10)
    assert [(r.arrival_ms, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 374, 44),
        (100.5, 396, 109),
        (200.0, 10, 1),
    ]
    ids = [piece.id for request in trace.requests for piece in request.prompt]
    assert len(set(ids)) == len(ids)


def test_azures_table_is_read_as_it_is_published(tmp_path: Path) -> None:
    rows: list[object] = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:15:51.2224670,879,55",
    ]
    trace = load_trace(str(written(tmp_path / "AzureLLMInferenceTrace_conv.csv", rows)), 1, 10)
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [request.arrival_ms for request in trace.requests] == pytest.approx([0.0, 4314.58, 4541.877], abs=0.01)


def test_a_users_lines_say_what_prompts_share_down_to_an_earlier_answer(tmp_path: Path) -> None:
    rows: list[object] = [
        {"arrival_ms": 5, "input_tokens": 100, "output_tokens": 40, "prefix": [["system", 60]], "answer": "a1"},
        {
            "arrival_ms": 9,
            "input_tokens": 160,
            "output_tokens": 7,
            "prefix": [["system", 60], ["q1", 40], ["a1", 40]],
            "ttft_slo_ms": 300,
            "max_tokens": 50,
            "priority": -1,
        },
    ]
    first, second = load_trace(str(written(tmp_path / "t.jsonl", rows)), 1, 10).requests
    assert first.prompt[0] == second.prompt[0]
    assert second.prompt[2] == Piece(first.answer_id, 40)
    assert (second.arrival_ms, second.ttft_slo_ms, second.max_tokens, second.priority) == (4.0, 300.0, 50, -1)
    assert len(second.tokens()) == 160
    assert len(second.tokens(with_answer=True)) == 167


def test_leadtimes_samples_are_read_and_their_lost_prefixes_told(tmp_path: Path) -> None:
    def sample(number: int, outcome: Outcome) -> str:
        return encode_sample(
            LatencySample(
                decision_id=f"d{number}",
                pool="default",
                model="m",
                endpoint="10.0.0.1:8000",
                outcome=outcome,
                status=200,
                streamed=True,
                received_unix_ms=1e12 + 100.0 * number,
                completed_unix_ms=1e12 + 100.0 * number + 50,
                rung=Rung.HEURISTIC,
                schema_hash=SCHEMA.hash,
                features=[0.0] * len(SCHEMA),
                input_tokens=1000,
                cached_tokens=250,
                output_tokens=10,
            )
        ).decode()

    rows: list[object] = [sample(0, Outcome.OK), sample(1, Outcome.CLIENT_ABORT), sample(2, Outcome.OK)]
    trace = load_trace(str(written(tmp_path / "t.jsonl", rows)), 1, 10)
    assert [request.arrival_ms for request in trace.requests] == [0.0, 200.0]
    assert "25%" in trace.notes[0]
    assert trace.notes[1].endswith("left out: 1")


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        ("t.jsonl", [MOONCAKE[0], {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}], "line 2"),
        ("t.jsonl", [MOONCAKE[0], "{"], "line 2: not JSON"),
        ("t.jsonl", [MOONCAKE[0], {"timestamp": 0, "input_length": 1, "output_length": 1}], "hash_ids"),
        ("t.jsonl", [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 5}, {"arrival_ms": 1}], "line 2"),
        (
            "t.jsonl",
            [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 5, "colour": 1}],
            "colour.*allowed: arrival_ms, input",
        ),
        (
            "t.jsonl",
            [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 5, "tpot_slo_ms": 0}],
            "tpot_slo_ms: found 0.*above 0",
        ),
        (
            "t.jsonl",
            [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 5, "priority": 1_000_001}],
            "line 1: priority: found 1000001; allowed: an integer from -1000000 to 1000000",
        ),
        (
            "t.jsonl",
            [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 5, "max_tokens": -1}],
            "max_tokens: found -1",
        ),
        ("t.jsonl", [{"arrival_ms": -1, "input_tokens": 5, "output_tokens": 5}], "arrival_ms"),
        ("t.jsonl", [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 0}], "output_tokens"),
        ("t.jsonl", [{"arrival_ms": 0, "input_tokens": 5, "output_tokens": 1, "prefix": [["a", 9]]}], "prefix"),
        ("t.csv", ["a,b", "1,2"], "columns"),
        ("t.csv", ["arrival_ms,context_tokens,generated_tokens", "0,many,2"], "line 2: context_tokens: found many"),
        ("t.csv", ["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,2"], "line 2: TIMESTAMP: found noon"),
        ("t.txt", ["hello"], "line 1"),
        ("t.jsonl", [], "no request"),
        ("t.jsonl", [{"decision_id": "d"}], "line 1"),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path: Path, name: str, rows: list[object], told: str) -> None:
    path = written(tmp_path / name, rows)
    with pytest.raises(TraceError, match=told):
        load_trace(str(path), 1, 10)


@pytest.mark.parametrize("name", ["no-such-trace", "mooncake"])
def test_a_trace_that_is_not_there_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=name):
        load_trace(name, 1, 10, tmp_path)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_trace_without_its_file_names_the_place_that_was_looked_at_and_the_option(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(name, 1, 10, tmp_path)
    assert str(tmp_path / RECORDED[name][0]) in str(caught.value)
    assert "--data" in str(caught.value)


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "sharegpt"])
def test_a_made_trace_is_fixed_by_its_seed(name: str) -> None:
    one, again, other = (load_trace(name, seed, 300) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert len(one.requests) == 300
    assert one.rate_per_s == pytest.approx(1.0, rel=0.2)


def test_a_later_turn_holds_the_earlier_ones_and_their_answers() -> None:
    requests = load_trace("D", 3, 2000).requests
    by_answer = {request.answer_id: request for request in requests}
    later = [r for r in requests if any(piece.id in by_answer for piece in r.prompt)]
    assert len(later) > 500
    for request in later[:50]:
        place = next(i for i, piece in enumerate(request.prompt) if piece.id in by_answer)
        earlier = by_answer[request.prompt[place].id]
        assert request.prompt[:place] == earlier.prompt
        assert np.array_equal(request.tokens()[: earlier.input_tokens], earlier.tokens())


def test_another_rate_keeps_the_rhythm() -> None:
    trace = load_trace("A", 1, 200)
    faster = trace.at_rate(10.0)
    assert faster.rate_per_s == pytest.approx(10.0)
    ratio = faster.requests[50].arrival_ms / faster.requests[100].arrival_ms
    assert ratio == pytest.approx(trace.requests[50].arrival_ms / trace.requests[100].arrival_ms)
