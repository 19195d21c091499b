"""From what was seen to what is said: void phases, prediction errors, the report's keys."""

from dataclasses import replace

import pytest
from rich.console import Console

from deploy.local.results import PhaseOutcome, prediction_error, report
from deploy.local.screen import result_table, summary_lines, ttft_p90_ratios
from shared.samples import LatencySample
from sim.loadgen import Distribution, LoadSummary
from tests.samples import make_sample

FLAT = Distribution(100, 100.0, 100.0, 100.0, 100.0)
PUNCTUAL = Distribution(100, 0.5, 0.5, 1.0, 2.0)
LOAD = LoadSummary(100, 0, FLAT, FLAT, FLAT, PUNCTUAL, 1_000, 500, 0.5, {"fast-1": 100}, {})


def outcome(name: str, **changes: object) -> PhaseOutcome:
    phase = PhaseOutcome(
        name=name,
        load=LOAD,
        simulator_lateness_mean_ms=0.5,
        simulator_lateness_p99_ms=2.0,
        served_by={"predictor": 90, "in_process": 8, "heuristic": 2, "shadow": 0},
        bundles={f"{name}-bundle": 98},
        samples=(sample(110.0, 100.0),),
        cpu_share={"router": 0.1},
    )
    return replace(phase, **changes)  # type: ignore[arg-type]


def sample(predicted_ms: float | None, actual_ms: float | None) -> LatencySample:
    prediction = None if predicted_ms is None else {"ttft_p50": predicted_ms}
    return make_sample("d", prediction=prediction, ttft_ms=actual_ms)


def three(**changes: object) -> list[PhaseOutcome]:
    return [outcome("round-robin"), outcome("load-prefix"), outcome("leadtime", **changes)]


def test_a_punctual_phase_is_not_void() -> None:
    assert not outcome("p").void


@pytest.mark.parametrize(
    "late",
    [
        {"load": replace(LOAD, lateness=Distribution(100, 5.1, 0.1, 0.1, 400.0))},
        {"simulator_lateness_mean_ms": 5.1},
        {"load": replace(LOAD, ttft=Distribution.of([]))},
    ],
)
def test_a_phase_is_void_when_client_or_simulator_is_late_or_nothing_answered(late: dict[str, object]) -> None:
    assert outcome("p", **late).void


def test_five_per_cent_of_the_median_is_still_allowed() -> None:
    assert not outcome("p", simulator_lateness_mean_ms=5.0).void


def test_prediction_error_counts_only_pairs() -> None:
    error = prediction_error([sample(110, 100), sample(80, 100), sample(150, 100), sample(None, 100), sample(50, None)])
    assert error.samples == 3
    assert error.mape == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert error.bias == pytest.approx(0.1)


def test_without_a_pair_the_error_is_unknown() -> None:
    assert prediction_error([sample(None, 1.0)]).mape is None


def test_the_report_has_the_agreed_keys() -> None:
    made = report(outcome("learning"), three())
    assert set(made) >= {"requests", "failed", "samples", "bundles", "void", "served_by", "prediction", "policies"}
    assert set(made["served_by"]) == {"predictor", "in_process", "prior", "heuristic"}
    assert set(made["prediction"]) >= {"ttft_mape", "ttft_bias"}
    assert list(made["policies"]) == ["round-robin", "load-prefix", "leadtime"]
    for policy in made["policies"].values():
        assert set(policy) >= {"ttft_p50_ms", "ttft_p90_ms", "e2e_p50_ms"}


def test_the_report_counts_all_phases_and_judges_the_measured_ones() -> None:
    made = report(outcome("learning"), three())
    assert (made["requests"], made["failed"], made["samples"], made["bundles"]) == (400, 0, 4, 4)
    assert made["served_by"] == {"predictor": 270, "in_process": 24, "prior": 0, "heuristic": 6}
    assert made["void"] is False


def test_a_void_phase_is_named_in_report_table_and_summary() -> None:
    made = report(outcome("learning"), three(simulator_lateness_mean_ms=9.0))
    assert (made["void"], made["void_phases"]) == (True, ["leadtime"])
    assert any("VOID: leadtime" in line for line in summary_lines(made))
    assert "leadtime (void)" in text_of(made)


def test_failures_are_said_with_their_reasons() -> None:
    failed = replace(LOAD, failed=2, failures={"status 503": 2})
    made = report(outcome("learning", load=failed), three())
    assert made["failed"] == 2
    assert "failed under learning: 2 x status 503" in summary_lines(made)


def test_ratios_compare_leadtime_with_its_rivals() -> None:
    better = replace(LOAD, ttft=replace(FLAT, p90_ms=50.0))
    assert ttft_p90_ratios(report(outcome("learning"), three(load=better))) == [
        ("round-robin", 0.5),
        ("load-prefix", 0.5),
    ]


def text_of(made: dict[str, object]) -> str:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(result_table(made))
    return console.export_text()
