"""The conductor: one request top to bottom, and what it does when a part of it fails."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry

from services.router.director import Director, DirectorOptions
from services.router.extproc.messages import RequestHead, Routed
from services.router.metrics import RouterMetrics
from services.router.offpolicy.log import LoggedDecision, LoggedOutcome
from services.router.predict.types import Prediction
from services.router.request.aliases import ModelAliases
from services.router.request.errors import RejectReason, RequestRejected
from services.router.request.objectives import Objective, Objectives
from services.router.request.parse import ParseConfig
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from services.router.state.pool import PoolConfig, PoolState
from shared import names as names_
from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung, decode_decision, decode_row
from shared.verdicts import Reason, Unsampled
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


def make(
    ladder: FakeLadder,
    addresses: tuple[str, ...] = ADDRESSES,
    completions: Callable[[LatencySample], None] | None = None,
    registry: CollectorRegistry | None = None,
    learned: Mapping[str, float] | None = None,
    to_log: Callable[[LoggedDecision | LoggedOutcome], None] | None = None,
    **options: Any,
) -> Director:
    state = PoolState(PoolConfig(), salt=b"s" * 16, tokens=TokenEstimator())
    for address in addresses:
        state.add_endpoint(address, hardware_class=2, now_ms=0.0)
        state.set_models(address, frozenset({"m"}))
        state.set_ready(address, ready=True)
    state.set_expected_output_tokens(learned or {})
    return Director(
        DirectorOptions(
            **{
                "pool": "default",
                "listed_endpoints": 3,
                "decision_budget_ms": 100.0,
                "parsing": ParseConfig(),
                **options,
            }
        ),
        state,
        ladder,
        PROFILES.pipeline("leadtime"),
        RouterMetrics(registry or CollectorRegistry()),
        ManualClock(1.0),
        np.random.default_rng(1),
        completions,
        to_log,
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


@pytest.mark.parametrize(("route", "expected"), [("title", 12.0), ("chat", 300.0), ("", 300.0)])
async def test_the_gateways_route_says_how_long_the_answer_will_be_and_is_written_down(
    route: str, expected: float
) -> None:
    director = make(FakeLadder([90.0, 10.0, 50.0]), learned={"m": 300.0, "m @ title": 12.0})
    result = await routed(director, replace(head(), route_name=route))
    assert result.metadata is not None
    decision = decode_decision(result.metadata)
    assert decision.route == route
    row = decode_row(decision.endpoints[0].features)
    assert row[SCHEMA.index["expected_output_tokens"]] == expected


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


FORMS: dict[str, dict[str, Any]] = {
    CHAT: {},
    "/v1/completions": {"prompt": "hello " * 50},
    "/v1/responses": {"input": "hello " * 50},
    "/v1/embeddings": {"input": ["hello " * 50, "you"]},
    "/v1/messages": {"max_tokens": 9},
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("profile", "ttft_ms"),
    [("leadtime", [1.0, 2.0, 3.0]), ("leadtime", None), ("predicted-latency-slo", [1.0, 2.0, 3.0]), ("random", None)],
    ids=["predicted", "by the fallback", "another preset", "without scores"],
)
async def test_whatever_is_asked_and_whoever_decides_a_request_counts_alike(
    path: str, streamed: bool, profile: str, ttft_ms: list[float] | None
) -> None:
    """A path that forgets to count leaves its endpoint looking idle, and the next request goes there too."""
    director = make(FakeLadder(ttft_ms))
    director.use_pipeline(PROFILES.pipeline(profile))
    state, clock = director._state, director._clock
    result = await routed(director, head(path), body(stream=streamed, **FORMS[path]))
    counts = {found.address: found.in_flight_requests for found in state.endpoints(clock.monotonic_ms())}
    assert counts == {address: int(address == result.destinations[0]) for address in ADDRESSES}
    director.finished(result.decision_id, completed=True)
    assert state.in_flight == 0
    assert not any(found.in_flight_requests for found in state.endpoints(clock.monotonic_ms()))


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
        predicts = True
        waiting_room = None
        profile = "broken"

        def run(self, context: Any, count: int) -> Any:
            raise ZeroDivisionError

    director = make(FakeLadder([1.0, 2.0, 3.0]))
    director.use_pipeline(Broken())  # type: ignore[arg-type]
    assert len((await routed(director)).destinations) == 3
    assert director._state.in_flight == 1


@pytest.mark.parametrize("part", ["expected_output_tokens", "_record", "dispatch", "prefixes"])
async def test_a_fault_of_ours_costs_no_request_and_leaves_nothing_in_the_ledger(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    director = make(FakeLadder([1.0, 2.0, 3.0]))
    state = director._state
    where: Any = director if part == "_record" else state.prefixes if part == "prefixes" else state
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


async def test_a_pick_that_was_passed_over_is_counted_once_and_its_request_moves() -> None:
    registry = CollectorRegistry()
    director = make(FakeLadder([90.0, 10.0, 50.0]), registry=registry)
    result = await routed(director)
    first, second = result.destinations[:2]
    director.served(result.decision_id, first)
    assert registry.get_sample_value("leadtime_router_picks_passed_over_total") == 0
    director.served(result.decision_id, second)
    counts = {status.address: status.in_flight_requests for status in director._state.endpoints(1.0)}
    assert (counts[first], counts[second]) == (0, 1)
    director.observe_end(
        Unsampled(decision_id=result.decision_id, reason=Reason.NOT_SUCCESS, status=503, endpoint=second)
    )
    assert registry.get_sample_value("leadtime_router_picks_passed_over_total") == 1
    outcome = director.decisions.newest(1)[0].as_dict()["outcome"]
    assert outcome == {"sample": "not_success", "endpoint": second, "status": 503}
    director.finished(result.decision_id, completed=True)
    assert director._state.in_flight == 0


@pytest.mark.parametrize("bodiless", [True, False])
async def test_an_endpoint_whose_good_answers_are_bare_is_set_aside(bodiless: bool) -> None:
    director = make(FakeLadder([90.0, 10.0, 50.0]))
    result = await routed(director)
    address = result.destinations[0]
    for _ in range(5):
        director.observe_end(
            Unsampled(
                decision_id=result.decision_id, reason=Reason.EMPTY, status=200, endpoint=address, bodiless=bodiless
            )
        )
    health = {status.address: status.health for status in director._state.endpoints(1.0)}
    assert health[address].failures == ({"empty": 5} if bodiless else {})


async def test_a_servers_error_is_in_the_decision_log_and_a_clients_is_not() -> None:
    logged: list[LoggedDecision | LoggedOutcome] = []
    director = make(FakeLadder([90.0, 10.0, 50.0]), to_log=logged.append)
    for status in (500, 400):
        result = await routed(director)
        director.observe_end(
            Unsampled(
                decision_id=result.decision_id,
                reason=Reason.NOT_SUCCESS,
                status=status,
                endpoint=result.destinations[0],
            )
        )
    assert [type(entry) for entry in logged] == [LoggedDecision, LoggedOutcome, LoggedDecision]


async def test_a_response_that_is_no_sample_says_so_beside_its_decision() -> None:
    director = make(FakeLadder([90.0, 10.0, 50.0]), completions=lambda _: None)
    result = await routed(director, shown())
    observer = director.response_observer(result.decision_id)
    assert observer is not None
    observer.headers(429, {}, result.destinations[0], 2.0)
    observer.end(3.0)
    outcome = director.decisions.newest(1)[0].as_dict()["outcome"]
    assert outcome == {"sample": "not_success", "endpoint": result.destinations[0], "status": 429}


ALIASES = ModelAliases({"fast": "m", "both": {"m": 1, "n": 1}, "gone": "other"})


async def test_an_alias_is_routed_learned_and_sent_on_as_its_model() -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), aliases=ALIASES)
    result = await routed(director, content=body(model="fast", note="日本語"))
    assert result.metadata is not None
    assert decode_decision(result.metadata).model == "m"
    assert result.body == body(model="m", note="日本語")
    assert (await routed(director, content=body())).body is None


async def test_an_alias_in_a_compressed_body_is_sent_on_plain() -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), aliases=ALIASES)
    result = await routed(director, head(content_encoding="gzip"), gzip.compress(body(model="fast")))
    assert result.body == body(model="m")
    assert result.removed_headers == ("content-encoding",)
    untouched = await routed(director, head(content_encoding="gzip"), gzip.compress(body()))
    assert (untouched.body, untouched.removed_headers) == (None, ())


async def test_an_alias_of_a_model_that_nobody_serves_is_a_404() -> None:
    rejection = await rejected(make(FakeLadder([1.0]), aliases=ALIASES), head(), body(model="gone"))
    assert rejection.status == 404


async def test_an_alias_is_rewritten_though_the_decision_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), aliases=ALIASES)
    monkeypatch.setattr(director._state, "expected_output_tokens", lambda *_: 1 / 0)
    result = await routed(director, content=body(model="fast"))
    assert (result.metadata, result.body) == (None, body(model="m"))


async def test_weights_divide_the_requests_of_an_alias() -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), aliases=ModelAliases({"both": {"m": 3, "n": 1}}))
    for address in ADDRESSES:
        director._state.set_models(address, frozenset({"m", "n"}))
    names = [
        orjson.loads((await routed(director, content=body(model="both"))).body or b"")["model"] for _ in range(200)
    ]
    assert 120 < names.count("m") < 180


async def test_a_request_that_does_not_want_predictions_gets_the_heuristic() -> None:
    ladder = FakeLadder([1.0, 2.0, 3.0])
    director = make(ladder)
    result = await routed(director, head(x_prediction_based_scheduling="false"))
    assert ladder.rows is None
    assert result.metadata is not None
    assert decode_decision(result.metadata).rung is Rung.HEURISTIC
    assert decode_decision(
        (await routed(director, head(x_prediction_based_scheduling="true"))).metadata or ""
    ).rung is (Rung.PREDICTOR)
    rejection = await rejected(director, head(x_prediction_based_scheduling="maybe"), body())
    assert (rejection.status, rejection.param) == (400, "x-prediction-based-scheduling")


CONTROL = {"x_slo_ttft_ms": "200", "x_llm_d_inference_objective": "batch", "x_leadtime_priority": "3", "x_other": "1"}
NAMES = ("x-slo-ttft-ms", "x-llm-d-inference-objective", "x-leadtime-priority")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_what_was_meant_for_the_router_does_not_go_on(path: str) -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]))
    assert (await routed(director, head(path, **CONTROL))).removed_headers == NAMES
    forwarding = make(FakeLadder([1.0, 2.0, 3.0]), forward_control_headers=True)
    assert (await routed(forwarding, head(path, **CONTROL))).removed_headers == ()


@pytest.mark.parametrize("forward", [False, True])
async def test_a_client_s_steering_headers_end_at_the_router_where_nobody_else_strips_them(forward: bool) -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), forward_control_headers=forward)
    names = [*names_.STRIPPED_FROM_CLIENTS, *(f"{prefix}x" for prefix in names_.STRIPPED_PREFIXES)]
    sent = head(**{name.replace("-", "_"): "kubernetes.default.svc:443" for name in names})
    ours = {names_.DESTINATION, names_.DECISION_ID}  # set by the answer
    removed = (await routed(director, sent)).removed_headers
    assert set(removed) == set(names) - ours


async def test_objective_and_priority_count_only_where_headers_are_trusted() -> None:
    objectives = Objectives({"batch": Objective(-5)})
    for trusted, expected in ((True, -5), (False, 0)):
        parsing = ParseConfig(trust_request_headers=trusted, objectives=objectives)
        result = await routed(
            make(FakeLadder([1.0, 2.0, 3.0]), parsing=parsing), head(x_llm_d_inference_objective="batch")
        )
        assert result.metadata is not None
        assert decode_decision(result.metadata).priority == expected


def shown(**headers: str) -> RequestHead:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead("POST", CHAT, names, response_shown=True)


STREAM = (
    b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n',
)


async def test_a_response_that_is_shown_becomes_a_sample_and_moves_the_ledger() -> None:
    samples: list[LatencySample] = []
    director = make(FakeLadder([90.0, 10.0, 50.0]), completions=samples.append)
    result = await routed(director, shown(), body(stream=True))
    observer = director.response_observer(result.decision_id)
    assert observer is not None
    observer.headers(200, {"content-type": "text/event-stream"}, result.destinations[0], 2.0)
    assert director._state.endpoints(3.0)[1].decoding_requests == 0
    for at_ms, chunk in enumerate(STREAM, start=11):
        observer.body(chunk, float(at_ms))
    assert director._state.endpoints(13.0)[1].decoding_requests == 1
    observer.end(31.0)
    director.finished(result.decision_id, completed=True)
    (sample,) = samples
    assert (sample.decision_id, sample.endpoint) == (result.decision_id, ADDRESSES[1])
    assert (sample.ttft_ms, sample.e2e_ms, sample.output_tokens) == (10.0, 30.0, 7)
    assert director.response_observer(result.decision_id) is None
    assert director._state.in_flight == 0


async def test_a_request_that_breaks_off_before_its_answer_is_an_abort() -> None:
    samples: list[LatencySample] = []
    director = make(FakeLadder([90.0, 10.0, 50.0]), completions=samples.append)
    result = await routed(director, shown())
    director._clock.advance(500.0)  # type: ignore[attr-defined]
    director.finished(result.decision_id, completed=False)
    assert [(sample.outcome, sample.e2e_ms) for sample in samples] == [(Outcome.CLIENT_ABORT, 500.0)]


@pytest.mark.parametrize(
    ("request_head", "collecting"),
    [
        (head(), True),
        (shown(), False),
        (shown(x_leadtime_probe="1"), True),
        (shown(user_agent="kube-probe/1.30"), True),
    ],
)
async def test_nobody_looks_at_what_is_not_shown_not_asked_for_or_a_probe_s(
    request_head: RequestHead, collecting: bool
) -> None:
    samples: list[LatencySample] = []
    director = make(
        FakeLadder([90.0, 10.0, 50.0]),
        completions=samples.append if collecting else None,
        probe_user_agents=("kube-probe/",),
    )
    result = await routed(director, request_head)
    assert director.response_observer(result.decision_id) is None
    director.finished(result.decision_id, completed=True)
    assert samples == []


async def test_a_sheddable_request_is_told_when_to_come_back_and_leaves_no_trace_in_the_ledger() -> None:
    ladder = FakeLadder([900.0, 800.0, 1000.0])
    director = make(ladder, parsing=ParseConfig(trust_request_headers=True))
    for busy in range(len(ADDRESSES)):  # one request on each
        ladder.ttft_ms = [1.0 if i == busy else 900.0 for i in range(len(ADDRESSES))]
        await routed(director)
    director.use_pipeline(PROFILES.pipeline("predicted-latency-slo"))
    ladder.ttft_ms = [900.0, 800.0, 1000.0]
    sheddable = head(x_leadtime_priority="-1", x_slo_ttft_ms="10")
    shed = await rejected(director, sheddable, body())
    assert (shed.status, shed.reason) == (429, RejectReason.SLO_UNREACHABLE)
    assert shed.headers()["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert 1 <= int(shed.headers()["retry-after"]) <= 600
    assert director._state.in_flight == len(ADDRESSES)
    await routed(director, head(x_leadtime_priority="0", x_slo_ttft_ms="10"))


async def test_a_profile_may_say_which_headers_are_believed() -> None:
    director = make(FakeLadder([1.0, 2.0, 3.0]), trust_by_profile=True)

    async def priority() -> int:
        metadata = (await routed(director, head(x_leadtime_priority="7"))).metadata
        assert metadata is not None
        return decode_decision(metadata).priority

    assert await priority() == 0
    director.use_pipeline(PROFILES.pipeline("predicted-latency"))
    assert await priority() == 7
    director.use_pipeline(PROFILES.pipeline("token-load"))
    assert await priority() == 0
