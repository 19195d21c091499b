"""What a waiting room gives is counted against the same requests without one; profiles are the preset's but for it."""

from pathlib import Path
from typing import Any

import pytest

from bench.late_binding import MODES, OFF, PRESET, ROOMS, profile, summarise
from services.router.scheduling.profile import load_presets
from services.router.scheduling.registry import Registry
from sim.replay.policies import policy


def row(trace: str, mode: str, goodput: float, p90_ms: float, *, load: float = 1.1, seed: int = 1) -> dict[str, Any]:
    return {"trace": trace, "load": load, "mode": mode, "seed": seed, "goodput": goodput, "ttft_p90_ms": p90_ms}


def test_goodput_is_summed_over_workloads_and_p90_is_compared_run_by_run() -> None:
    rows = [
        row("A", OFF, 0.5, 1_000.0),
        row("B", OFF, 0.1, 400.0),
        row("A", "overload", 0.6, 2_000.0),
        row("B", "overload", 0.3, 200.0),
        row("A", "overload", 0.9, 1.0, seed=2),  # without its like: not counted
    ]
    [found] = summarise(rows)
    assert (found["load"], found["mode"], found["runs"]) == (1.1, "overload", 2)
    assert found["goodput_ratio"] == pytest.approx(0.9 / 0.6)
    assert found["most"] == pytest.approx(2.0 / 0.6)
    assert found["ttft_p90_ratio"] == pytest.approx(1.0)
    assert found["ttft_p90_ratio_by_trace"] == pytest.approx({"A": 2.0, "B": 0.5})


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_profile_is_the_preset_with_a_room(mode: str, tmp_path: Path) -> None:
    preset = next(each for each in load_presets(Registry()) if each.name == PRESET)
    found = policy(profile(mode, tmp_path))
    ours = found.profiles.get(found.profile)
    assert found.learned
    assert ours.scorers == preset.scorers
    assert (ours.filters, ours.picker, ours.fallback) == (preset.filters, preset.picker, preset.fallback)
    assert preset.waiting_room is None
    assert ours.waiting_room is not None
    assert {name: getattr(ours.waiting_room, name) for name in ROOMS[mode]} == ROOMS[mode]
