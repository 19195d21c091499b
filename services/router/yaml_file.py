"""An operator's YAML file → plain values; one that isn't is refused in words: why, at which line. Edge: a file."""

from pathlib import Path
from typing import Any

import yaml

from shared.errors import FieldError, reason_of


def read_yaml(file: Path, field: str, allowed: str) -> Any:
    """The document; raises FieldError of `field` for a file that can't be read or isn't YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(field, f"a file that can't be read ({reason_of(error)})", allowed) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none is a ValueError
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise FieldError(field, f"text that isn't YAML{where}", allowed) from None
