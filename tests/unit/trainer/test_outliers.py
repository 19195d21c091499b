"""Labels that can't be true stay out of the fit; a pool that changed and a slow endpoint are no lies."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.queueing import as_samples, observe
from services.trainer.intake import Intake, Reject, Taken
from services.trainer.outliers import LOG_LIMIT, NEWEST_ROWS, believed, false_labels
from services.trainer.train import FitOptions, fit
from services.trainer.window import SampleWindow
from shared.prediction import TARGETS
from shared.samples import LatencySample, encode_sample
from tests.unit.trainer.snapshots import line_snapshot, prompts, snapshot_of

OPTIONS = FitOptions()


def noise(count, seed=1):
    return np.random.default_rng(seed).normal(0.0, 0.3, count)


def one_endpoint(count):
    return np.zeros(count, np.int64)


def test_honest_labels_are_all_believed():
    assert not false_labels(noise(1000), one_endpoint(1000)).any()


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_labels_off_by_a_hundred_are_not_believed(factor):
    errors = noise(1000)
    errors[::10] += np.log(factor)
    out = false_labels(errors, one_endpoint(1000))
    assert np.flatnonzero(out).tolist() == list(range(0, 1000, 10))


def test_a_pool_that_became_twenty_times_slower_is_believed():
    errors = noise(1000)
    errors[-NEWEST_ROWS // 2 :] += np.log(20.0)
    assert not false_labels(errors, one_endpoint(1000)).any()


def test_an_endpoint_that_is_always_slow_is_believed_and_a_lie_elsewhere_is_not():
    errors, endpoints = noise(1000), np.arange(1000) % 20
    errors[endpoints == 3] += np.log(30.0)
    errors[4] += np.log(100.0)
    assert np.flatnonzero(false_labels(errors, endpoints)).tolist() == [4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=300), st.integers(1, 5))
def test_no_row_near_the_median_is_ever_left_out_and_never_most_rows(errors, endpoints):
    values = np.array(errors)
    out = false_labels(values, np.arange(len(values)) % endpoints)
    assert not out[np.abs(values - np.median(values)) <= LOG_LIMIT].any()
    assert out.mean() <= 0.5


def test_passes_end_when_nothing_changes():
    fitted = []

    def errors_of(kept):
        fitted.append(int(kept.sum()))
        errors = noise(100)
        errors[7] = 9.0
        return errors

    assert np.flatnonzero(~believed(errors_of, one_endpoint(100))).tolist() == [7]
    assert fitted == [100, 99]


@pytest.mark.parametrize("count", [10, 30, 300, 2000])
def test_a_tenth_of_labels_times_a_hundred_leaves_the_line_where_it_was(count):
    clean = line_snapshot(count)
    labels = clean.targets["ttft"].copy()
    labels[3::10] *= 100.0
    model = fit(snapshot_of(clean.rows, ttft=labels), OPTIONS)
    predicted = model.predict(prompts([100, 1000]))[:, 0]
    assert predicted == pytest.approx([30.0, 120.0], rel=0.3 if count < 100 else 0.1)


def poisoned(samples: list[LatencySample], seed: int, kinds: tuple[int, ...] = (0, 1, 2, 3)) -> list[bytes]:
    """Each tenth message lies: labels ×100 (0), negative (1), not a number (2), or a stamp from the far future (3)."""
    rng = np.random.default_rng(seed)
    messages = []
    for sample in samples:
        data = encode_sample(sample)
        if rng.random() < 0.1:
            kind = rng.choice(kinds)
            if kind == 0:
                factors = {name: getattr(sample, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
                changed = {name: 100.0 * value for name, value in factors.items() if value is not None}
                data = encode_sample(msgspec.structs.replace(sample, **changed))
            elif kind == 1:
                data = encode_sample(msgspec.structs.replace(sample, ttft_ms=-sample.ttft_ms))
            elif kind == 2:
                data = data.replace(b'"ttft_ms":', b'"ttft_ms":NaN,"was":')
            else:
                data = encode_sample(msgspec.structs.replace(sample, completed_unix_ms=9e13))
        messages.append(data)
    return messages


def trained(messages: list[bytes], now_unix_ms: float):
    """The model of what intake takes of these messages, and the reasons of the rest."""
    intake, window, reasons = Intake("default", remembered=100_000), SampleWindow(bin_rows=5_000), []
    for message in messages:
        outcome = intake.examine(message, now_unix_ms)
        if isinstance(outcome, Taken):
            window.add(outcome.row, outcome.targets, outcome.sample.endpoint)
        else:
            reasons.append(outcome)
    return fit(window.snapshot(), OPTIONS), reasons


@pytest.mark.parametrize("kinds", [(0, 1, 2, 3), (0,)], ids=["four ways", "all x100"])
def test_a_poisoned_stream_moves_the_models_error_by_a_tenth_at_most(kinds):
    """Same requests, a tenth of them false: error on clean rows that neither model saw, mean of three streams."""
    errors = {(target, name): [] for target in TARGETS for name in ("clean", "dirty")}
    covered = {key: [] for key in errors}
    for seed in (1, 2, 3):
        observed = observe(5_000, seed=seed)
        samples = as_samples(observed)
        now = max(sample.completed_unix_ms for sample in samples)
        clean, none = trained([encode_sample(sample) for sample in samples[:3_500]], now)
        dirty, reasons = trained(poisoned(samples[:3_500], seed, kinds), now)
        assert none == []
        assert set(reasons) == ({Reject.MALFORMED, Reject.CLOCK} if len(kinds) > 1 else set())
        for target in TARGETS:
            assert dirty.disbelieved[target] > 40
            actual = getattr(observed, f"{target}_ms")[3_500:]
            known = np.isfinite(actual)
            for name, model in (("clean", clean), ("dirty", dirty)):
                predicted = model.predict(observed.rows[3_500:][known])
                median, upper = (predicted[:, model.outputs.index(f"{target}_{q}")] for q in ("p50", "p90"))
                errors[target, name].append(np.abs(median / actual[known] - 1).mean())
                covered[target, name].append((actual[known] <= upper).mean())
    for target in TARGETS:
        assert np.mean(errors[target, "dirty"]) <= 1.1 * np.mean(errors[target, "clean"])
        assert abs(np.mean(covered[target, "dirty"]) - np.mean(covered[target, "clean"])) < 0.05


def test_ignoring_false_labels_costs_honest_rows_nothing():
    snapshot = line_snapshot(500)
    assert fit(snapshot, OPTIONS).disbelieved == {"ttft": 0}


def test_what_one_endpoint_says_against_all_others_is_its_own():
    """Pods without a hardware class, one of them 30 times slower: its rows stay in the fit."""
    snapshot = line_snapshot(600)
    slow = np.arange(600) % 6 == 0
    labels = snapshot.targets["ttft"] * np.where(slow, 30.0, 1.0)
    mixed = snapshot_of(snapshot.rows, ttft=labels)
    endpoints = tuple("10.0.0.2:8000" if one else "10.0.0.1:8000" for one in slow)
    assert fit(dataclasses.replace(mixed, endpoints=endpoints), OPTIONS).disbelieved == {"ttft": 0}
    assert fit(mixed, OPTIONS).disbelieved["ttft"] > 50
