"""The ladder: the first step that can answers in time, calibrated once; what goes wrong costs no request."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.router.predict.client import RawAnswer
from services.router.predict.errors import FailureReason, PredictError
from services.router.predict.ladder import Ladder, LadderConfig
from services.router.predict.metrics import PredictMetrics
from shared.bundle import Calibration
from shared.inference import BundleModel, CompiledCalibration
from shared.prior import PriorModel
from shared.samples import Rung
from tests.bundles import OUTPUTS, default_weights, expected, linear_graph, make_bundle, rows_of
from tests.fakes.manual_clock import ManualClock

REMOTE_VERSION = "1700000009000-0123abcd"


class FakeClient:
    """A client that answers as told and remembers the deadlines it was given."""

    def __init__(self, outcome=None) -> None:
        self.outcome = outcome
        self.deadlines: list[float] = []

    async def predict(self, rows, deadline_ms):
        self.deadlines.append(deadline_ms)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if self.outcome == "hang":
            await asyncio.get_running_loop().create_future()
        return RawAnswer(expected(rows, offset=7.0), OUTPUTS, REMOTE_VERSION)

    def describe(self):
        return []


class FakeBundles:
    """The own copy, without Redis."""

    def __init__(self, model=None, calibration: Calibration | None = None, of_prior=()) -> None:
        self.model = model
        self.calibration = calibration
        self.of_prior = frozenset(of_prior)

    def calibration_for(self, version, outputs):
        if self.calibration is None or self.calibration.bundle_version != version:
            return None
        return CompiledCalibration(self.calibration, outputs)

    def prior_targets(self, version):
        return self.of_prior

    def describe(self):
        return {}


OWN = BundleModel(make_bundle(offset=1.0))


def make(client=None, bundles=None, prior=None, **config):
    registry = CollectorRegistry()
    clock = ManualClock()  # a stall of a busy machine is no spent deadline
    metrics = PredictMetrics(registry, clock)
    ladder = Ladder(client, bundles, metrics, clock, prior=prior, config=LadderConfig(**config))
    return ladder, registry


async def ask(ladder, rows=None, deadline_ms=40.0):
    rows = rows_of(1, 2, 3) if rows is None else rows
    addresses = [f"10.0.0.{i}:8000" for i in range(len(rows))]
    return await ladder.predict(rows, addresses, np.zeros(len(rows), np.float32), deadline_ms)


async def test_the_predictor_answers_first_by_default():
    ladder, registry = make(FakeClient(), FakeBundles(OWN))
    prediction = await ask(ladder)
    assert (prediction.rung, prediction.bundle_version) == (Rung.PREDICTOR, REMOTE_VERSION)
    assert set(prediction.columns) == set(OUTPUTS)
    assert np.array_equal(prediction.columns["ttft_p50"], expected(rows_of(1, 2, 3), offset=7.0)[:, 0])
    assert registry.get_sample_value("leadtime_router_predict_seconds_count", {"rung": "predictor"}) == 1


async def test_where_so_set_the_own_copy_answers_first_and_no_call_is_made():
    client = FakeClient()
    ladder, _ = make(client, FakeBundles(OWN), first="in_process")
    assert (await ask(ladder)).rung is Rung.IN_PROCESS
    assert client.deadlines == []


async def test_where_the_own_copy_is_first_but_not_there_yet_the_predictor_is_asked():
    ladder, _ = make(FakeClient(), FakeBundles(), first="in_process")
    assert (await ask(ladder)).rung is Rung.PREDICTOR


@pytest.mark.parametrize("reason", FailureReason)
async def test_when_the_predictor_fails_the_own_copy_answers_and_the_reason_is_counted(reason):
    ladder, registry = make(FakeClient(PredictError(reason, "told")), FakeBundles(OWN))
    prediction = await ask(ladder)
    assert (prediction.rung, prediction.bundle_version) == (Rung.IN_PROCESS, OWN.bundle_version)
    assert np.array_equal(prediction.columns["ttft_p50"], expected(rows_of(1, 2, 3))[:, 0])
    labels = {"rung": "predictor", "reason": reason.value}
    assert registry.get_sample_value("leadtime_router_predict_failures_total", labels) == 1
    assert ladder.describe()["last_failures"]["predictor"]["reason"] == reason.value


async def test_without_any_prediction_there_is_none_and_that_is_counted():
    ladder, _ = make(FakeClient(PredictError(FailureReason.NO_REPLICA, "")), FakeBundles())
    assert await ask(ladder) is None
    assert ladder.describe()["by_rung"] == {"predictor": 0, "in_process": 0, "prior": 0, "heuristic": 1}


async def test_a_ladder_without_steps_gives_none():
    ladder, _ = make()
    assert await ask(ladder) is None


async def test_no_candidates_need_no_prediction():
    client = FakeClient()
    ladder, _ = make(client, FakeBundles(OWN))
    assert await ask(ladder, rows_of()) is None
    assert client.deadlines == []


@pytest.mark.parametrize("step", ["client", "model", "calibration"])
async def test_a_fault_of_ours_never_reaches_the_request(step):
    client = FakeClient(RuntimeError("ours") if step == "client" else None)
    bundles = FakeBundles(OWN)
    if step == "model":
        bundles.model = SimpleNamespace(predict=lambda rows: 1 / 0, outputs=OUTPUTS, bundle_version="v")
        client.outcome = PredictError(FailureReason.TIMEOUT, "")
    if step == "calibration":
        bundles.calibration_for = lambda *_: 1 / 0
    ladder, registry = make(client, bundles)
    prediction = await ask(ladder)
    assert (prediction is None) == (step != "client")
    faulty = "in_process" if step == "model" else "predictor"
    labels = {"rung": faulty, "reason": "fault"}
    assert registry.get_sample_value("leadtime_router_predict_failures_total", labels) == 1


async def test_an_own_copy_that_answers_nonsense_gives_no_prediction():
    # Whole when it was loaded, on rows of 0 and 1; wrong from the second token on.
    graph = linear_graph(-default_weights(len(OUTPUTS)), 10.0)
    ladder, registry = make(None, FakeBundles(BundleModel(make_bundle(graph=graph))))
    assert await ask(ladder, rows_of(1)) is not None
    assert await ask(ladder, rows_of(1, 5_000)) is None
    labels = {"rung": "in_process", "reason": "bad_answer"}
    assert registry.get_sample_value("leadtime_router_predict_failures_total", labels) == 1


async def test_a_cancelled_decision_is_cancelled():
    ladder, _ = make(FakeClient("hang"), FakeBundles(OWN))
    asked = asyncio.ensure_future(ask(ladder))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize(("own", "deadline_ms", "given"), [(True, 40.0, 35.0), (True, 6.0, 3.0), (False, 40.0, 40.0)])
async def test_the_remote_step_leaves_the_own_copy_the_time_it_needs(own, deadline_ms, given):
    client = FakeClient()
    ladder, _ = make(client, FakeBundles(OWN if own else None))
    await ask(ladder, deadline_ms=deadline_ms)
    assert client.deadlines == [pytest.approx(given, abs=0.5)]


async def test_a_deadline_that_is_over_asks_nobody():
    client = FakeClient()
    ladder, _ = make(client, FakeBundles(OWN))
    assert await ask(ladder, deadline_ms=0.0) is None
    assert client.deadlines == []
    assert {failure["reason"] for failure in ladder.describe()["last_failures"].values()} == {"timeout"}


async def test_many_rows_leave_the_loop():
    ladder, _ = make(None, FakeBundles(OWN), inline_max_rows=10)
    rows = rows_of(*range(50))
    prediction = await ask(ladder, rows, deadline_ms=5_000.0)
    assert np.array_equal(prediction.columns["ttft_p90"], expected(rows)[:, 1])


@pytest.mark.parametrize("first", ["predictor", "in_process"])
async def test_the_calibration_of_the_answering_bundle_is_applied_once(first):
    version = REMOTE_VERSION if first == "predictor" else OWN.bundle_version
    calibration = Calibration(
        pool="default",
        bundle_version=version,
        sequence=1,
        updated_unix_ms=0.0,
        log_bias={"ttft": float(np.log(2))},
        endpoint_log_bias={"ttft": {"10.0.0.1:8000": float(np.log(1.5))}},
    )
    ladder, registry = make(FakeClient(), FakeBundles(OWN, calibration), first=first)
    prediction = await ask(ladder)
    raw = expected(rows_of(1, 2, 3), offset=7.0 if first == "predictor" else 1.0)
    assert np.allclose(prediction.columns["ttft_p50"], raw[:, 0] * [2, 3, 2])
    assert np.allclose(prediction.columns["tpot_p50"], raw[:, 2])
    assert registry.get_sample_value("leadtime_router_predict_uncalibrated_total") == 0


async def test_an_answer_of_an_unknown_bundle_is_valid_and_passed_on_raw():
    calibration = Calibration(pool="default", bundle_version="other", sequence=1, updated_unix_ms=0.0)
    ladder, registry = make(FakeClient(), FakeBundles(None, calibration))
    prediction = await ask(ladder)
    assert np.array_equal(prediction.columns["ttft_p50"], expected(rows_of(1, 2, 3), offset=7.0)[:, 0])
    assert registry.get_sample_value("leadtime_router_predict_uncalibrated_total") == 1


async def test_the_remote_step_gets_its_own_deadline_and_leaves_the_budget_to_the_own_copy():
    """A stall of the event loop past the remote deadline must not cost the own copy its turn."""
    client = FakeClient(PredictError(FailureReason.TIMEOUT, "late"))
    ladder, _ = make(client, FakeBundles(OWN), remote_ms=40.0)
    assert (await ask(ladder, deadline_ms=100.0)).rung is Rung.IN_PROCESS
    assert client.deadlines[0] <= 40.0


PRIOR = PriorModel("8b")


async def test_before_anything_was_learned_the_prior_answers_and_is_marked():
    ladder, registry = make(FakeClient(PredictError(FailureReason.UNAVAILABLE, "503")), FakeBundles(), PRIOR)
    prediction = await ask(ladder)
    assert (prediction.rung, prediction.bundle_version) == (Rung.PRIOR, PRIOR.bundle_version)
    assert prediction.low_confidence
    assert not prediction.columns["in_range"].any()
    assert ladder.by_rung[Rung.PRIOR] == 1
    assert registry.get_sample_value("leadtime_router_predict_seconds_count", {"rung": "prior"}) == 1


async def test_where_a_bundle_was_learned_its_failure_is_no_reason_to_believe_the_prior():
    broken = SimpleNamespace(predict=lambda rows: np.full((len(rows), 1), np.nan), outputs=OUTPUTS, bundle_version="v")
    ladder, _ = make(FakeClient(PredictError(FailureReason.UNAVAILABLE, "503")), FakeBundles(broken), PRIOR)
    assert await ask(ladder) is None


async def test_a_learned_prediction_is_not_marked():
    ladder, _ = make(FakeClient(), FakeBundles(OWN), PRIOR)
    assert not (await ask(ladder)).low_confidence


@pytest.mark.parametrize("of_prior", [(), ("ttft",), ("ttft", "tpot")])
async def test_what_a_bundle_has_from_the_prior_is_told_apart_from_what_was_measured(of_prior):
    ladder, _ = make(FakeClient(), FakeBundles(OWN, of_prior=of_prior))
    prediction = await ask(ladder)
    assert prediction.prior_targets == set(of_prior)
    assert {"ttft_p50", "tpot_p50"} <= prediction.columns.keys()
    left = {name.partition("_")[0] for name in prediction.measured().columns}
    assert not left & set(of_prior)
    assert {"ttft", "tpot"} - set(of_prior) <= left


async def test_what_the_trainer_measured_of_the_prior_bends_it():
    """A bias of log 2 for TTFT: the pool is twice as slow as the table says."""
    calibration = Calibration(
        pool="default",
        bundle_version=PRIOR.bundle_version,
        sequence=1,
        updated_unix_ms=0.0,
        log_bias={"ttft": float(np.log(2.0))},
    )
    plain = await ask(make(None, FakeBundles(), PRIOR)[0])
    bent = await ask(make(None, FakeBundles(calibration=calibration), PRIOR)[0])
    assert bent.columns["ttft_p50"] == pytest.approx(2 * plain.columns["ttft_p50"], rel=1e-5)
    assert bent.columns["tpot_p50"] == pytest.approx(plain.columns["tpot_p50"], rel=1e-5)
