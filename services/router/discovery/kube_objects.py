"""Kubernetes documents → endpoints, priorities and model names. Pure.

Reads only the fields it needs and doubts each of them: an object that lacks one, or has another kind there, is left
out, since one odd object must not take a pool down.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.router.discovery.endpoints import Listed, address_of
from services.router.request.aliases import MAX_NAME_CHARACTERS, MAX_WEIGHT
from services.router.request.slo import MAX_PRIORITY
from services.router.state.roles import Role
from shared.errors import FieldError
from shared.features import hardware_code

ROLE_LABEL: Final = "llm-d.ai/role"


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod says that matters here. `usable`: running, ready, not being deleted or evicted, with an address."""

    uid: str
    ip: str
    usable: bool
    started: str
    """Time of start as Kubernetes writes it: texts of one form, which sort by time."""
    role: Role
    hardware_class: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """An InferencePool's part for us: which pods, which of their ports."""

    selector: str
    ports: tuple[int, ...]


def pod(document: Any, hardware_label: str) -> Pod | None:
    """Read one pod; None for what isn't one."""
    metadata, status, spec = _table(document, "metadata"), _table(document, "status"), _table(document, "spec")
    uid = metadata.get("uid")
    if not isinstance(uid, str):
        return None
    labels = _table(metadata, "labels")
    ip = status.get("podIP")
    conditions = status.get("conditions")
    ready = [each.get("status") for each in _tables(conditions) if each.get("type") == "Ready"]
    usable = (
        isinstance(ip, str)
        and bool(ip)
        and status.get("phase") == "Running"
        and not metadata.get("deletionTimestamp")
        and (not ready or ready[0] == "True")
        and spec is not None
    )
    return Pod(
        uid,
        ip if isinstance(ip, str) else "",
        usable,
        str(status.get("startTime") or metadata.get("creationTimestamp") or ""),
        _role(labels.get(ROLE_LABEL)),
        _hardware(labels.get(hardware_label)),
    )


def endpoints(pods: Iterable[Pod], ports: Sequence[int]) -> dict[str, Listed]:
    """Each usable pod's ports as endpoints. Where two pods claim an address, the one that started last has it."""
    listing: dict[str, Listed] = {}
    for each in sorted((each for each in pods if each.usable), key=lambda each: (each.started, each.uid)):
        for port in ports:
            try:
                address = address_of(each.ip, port)
            except ValueError:
                break
            listing[address] = Listed(each.hardware_class, each.role, each.uid)
    return listing


def pool_spec(document: Any) -> PoolSpec | None:
    """Read an InferencePool (v1); None if it selects nothing that can be asked for."""
    spec = _table(document, "spec")
    labels = _table(_table(spec, "selector"), "matchLabels")
    ports = [each.get("number") for each in _tables(spec.get("targetPorts"))]
    whole = tuple(port for port in ports if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65_536)
    pairs = [f"{key}={value}" for key, value in sorted(labels.items()) if isinstance(value, str)]
    if not pairs or not whole or len(pairs) != len(labels):
        return None
    return PoolSpec(",".join(pairs), whole)


def objective(document: Any, pool: str) -> tuple[str, int] | None:
    """An InferenceObjective of the pool: its name and priority (unset: 0)."""
    spec = _table(document, "spec")
    name = _table(document, "metadata").get("name")
    if _table(spec, "poolRef").get("name") != pool or not isinstance(name, str):
        return None
    priority = spec.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        return None
    return name, max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of an InferenceModelRewrite: for these names (none: for all), models by weight."""

    models: tuple[str, ...]
    targets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An InferenceModelRewrite of the pool."""

    created: str
    name: str
    rules: tuple[Rule, ...]


def rewrite(document: Any, pool: str) -> Rewrite | None:
    """Read an InferenceModelRewrite; rules that can't be followed are left out."""
    metadata, spec = _table(document, "metadata"), _table(document, "spec")
    if _table(spec, "poolRef").get("name") != pool:
        return None
    rules = [rule for each in _tables(spec.get("rules")) if (rule := _rule(each)) is not None]
    return Rewrite(str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or ""), tuple(rules))


def _rule(document: Mapping[str, Any]) -> Rule | None:
    models: list[str] = []
    for match in _tables(document.get("matches")):
        wanted = _table(match, "model")
        value: Any = wanted.get("value")
        if wanted.get("type", "Exact") != "Exact" or not _is_name(value):
            return None  # a kind of match that isn't known must not become one for all
        models.append(value)
    if document.get("matches") and not models:
        return None
    named: list[tuple[Any, Any]] = [
        (each.get("modelRewrite"), each.get("weight")) for each in _tables(document.get("targets"))
    ]
    if not named or not all(_is_name(name) for name, _ in named):
        return None
    weighted = any(weight is not None for _, weight in named)
    targets: dict[str, int] = {}
    for name, weight in named:
        # Where one target has a weight, those without are never picked.
        share = weight if weighted else 1
        if share is None:
            continue
        if not isinstance(share, int) or isinstance(share, bool) or not 0 < share <= MAX_WEIGHT:
            return None
        targets[name] = targets.get(name, 0) + share
    return Rule(tuple(models), targets)


def alias_rules(rewrites: Iterable[Rewrite]) -> tuple[dict[str, Mapping[str, int]], Mapping[str, int] | None]:
    """All rules as one table, and the one for every other name: exact over generic, older objects first, then order."""
    exact: dict[str, Mapping[str, int]] = {}
    generic: Mapping[str, int] | None = None
    for each in sorted(rewrites, key=lambda each: (each.created, each.name)):
        for rule in each.rules:
            for model in rule.models:
                exact.setdefault(model, rule.targets)
            if not rule.models and generic is None:
                generic = rule.targets
    return exact, generic


def _role(label: Any) -> Role:
    try:
        return Role.of(label if isinstance(label, str) else "")
    except FieldError:
        return Role.BOTH


def _hardware(label: Any) -> int:
    try:
        return hardware_code(label) if isinstance(label, str) and label else 0
    except FieldError:
        return 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS


def _table(document: Any, key: str) -> Mapping[str, Any]:
    found = document.get(key) if isinstance(document, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
