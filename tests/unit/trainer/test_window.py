"""The training window keeps rare regimes, stays bounded, and orders by arrival."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.window import BINS, KV_BINS, PREFIX_BINS, SampleWindow, bin_of, held_out_rows
from shared.features import SCHEMA
from tests.unit.trainer.snapshots import rows_of


def row(kv: float = 0.0, known: float = 1.0, tokens: float = 100.0, uncached: float = 100.0):
    return rows_of(1, kv_cache_utilization=kv, scrape_known=known, input_tokens=tokens, uncached_tokens=uncached)[0]


@pytest.mark.parametrize(
    ("kv", "known", "tokens", "uncached", "expected"),
    [
        (0.0, 1, 100, 100, 0),
        (0.0, 1, 100, 76, 0),
        (0.0, 1, 100, 75, 1),
        (0.0, 1, 100, 0, PREFIX_BINS - 1),
        (0.55, 1, 100, 100, 5 * PREFIX_BINS),
        (1.0, 1, 100, 100, (KV_BINS - 1) * PREFIX_BINS),
        (0.55, 0, 100, 100, KV_BINS * PREFIX_BINS),
        (0.0, 1, 0, 0, PREFIX_BINS - 1),
        (0.0, 1, 10, 50, 0),
    ],
)
def test_bins_are_tenths_of_kv_and_quarters_of_prefix_hit(kv, known, tokens, uncached, expected):
    assert bin_of(row(kv, known, tokens, uncached)) == expected


def test_a_flood_of_one_regime_leaves_the_rare_one_in_place():
    window = SampleWindow(bin_rows=50)
    window.add(row(kv=0.95), {"ttft": 900.0}, "rare")
    for i in range(10_000):
        window.add(row(kv=0.15), {"ttft": 100.0 + i}, "common")
    snapshot = window.snapshot()
    assert len(snapshot) == 51
    assert snapshot.endpoints[0] == "rare"
    assert snapshot.targets["ttft"][1:].min() == 100.0 + 9_950


def test_the_newest_of_a_full_bin_stay_in_order_of_arrival():
    window = SampleWindow(bin_rows=3)
    for i in range(5):
        window.add(row(), {"e2e": float(i + 1)}, "a")
    snapshot = window.snapshot()
    assert snapshot.targets["e2e"].tolist() == [3.0, 4.0, 5.0]
    assert snapshot.sequence.tolist() == [3, 4, 5]
    assert window.snapshot(newer_than=4).targets["e2e"].tolist() == [5.0]


def test_the_newest_are_kept_whatever_their_bin_and_older_ones_move_into_bins():
    window = SampleWindow(recent_rows=100, bin_rows=5)
    window.add(row(kv=0.95), {"ttft": 900.0}, "rare")
    for i in range(300):
        window.add(row(kv=0.15), {"ttft": float(i + 1)}, "common")
    snapshot = window.snapshot()
    assert len(window) == len(snapshot) == 106
    assert snapshot.endpoints[0] == "rare"
    assert snapshot.rows[0].tolist() == row(kv=0.95).tolist()
    assert snapshot.targets["ttft"][1:].tolist() == [float(i) for i in range(196, 301)]
    assert window.composition()["kv_cache_utilization"]["0.1-0.2"] == 105


def test_rows_of_before_a_change_weigh_less():
    window = SampleWindow(recent_rows=10)
    for _ in range(4):
        window.add(row(), {"e2e": 1.0}, "a")
    plain = window.snapshot().weights(half_life=1e9, floor=0.1)
    window.changed_at = 3
    assert window.snapshot().weights(half_life=1e9, floor=0.1) / plain == pytest.approx([0.3, 0.3, 1, 1])


def test_an_unknown_target_is_counted_for_none():
    window = SampleWindow()
    window.add(row(), {"e2e": 5.0}, "a")
    window.add(row(), {"ttft": 1.0, "tpot": 2.0, "e2e": 9.0}, "a")
    assert [window.known(target) for target in ("ttft", "tpot", "e2e")] == [1, 1, 2]
    snapshot = window.snapshot()
    assert snapshot.known("ttft").tolist() == [1]
    assert np.isfinite(snapshot.rows).all()


def test_cut_off_requests_are_kept_apart_and_bounded():
    window = SampleWindow(censored=10)
    for i in range(25):
        window.add_censored(row(), float(i))
    snapshot = window.snapshot()
    assert len(window) == 0
    assert snapshot.censored_ms.tolist() == [float(i) for i in range(15, 25)]
    assert snapshot.censored_rows.shape == (10, len(SCHEMA))


def test_weights_halve_with_the_half_life_and_stop_at_the_floor():
    window = SampleWindow()
    for _ in range(401):
        window.add(row(kv=np.random.default_rng(1).random()), {"e2e": 1.0}, "a")
    weights = window.snapshot().weights(half_life=100, floor=0.1)
    assert weights[-1] == 1.0
    assert weights[-101] == pytest.approx(0.5)
    assert weights[0] == pytest.approx(0.1)


def test_a_snapshot_is_a_copy():
    window = SampleWindow()
    window.add(row(), {"e2e": 1.0}, "a")
    snapshot = window.snapshot()
    window.add(row(), {"e2e": 2.0}, "b")
    snapshot.rows[:] = -1
    assert len(snapshot) == 1
    assert (window.snapshot().rows >= 0).all()


def test_composition_counts_every_row_once():
    window = SampleWindow(bin_rows=5)
    for kv in (0.05, 0.05, 0.95):
        window.add(row(kv=kv), {"e2e": 1.0}, "a")
    window.add(row(known=0.0, uncached=10.0), {"e2e": 1.0}, "a")
    table = window.composition()
    assert table["kv_cache_utilization"]["0.0-0.1"] == 2
    assert table["kv_cache_utilization"]["unknown"] == 1
    assert table["prefix_hit_ratio"]["0.75-1.00"] == 1
    assert sum(table["prefix_hit_ratio"].values()) == len(window) == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=200), st.integers(1, 4), st.integers(0, 60))
def test_it_never_outgrows_its_bins_and_never_reorders(points, bin_rows, recent_rows):
    window = SampleWindow(recent_rows=recent_rows, bin_rows=bin_rows)
    for number, (kv, uncached) in enumerate(points, start=1):
        window.add(row(kv=kv, uncached=100 * uncached), {"e2e": float(number)}, "a")
    snapshot = window.snapshot()
    assert len(window) == len(snapshot) <= BINS * bin_rows + recent_rows
    newest = range(max(1, len(points) - recent_rows + 1), len(points) + 1)
    assert set(newest) <= set(snapshot.sequence.tolist())
    assert sum(window.composition()["prefix_hit_ratio"].values()) == len(window)
    assert (np.diff(snapshot.sequence) > 0).all()
    assert snapshot.targets["e2e"].tolist() == snapshot.sequence.astype(float).tolist()
    if points:
        assert snapshot.sequence[-1] == len(points)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, 0), (3, 0), (8, 2), (10, 2), (100, 25), (300, 30), (1000, 100), (2900, 290), (50_000, 300)],
)
def test_a_tenth_is_held_out_but_at_least_a_few(count, expected):
    assert held_out_rows(count, 0.1) == expected
