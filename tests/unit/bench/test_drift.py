"""How many labels it takes until errors are what they were before a change."""

import numpy as np
import pytest

from bench.model_drift import ROLLING, labels_to_recover
from bench.recording import SCENARIOS, Recording, Shift

COUNT = 1_000
CHANGE = 400


@pytest.fixture
def recording():
    """A request a millisecond that ends 1 ms later; nothing else happens."""
    dispatched = np.arange(COUNT, dtype=np.float64)
    ones = np.ones(COUNT, np.int64)
    return Recording(
        SCENARIOS["poisson-2048"], [], dispatched, dispatched + 0.5, dispatched + 1.0, np.zeros(COUNT, bool),
        ones, ones, ones, ones, ones,
    )  # fmt: skip


def recovered(recording, wrong_until, wrong=0.5):
    relative = np.full(COUNT, 0.1)
    relative[CHANGE:wrong_until] = wrong
    return labels_to_recover(recording, relative, np.arange(COUNT), Shift(float(CHANGE), 1.5), 0.1)


def test_the_last_wrong_label_leaves_the_rolling_mean_a_window_later(recording):
    # One or three of a hundred at ×5 are within 15 % of the mean; the count starts with the change.
    assert recovered(recording, CHANGE + 50) == 50 + ROLLING - 3


def test_what_never_recovers_has_no_number(recording):
    assert recovered(recording, COUNT) is None


def test_what_was_never_hurt_takes_none(recording):
    assert recovered(recording, CHANGE) == 0
