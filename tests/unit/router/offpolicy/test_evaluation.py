"""A decision log and another profile: what is asked of it, what of its outcomes counts, and what can't be read."""

import asyncio
import shutil

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.router.offpolicy.estimate import Verdict
from services.router.offpolicy.evaluation import Metric, evaluate_profile
from services.router.offpolicy.log import (
    LoggedDecision,
    LoggedOutcome,
    context_of,
    encode_line,
    failure_of,
    join,
    logged_decision,
    outcome_of,
    read_lines,
)
from services.router.offpolicy.log_file import DecisionLogFile
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from shared.errors import FieldError
from shared.features import SCHEMA
from shared.samples import encode_sample
from shared.verdicts import Reason, Unsampled
from tests.decision_log import decision_log
from tests.samples import make_sample
from tests.unit.router.scheduling.builders import candidates, context

PROFILES = Profiles(load_presets(Registry()))


def verdict(lines, profile, metric=Metric.TTFT_MS) -> Verdict:
    return evaluate_profile(join(read_lines(lines, "log")), PROFILES.pipeline(profile)).metrics[metric]


def test_a_log_of_lots_shows_what_a_better_policy_would_have_earned():
    lines = decision_log(600)
    predictions = [entry.predictions["ttft_p50"] for entry in read_lines(lines, "log") if hasattr(entry, "chosen")]
    noise = np.exp(0.02)
    found = verdict(lines, "leadtime")
    assert found.logged.value == pytest.approx(np.mean(predictions) * noise, rel=0.08)
    assert found.dr.value == pytest.approx(np.min(predictions, axis=1).mean() * noise, rel=0.04)
    assert found.dr.low < np.min(predictions, axis=1).mean() * noise < found.dr.high
    assert found.difference.high < -50
    assert found.warnings == ()


def test_the_logging_profile_itself_earns_what_was_logged():
    found = verdict(decision_log(), "random")
    assert found.dr.value == pytest.approx(found.logged.value, rel=0.02)


def test_a_log_without_lots_says_that_it_can_not_tell():
    found = verdict(decision_log(logging="leadtime"), "random")
    assert any("never tried" in warning for warning in found.warnings)


def test_decisions_without_an_outcome_are_counted_and_left_out():
    lines = decision_log(100)[:-2:1]
    del lines[1]
    found = evaluate_profile(join(read_lines(lines, "log")), PROFILES.pipeline("leadtime"))
    assert (found.decisions, found.without_outcome) == (99, 1)
    assert found.metrics[Metric.TTFT_MS].rows == 98


def test_what_was_not_measured_has_no_verdict():
    found = evaluate_profile(join(read_lines(decision_log(50), "log")), PROFILES.pipeline("leadtime"))
    assert set(found.metrics) == {Metric.TTFT_MS}


def entry(**changes) -> LoggedDecision:
    (first, *_) = read_lines(decision_log(1), "log")
    return msgspec.structs.replace(first, **changes)


@pytest.mark.parametrize(
    ("slo", "outcome", "reward"),
    [
        ({"ttft_slo_ms": 100.0}, {"ttft_ms": 97.0}, 1.0),
        ({"ttft_slo_ms": 100.0}, {"ttft_ms": 99.0}, 0.0),
        ({"ttft_slo_ms": 100.0, "tpot_slo_ms": 10.0}, {"ttft_ms": 50.0, "tpot_ms": 11.0}, 0.0),
        ({"ttft_slo_ms": 100.0}, {"outcome": "upstream_error"}, 0.0),
        ({"ttft_slo_ms": 100.0}, {"outcome": "upstream_reset", "ttft_ms": 5.0}, 0.0),
        ({"ttft_slo_ms": 100.0}, {"outcome": "client_abort", "ttft_ms": 5.0}, 1.0),
        ({"ttft_slo_ms": 100.0}, {"outcome": "client_abort"}, None),
        ({}, {"ttft_ms": 5.0}, None),
        ({}, {"outcome": "upstream_error"}, None),
    ],
    ids=[
        "met",
        "missed by what was spent before",
        "one of two missed",
        "failed",
        "broken off in time",
        "left in time",
        "left early",
        "none stated",
        "failed, none stated",
    ],
)
def test_goodput_is_whether_every_stated_objective_was_met(slo, outcome, reward):
    decision = entry(**slo)
    told = LoggedOutcome(**{"decision_id": "d0", "endpoint": decision.addresses[0], "outcome": "ok", **outcome})
    found = evaluate_profile(join([decision, told]), PROFILES.pipeline("random")).metrics.get(Metric.GOODPUT)
    assert (None if found is None else found.logged.value) == reward


def test_what_the_policy_saw_is_seen_again():
    ctx = context_of(entry(ttft_slo_ms=70.0, priority=-2, expected_output_tokens=9.0), np.random.default_rng(0))
    assert ctx.candidates.uncached_tokens.tolist() == [500, 500, 500]
    assert ctx.candidates.prefill_ms_per_token.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert (ctx.request.slo.ttft_ms, ctx.request.priority, ctx.elapsed_ms) == (70.0, -2, 2.0)
    assert ctx.expected_output_tokens == 9.0
    assert ctx.prediction.get("ttft_p90") is not None


def test_a_sample_is_an_outcome_too():
    sample = make_sample(decision_id="d0", ttft_ms=12.0)
    (told,) = read_lines([encode_sample(sample)], "samples")
    assert told == outcome_of(sample)
    assert told.ttft_ms == 12.0


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        (Unsampled(decision_id="d", reason=Reason.NOT_SUCCESS, status=500, endpoint="10.0.0.1:8000"), True),
        (Unsampled(decision_id="d", reason=Reason.NO_ENDPOINT, status=503), True),
        (Unsampled(decision_id="d", reason=Reason.SHED, status=503), False),
        (Unsampled(decision_id="d", reason=Reason.NOT_SUCCESS, status=400, endpoint="10.0.0.1:8000"), False),
        (Unsampled(decision_id="d", reason=Reason.EMPTY, status=200, endpoint="10.0.0.1:8000"), False),
    ],
    ids=["an error", "no endpoint", "shed", "the client's fault", "empty"],
)
def test_a_servers_error_is_an_outcome_though_it_is_no_sample(end, failed):
    told = failure_of(end)
    assert (told is not None) is failed
    if told is not None:
        assert (told.decision_id, told.outcome) == ("d", "upstream_error")
        assert next(read_lines([encode_line(told)], "log")) == told


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "log, line 1"),
        (b'{"kind":"other"}', "log, line 1: entry"),
        (b'{"kind":"outcome"}', "log, line 1: entry.decision_id: found nothing"),
        (b'{"arrival_ms":1}', "log, line 1: sample.decision_id: found nothing"),
        (encode_line(entry(chosen=3)), "chosen: found 3; allowed: 0 to 2"),
        (encode_line(entry(propensity=0.0)), "propensity: found 0.0"),
        (encode_line(entry(features=[[1.0]])), "features"),
        (encode_line(entry(predictions={"ttft_p50": [1.0]})), "predictions.ttft_p50"),
        (encode_line(entry(version=9)), "version: found 9"),
    ],
)
def test_a_line_that_can_not_be_read_is_named(line, fault):
    with pytest.raises(FieldError, match=fault):
        list(read_lines([line], "log"))


def test_an_empty_log_is_refused():
    with pytest.raises(ValueError, match="no decisions"):
        evaluate_profile([], PROFILES.pipeline("random"))


def test_no_prompt_and_no_session_is_in_a_line():
    ctx = context(candidates(1), None, session_id="secret-session")
    rows = SCHEMA.rows(1, {"input_tokens": 5.0})
    request = msgspec.json.encode(ctx.request.session_id)
    line = encode_line(
        logged_decision(
            "d", ctx.request, ctx.candidates, rows, None, received_unix_ms=0.0, profile="p", propensity=1.0, chosen=0,
            elapsed_ms=0.0,
        )
    )  # fmt: skip
    assert b"secret" in request
    assert b"secret" not in line
    assert b"prompt" not in line


async def test_the_file_is_written_rotated_and_bounded(tmp_path):
    path, registry = tmp_path / "decisions.jsonl", CollectorRegistry()
    log = DecisionLogFile(path, 2_000, registry)
    for _ in range(3):
        log.offer(entry())
        await log.flush()
    assert path.with_name("decisions.jsonl.1").exists()
    both = [line for name in (path, path.with_name("decisions.jsonl.1")) for line in name.read_bytes().splitlines()]
    assert len(both) <= 3
    assert list(read_lines(both, "log"))
    assert path.stat().st_mode & 0o077 == 0, "its owner's alone"
    assert registry.get_sample_value("leadtime_router_decision_log_lines_total", {"fate": "written"}) == 3.0


async def test_several_routers_write_into_one_file_and_rotate_it_once(tmp_path):
    """Room for five eighths of the lines: one rotation, and everything is in the two files."""
    path, each, routers = tmp_path / "d.jsonl", 20, 8
    size = len(encode_line(entry()))
    logs = [DecisionLogFile(path, size * each * routers * 5 // 8, CollectorRegistry()) for _ in range(routers)]

    async def write(log: DecisionLogFile) -> None:
        for _ in range(each):
            log.offer(entry())
            await log.flush()

    await asyncio.gather(*map(write, logs))
    files = [path.with_name("d.jsonl.1"), path]
    assert [len(file.read_bytes()) // size for file in files] == [each * routers * 5 // 8, each * routers * 3 // 8]


async def test_a_router_that_comes_late_to_a_full_file_leaves_the_one_before_alone(tmp_path, monkeypatch):
    """It opened the log just before another router rotated it."""
    path, size = tmp_path / "d.jsonl", len(encode_line(entry()))
    first, second = (DecisionLogFile(path, size * 3, CollectorRegistry()) for _ in range(2))
    for _ in range(3):
        first.offer(entry())
    await first.flush()
    opened = second._open
    turns = iter([True])

    def open_then_be_overtaken() -> int:
        file = opened()
        if next(turns, False):
            first.offer(entry())
            first._write(first._taken())
        return file

    monkeypatch.setattr(second, "_open", open_then_be_overtaken)
    second.offer(entry())
    await second.flush()
    assert len(path.with_name("d.jsonl.1").read_bytes()) == size * 3
    assert len(path.read_bytes()) == size * 2


async def test_what_waits_at_the_stop_is_written(tmp_path):
    log = DecisionLogFile(tmp_path / "d.jsonl", 10**6, CollectorRegistry())
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.offer(entry())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len((tmp_path / "d.jsonl").read_bytes().splitlines()) == 1


async def test_a_file_that_can_not_be_written_is_counted(tmp_path):
    registry = CollectorRegistry()
    (tmp_path / "folder").mkdir()
    log = DecisionLogFile(tmp_path / "folder" / "d.jsonl", 10**6, registry)
    shutil.rmtree(tmp_path / "folder")
    log.offer(entry())
    await log.flush()
    assert registry.get_sample_value("leadtime_router_decision_log_lines_total", {"fate": "failed"}) == 1.0
