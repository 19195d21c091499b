"""What a request is owed: what it says itself, else its objective, else its model's default, half by half."""

import pytest

from services.router.objectives_file import read_objectives
from services.router.request.inference_request import Slo
from services.router.request.objectives import Objective, Objectives, objective_table
from services.router.request.parse import ParseConfig, parse
from services.router.request.tokens import TokenEstimator
from shared.errors import FieldError

TABLES = Objectives(
    {"batch": Objective(-1), "chat": Objective(5, Slo(500.0)), "loose": Objective(None, Slo(None, 80.0))},
    {"m": Objective(1, Slo(2000.0, 40.0))},
)


@pytest.mark.parametrize(
    ("name", "model", "priority", "slo", "resolved"),
    [
        (None, "other", None, Slo(), (0, Slo())),
        (None, "m", None, Slo(), (1, Slo(2000.0, 40.0))),
        (None, "m", None, Slo(9.0), (1, Slo(9.0, 40.0))),
        ("batch", "m", None, Slo(), (-1, Slo(2000.0, 40.0))),
        ("chat", "m", None, Slo(None, 7.0), (5, Slo(500.0, 7.0))),
        ("chat", "other", -9, Slo(), (-9, Slo(500.0))),
        ("loose", "m", None, Slo(), (1, Slo(2000.0, 80.0))),
        ("never heard of", "m", 0, Slo(), (0, Slo(2000.0, 40.0))),
    ],
)
def test_each_half_comes_from_the_nearest_that_states_it(name, model, priority, slo, resolved):
    assert TABLES.resolve(name, model, priority, slo) == resolved


def test_an_untrusted_client_names_no_objective_but_its_model_s_default_holds():
    headers = {"x-llm-d-inference-objective": "chat", "x-slo-tpot-ms": "3"}
    body = b'{"model":"m","prompt":"x"}'
    untrusted = parse("/v1/completions", headers, body, TokenEstimator(), ParseConfig(objectives=TABLES))
    assert (untrusted.priority, untrusted.slo) == (1, Slo(2000.0, 3.0))
    config = ParseConfig(trust_request_headers=True, objectives=TABLES)
    assert parse("/v1/completions", headers, body, TokenEstimator(), config).slo == Slo(500.0, 3.0)


def test_a_table_gives_a_priority_or_all_of_an_objective():
    table = objective_table({"a": -3, "b": {"ttft_slo_ms": 100, "priority": 2}, "c": {}}, "objectives")
    assert table == {"a": Objective(-3), "b": Objective(2, Slo(100.0)), "c": Objective()}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"a": "low"}, r"objectives\.a: .*a priority, or a table"),
        ({"a": {"prio": 1}}, r"objectives\.a\.prio: .*priority, ttft_slo_ms, tpot_slo_ms"),
        ({"a": {"priority": True}}, r"objectives\.a\.priority: .*whole number"),
        ({"a": 2_000_000}, r"objectives\.a\.priority: .*2000000.*-1000000 to 1000000"),
        ({"a": {"ttft_slo_ms": -1}}, r"objectives\.a\.ttft_slo_ms: .*-1.*above 0"),
        ({"a": {"tpot_slo_ms": float("nan")}}, r"objectives\.a\.tpot_slo_ms: .*nan"),
        ({"": 1}, "objectives: .*1 to 256 characters"),
        ({5: 1}, "objectives: .*1 to 256 characters"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_allowed(document, fault):
    with pytest.raises(FieldError, match=fault):
        objective_table(document, "objectives")


def test_a_file_and_the_settings_make_one_table(tmp_path):
    file = tmp_path / "objectives.yaml"
    file.write_text("objectives:\n  chat: {priority: 1, ttft_slo_ms: 500}\nmodels:\n  m: {tpot_slo_ms: 40}\n")
    tables = read_objectives({"batch": -1}, {}, file)
    assert tables.by_name == {"batch": Objective(-1), "chat": Objective(1, Slo(500.0))}
    assert tables.by_model == {"m": Objective(None, Slo(None, 40.0))}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("objectives: {batch: 1}", "objectives.batch"),
        ("objectives: 5", "objectives: found"),
        ("[1]", "objectives_file: "),
        ("other: {}", "unknown key"),
        ("a: [", r"isn't YAML \(line 1\)"),
        ("models: {m: low}", "models.m"),
    ],
)
def test_a_file_that_can_not_work_is_named(text, fault, tmp_path):
    file = tmp_path / "objectives.yaml"
    file.write_text(text)
    with pytest.raises(FieldError, match=fault):
        read_objectives({"batch": -1}, {}, file)
