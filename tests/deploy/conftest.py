"""One engine and one stack for the whole folder: its tests are steps of one story, in the order of the file."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.compose_stack import ComposeStack, open_stack
from tests.deploy.engine import engine

_FACTS = pytest.StashKey[dict[str, Any]]()
_LOGS = pytest.StashKey[str]()


def end_as_by_hand(number: int, _: object) -> None:
    """SIGTERM as Ctrl-C: what was started is stopped and removed before the end."""
    raise KeyboardInterrupt(f"signal {number}")


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> Iterator[ComposeStack]:
    """Images built from this checkout; nothing runs yet."""
    signal.signal(signal.SIGTERM, end_as_by_hand)
    with engine() as source:
        stack = open_stack()
        request.config.stash[_FACTS] = stack.facts
        stack.facts["base_images"] = source
        try:
            stack.timed("build_s", "build", "--quiet")
            yield stack
            if request.session.testsfailed:
                request.config.stash[_LOGS] = stack.logs()
        finally:
            stack.close()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if logs := config.stash.get(_LOGS, ""):
        terminalreporter.section("what the containers said")
        terminalreporter.write_line(logs)
    facts = config.stash.get(_FACTS, None)
    if facts is not None:
        terminalreporter.write_line(json.dumps(facts))
