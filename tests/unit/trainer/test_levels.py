"""Labels are brought to one level before a fit: of before a change, and of endpoints that differ from the pool."""

import dataclasses

import numpy as np
import pytest

from bench.queueing import observe
from services.trainer.cycle import CycleOptions, run_cycle
from services.trainer.levels import leveled, without_endpoints
from tests.unit.trainer.snapshots import NOW, window_of

SLOW = "10.0.0.2:8000"


def test_labels_of_before_a_change_are_moved_to_the_level_since(snapshot, first):
    """Everything takes half as long again from row 1,500 on."""
    slower = np.where(np.arange(len(snapshot)) >= 1_500, np.float32(1.5), np.float32(1.0))
    changed = dataclasses.replace(
        snapshot,
        targets={name: labels * slower for name, labels in snapshot.targets.items()},
        changed_at=int(snapshot.sequence[1_500]),
    )
    labels, moved = changed.targets["ttft"], leveled(changed, first.champion).targets["ttft"]
    assert moved[:1_500] / labels[:1_500] == pytest.approx(1.5, rel=0.12)
    np.testing.assert_array_equal(moved[1_500:], labels[1_500:])


def test_without_a_change_a_champion_or_rows_enough_labels_stay(snapshot, first):
    late = dataclasses.replace(snapshot, changed_at=int(snapshot.sequence[-10]))
    early = dataclasses.replace(snapshot, changed_at=1)
    for same, champion in ((snapshot, first.champion), (late, None), (late, first.champion), (early, first.champion)):
        for target, labels in leveled(same, champion).targets.items():
            np.testing.assert_array_equal(labels, snapshot.targets[target])


def test_what_a_label_tells_of_is_when_its_request_was_sent(snapshot, first):
    """Of the newest 500 rows every second one was sent before the change."""
    sent = snapshot.sequence.copy()
    sent[1_500::2] = sent[1_400]
    slower = np.where(sent >= sent[1_501], np.float32(1.5), np.float32(1.0))
    changed = dataclasses.replace(
        snapshot,
        sent=sent,
        targets={name: labels * slower for name, labels in snapshot.targets.items()},
        changed_at=int(sent[1_501]),
    )
    labels, moved = changed.targets["ttft"], leveled(changed, first.champion).targets["ttft"]
    assert moved[1_500::2] / labels[1_500::2] == pytest.approx(1.5, rel=0.15)
    np.testing.assert_array_equal(moved[1_501::2], labels[1_501::2])


def _with_a_slow_endpoint(snapshot, since):
    """One endpoint takes twice as long from row `since` on."""
    own = np.array([endpoint == SLOW for endpoint in snapshot.endpoints])
    slower = np.where(own & (np.arange(len(snapshot)) >= since), np.float32(2.0), np.float32(1.0))
    return own, dataclasses.replace(
        snapshot,
        targets={name: labels * slower for name, labels in snapshot.targets.items()},
        endpoints_changed_at={SLOW: int(snapshot.sequence[since])} if since else {},
    )


@pytest.mark.parametrize("since", [0, 1_000])
def test_an_endpoint_that_differs_is_brought_to_the_pools_level(snapshot, first, since):
    own, slow = _with_a_slow_endpoint(snapshot, since)
    alike = without_endpoints(slow, first.champion)
    for target in ("ttft", "tpot"):
        ratio = alike.targets[target] / snapshot.targets[target]
        known = np.isfinite(ratio)
        assert np.median(ratio[known & own]) == pytest.approx(1.0, abs=0.1)
        np.testing.assert_array_equal(ratio[known & ~own], 1.0)


def test_endpoints_that_are_alike_keep_their_labels(snapshot, first):
    for champion in (None, first.champion):
        for target, labels in without_endpoints(snapshot, champion).targets.items():
            np.testing.assert_array_equal(labels, snapshot.targets[target])


def test_a_slow_endpoint_is_its_calibrations_to_say_and_not_the_models(snapshot):
    """A model fitted beside a slow endpoint predicts the others as if it weren't there; the calibration knows it."""
    champion = run_cycle(window_of(observe(1000, seed=8)).snapshot(), None, CycleOptions("default"), NOW).champion
    _, slow = _with_a_slow_endpoint(snapshot, 0)
    alone, beside = (run_cycle(rows, champion, CycleOptions("default"), NOW + 1) for rows in (snapshot, slow))
    without, with_it = (report.champion.model.predict(snapshot.rows)[:, 0] for report in (alone, beside))
    assert np.median(with_it / without) == pytest.approx(1.0, abs=0.05)
    found = beside.calibrator.calibration("default", 1, 0.0, {})
    assert found.log_bias["ttft"] + found.endpoint_log_bias["ttft"][SLOW] == pytest.approx(np.log(2.0), abs=0.15)
