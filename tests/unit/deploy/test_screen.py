"""What a person sees of a demo, on terminals of several widths."""

import io

import pytest
from rich.console import Console

from deploy.local.screen import PhaseProgress, Screen

PHASE = PhaseProgress("round-robin", 344, 30, 0, [150.0, 377.0], {"heuristic": 2}, 0)


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with Screen(console) as screen:
        screen.begin_phase("round-robin", 344, 21.5)
        screen.show(PHASE)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_phase_s_name_and_count_are_whole_on_any_terminal(width: int) -> None:
    assert "round-robin " in shown(width)
    assert "30/344" in shown(width)
    assert "…" not in shown(width)


def test_a_bar_is_drawn_only_where_there_is_room_for_it() -> None:
    assert "━" in shown(120)
    assert "━" not in shown(80)
