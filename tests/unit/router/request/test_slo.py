import orjson
import pytest

from services.router.request.errors import InvalidRequest, RejectReason
from services.router.request.inference_request import Slo
from services.router.request.parse import ParseConfig, parse
from services.router.request.slo import (
    control_headers,
    parse_fairness_id,
    parse_objective,
    parse_prediction_wanted,
    parse_priority,
    parse_slo,
)
from services.router.request.tokens import TokenEstimator

BODY = b'{"model":"m","prompt":"x"}'


@pytest.mark.parametrize(
    ("headers", "slo"),
    [
        ({}, Slo()),
        ({"x-llm-d-slo-ttft-ms": "250"}, Slo(250.0)),
        ({"x-slo-ttft-ms": " 1.5e2 ", "x-slo-tpot-ms": "20."}, Slo(150.0, 20.0)),
        ({"x-slo-ttft-ms": "wrong", "x-llm-d-slo-ttft-ms": "9"}, Slo(9.0)),
    ],
)
def test_objectives_are_read_in_both_spellings_and_the_first_wins(headers, slo):
    assert parse_slo(headers) == slo


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e999",
        "1_000",
        "0x10",
        "１２",
        "12 ms",
        "1,5",
        "86400001",
        "100, 200",
        "-0",
        "1e-999",
    ],
)
@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"])
def test_a_value_that_is_no_duration_above_zero_is_a_400_that_names_the_header(name, value):
    with pytest.raises(InvalidRequest) as caught:
        parse_slo({name: value})
    assert caught.value.param == name
    assert caught.value.reason is RejectReason.HEADER_INVALID
    assert name in caught.value.message


def test_a_priority_is_what_its_header_says_and_nothing_without_one():
    assert parse_priority({"x-leadtime-priority": "-3"}) == -3
    assert parse_priority({}) is None


def test_an_objective_is_named_in_either_spelling():
    assert parse_objective({"x-gateway-inference-objective": " batch "}) == "batch"
    assert parse_objective({"x-llm-d-inference-objective": ""}) is None
    assert parse_objective({}) is None


def test_a_session_is_named_by_header_or_by_the_prompt_cache_key_of_the_body():
    def session(headers, **fields):
        body = orjson.dumps({"model": "m", "prompt": "hello", **fields})
        return parse("/v1/completions", headers, body, TokenEstimator()).session_id

    assert session({"x-session-id": " a "}, prompt_cache_key="b") == "a"
    assert session({}, prompt_cache_key="b") == "b"
    assert session({}, prompt_cache_key=7) == session({}) == ""
    with pytest.raises(InvalidRequest, match="x-session-id"):
        session({"x-session-id": "x" * 513})


@pytest.mark.parametrize("value", ["high", "1.5", "1000001", ""])
def test_a_priority_that_is_no_small_integer_is_refused(value):
    with pytest.raises(InvalidRequest):
        parse_priority({"x-leadtime-priority": value})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", "0"),
        ("-5", "-5"),
        ("1e9", "1e9"),
        (".5", ".5"),
        ("NaN", "NaN"),
        ("-inf", "-inf"),
        ("", "an empty value"),
        ("  ", "an empty value"),
        ("500ms", "a number with something behind it"),
        ("2 s", "a number with something behind it"),
        ("300, 400", "2 numbers"),
        ("300,secret", "text of 10 characters"),
        ("my secret", "text of 9 characters"),
        ("1" * 40, "text of 40 characters"),
    ],
)
def test_what_an_objective_s_header_held_is_told_by_its_kind_and_a_number_as_it_is(text, found):
    with pytest.raises(InvalidRequest) as caught:
        parse_slo({"x-slo-ttft-ms": text})
    allowed = "a number of milliseconds above 0, at most 86400000"
    assert caught.value.message == f"header x-slo-ttft-ms: found {found}; allowed: {allowed}"


def test_a_fairness_id_has_a_bounded_length():
    assert parse_fairness_id({"x-llm-d-inference-fairness-id": " tenant "}) == "tenant"
    with pytest.raises(InvalidRequest):
        parse_fairness_id({"x-gateway-inference-fairness-id": "x" * 129})


def test_steering_headers_count_only_where_they_are_trusted():
    headers = {"x-leadtime-priority": "7", "x-llm-d-inference-fairness-id": "a", "x-slo-ttft-ms": "100"}
    plain = parse("/v1/completions", headers, BODY, TokenEstimator())
    trusted = parse("/v1/completions", headers, BODY, TokenEstimator(), ParseConfig(trust_request_headers=True))
    assert (plain.priority, plain.fairness_id, plain.slo.ttft_ms) == (0, "", 100.0)
    assert (trusted.priority, trusted.fairness_id) == (7, "a")


@pytest.mark.parametrize(
    ("text", "wanted"), [(None, True), ("true", True), (" FALSE ", False), ("0", False), ("1", True)]
)
def test_a_request_may_ask_for_the_heuristic(text, wanted):
    headers = {} if text is None else {"x-prediction-based-scheduling": text}
    assert parse_prediction_wanted(headers) is wanted
    request = parse("/v1/completions", headers, BODY, TokenEstimator())
    assert request.prediction_wanted is wanted


@pytest.mark.parametrize("text", ["", "no", "2", "truefalse"])
def test_what_is_neither_true_nor_false_is_a_400_that_names_the_header(text):
    with pytest.raises(InvalidRequest) as caught:
        parse_prediction_wanted({"x-prediction-based-scheduling": text})
    assert caught.value.param == "x-prediction-based-scheduling"


def test_headers_for_the_router_alone_are_named():
    mine = [
        "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "x-llm-d-inference-objective",
        "x-gateway-inference-objective", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id",
        "x-leadtime-priority", "x-prediction-based-scheduling", "x-leadtime-anything", "leadtime-pool",
    ]  # fmt: skip
    others = [":path", "content-type", "authorization", "x-request-id", "x-leadtime-probe", "x-leadtime-decision-id"]
    assert control_headers(dict.fromkeys([*others, *mine], "1")) == tuple(mine)
