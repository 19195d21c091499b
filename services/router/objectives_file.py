"""The operator's table of objectives: from settings and from a YAML file, as one. Edge: reads a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from services.router.request.objectives import Objectives, objective_table
from services.router.yaml_file import read_yaml
from shared.errors import FieldError, kind_of

_FIELD: Final = "objectives_file"
_ALLOWED: Final = "a table with objectives, models or both"
_SECTIONS: Final = ("objectives", "models")


def read_objectives(by_name: Mapping[str, Any], by_model: Mapping[str, Any], file: Path | None = None) -> Objectives:
    """Tables of the settings joined with those of the file (`objectives:`, `models:`).

    Raises FieldError for a file that isn't one, a wrong entry, or a name that both have.
    """
    sections: dict[str, Mapping[str, Any]] = {"objectives": by_name, "models": by_model}
    if file is not None:
        for section, table in _document(file).items():
            both = sorted(set(table) & set(sections[section]))
            if both:
                raise FieldError(
                    f"{_FIELD}.{section}.{both[0][:64]}", "a name that the setting has too", "one of the two"
                )
            sections[section] = {**sections[section], **table}
    return Objectives(
        objective_table(sections["objectives"], "objectives"), objective_table(sections["models"], "models")
    )


def _document(file: Path) -> dict[str, dict[str, Any]]:
    document = read_yaml(file, _FIELD, _ALLOWED)
    if not isinstance(document, dict):
        raise FieldError(_FIELD, kind_of(document), _ALLOWED)
    for section, table in document.items():
        if section not in _SECTIONS:
            raise FieldError(f"{_FIELD}.{str(section)[:64]}", "an unknown key", ", ".join(_SECTIONS))
        if not isinstance(table, dict):
            raise FieldError(f"{_FIELD}.{section}", kind_of(table), "a table")
    return document
