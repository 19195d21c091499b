"""Names that clients use for models → the models that serve them, drawn by weight. Pure.

An alias hides which model answers: a rollout moves weight from one to the other, and no client changes. The draw is
made once per request, with the caller's random number.

Limits: one step, an alias's target isn't looked up again; names match as they are written. A rule for every other name
can be had from Kubernetes alone (InferenceModelRewrite without matches).
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

    __slots__ = ("_every_other", "_targets")

    def __init__(self, table: AliasTable, every_other: Mapping[str, int] | None = None) -> None:
        """`every_other`: models by weight for names that the table lacks. Raises FieldError that names the alias."""
        self._targets = {alias: _weighed(alias, targets) for alias, targets in table.items()}
        self._every_other = None if every_other is None else _weighed("*", every_other)

    def __bool__(self) -> bool:
        return bool(self._targets) or self._every_other is not None

    def target(self, name: str, draw: float) -> str | None:
        """The model behind `name`, by a number from 0 (included) to 1 (excluded); None where that is itself."""
        found = self._targets.get(name, self._every_other)
        if found is None:
            return None
        models, sums = found
        model = models[bisect_right(sums, draw * sums[-1])]
        return None if model == name else model


def _weighed(alias: str, targets: str | Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    weights = {targets: 1} if isinstance(targets, str) else dict(targets)
    _check(alias, weights)
    models = tuple(model for model, weight in weights.items() if weight)
    return models, tuple(itertools.accumulate(weights[model] for model in models))


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
