"""The ring of decisions and the live prediction error."""

import numpy as np
import pytest

from services.router.decision_id import uuid7
from services.router.decisions import DecisionLog, DecisionRecord, PredictionError
from services.router.scheduling.decision import Decision, Opinion
from shared.features import SCHEMA
from shared.samples import Rung
from shared.verdicts import Reason, Unsampled
from tests.samples import make_sample


def record(decision_id: str) -> DecisionRecord:
    scores = np.array([0.25, 1.0], np.float32)
    decision = Decision(
        order=(1, 0),
        propensity=1.0 - 0.9 + 0.7,
        profile="leadtime",
        used_fallback=False,
        alive=np.ones(2, np.bool_),
        total=scores,
        opinions=(Opinion("predicted-cost-scorer", 1.0, scores),),
        narrowings=(),
    )
    return DecisionRecord(
        decision_id=decision_id,
        received_unix_ms=1.0,
        model="m",
        input_tokens=10.0,
        rung=Rung.PREDICTOR,
        bundle_version="v",
        decision_ms=0.5,
        addresses=("127.0.0.1:1", "127.0.0.1:2"),
        rows=SCHEMA.rows(2, {"uncached_tokens": np.array([5.0, 6.0])}),
        predictions={"ttft_p50": np.array([30.0, 20.0], np.float32)},
        decision=decision,
    )


def test_a_decision_shows_its_candidates_best_first() -> None:
    shown = record("a").as_dict()
    assert [candidate["address"] for candidate in shown["candidates"]] == ["127.0.0.1:2", "127.0.0.1:1"]
    best = shown["candidates"][0]
    assert best["features"]["uncached_tokens"] == 6.0
    assert best["prediction"] == {"ttft_p50": 20.0}
    assert best["scores"] == {"predicted-cost-scorer": 1.0, "total": 1.0}
    assert shown["outcome"] is None
    assert shown["propensity"] == 0.8, "rounded for people: it is 0.7999999999999999"


def test_the_end_of_a_request_without_a_sample_is_put_beside_its_decision() -> None:
    log = DecisionLog()
    log.add(record("a"))
    log.observe(Unsampled(decision_id="a", reason=Reason.NOT_SUCCESS, status=503, endpoint="127.0.0.1:1"))
    found = log.find("a")
    assert found is not None
    assert found.as_dict()["outcome"] == {"sample": "not_success", "endpoint": "127.0.0.1:1", "status": 503}
    log.observe(make_sample("a"))
    log.observe(Unsampled(decision_id="a", reason=Reason.EMPTY))
    assert found.as_dict()["outcome"]["sample"] == "accepted"


def test_an_outcome_is_put_beside_its_decision() -> None:
    log = DecisionLog(capacity=2)
    log.add(record("a"))
    log.observe(make_sample("a", "127.0.0.1:2", ttft_ms=25.0))
    log.observe(make_sample("unknown"))
    found = log.find("a")
    assert found is not None
    outcome = found.as_dict()["outcome"]
    assert outcome["ttft_ms"] == 25.0
    assert outcome["output_tokens_estimated"] is False


def test_the_ring_keeps_the_newest() -> None:
    log = DecisionLog(capacity=3)
    for name in "abcde":
        log.add(record(name))
    assert [r.decision_id for r in log.newest(10)] == ["e", "d", "c"]
    assert log.find("a") is None


def test_the_error_is_none_before_the_first_pair_and_signed_after() -> None:
    error = PredictionError(capacity=4)
    assert error.report() == {"samples": 0, "mape": None, "bias": None}
    for predicted, actual in ((110.0, 100.0), (120.0, 100.0), (130.0, 100.0)):
        error.observe(predicted, actual)
    report = error.report()
    assert report["samples"] == 3
    assert report["mape"] == pytest.approx(0.2)
    assert report["bias"] == pytest.approx(0.2)


def test_only_the_newest_pairs_count() -> None:
    error = PredictionError(capacity=2)
    error.observe(1_000.0, 1.0)
    error.observe(1.0, 1.0)
    error.observe(1.0, 1.0)
    assert error.report()["mape"] == pytest.approx(0.0)


def test_ids_sort_by_time_and_are_version_7() -> None:
    early, late = uuid7(1_000.0, 2**74 - 1), uuid7(1_001.0, 0)
    assert early < late
    assert early[14] == "7"
    assert early[19] in "89ab"
    assert uuid7(1.0, 1) != uuid7(1.0, 2)
