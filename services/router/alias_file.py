"""The operator's table of model aliases: from a setting and from a YAML file, as one. Edge: reads a file, at start."""

from pathlib import Path
from typing import Final

from services.router.request.aliases import AliasTable
from services.router.yaml_file import read_yaml
from shared.errors import FieldError, kind_of

_ALLOWED: Final = "a table: alias → model, or models by weight"


def alias_table(given: AliasTable, file: Path | None) -> AliasTable:
    """Both tables joined; raises FieldError for a file that isn't one, or an alias that both have."""
    if file is None:
        return given
    document = read_yaml(file, "model_aliases_file", _ALLOWED)
    if not isinstance(document, dict):
        raise FieldError("model_aliases_file", kind_of(document), _ALLOWED)
    for alias, targets in document.items():
        if not _is_entry(alias, targets):
            raise FieldError(
                f"model_aliases_file.{str(alias)[:64]}",
                kind_of(targets),
                "a model's name, or a table of names and whole numbers",
            )
        if alias in given:
            raise FieldError(f"model_aliases_file.{alias[:64]}", "an alias that the setting has too", "one of the two")
    return {**given, **document}


def _is_entry(alias: object, targets: object) -> bool:
    if not isinstance(alias, str):
        return False
    if isinstance(targets, str):
        return True
    return isinstance(targets, dict) and all(
        isinstance(model, str) and isinstance(weight, int) and not isinstance(weight, bool)
        for model, weight in targets.items()
    )
