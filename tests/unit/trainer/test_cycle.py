"""A whole cycle: from a snapshot to a verified bundle, or to a verdict that says why not."""

import dataclasses

import numpy as np
import pytest

from services.trainer import cycle
from services.trainer.champion import Champion
from services.trainer.cycle import CycleOptions, run_cycle, warmed
from services.trainer.export import Parity
from services.trainer.train import FitOptions
from services.trainer.views import report_view
from shared.bundle import pack, unpack
from shared.features import SCHEMA
from shared.inference import BundleModel
from shared.prediction import OUTPUTS as ALL_OUTPUTS
from tests.bundles import OUTPUTS, default_weights, linear_graph, make_bundle
from tests.unit.trainer.snapshots import NOW, prompts, snapshot_of


def test_a_first_cycle_makes_a_bundle_that_loads_and_predicts(snapshot, first):
    assert first.verdict.accepted
    bundle = unpack(pack(first.champion.bundle), pool="default", schema_hash=SCHEMA.hash)
    assert bundle.manifest.version == first.champion.version == f"1800000000000-{first.champion.version[-8:]}"
    assert bundle.manifest.renderings[0].parity_max_relative_error <= 1e-4
    assert bundle.manifest.renderings[0].parity_rows >= len(snapshot)
    assert bundle.manifest.window_samples == len(snapshot)
    assert BundleModel(bundle).predict(snapshot.rows[:5]).shape == (5, len(bundle.manifest.outputs))
    assert first.metrics["ttft"].samples > 50
    assert first.metrics["ttft"].mape < 0.4
    assert first.cpu_ms > 0


def test_the_new_calibration_has_seen_the_newest_rows(first):
    assert first.calibrator.bundle_version == first.champion.version
    assert first.calibrator.samples == 1000
    assert 0 < first.calibrator.live()["ttft"].mape < 0.4


def test_an_endpoint_that_has_been_silent_for_a_thousand_samples_is_believed_to_be_as_the_pool(snapshot, first):
    """Each bundle's calibration begins anew from the newest rows: what is said of an endpoint goes with its traffic."""
    silent = "10.0.0.9:8000"
    for spoke, known in ((1_001, True), (1_000, False)):
        endpoints = (*(silent,) * spoke, *snapshot.endpoints[spoke:])
        state = warmed(
            dataclasses.replace(snapshot, endpoints=endpoints), first.champion, CycleOptions("p").calibration
        )
        assert (silent in state.calibration("default", 1, 0.0, {}).endpoint_log_bias["ttft"]) is known


def test_the_same_rows_make_an_equal_challenger_which_may_replace_the_champion(snapshot, first):
    again = run_cycle(snapshot, first.champion, CycleOptions("default"), NOW + 1)
    assert again.verdict.accepted
    ours, theirs = again.verdict.log_error["ttft"]
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_worse_challenger_is_refused_with_a_reason_and_makes_no_bundle(snapshot, first):
    swapped = dataclasses.replace(
        snapshot, rows=np.concatenate([snapshot.rows[-1000:][::-1], snapshot.rows[1000:]])[-len(snapshot) :]
    )
    assert len(swapped) == len(snapshot)
    report = run_cycle(swapped, first.champion, CycleOptions("default"), NOW + 1)
    assert not report.verdict.accepted
    assert report.verdict.reason.startswith("worse_")
    assert "champion" in report.verdict.detail
    assert report.champion is None


def test_a_saved_bundle_that_answers_nonsense_is_replaced_and_teaches_nothing(snapshot):
    graph = linear_graph(-default_weights(len(OUTPUTS)), 10.0)
    bundle = make_bundle(graph=graph)
    saved = Champion(bundle, BundleModel(bundle), saved=True)
    assert run_cycle(snapshot, saved, CycleOptions("default"), NOW).verdict.accepted
    assert warmed(snapshot, saved, CycleOptions("default").calibration).samples == 0


def test_a_graph_that_strays_is_never_published(snapshot, monkeypatch):
    monkeypatch.setattr(cycle, "parity", lambda *_: Parity(3e-4, 100))
    report = run_cycle(snapshot, None, CycleOptions("default"), NOW)
    assert (report.verdict.accepted, report.verdict.reason) == (False, "parity")
    assert report.champion is None
    assert report.parity.max_relative_error == 3e-4


def test_a_model_that_cannot_be_exported_is_never_published(snapshot, monkeypatch):
    def refuse(*_):
        raise ValueError("no converter")

    monkeypatch.setattr(cycle, "render", refuse)
    report = run_cycle(snapshot, None, CycleOptions("default"), NOW)
    assert (report.verdict.accepted, report.verdict.reason, report.verdict.detail) == (False, "export", "no converter")


def test_too_few_rows_end_the_cycle():
    report = run_cycle(snapshot_of(prompts([5, 6]), ttft=[1, 2]), None, CycleOptions("default"), NOW)
    assert (report.verdict.accepted, report.verdict.reason) == (False, "too_few_rows")


@pytest.mark.parametrize("count", [10, 30, 100])
def test_a_first_model_comes_from_ten_samples(count):
    rng = np.random.default_rng(1)
    tokens = rng.integers(16, 2000, count)
    report = run_cycle(
        snapshot_of(prompts(tokens), ttft=20 + 0.1 * tokens, e2e=500 + 0.2 * tokens), None, CycleOptions("p"), NOW
    )
    assert report.verdict.accepted
    assert report.champion.model.outputs == (
        "ttft_p50", "ttft_p90", "ttft_p99", "e2e_p50", "e2e_p90", "e2e_p99", "in_range",
    )  # fmt: skip


def test_cut_off_requests_are_judged_and_not_fitted(snapshot, first):
    cut_off = dataclasses.replace(
        snapshot, censored_rows=snapshot.rows[:200], censored_ms=np.full(200, 1e7, np.float32)
    )
    report = run_cycle(cut_off, None, CycleOptions("default"), NOW)
    assert report.censored_beyond_p90 == 1.0
    assert report.champion.bundle.manifest.renderings[0].sha256 == first.champion.bundle.manifest.renderings[0].sha256


def test_more_trees_are_a_matter_of_options(snapshot):
    report = run_cycle(snapshot, None, CycleOptions("default", fit=FitOptions(rounds=5, depth=2)), NOW)
    assert report.verdict.accepted


def test_a_report_is_plain_data(first):
    view = report_view(first)
    assert view["metrics"]["ttft"]["mape"] == first.metrics["ttft"].mape
    assert view["parity"]["rows"] == first.parity.rows
    assert set(view["gains"]) == {"ttft", "tpot", "e2e"}


WITH_PRIOR = CycleOptions("default", fit=FitOptions(prior="8b"))


def without(snapshot, *targets):
    unknown = np.full(len(snapshot), np.nan, np.float32)
    return dataclasses.replace(snapshot, targets={**snapshot.targets, **dict.fromkeys(targets, unknown)})


def test_a_first_bundle_of_answers_that_were_not_streamed_has_all_targets_and_says_which_are_the_priors(snapshot):
    report = run_cycle(without(snapshot, "ttft", "tpot"), None, WITH_PRIOR, NOW)
    assert report.verdict.accepted
    bundle = unpack(pack(report.champion.bundle), pool="default", schema_hash=SCHEMA.hash)
    assert bundle.manifest.outputs == list(ALL_OUTPUTS)
    assert bundle.manifest.prior_targets == ["ttft", "tpot"]
    assert bundle.manifest.metrics.keys() == {"e2e"}
    assert bundle.manifest.renderings[0].parity_max_relative_error <= 1e-4
    assert BundleModel(bundle).predict(snapshot.rows[:5]).shape == (5, len(ALL_OUTPUTS))


def test_a_few_labels_that_are_far_from_the_prior_refuse_no_bundle_over_it(snapshot):
    """Nine streamed answers among hundreds: too few to fit, and no reason to call the prior hopeless."""
    streamed = np.full(len(snapshot), np.nan, np.float32)
    streamed[-9:] = 3_600_000.0
    few = without(snapshot, "tpot")
    few = dataclasses.replace(few, targets={**few.targets, "ttft": streamed})
    report = run_cycle(few, None, WITH_PRIOR, NOW)
    assert report.verdict.accepted
    assert report.champion.bundle.manifest.prior_targets == ["ttft", "tpot"]


@pytest.mark.parametrize("options", [WITH_PRIOR, CycleOptions("default")], ids=["prior", "no prior"])
def test_no_bundle_takes_the_place_of_one_that_has_learned_more_targets(snapshot, first, options):
    report = run_cycle(without(snapshot, "ttft", "tpot"), first.champion, options, NOW + 1)
    assert (report.verdict.accepted, report.verdict.reason) == (False, "fewer_targets")
    assert "ttft, tpot" in report.verdict.detail


def test_what_was_the_priors_is_replaced_by_what_was_learned(snapshot):
    early = run_cycle(without(snapshot, "ttft", "tpot"), None, WITH_PRIOR, NOW).champion
    later = run_cycle(snapshot, early, WITH_PRIOR, NOW + 1)
    assert later.verdict.accepted
    assert later.champion.bundle.manifest.prior_targets == []
