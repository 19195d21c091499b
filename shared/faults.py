"""What pydantic and msgspec find wrong, in our words: the field, the kind of what was found, what is allowed. Pure.

Their own sentences name types of their languages, and pydantic's repeat what was sent; a number alone is told as it is.
For settings, the HTTP edges of all services and files of lines; policies have a table of their own.
"""

import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel

from shared.errors import FieldError, kind_of

_NUMERIC: Final = ("int_", "float_", "greater_", "less_", "finite_", "multiple_")
# Beginnings of pydantic's sentences, and ours of the same meaning behind "allowed: ".
_BEGINNINGS: Final = (
    ("Input should be ", ""),
    ("String should ", "text that should "),
    ("Value should ", "a value that should "),
    ("Value error, ", ""),
)


def in_words(faults: Sequence[Mapping[str, Any]], model: Any = None, skip: int = 0) -> list[tuple[str, str]]:
    """(field, what is wrong) for each of `ValidationError.errors()`; the field is "body" where it is the whole.

    `model`, a BaseModel, says which keys are known where one isn't; the first `skip` parts of a location lie above it.
    """
    return [_worded(fault, model, skip) for fault in faults]


def _worded(fault: Mapping[str, Any], model: Any, skip: int) -> tuple[str, str]:
    location: tuple[Any, ...] = tuple(fault["loc"])
    field = ".".join(str(part) for part in location) or "body"
    context: Mapping[str, Any] = fault.get("ctx") or {}
    match fault["type"]:
        case "json_invalid":
            # What FastAPI puts behind the body is a position.
            return (str(location[0]) if location else "body"), f"not JSON: {context.get('error', 'malformed')}"
        case "missing":
            return field, f"found nothing; allowed: {'an object as JSON' if field == 'body' else 'a value'}"
        case "extra_forbidden":
            known = _keys(model, location[skip:-1])
            return field, f"no such key; allowed: {', '.join(known)}" if known else "no such key"
        case "path_not_file" | "path_not_directory":
            return field, f"found a path that {fault['msg'].removeprefix('Path ')}; allowed: one that does"
        case "value_error":
            return field, _without_prefix(fault["msg"])
        case _:
            return field, f"found {_found(fault)}; allowed: {_without_prefix(fault['msg'])}"


def _found(fault: Mapping[str, Any]) -> str:
    """A number where one is asked for is told as it is; of everything else, which may be a secret, only the kind."""
    value = fault.get("input")
    text = str(value)
    numeric = fault["type"].startswith(_NUMERIC) and not isinstance(value, bool)
    if numeric and isinstance(value, int | float | str) and len(text) <= 20:
        try:
            float(text)
        except ValueError:
            return kind_of(value)
        return text
    return kind_of(value)


def _without_prefix(message: str) -> str:
    message = message.partition(", unable to ")[0]  # what was found, again
    for theirs, ours in _BEGINNINGS:
        if message.startswith(theirs):
            return ours + message.removeprefix(theirs)
    return message


def _keys(model: Any, location: Sequence[Any]) -> list[str]:
    """Keys of the model at `location`, empty where it can't be told."""
    at = model
    for part in location:
        at = at.model_fields[part].annotation if _is_model(at) and part in at.model_fields else at
        if not isinstance(part, int) and _is_model(at):
            continue
        at = _inner(at)
    at = _inner(at)
    return sorted(at.model_fields) if _is_model(at) else []


def _inner(annotation: Any) -> Any:
    """The model inside `tuple[Model, ...]`, `Model | None` and the like; else the annotation itself."""
    if get_origin(annotation) in {tuple, list, Union, types.UnionType}:
        return next((_inner(part) for part in get_args(annotation) if _is_model(_inner(part))), annotation)
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


_MISSING: Final = re.compile(r"Object missing required field `(.*?)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`")
_EXPECTED: Final = re.compile(r"Expected `(.*?)`, got `(.*?)`")
_BOUND: Final = re.compile(r"Expected (.*)")
_PLACE: Final = re.compile(r" - at `(?:key in )?\$(.*?)`$")
_WORDS: Final = {
    "str": "text", "int": "an integer", "float": "a number", "bool": "a boolean", "null": "nothing", "array": "a list",
    "object": "an object", "bytes": "bytes",
}  # fmt: skip


def of_message(error: msgspec.ValidationError, root: str, fields: Sequence[str] = ()) -> FieldError:
    """What msgspec found wrong in a message called `root`; `fields`, in order, are the keys that it may have."""
    text = str(error)
    place = _PLACE.search(text)
    path = root + (place.group(1) if place else "")
    said = text[: place.start()] if place else text
    if missing := _MISSING.fullmatch(said):
        return FieldError(f"{path}.{missing.group(1)}", "nothing", "a value")
    if unknown := _UNKNOWN.fullmatch(said):
        return FieldError(f"{path}.{unknown.group(1)[:64]}", "no key that is known", ", ".join(fields) or "none beside")
    if kinds := _EXPECTED.fullmatch(said):
        allowed, found = (_in_a_word(part) for part in kinds.groups())
        return FieldError(path, found, allowed)
    if bound := _BOUND.fullmatch(said):
        return FieldError(path, "a value out of range", bound.group(1).replace("`", ""))
    return FieldError(path, f"another form ({said[:200]})", "the documented one")


def _in_a_word(kinds: str) -> str:
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds.split(" | "))
