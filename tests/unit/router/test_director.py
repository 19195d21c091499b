"""The conductor: one request top to bottom, and what it does when a part of it fails."""

from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry

from services.router.director import Director, DirectorOptions
from services.router.extproc.messages import RequestHead, Routed
from services.router.metrics import RouterMetrics
from services.router.predict.types import Prediction
from services.router.request.errors import RejectReason, RequestRejected
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung, decode_decision, decode_row
from tests.fakes.manual_clock import ManualClock

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "[::1]:3")
CHAT = "/v1/chat/completions"
PROFILES = Profiles(load_presets(Registry()))


class FakeLadder:
    """Predicts TTFTs as told, or nothing; remembers what it was asked."""

    def __init__(self, ttft_ms: list[float] | None) -> None:
        self.ttft_ms = ttft_ms
        self.rows: Any = None
        self.backlog: Any = None
        self.deadline_ms = 0.0

    async def predict(self, rows: Any, addresses: Any, backlog: Any, deadline_ms: float) -> Prediction | None:
        self.rows, self.backlog, self.deadline_ms = rows, backlog, deadline_ms
        if self.ttft_ms is None:
            return None
        column = np.array(self.ttft_ms, np.float32)
        return Prediction({"ttft_p50": column, "ttft_p90": column * 2}, "1700000000000-0123abcd", Rung.PREDICTOR)


def make(ladder: FakeLadder, addresses: tuple[str, ...] = ADDRESSES) -> Director:
    state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
    for address in addresses:
        state.add_endpoint(address, hardware_class=2, now_ms=0.0)
        state.set_models(address, frozenset({"m"}))
        state.set_ready(address, ready=True)
    return Director(
        DirectorOptions(pool="default", listed_endpoints=3, decision_budget_ms=100.0, parsing=ParseConfig()),
        state,
        ladder,
        PROFILES.pipeline("leadtime"),
        RouterMetrics(CollectorRegistry()),
        ManualClock(1.0),
        np.random.default_rng(1),
    )


def head(path: str = CHAT, method: str = "POST", **headers: str) -> RequestHead:
    return RequestHead(method, path, {name.replace("_", "-"): value for name, value in headers.items()})


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 50}], **fields})


async def routed(director: Director, request: RequestHead | None = None, content: bytes | None = None) -> Routed:
    result = await director.decide(request or head(), body() if content is None else content)
    assert isinstance(result, Routed)
    return result


async def rejected(director: Director, request: RequestHead, content: bytes | None) -> RequestRejected:
    result = await director.decide(request, content)
    assert isinstance(result, RequestRejected)
    return result


async def test_the_quickest_endpoint_comes_first_and_the_metadata_says_why() -> None:
    director = make(FakeLadder([90.0, 10.0, 50.0]))
    result = await routed(director, head(x_slo_ttft_ms="200"), body(stream=True, max_tokens=7))
    assert result.destinations[0] == ADDRESSES[1]
    assert result.metadata is not None
    decision = decode_decision(result.metadata)
    assert decision.decision_id == result.decision_id
    assert (decision.model, decision.streamed, decision.ttft_slo_ms) == ("m", True, 200.0)
    assert (decision.rung, decision.bundle_version) == (Rung.PREDICTOR, "1700000000000-0123abcd")
    assert [endpoint.address for endpoint in decision.endpoints] == list(result.destinations)
    first = decision.endpoints[0]
    assert first.prediction is not None
    assert first.prediction["ttft_p50"] == pytest.approx(10.0)
    row = decode_row(first.features)
    assert row[SCHEMA.index["expected_output_tokens"]] == 7.0
    assert row[SCHEMA.index["hardware_class"]] == 2.0


async def test_all_candidates_are_asked_for_in_one_call_within_the_budget() -> None:
    ladder = FakeLadder([1.0, 2.0, 3.0])
    await routed(make(ladder))
    assert ladder.rows.shape == (3, len(SCHEMA))
    assert ladder.rows.dtype == np.float32
    assert ladder.backlog.shape == (3,)
    assert ladder.deadline_ms <= 100.0


async def test_a_request_is_in_the_ledger_until_it_is_finished_once() -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]))
    first, second = await routed(director), await routed(director)
    assert director._state.in_flight == 2
    for decision_id in (first.decision_id, first.decision_id, second.decision_id):
        director.finished(decision_id, completed=True)
    assert director._state.in_flight == 0


async def test_the_next_request_sees_the_one_before_it() -> None:
    ladder = FakeLadder([1.0, 2.0, 3.0])
    director = make(ladder)
    await routed(director)
    await routed(director)
    pending = ladder.rows[:, SCHEMA.index["pending_requests"]]
    assert sorted(pending) == [0.0, 0.0, 1.0]


async def test_without_a_prediction_the_fallback_profile_decides() -> None:
    director = make(FakeLadder(None))
    result = await routed(director)
    assert result.metadata is not None
    decision = decode_decision(result.metadata)
    assert (decision.rung, decision.bundle_version) == (Rung.HEURISTIC, None)
    assert all(endpoint.prediction is None for endpoint in decision.endpoints)
    assert director.decisions.newest(1)[0].decision.used_fallback


async def test_a_plugin_that_fails_costs_no_request() -> None:
    class Broken:
        profile = "broken"

        def run(self, context: Any, count: int) -> Any:
            raise ZeroDivisionError

    director = make(FakeLadder([1.0, 2.0, 3.0]))
    director.pipeline = Broken()  # type: ignore[assignment]
    assert len((await routed(director)).destinations) == 3
    assert director._state.in_flight == 1


@pytest.mark.parametrize("part", ["_rows", "_answer", "dispatch", "prefixes"])
async def test_a_fault_of_ours_costs_no_request_and_leaves_nothing_in_the_ledger(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    director = make(FakeLadder([1.0, 2.0, 3.0]))
    state = director._state
    where: Any = {"_rows": director, "_answer": director, "dispatch": state}.get(part, state.prefixes)
    monkeypatch.setattr(where, "insert" if part == "prefixes" else part, fail)
    result = await routed(director)
    assert len(result.destinations) == 3
    assert result.metadata is None
    assert state.in_flight == 0


@pytest.mark.parametrize(
    ("request_head", "content"),
    [
        (head("/v1/models", "GET"), None),
        (head("/tokenize"), b"{}"),
        (head("/v1/chat/completions", "GET"), None),
        (head(content_encoding="zstd"), b"\x28\xb5\x2f\xfd"),
    ],
)
async def test_what_names_no_model_is_routed_by_load_and_teaches_nothing(
    request_head: RequestHead, content: bytes | None
) -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]))
    result = await director.decide(request_head, content)
    assert isinstance(result, Routed)
    assert result.metadata is None
    assert director._state.in_flight == 0


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (None, 400, None),
        (orjson.dumps({"messages": []}), 400, "model"),
        (orjson.dumps({"model": "m"}), 400, "messages"),
        (body(model="other"), 404, "model"),
    ],
)
async def test_a_bad_request_is_answered_counted_and_leaves_nothing(
    content: bytes | None, status: int, param: str | None
) -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]))
    rejection = await rejected(director, head(), content)
    assert (rejection.status, rejection.param) == (status, param)
    assert director._metrics.by_reason[rejection.reason] == 1
    assert director._state.in_flight == 0


async def test_an_slo_that_is_none_is_refused_by_its_header() -> None:
    rejection = await rejected(make(FakeLadder([1.0, 2.0, 3.0])), head(x_slo_ttft_ms="soon"), body())
    assert rejection.status == 400
    assert rejection.param == "x-slo-ttft-ms"


async def test_a_pool_without_an_endpoint_is_a_503() -> None:
    rejection = await rejected(make(FakeLadder(None), addresses=()), head(), body())
    assert (rejection.status, rejection.reason) == (503, RejectReason.NO_ENDPOINT)


async def test_a_subset_hint_is_obeyed() -> None:
    director = make(FakeLadder([1.0]))
    request = RequestHead("POST", CHAT, {}, frozenset({ADDRESSES[2]}))
    assert (await routed(director, request)).destinations == (ADDRESSES[2],)


async def test_an_outcome_is_put_beside_its_prediction() -> None:
    director = make(FakeLadder([90.0, 10.0, 50.0]))
    result = await routed(director)
    assert result.metadata is not None
    decision = decode_decision(result.metadata)
    director.observe(
        LatencySample(
            decision_id=result.decision_id,
            pool="default",
            model="m",
            endpoint=result.destinations[0],
            outcome=Outcome.OK,
            status=200,
            streamed=True,
            received_unix_ms=1.0,
            completed_unix_ms=2.0,
            rung=Rung.PREDICTOR,
            schema_hash=SCHEMA.hash,
            features=decode_row(decision.endpoints[0].features).tolist(),
            prediction=decision.endpoints[0].prediction,
            ttft_ms=20.0,
        )
    )
    assert director.ttft_error.report()["bias"] == pytest.approx(-0.5)
    shown = director.decisions.newest(1)[0].as_dict()
    assert shown["outcome"]["ttft_ms"] == 20.0
