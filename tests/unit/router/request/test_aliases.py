"""Aliases: by weight, checked at start, from a setting and a file."""

from pathlib import Path

import pytest

from services.router.alias_file import alias_table
from services.router.request.aliases import ModelAliases
from shared.errors import FieldError


def test_a_name_that_is_no_alias_has_no_target() -> None:
    assert ModelAliases({}).target("m", 0.5) is None
    assert not ModelAliases({})


@pytest.mark.parametrize(("draw", "model"), [(0.0, "a"), (0.74, "a"), (0.75, "b"), (0.99, "b"), (1.0 - 2.0**-53, "b")])
def test_the_draw_falls_by_weight(draw: float, model: str) -> None:
    assert ModelAliases({"x": {"a": 3, "none": 0, "b": 1}}).target("x", draw) == model


def test_an_alias_of_one_model_needs_no_weight() -> None:
    assert ModelAliases({"x": "a"}).target("x", 0.99) == "a"


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"x": {}}, "model_aliases.x"),
        ({"x": {"a": 0}}, "model_aliases.x"),
        ({"x": {"a": -1}}, "model_aliases.x.a"),
        ({"x": {"a": 1_000_001}}, "model_aliases.x.a"),
        ({"x": ""}, "model_aliases"),
        ({"": "a"}, "model_aliases"),
        ({"x": "a" * 257}, "model_aliases"),
    ],
)
def test_a_table_that_can_not_work_names_the_alias(table: dict, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        ModelAliases(table)
    assert caught.value.field == field


def test_the_file_joins_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text("chat: {llama-a: 9, llama-b: 1}\nbest: llama-b\n")
    assert alias_table({"x": "y"}, file) == {"x": "y", "chat": {"llama-a": 9, "llama-b": 1}, "best": "llama-b"}
    assert alias_table({"x": "y"}, None) == {"x": "y"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n",
        "x: 3\n",
        "x: {a: 1.5}\n",
        "x: {a: true}\n",
        "x: [a]\n",
        "1: a\n",
        "x: {1: 1}\n",
        "x: [\n",
        "y: a\n",
    ],
)
def test_a_file_that_is_no_table_stops_the_start(text: str, tmp_path: Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text(text)
    with pytest.raises(FieldError, match="model_aliases_file"):
        alias_table({"y": "z"}, file)


def test_a_rule_for_every_other_name_comes_after_the_table():
    aliases = ModelAliases({"chat": "llama"}, {"fallback": 1})
    assert aliases
    assert (aliases.target("chat", 0.5), aliases.target("anything", 0.5)) == ("llama", "fallback")
    assert aliases.target("fallback", 0.5) is None
    assert ModelAliases({}, {"fallback": 1})
