"""Profiles: YAML → producer, admitters, filters, weighted scorers, one picker and a fallback, checked whole; and
profiles → pipelines.

Presets ship inside the package; an operator's own file has the same form. Everything is checked when it is read: an
unknown plugin or key, a value out of range, a key written twice, a fallback that doesn't exist or has one of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import Field

from services.router.admission.waiting_room import WaitingRoomConfig
from services.router.scheduling.config import StrictConfig, validated
from services.router.scheduling.pipeline import NamedFilter, Pipeline, WeightedScorer
from services.router.scheduling.registry import Kind, Plugin, Registry
from shared.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin with its checked config; `weight` is a scorer's, 1 elsewhere."""

    plugin: Plugin
    config: StrictConfig
    weight: float = 1.0

    def build(self) -> Any:
        """A fresh instance of the plugin."""
        return self.plugin.build(self.config)

    def as_dict(self) -> dict[str, Any]:
        return {"plugin": self.plugin.name, "config": self.config.model_dump()}


@dataclass(frozen=True, slots=True)
class Profile:
    """One policy. `fallback` names the profile that decides where no scorer has an opinion."""

    name: str
    description: str
    filters: tuple[Choice, ...]
    scorers: tuple[Choice, ...]
    picker: Choice
    fallback: str | None
    producer: Choice | None = None
    admitters: tuple[Choice, ...] = ()
    waiting_room: WaitingRoomConfig | None = None
    trust_request_headers: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The whole profile with every value that holds, defaults too, as it could be written."""
        return {
            "name": self.name,
            "description": self.description,
            "producer": None if self.producer is None else self.producer.as_dict(),
            "admitters": [choice.as_dict() for choice in self.admitters],
            "filters": [choice.as_dict() for choice in self.filters],
            "scorers": [{**choice.as_dict(), "weight": choice.weight} for choice in self.scorers],
            "picker": self.picker.as_dict(),
            "trust_request_headers": self.trust_request_headers,
            "waiting_room": None if self.waiting_room is None else self.waiting_room.model_dump(),
            "fallback": self.fallback,
        }


class _PluginDocument(StrictConfig):
    plugin: str
    config: dict[str, Any] = Field(default_factory=dict)


class _ScorerDocument(_PluginDocument):
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0


class _ProfileDocument(StrictConfig):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    description: str = ""
    producer: _PluginDocument | None = None
    admitters: list[_PluginDocument] = Field(default_factory=list)
    filters: list[_PluginDocument] = Field(default_factory=list)
    scorers: list[_ScorerDocument] = Field(default_factory=list)
    picker: _PluginDocument
    waiting_room: WaitingRoomConfig | None = None
    trust_request_headers: bool = False
    fallback: str | None = None


class YamlLoader(yaml.SafeLoader):
    """safe_load that refuses a key written twice: YAML's own loader keeps the last in silence."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.name = "the document"  # in faults, before line and column

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                problem=f"key '{twice}' is written twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def parse_profile(text: str, source: str, registry: Registry) -> Profile:
    """YAML → checked profile; `source` names it in faults. Raises ConfigurationError."""
    try:
        document = YamlLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    parsed = validated(_ProfileDocument, document, source)
    where = f"profile {parsed.name}"
    return Profile(
        name=parsed.name,
        description=parsed.description,
        filters=tuple(_choice(Kind.FILTER, filter_, where, registry) for filter_ in parsed.filters),
        scorers=tuple(_choice(Kind.SCORER, scorer, where, registry, scorer.weight) for scorer in parsed.scorers),
        picker=_choice(Kind.PICKER, parsed.picker, where, registry),
        fallback=parsed.fallback,
        producer=None if parsed.producer is None else _choice(Kind.PRODUCER, parsed.producer, where, registry),
        admitters=tuple(_choice(Kind.ADMITTER, admitter, where, registry) for admitter in parsed.admitters),
        waiting_room=parsed.waiting_room,
        trust_request_headers=parsed.trust_request_headers,
    )


def load_presets(registry: Registry) -> tuple[Profile, ...]:
    """The profiles that ship with Leadtime, in order of their names."""
    folder = resources.files("services.router.scheduling") / "presets"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    presets = [parse_profile(file.read_text("utf-8"), f"preset {file.name}", registry) for file in files]
    return tuple(sorted(presets, key=lambda profile: profile.name))


class Profiles:
    """Profiles that may be switched between by name, checked against each other."""

    __slots__ = ("_profiles",)

    def __init__(self, profiles: Iterable[Profile]) -> None:
        """Raises ConfigurationError for a name used twice, and for a fallback that is unknown or has one itself."""
        by_name: dict[str, Profile] = {}
        for profile in profiles:
            if profile.name in by_name:
                raise ConfigurationError(f"profile {profile.name}: defined twice; allowed: once")
            by_name[profile.name] = profile
        last_resorts = [profile.name for profile in by_name.values() if profile.fallback is None]
        for profile in by_name.values():
            if profile.fallback is not None and profile.fallback not in last_resorts:
                raise ConfigurationError(
                    f"profile {profile.name}: fallback: found '{profile.fallback[:64]}'; allowed: a profile without a "
                    f"fallback of its own: {', '.join(last_resorts) or 'none is defined'}"
                )
        self._profiles: Mapping[str, Profile] = by_name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._profiles)

    def get(self, name: str) -> Profile:
        """The profile of this name; raises ConfigurationError that names the known ones."""
        profile = self._profiles.get(name)
        if profile is None:
            raise ConfigurationError(f"profile: found '{name[:64]}'; allowed: {', '.join(self._profiles)}")
        return profile

    def pipeline(self, name: str) -> Pipeline:
        """A fresh pipeline of this profile, its fallback included; raises ConfigurationError for an unknown name."""
        profile = self.get(name)
        return Pipeline(
            profile.name,
            tuple(NamedFilter(choice.plugin.name, choice.build()) for choice in profile.filters),
            tuple(WeightedScorer(choice.plugin.name, choice.weight, choice.build()) for choice in profile.scorers),
            profile.picker.build(),
            None if profile.fallback is None else self.pipeline(profile.fallback),
            producer=None if profile.producer is None else profile.producer.build(),
            admitters=tuple(choice.build() for choice in profile.admitters),
            waiting_room=profile.waiting_room,
            trusts_headers=profile.trust_request_headers,
        )


def _choice(kind: Kind, document: _PluginDocument, where: str, registry: Registry, weight: float = 1.0) -> Choice:
    plugin = registry.find(kind, document.plugin, where)
    return Choice(plugin, validated(plugin.config, document.config, f"{where}: {plugin.name}"), weight)
