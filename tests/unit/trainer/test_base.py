"""The base of a model: what rows show is theirs, what they don't stays the prior's; thousands of rows stand alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.queueing import A100_70B, Scenario, observe
from services.trainer.base import FREE_ROWS, fit_base, unfitted
from services.trainer.basis import basis_of
from services.trainer.export import parity, parity_rows, render
from services.trainer.prior import prior_base
from services.trainer.train import FitOptions, fit
from shared.features import HARDWARE_CLASSES, SCHEMA, hardware_code
from shared.prediction import OUTPUTS, TARGETS
from shared.prior import PriorModel
from tests.unit.trainer.snapshots import prompts, rows_of, runner, snapshot_of, window_of

ANCHOR_ROWS = FitOptions().anchor_rows


def based(target, rows, y_ms, size="8b"):
    weights = np.ones(len(rows), np.float32)
    return fit_base(
        basis_of(target), rows, np.asarray(y_ms, np.float32), weights, prior_base(target, size), ANCHOR_ROWS
    )


def coefficients(base, hardware="unknown"):
    row = base.coefficients[base.slots[hardware_code(hardware)]]
    return dict(zip(base.basis.names, row.tolist(), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hardware", HARDWARE_CLASSES)
def test_without_a_row_it_is_the_prior_of_every_hardware_class(target, hardware):
    prior = prior_base(target, "8b")
    rows = rows_of(
        3,
        input_tokens=[100, 4000, 9000],
        uncached_tokens=[100, 3000, 500],
        pending_uncached_tokens=[0, 20_000, 500],
        decoding_requests=[0, 40, 200],
        decode_context_tokens=[0, 90_000, 400_000],
        hardware_class=hardware_code(hardware),
    )
    assert unfitted(prior).predict(rows) == pytest.approx(prior.predict(rows), rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(level=st.floats(0.2, 5.0), count=st.integers(8, 400), seed=st.integers(0, 1000))
def test_what_rows_never_met_keeps_the_priors_price_at_the_rows_level(level, count, seed):
    """Prompts on idle endpoints: backlog and batch cost what the prior says, as many times as slow as the rows are."""
    rows = prompts(np.random.default_rng(seed).integers(16, 4000, count))
    prior = prior_base("ttft", "8b")
    base = coefficients(based("ttft", rows, level * prior.predict(rows)))
    due = dict(zip(prior.basis.names, (level * prior.coefficients[0]).tolist(), strict=True))
    for name in ("pending uncached", "decoding", "decode context", "backlog beside decodes", "own uncached"):
        assert base[name] == pytest.approx(due[name], rel=0.02)


def test_what_rows_show_follows_the_rows():
    """Four times the prior's price of a pending token, seen by two hundred rows; the price of a batch wasn't seen."""
    rng = np.random.default_rng(1)
    rows = prompts(rng.integers(16, 2000, 200))
    rows[:, SCHEMA.index["pending_uncached_tokens"]] = rng.integers(0, 20_000, 200)
    prior = prior_base("ttft", "8b")
    dearer = np.where(np.array(prior.basis.names) == "pending uncached", 4.0, 1.0)
    y_ms = prior.basis.evaluate(rows) @ (prior.coefficients[0] * dearer)
    base = based("ttft", rows, y_ms)
    assert np.median(np.abs(base.predict(rows) / y_ms - 1.0)) < 0.05
    named = dict(zip(prior.basis.names, prior.coefficients[0].tolist(), strict=True))
    assert coefficients(base)["pending uncached"] > 3.0 * named["pending uncached"]


def test_a_class_without_rows_is_as_much_slower_as_the_prior_says():
    rows = prompts(np.linspace(100, 4000, 30))
    rows[:, SCHEMA.index["hardware_class"]] = hardware_code("h100")
    prior = prior_base("ttft", "8b")
    base = based("ttft", rows, 1.5 * prior.predict(rows))
    rows[:, SCHEMA.index["hardware_class"]] = hardware_code("a100")
    rows[:, SCHEMA.index["pending_uncached_tokens"]] = 10_000
    assert base.predict(rows) == pytest.approx(1.5 * prior.predict(rows), rel=0.03)


def test_a_rare_class_has_its_own_level_and_the_pools_shape():
    """A thousand rows of H100s, thirty of idle A100s that are twice as slow as the prior's: so is their backlog."""
    rng = np.random.default_rng(2)
    rows = prompts(rng.integers(16, 3000, 1030))
    rows[:, SCHEMA.index["hardware_class"]] = hardware_code("h100")
    rows[:1000, SCHEMA.index["pending_uncached_tokens"]] = rng.integers(0, 20_000, 1000)
    rows[1000:, SCHEMA.index["hardware_class"]] = hardware_code("a100")
    prior = prior_base("ttft", "8b")
    y_ms = prior.predict(rows) * np.where(np.arange(1030) < 1000, 1.0, 2.0)
    asked = prompts([1000.0])
    asked[:, SCHEMA.index["hardware_class"]] = hardware_code("a100")
    asked[:, SCHEMA.index["pending_uncached_tokens"]] = 20_000
    assert 1.3 < based("ttft", rows, y_ms).predict(asked)[0] / prior.predict(asked)[0] < 2.1


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_thousands_of_rows_stand_alone(size):
    observed = observe(FREE_ROWS + 500, seed=1, scenario=Scenario(pods=(A100_70B,)))
    weights = np.ones(len(observed.rows), np.float32)
    free = fit_base(basis_of("ttft"), observed.rows, observed.ttft_ms, weights, None, ANCHOR_ROWS)
    held = based("ttft", observed.rows, observed.ttft_ms, size)
    assert held.predict(observed.rows) == pytest.approx(free.predict(observed.rows), rel=0.01)


@pytest.mark.parametrize("hopper_rows", [0, 60, 400])
def test_beyond_the_longest_prompts_seen_each_class_grows_as_its_hardware_does(hopper_rows):
    """Rows of up to 1,024 tokens that say the same of both classes: a line goes on as one on A100, not on H100."""
    rng = np.random.default_rng(1)
    count = 400 + hopper_rows
    rows = rows_of(
        count,
        uncached_tokens=(own := rng.integers(16, 1025, count)),
        input_tokens=own,
        pending_uncached_tokens=(pending := rng.integers(0, 2000, count)),
        # Tells the backlog from its parts.
        oldest_pending_age_ms=rng.integers(0, 5000, count),
        hardware_class=np.where(np.arange(count) < 400, hardware_code("a100"), hardware_code("h100")),
    )
    y_ms = (20 + 0.1 * own + 0.05 * pending).astype(np.float32)
    base = fit_base(basis_of("ttft"), rows, y_ms, np.ones(count, np.float32), None, ANCHOR_ROWS)
    asked = prompts([1000.0, 8192.0])
    asked[:, SCHEMA.index["hardware_class"]] = hardware_code("a100")
    assert base.predict(asked) == pytest.approx([120.0, 839.2], rel=0.01)
    if hopper_rows:
        asked[:, SCHEMA.index["hardware_class"]] = hardware_code("h100")
        near, far = base.predict(asked)
        assert near == pytest.approx(120.0, rel=0.01)
        # 3 % of the slope from 1,024, 2,048 and 4,096 tokens on.
        assert far == pytest.approx(839.2 + 0.1 * (0.03 * 7168 + 0.0309 * 6144 + 0.031827 * 4096), rel=0.01)


@pytest.mark.parametrize("missing", [("ttft", "tpot"), ("tpot",), ("e2e",)])
def test_a_model_keeps_the_priors_targets_and_its_graph_says_the_same(missing):
    observed = observe(60, seed=4)
    labels = {"ttft": observed.ttft_ms, "tpot": observed.tpot_ms, "e2e": observed.e2e_ms}
    snapshot = snapshot_of(observed.rows, **{target: own for target, own in labels.items() if target not in missing})
    model = fit(snapshot, FitOptions(prior="8b"))
    assert model.outputs == OUTPUTS
    assert model.prior_targets == missing
    assert set(model.learned) == set(TARGETS) - set(missing)
    prior = PriorModel("8b")
    asked, said = model.predict(observed.rows), prior.predict(observed.rows)
    for target in missing:
        median, p90 = (OUTPUTS.index(f"{target}_{quantile}") for quantile in ("p50", "p90"))
        assert asked[:, median] == pytest.approx(said[:, median], rel=1e-4)
        assert (asked[:, p90] >= 0.999 * said[:, p90]).all()
    rows = parity_rows(model, observed.rows, np.random.default_rng(1))
    assert parity(runner(render(model)), model.predict(rows), rows).max_relative_error <= 1e-4


def test_without_a_prior_a_target_without_rows_is_absent():
    observed = window_of(observe(60, seed=4, scenario=Scenario(pods=(A100_70B,)))).snapshot()
    unstreamed = snapshot_of(observed.rows, e2e=observed.targets["e2e"])
    assert fit(unstreamed, FitOptions()).outputs == ("e2e_p50", "e2e_p90", "e2e_p99", "in_range")


def test_a_few_quick_answers_are_no_reason_for_a_narrow_spread():
    """Ten labels without an error, then a hundred: the spread begins at the prior's and comes down with rows."""
    spreads = []
    for count in (10, 100):
        rows = prompts(np.linspace(50, 2000, count))
        model = fit(snapshot_of(rows, ttft=20 + 0.05 * rows[:, 0]), FitOptions(prior="8b"))
        spreads.append(float(model.targets["ttft"].q90))
    assert 0.75 > spreads[0] > spreads[1] > 0.0
