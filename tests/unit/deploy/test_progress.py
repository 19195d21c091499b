"""Progress of a long command: a line now and then where nobody can see a bar."""

import io

from rich.console import Console

from deploy.local.progress import LINE_EVERY_S, progress


def test_without_a_terminal_a_line_comes_when_nothing_was_said_for_a_while() -> None:
    out, clock = io.StringIO(), [0.0]
    with progress(Console(file=out, force_terminal=False), lambda: clock[0]) as told:
        told.at("leadtime at 70%", 0.1)
        clock[0] += LINE_EVERY_S
        told.at("leadtime at 70%", 0.25)
        told.at("leadtime at 70%", 0.26)
        told.line("leadtime at 70%: done")
        clock[0] += LINE_EVERY_S / 2
        told.at("random at 70%", 0.5)
        clock[0] += LINE_EVERY_S / 2
        told.at("random at 70%", 0.75)
    assert out.getvalue().splitlines() == ["leadtime at 70%: 25%", "leadtime at 70%: done", "random at 70%: 75%"]


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    out = io.StringIO()
    with progress(Console(file=out, force_terminal=True, width=80)) as told:
        told.at("leadtime at 70%", 0.4)
        told.line("random at 70%: done")
    assert "random at 70%: done" in out.getvalue()
    assert "leadtime at 70%" in out.getvalue()
