"""When a fit is due."""

import pytest

from services.trainer.cadence import Cadence


@pytest.mark.parametrize(
    ("now_ms", "last_fit_ms", "samples", "new_samples", "saved", "due", "why"),
    [
        (0, None, 9, 9, False, False, "9 of 10 samples"),
        (0, None, 10, 10, False, True, "10 new samples"),
        (0, None, 99, 99, True, False, "99 of 100 samples"),
        (0, None, 100, 100, True, True, "100 new samples"),
        (9_999, 0, 50, 5, False, False, "interval not over"),
        (10_000, 0, 50, 5, False, True, "5 new samples"),
        (3_600_000, 0, 5_000, 0, False, False, "no new samples"),
    ],
)
def test_a_fit_is_due_when_enough_is_there_something_is_new_and_the_interval_is_over(
    now_ms, last_fit_ms, samples, new_samples, saved, due, why
):
    verdict = Cadence().due(
        now_ms=now_ms, last_fit_ms=last_fit_ms, samples=samples, new_samples=new_samples, saved=saved
    )
    assert verdict == (due, why)
