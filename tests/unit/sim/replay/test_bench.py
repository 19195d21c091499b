"""The replay's benchmark: marks are counted right, and a run that was cut short goes on where it stopped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import replay
from bench.replay import EQUAL, MIXED, Cell, Grid, summarise
from bench.row_file import read_rows


def row(trace: str, load: float, hardware: str, policy: str, seed: int = 1, **values: float) -> dict[str, Any]:
    figures = dict.fromkeys(replay.METRICS, 100.0) | {"goodput": 0.8} | values
    return {"trace": trace, "load": load, "hardware": hardware, "policy": policy, "seed": seed, **figures}


def marks(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["mark"]: entry for entry in summarise(rows)["marks"]}


def test_ratios_are_geometric_means_over_workloads_of_means_over_seeds() -> None:
    rows = [row(name, 0.85, EQUAL, "token-load") for name in ("A", "B")]
    rows += [
        row("A", 0.85, EQUAL, "leadtime", 1, ttft_p90_ms=50.0),
        row("A", 0.85, EQUAL, "leadtime", 2, ttft_p90_ms=200.0),
        row("B", 0.85, EQUAL, "leadtime", ttft_p90_ms=400.0),
    ]
    ratios = Grid.of(rows).ratios("ttft_p90_ms", 0.85, EQUAL, "leadtime", "token-load")
    assert ratios == pytest.approx({"A": 1.0, "B": 4.0})
    found = marks(rows)["equal at 85%: ttft_p90_ms / token-load"]
    assert (found["value"], found["met"], found["cells"]) == (pytest.approx(2.0), False, 2)


def test_a_missed_mark_names_the_cells_that_it_is_owed_to_worst_first() -> None:
    rows = [row(name, 0.85, EQUAL, "token-load") for name in ("A", "B")]
    rows += [row("A", 0.85, EQUAL, "leadtime", ttft_p90_ms=90.0), row("B", 0.85, EQUAL, "leadtime", ttft_p90_ms=150.0)]
    [missed] = [line for line in summarise(rows)["missed"] if line.startswith("equal at 85%: ttft_p90_ms / token-load")]
    assert missed == "equal at 85%: ttft_p90_ms / token-load: 1.162, due ≤1; B 1.50, A 0.90"


def test_the_grid_is_run_workload_by_workload_busy_loads_and_the_compared_policies_first() -> None:
    order = replay.cells()
    assert len(set(order)) == len(order) == 3 * 4 * 2 * 6 * len(replay.POLICIES)
    first = order[: 24 * len(replay.COMPARED)]
    assert {cell.seed for cell in first} == {1}
    assert {cell.load for cell in first} == {0.85, 0.95}
    one = order[: 4 * len(replay.COMPARED)]
    assert [cell.policy for cell in one] == 4 * list(replay.COMPARED)
    assert len({cell.trace for cell in one}) == 1


def test_rows_of_another_revision_are_told() -> None:
    now = replay.policy_revision("leadtime")
    rows = [row("A", load, EQUAL, "leadtime") | {"policy_revision": name} for load, name in ((0.5, now), (0.7, "old"))]
    assert summarise(rows)["of_another_revision"] == 1


def test_a_revision_is_of_what_decides_not_of_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(text: str) -> str:
        (tmp_path / f"words{len(text)}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return replay.code_of(f"words{len(text)}")

    plain = code("def f() -> int:\n    return 1\n")
    assert code('"""Module."""\n\ndef f() -> int:\n    """One."""\n    return 1  # why\n') == plain
    assert code("def f() -> int:\n    return 22\n") != plain


def test_a_policy_has_a_revision_of_its_own() -> None:
    assert len({replay.policy_revision(name) for name in replay.POLICIES}) == len(replay.POLICIES)


def test_a_cell_without_its_counterpart_is_left_out_and_a_mark_without_cells_is_not_run() -> None:
    summary = summarise([row("A", 0.85, EQUAL, "leadtime")])
    assert summary["missed"] == []
    assert "equal at 85%: ttft_p90_ms / token-load" in summary["not_run"]


def test_slo_misses_are_compared_with_the_best_policy_without_prediction() -> None:
    rows = [
        row("A", 0.85, MIXED, "token-load", goodput=0.6),
        row("A", 0.85, MIXED, "lmetric", goodput=0.8),
        row("A", 0.85, MIXED, "leadtime", goodput=0.95),
    ]
    assert marks(rows)["mixed at 85%: SLO misses / best without prediction"]["value"] == pytest.approx(0.25)


def test_goodput_behind_any_other_but_the_oracle_is_told_by_cell() -> None:
    rows = [
        row("A", 0.5, EQUAL, "leadtime", goodput=0.9),
        row("A", 0.5, EQUAL, "oracle", goodput=1.0),
        row("A", 0.5, EQUAL, "lmetric", goodput=0.93),
    ]
    found = marks(rows)["goodput − best other, worst cell"]
    assert (found["met"], found["by_cell"]) == (False, {f"A at 50% on {EQUAL}": pytest.approx(-0.03)})


def test_a_full_run_goes_on_where_it_stopped_and_makes_rows_of_another_revision_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "rows.jsonl"
    capacities = [{"trace": "D", "hardware": pool, "capacity_per_s": 2.0} for pool in ("h100-8b:8", "a100-8b:8")]
    now = {"policy_revision": replay.policy_revision("token-load")}
    stale = row("D", 0.5, EQUAL, "lmetric") | {"policy_revision": "of old"}
    done = [json.dumps(each) for each in (*capacities, row("D", 0.5, EQUAL, "token-load") | now, stale)]
    results.write_text("\n".join(done) + '\n{"trace": "D", "lo')
    monkeypatch.setattr(replay, "REQUESTS", {"D": 40})
    monkeypatch.setattr(replay, "CAPACITY_REQUESTS", {"D": 40})
    played: list[Cell] = []

    def play(cell: Cell, rate_per_s: float, requests: int) -> dict[str, Any]:
        played.append(cell)
        assert (rate_per_s, requests) == (2.0, 40)
        revision = {"policy_revision": replay.policy_revision(cell.policy)}
        return row(**asdict(cell), cpu_s=1.0) | revision

    monkeypatch.setattr(replay, "play", play)
    cells = [Cell("D", 0.5, EQUAL, name, 1) for name in ("token-load", "lmetric", "random")]
    replay.full(results, cells)
    assert [cell.policy for cell in played] == ["lmetric", "random"]
    replay.full(results, cells)
    assert len(played) == 2
    assert len([each for each in read_rows(results, Cell) if "policy" in each]) == 3


def test_one_real_cell_has_every_key_that_was_agreed() -> None:
    found = replay.play(Cell("D", 0.5, EQUAL, "token-load", 1), 4.0, 60)
    agreed = {"trace", "load", "hardware", "policy", "seed", "goodput", "prefix_hit_ratio", *replay.METRICS}
    assert agreed <= found.keys()
