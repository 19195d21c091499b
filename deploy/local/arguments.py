"""Faults of the command line's numbers in our words, in one place: what was found, and what is allowed. Pure.

Typer's own sentences are pydantic's, which name one bound and not what was typed.
"""

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose arguments are refused in our words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = _told(error.__cause__.errors()[0], error.param)
            raise


def _told(fault: Any, option: Any) -> str:
    """`option` has `min` and `max`, each a number or None, where it takes a number."""
    low, high = getattr(option, "min", None), getattr(option, "max", None)
    kind = {"int": "an integer", "float": "a number"}.get(fault["type"].partition("_")[0], "")
    bounds = f"{low} to {high}" if high is not None else f"{low} or more" if low is not None else ""
    allowed = ", ".join(filter(None, (kind, bounds))) or fault["msg"].removeprefix("Input should be ")
    return f"found {str(fault['input'])[:64]}; allowed: {allowed}"
