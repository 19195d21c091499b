"""What a request is owed where it doesn't say so itself: objectives by name, and each model's own. Pure.

An objective is a priority and latencies; a trusted request names one by header, and a model may have a default. What
the request says itself (priority header, SLO headers) wins, then its objective, then its model's default, half by half:
a request that states TTFT alone keeps the model's TPOT.

A priority below 0 marks what may be shed. An unknown name is no error: clients are older or newer than the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.router.request.inference_request import Slo
from services.router.request.slo import MAX_PRIORITY, MAX_SLO_MS
from shared.errors import FieldError, kind_of

MAX_NAME_CHARACTERS: Final = 256
_KEYS: Final = ("priority", "ttft_slo_ms", "tpot_slo_ms")


@dataclass(frozen=True, slots=True)
class Objective:
    """One class of traffic. `priority` None: not its business."""

    priority: int | None = None
    slo: Slo = field(default_factory=Slo)


_NONE: Final = Objective()


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives by name, and the default of each model."""

    by_name: Mapping[str, Objective] = field(default_factory=dict)
    by_model: Mapping[str, Objective] = field(default_factory=dict)

    def resolve(self, name: str | None, model: str, priority: int | None, slo: Slo) -> tuple[int, Slo]:
        """Priority and SLO of a request for `model` that names the objective `name` and says `priority` and `slo`."""
        if not self.by_name and not self.by_model:
            return priority or 0, slo
        named = self.by_name.get(name, _NONE) if name else _NONE
        usual = self.by_model.get(model, _NONE)
        if priority is None:
            priority = usual.priority if named.priority is None else named.priority
        ttft, tpot = slo.ttft_ms, slo.tpot_ms
        for fallback in (named.slo, usual.slo):
            ttft = fallback.ttft_ms if ttft is None else ttft
            tpot = fallback.tpot_ms if tpot is None else tpot
        return priority or 0, Slo(ttft, tpot)


def objective_table(document: Mapping[str, Any], where: str) -> dict[str, Objective]:
    """`{name: -1}` or `{name: {priority: -1, ttft_slo_ms: 500, tpot_slo_ms: 50}}`; raises FieldError naming the key."""
    table: dict[str, Objective] = {}
    for name, entry in document.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise FieldError(
                where, "a name that is no text, or too long", f"text of 1 to {MAX_NAME_CHARACTERS} characters"
            )
        field_ = f"{where}.{name[:64]}"
        values = {"priority": entry} if isinstance(entry, int) else entry
        if not isinstance(values, Mapping):
            raise FieldError(field_, kind_of(entry), f"a priority, or a table of {', '.join(_KEYS)}")
        for key in values:
            if key not in _KEYS:
                raise FieldError(f"{field_}.{str(key)[:64]}", "an unknown key", ", ".join(_KEYS))
        table[name] = Objective(
            _priority(values.get("priority"), f"{field_}.priority"),
            Slo(*(_latency(values.get(key), f"{field_}.{key}") for key in _KEYS[1:])),
        )
    return table


def _priority(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        raise FieldError(where, _shown(value), f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _latency(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value <= MAX_SLO_MS:
        raise FieldError(where, _shown(value), f"ms above 0, at most {MAX_SLO_MS:.0f}")
    return float(value)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float) else kind_of(value)
