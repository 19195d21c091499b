"""A window of simulated requests and the first cycle on it: made once, changed by nobody."""

import pytest

from bench.queueing import observe
from services.trainer.cycle import CycleOptions, CycleReport, run_cycle
from services.trainer.window import Snapshot
from tests.unit.trainer.snapshots import NOW, window_of


@pytest.fixture(scope="session")
def snapshot() -> Snapshot:
    return window_of(observe(2000, seed=7)).snapshot()


@pytest.fixture(scope="session")
def first(snapshot: Snapshot) -> CycleReport:
    return run_cycle(snapshot, None, CycleOptions("default"), NOW)
