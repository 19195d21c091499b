"""Names that clients use for models → the models that serve them, drawn by weight. Pure.

An alias hides which model answers: a rollout moves weight from one to the other, and no client changes. The draw is
made once per request, with the caller's random number.

Limits: one step, an alias's target isn't looked up again; names match as they are written.
"""

import itertools
from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from shared.errors import FieldError

MAX_NAME_CHARACTERS: Final = 256
MAX_WEIGHT: Final = 1_000_000

AliasTable = Mapping[str, str | Mapping[str, int]]
"""As an operator writes it: alias → model, or alias → {model: weight}."""


class ModelAliases:
    """The table, checked and summed up once."""

    __slots__ = ("_targets",)

    def __init__(self, table: AliasTable) -> None:
        """Raises FieldError that names the alias."""
        self._targets: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        for alias, targets in table.items():
            weights = {targets: 1} if isinstance(targets, str) else dict(targets)
            _check(alias, weights)
            models = tuple(model for model, weight in weights.items() if weight)
            self._targets[alias] = models, tuple(itertools.accumulate(weights[model] for model in models))

    def __bool__(self) -> bool:
        return bool(self._targets)

    def target(self, name: str, draw: float) -> str | None:
        """The model behind `name`, by a number from 0 (included) to 1 (excluded); None where it is no alias."""
        found = self._targets.get(name)
        if found is None:
            return None
        models, sums = found
        return models[bisect_right(sums, draw * sums[-1])]


def _check(alias: str, weights: Mapping[str, int]) -> None:
    for name in (alias, *weights):
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise FieldError(
                "model_aliases", f"a name of {len(name)} characters", f"1 to {MAX_NAME_CHARACTERS} characters"
            )
    for model, weight in weights.items():
        if not 0 <= weight <= MAX_WEIGHT:
            raise FieldError(f"model_aliases.{alias}.{model}", f"weight {weight}", f"0 to {MAX_WEIGHT}")
    if not any(weights.values()):
        raise FieldError(f"model_aliases.{alias}", "no model with a weight", "at least one")
