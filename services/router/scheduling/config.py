"""Strict configs of plugins and profiles, and faults that name profile, plugin, key, value and allowed range. No I/O.

An unknown key, a wrong kind and a value out of range stop the service at start: a typo in a policy must not become a
default in silence.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.errors import ConfigurationError

_KINDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}
_MAX_VALUE_CHARACTERS: Final = 64


class StrictConfig(BaseModel):
    """Base of every plugin's config: frozen, no unknown keys, no conversion between kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Config = TypeVar("Config", bound=StrictConfig)


def validated(config: type[Config], values: Any, where: str) -> Config:
    """Check `values` against a config; raises ConfigurationError with one line per fault, each beginning with `where`.

    `where` names the profile and, inside it, the plugin.
    """
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{where}: found {_shown(values)}; allowed: a mapping of {_listed(config.model_fields)}"
        )
    try:
        return config.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=True)
        raise ConfigurationError("\n".join(_fault(config, fault, where) for fault in faults)) from None


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: its kind, bounds and choices."""
    return _kind(field.annotation, field.metadata)


def _kind(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *constraints = get_args(annotation)
        return _kind(kind, [bound for constraint in constraints for bound in getattr(constraint, "metadata", [])])
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin in {Union, UnionType}:
        kinds = [_kind(part) for part in get_args(annotation) if part is not NoneType]
        return " or ".join(kinds) + " (or null)" * (NoneType in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, StrictConfig):
        return f"a mapping of {_listed(annotation.model_fields)}"
    return " ".join([_KINDS.get(origin or annotation, str(annotation)), *_range(bounds)])


def _range(bounds: Sequence[Any]) -> list[str]:
    """Bounds in words, the lower one first."""
    words: dict[str, str] = {}
    for bound in bounds:
        if isinstance(bound, annotated_types.Ge):
            words["low"] = f"from {bound.ge}"
        elif isinstance(bound, annotated_types.Gt):
            words["low"] = f"above {bound.gt}"
        elif isinstance(bound, annotated_types.Le):
            words["high"] = f"to {bound.le}"
        elif isinstance(bound, annotated_types.Lt):
            words["high"] = f"below {bound.lt}"
        elif (pattern := getattr(bound, "pattern", None)) is not None:
            words["low"] = f"matching {pattern}"
    if "low" in words and words.get("high", "").startswith("below"):
        words["high"] = f"and {words['high']}"
    return [words[end] for end in ("low", "high") if end in words]


def _fault(config: type[StrictConfig], fault: ErrorDetails, where: str) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    owner, field = _field_at(config, fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: {key}: no such key; allowed: {_listed(owner.model_fields)}"
    takes = allowed(field) if field is not None else fault["msg"]
    if fault["type"] == "missing":
        return f"{where}: {key}: missing; allowed: {takes}"
    return f"{where}: {key}: found {_shown(fault['input'])}; allowed: {takes}"


def _field_at(config: type[StrictConfig], location: Iterable[int | str]) -> tuple[type[StrictConfig], FieldInfo | None]:
    """The innermost config on the way to a fault, and the field of it that is at fault, if it has one."""
    owner = config
    field: FieldInfo | None = None
    for part in location:
        inner = None if field is None else _config_in(field.annotation)
        if inner is not None and isinstance(part, str):
            owner, field = inner, None
        if isinstance(part, str) and field is None:
            field = owner.model_fields.get(part)
    return owner, field


def _config_in(annotation: Any) -> type[StrictConfig] | None:
    if isinstance(annotation, type) and issubclass(annotation, StrictConfig):
        return annotation
    return next((found for part in get_args(annotation) if (found := _config_in(part)) is not None), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no keys at all"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"
