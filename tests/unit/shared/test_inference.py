"""A bundle runs as its manifest says or not at all; calibration bends predictions in one place, within bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bundle import Calibration
from shared.errors import IntegrityError
from shared.features import SCHEMA
from shared.inference import (
    CPU_PROVIDER,
    MAX_LOG_CORRECTION,
    BundleModel,
    CompiledCalibration,
    as_columns,
    calibrate,
)
from tests.bundles import OUTPUTS, default_weights, expected, linear_graph, make_bundle, rows_of

VERSION = "1700000000000-0123abcd"
QUANTILES = ("ttft_p50", "ttft_p90", "ttft_p99")


def calibration(**changes) -> Calibration:
    return Calibration(
        **{"pool": "default", "bundle_version": VERSION, "sequence": 1, "updated_unix_ms": 0.0, **changes}
    )


def apply(raw, given_calibration, *, backlog=None, addresses=None, outputs=QUANTILES, version=VERSION):
    raw = np.asarray(raw, np.float32)
    return calibrate(
        raw,
        outputs,
        version,
        given_calibration,
        np.zeros(len(raw), np.float32) if backlog is None else np.asarray(backlog, np.float32),
        addresses or ["10.0.0.1:8000"] * len(raw),
    )


def test_a_bundle_answers_every_row_in_order():
    model = BundleModel(make_bundle(offset=3.0))
    rows = rows_of(5, 1, 900)
    assert (model.outputs, model.provider, model.rendering) == (OUTPUTS, CPU_PROVIDER, "tree_ensemble")
    assert np.array_equal(model.predict(rows), expected(rows, offset=3.0))


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (b"no graph", "loaded"),
        (linear_graph(np.zeros((len(SCHEMA) - 1, len(OUTPUTS)), np.float32), 0.0), "columns"),
        (linear_graph(default_weights(len(OUTPUTS) + 1), 0.0), "answers"),
        (linear_graph(default_weights(len(OUTPUTS)), np.nan), "no latency"),
    ],
)
def test_a_graph_that_does_not_fit_its_manifest_is_refused(graph, says):
    with pytest.raises(IntegrityError, match=says):
        BundleModel(make_bundle(graph=graph))


def test_without_a_calibration_the_raw_answer_is_passed_on():
    raw = np.ones((2, 3), np.float32)
    assert apply(raw, None) is raw


def test_a_calibration_of_another_bundle_is_ignored():
    raw = np.ones((2, 3), np.float32)
    assert apply(raw, calibration(bundle_version="other", log_bias={"ttft": 1.0})) is raw


def test_the_bias_of_a_target_multiplies_all_its_quantiles_and_no_other_column():
    raw = [[100, 200, 300, 50, 1]]
    bent = apply(raw, calibration(log_bias={"ttft": float(np.log(1.5))}), outputs=(*QUANTILES, "tpot_p50", "in_range"))
    assert np.allclose(bent, [[150, 300, 450, 50, 1]])


def test_the_raw_answer_is_left_as_it_was():
    raw = np.full((1, 3), 100, np.float32)
    apply(raw, calibration(log_bias={"ttft": 1.0}))
    assert (raw == 100).all()


def test_an_endpoints_own_bias_applies_to_its_rows_alone():
    bent = apply(
        [[100, 100, 100]] * 2,
        calibration(endpoint_log_bias={"ttft": {"10.0.0.2:8000": float(np.log(2))}}),
        addresses=["10.0.0.1:8000", "10.0.0.2:8000"],
    )
    assert np.allclose(bent[:, 0], [100, 200])


@pytest.mark.parametrize(("backlog", "factor"), [(0, 1.1), (99, 1.1), (100, 1.2), (999, 1.2), (1000, 1.3), (1e6, 1.3)])
def test_a_quantiles_offset_is_that_of_the_backlogs_bin(backlog, factor):
    offsets = {"ttft_p90": [float(np.log(f)) for f in (1.1, 1.2, 1.3)]}
    bent = apply(
        [[100, 100, 1000]],
        calibration(backlog_edges_tokens=[100, 1000], quantile_log_offset=offsets),
        backlog=[backlog],
    )
    assert np.allclose(bent, [[100, 100 * factor, 1000]])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(*[st.floats(0.125, 2**20, width=32)] * 3), min_size=1, max_size=5),
    st.floats(-10, 10),
    st.lists(st.floats(-10, 10), min_size=2, max_size=2),
    st.floats(0, 2**20, width=32),
)
def test_quantiles_never_cross_and_no_correction_exceeds_its_bound(raw, bias, offsets, backlog):
    bent = apply(
        raw,
        calibration(log_bias={"ttft": bias}, backlog_edges_tokens=[1000.0], quantile_log_offset={"ttft_p90": offsets}),
        backlog=[backlog] * len(raw),
    )
    assert (np.diff(bent, axis=1) >= 0).all()
    assert np.isfinite(bent).all()
    ratio = bent[:, 0] / np.asarray(raw, np.float32)[:, 0]
    assert (np.abs(np.log(ratio)) <= MAX_LOG_CORRECTION + 1e-4).all()


def test_columns_are_named_by_the_bundles_own_outputs():
    columns = as_columns(np.array([[1, 2], [3, 4]], np.float32), ("ttft_p50", "in_range"))
    assert {name: column.tolist() for name, column in columns.items()} == {"ttft_p50": [1, 3], "in_range": [2, 4]}


def test_a_compiled_calibration_may_be_applied_again_and_again():
    compiled = CompiledCalibration(
        calibration(log_bias={"ttft": 0.5}, endpoint_log_bias={"ttft": {"10.0.0.1:8000": 0.1}}), QUANTILES
    )
    raw, backlog = np.full((2, 3), 100, np.float32), np.zeros(2, np.float32)
    first = compiled.apply(raw, backlog, ["10.0.0.1:8000", "10.0.0.9:8000"])
    assert np.array_equal(compiled.apply(raw, backlog, ["10.0.0.1:8000", "10.0.0.9:8000"]), first)
    assert (raw == 100).all()
