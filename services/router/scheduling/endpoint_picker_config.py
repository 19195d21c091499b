"""The incumbent's `EndpointPickerConfig` documents → profiles of ours, where their plugins are known. No I/O.

Read are `plugins` and `schedulingProfiles` of `llm-d.ai/v1alpha1` and its older group. A plugin type or parameter that
isn't known is a fault, and all of them are told at once: a policy that silently lacks a part is another policy. Types
that only name what is always there here (data sources, the profile handler, index and in-flight producers) are known
and do nothing; tuning values of such parts, and sections that configure other rooms, are read over and told as remarks.

Decisions. Where the document leaves out a value, the incumbent's default holds, not ours (exploration 0, penalty 18 s,
end-to-end latency). A weight of 0 leaves the scorer out. Admitters and producers count by being listed under `plugins`.
Exactly one scheduling profile: several mean disaggregated serving.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from services.router.scheduling.config import validated
from services.router.scheduling.profile import Choice, Profile, YamlLoader
from services.router.scheduling.registry import Kind, Registry
from shared.errors import ConfigurationError

KIND: Final = "EndpointPickerConfig"
GROUPS: Final = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
NAME: Final = "endpoint-picker-config"

_READ: Final = ("apiVersion", "kind", "metadata", "plugins", "schedulingProfiles")
_READ_OVER: Final = (
    "featureGates", "dataLayer", "data", "flowControl", "requestHandler", "saturationDetector", "parser",
)  # fmt: skip
_MAX_ENDPOINTS: Final = 8


class _Refused(ValueError):
    """A value that can't be taken over; says what is allowed."""


Converter = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _penalty(value: Any) -> Any:
    return None if value == 0 else _number(value)


def _threshold(value: Any) -> Any:
    """Zero and below switch the filter off there; at 0 ours keeps everyone."""
    number = _number(value)
    return max(number, 0.0) if isinstance(number, float) else number


def _choice_of(words: Mapping[str, str]) -> Converter:
    def convert(value: Any) -> str:
        if value not in words:
            raise _Refused(f"one of {', '.join(words)}")
        return words[value]

    return convert


def _only(allowed: Any) -> Converter:
    def convert(value: Any) -> None:
        if value != allowed:
            raise _Refused(repr(allowed))

    return convert


def _endpoints(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_ENDPOINTS:
        raise _Refused(f"a whole number from 1 to {_MAX_ENDPOINTS}")


@dataclass(frozen=True, slots=True)
class _Known:
    """A plugin type of the document: which of ours it is (None: a part that is always there), and its parameters.

    `keys`: their name → our name and how the value is taken over; a None name is checked only. `over`: read over.
    `defaults`: what theirs takes where the document says nothing, by our names.
    """

    kind: Kind | None = None
    plugin: str = ""
    keys: Mapping[str, tuple[str | None, Converter]] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PREFIX_TUNING: Final = (
    "autoTune", "blockSize", "blockSizeTokens", "hashBlockSize", "lruCapacityPerServer", "maxPrefixBlocksToMatch",
    "maxPrefixTokensToMatch", "prefixMatchInfoProducerName",
)  # fmt: skip
_PRECISE_TUNING: Final = ("tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing")
_PICKER: Final[Mapping[str, tuple[str | None, Converter]]] = {"maxNumOfEndpoints": (None, _endpoints)}

_TYPES: Final[Mapping[str, _Known]] = {
    "queue-scorer": _Known(Kind.SCORER, "queue-scorer"),
    "kv-cache-utilization-scorer": _Known(Kind.SCORER, "kv-cache-utilization-scorer"),
    "kv-cache-scorer": _Known(Kind.SCORER, "kv-cache-utilization-scorer"),
    "prefix-cache-scorer": _Known(Kind.SCORER, "prefix-cache-scorer", over=_PREFIX_TUNING),
    "precise-prefix-cache-scorer": _Known(Kind.SCORER, "prefix-cache-scorer", over=_PRECISE_TUNING),
    "running-requests-size-scorer": _Known(Kind.SCORER, "running-requests-scorer", defaults={"source": "scraped"}),
    "active-request-scorer": _Known(Kind.SCORER, "running-requests-scorer", over=("requestTimeout",)),
    "token-load-scorer": _Known(Kind.SCORER, "token-load-scorer", over=("queueThresholdTokens",)),
    "session-affinity-scorer": _Known(Kind.SCORER, "session-affinity-scorer"),
    "latency-scorer": _Known(
        Kind.SCORER,
        "latency-scorer",
        {
            "ttftWeight": ("ttft_weight", _number),
            "tpotWeight": ("tpot_weight", _number),
            "headroomSelectionStrategy": ("strategy", _same),
        },
        over=("compositeKVWeight", "compositeQueueWeight", "compositePrefixWeight"),
    ),
    "prefix-cache-affinity-filter": _Known(
        Kind.FILTER,
        "prefix-cache-affinity-filter",
        {
            "affinityThreshold": ("affinity_threshold", _threshold),
            "explorationProbability": ("exploration_probability", _number),
            "maxTTFTPenaltyMs": ("max_ttft_penalty_ms", _penalty),
            "ttftSource": (
                "ttft_source",
                _choice_of({"latencyPredictor": "prediction", "prefillThroughput": "prefill-throughput"}),
            ),
            "peakPrefillThroughput": ("peak_prefill_tokens_per_s", _number),
        },
        over=("prefixMatchInfoProducerName", "inFlightLoadProducerName"),
        defaults={
            "exploration_probability": 0.0,
            "max_ttft_penalty_ms": 18_000.0,
            "ttft_source": "prefill-throughput",
        },
    ),
    "slo-headroom-tier-filter": _Known(
        Kind.FILTER, "slo-headroom-tier-filter", {"epsilonExploreNeg": ("exploration_probability", _number)}
    ),
    "latency-slo-admitter": _Known(Kind.ADMITTER, "latency-slo-admitter"),
    "predicted-latency-producer": _Known(
        Kind.PRODUCER,
        "predicted-latency-producer",
        {
            "streamingMode": ("streaming_mode", _same),
            "sloBufferFactor": ("slo_buffer_factor", _number),
            "predictInProduce": ("predict", _same),
            "useEncoderCacheFeatures": (None, _only(allowed=False)),
            "endpointRoleLabel": (None, _only("")),
        },
        over=(
            "samplingMean", "maxDecodeTokenSamplesForPrediction", "contextTTL", "prefixMatchInfoProducerName",
            "inFlightLoadProducerName", "encoderCacheMatchInfoProducerName",
        ),
        defaults={"streaming_mode": False},
    ),
    "max-score-picker": _Known(Kind.PICKER, "max-score-picker", _PICKER),
    "weighted-random-picker": _Known(Kind.PICKER, "weighted-random-picker", _PICKER),
    "random-picker": _Known(Kind.PICKER, "random-picker", _PICKER),
    "single-profile-handler": _Known(),
    "approx-prefix-cache-producer": _Known(over=_PREFIX_TUNING),
    "precise-prefix-cache-producer": _Known(over=_PRECISE_TUNING),
    "inflight-load-producer": _Known(over=("requestTimeout",)),
    "session-id-producer": _Known(keys={"headerName": (None, _only("x-session-id"))}),
    "metrics-data-source": _Known(over=("scheme", "path", "insecureSkipVerify")),
    "core-metrics-extractor": _Known(over=("engineConfigs", "defaultEngine", "engineLabelKey")),
    "endpoint-notification-source": _Known(),
    "openai-parser": _Known(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adopted:
    """A document as a profile, and what was read over."""

    profile: Profile
    remarks: tuple[str, ...]


def is_endpoint_picker_config(document: Any) -> bool:
    """Whether a YAML document calls itself one: by its kind, or by an `apiVersion`, which no profile of ours has."""
    return isinstance(document, dict) and ("apiVersion" in document or document.get("kind") == KIND)


def parse_endpoint_picker_config(text: str, source: str, registry: Registry) -> Adopted:
    """YAML → profile. Raises ConfigurationError with a line for every fault found, each beginning with `source`."""
    try:
        document = YamlLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    return _Reader(source, registry).read(document)


class _Reader:
    """Reads one document; collects faults and remarks on the way."""

    def __init__(self, source: str, registry: Registry) -> None:
        self._source = source
        self._registry = registry
        self._faults: list[str] = []
        self._remarks: list[str] = []

    def read(self, document: Any) -> Adopted:
        if not isinstance(document, dict):
            raise ConfigurationError(f"{self._source}: not a mapping; allowed: an {KIND} document")
        self._head(document)
        plugins = self._plugins(document.get("plugins"))
        profile = self._profile(document.get("schedulingProfiles"), plugins)
        if self._faults or profile is None:
            raise ConfigurationError("\n".join(f"{self._source}: {fault}" for fault in self._faults))
        return Adopted(profile, tuple(self._remarks))

    def _head(self, document: Mapping[str, Any]) -> None:
        if document.get("kind") != KIND:
            self._faults.append(f"kind: found {_shown(document.get('kind'))}; allowed: {KIND}")
        if document.get("apiVersion") not in GROUPS:
            self._faults.append(f"apiVersion: found {_shown(document.get('apiVersion'))}; allowed: {', '.join(GROUPS)}")
        for key in document:
            if key in _READ_OVER:
                self._remarks.append(f"{key}: not read; that is set by LEADTIME_ROUTER_… here")
            elif key not in _READ:
                self._faults.append(f"{_shown(key)}: no such key; allowed: {', '.join((*_READ, *_READ_OVER))}")

    def _plugins(self, entries: Any) -> dict[str, tuple[str, Choice | None]]:
        """Type and choice by plugin name, in order; no choice for a part that is always there, and for a faulty one."""
        found: dict[str, tuple[str, Choice | None]] = {}
        if not isinstance(entries, list) or not entries:
            self._faults.append("plugins: found nothing; allowed: a list of {type, name, parameters}")
            return found
        for at, entry in enumerate(entries):
            where = f"plugins[{at}]"
            if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                self._faults.append(f"{where}: found {_shown(entry)}; allowed: a mapping with a type")
                continue
            kind = entry["type"]
            name = entry.get("name") or kind
            for key in set(entry) - {"type", "name", "parameters"}:
                self._faults.append(f"{where}: {_shown(key)}: no such key; allowed: name, parameters, type")
            if not isinstance(name, str) or name in found:
                self._faults.append(f"{where}: name {_shown(name)}: allowed: text that no other plugin bears")
                continue
            known = _TYPES.get(kind)
            if known is None:
                self._faults.append(
                    f"{where}: plugin type {_shown(kind)} isn't known; allowed: {', '.join(sorted(_TYPES))}"
                )
                continue
            found[name] = kind, self._choice(f"{where} ({kind})", known, entry.get("parameters"))
        return found

    def _choice(self, where: str, known: _Known, parameters: Any) -> Choice | None:
        if parameters is not None and not isinstance(parameters, dict):
            self._faults.append(f"{where}: parameters: found {_shown(parameters)}; allowed: a mapping")
            return None
        values = dict(known.defaults)
        theirs = {}
        for key, value in (parameters or {}).items():
            if key in known.over:
                self._remarks.append(f"{where}: {key}: read over")
            elif key not in known.keys:
                allowed = ", ".join(sorted((*known.keys, *known.over))) or "no parameters at all"
                self._faults.append(f"{where}: {_shown(key)}: no such parameter; allowed: {allowed}")
            else:
                ours, convert = known.keys[key]
                try:
                    converted = convert(value)
                except _Refused as refused:
                    self._faults.append(f"{where}: {key}: found {_shown(value)}; allowed: {refused}")
                    continue
                if ours is not None:
                    values[ours], theirs[ours] = converted, key
        if known.kind is None:
            return None
        plugin = self._registry.find(known.kind, known.plugin, where)
        try:
            return Choice(plugin, validated(plugin.config, values, where))
        except ConfigurationError as error:
            for line in str(error).splitlines():
                for ours, key in theirs.items():
                    line = line.replace(f"{where}: {ours}:", f"{where}: {key}:")  # noqa: PLW2901
                self._faults.append(line)
            return None

    def _profile(self, entries: Any, plugins: Mapping[str, tuple[str, Choice | None]]) -> Profile | None:
        references = self._references(entries, plugins)
        if references is None:
            return None
        chosen: dict[Kind, list[Choice]] = {kind: [] for kind in Kind}
        named = [(name, 1.0) for name, (_, choice) in plugins.items() if choice and _stands_alone(choice)]
        for name, weight in [*named, *references]:
            choice = plugins[name][1]
            if choice is None:
                continue
            kind = choice.plugin.kind
            if kind is Kind.SCORER:
                if weight > 0:
                    chosen[kind].append(Choice(choice.plugin, choice.config, weight))
            elif not any(choice is other for other in chosen[kind]):
                chosen[kind].append(choice)
        for kind in (Kind.PICKER, Kind.PRODUCER):
            if len(chosen[kind]) > 1:
                names = ", ".join(choice.plugin.name for choice in chosen[kind])
                self._faults.append(f"schedulingProfiles[0]: several {kind}s ({names}); allowed: one")
        pickers = chosen[Kind.PICKER] or [self._default(Kind.PICKER, "max-score-picker")]
        predicted = any(choice.plugin.name == "latency-scorer" for choice in chosen[Kind.SCORER])
        return Profile(
            name=NAME,
            description=f"{KIND} of {self._source}",
            filters=tuple(chosen[Kind.FILTER]),
            scorers=tuple(chosen[Kind.SCORER]),
            picker=pickers[0],
            fallback="composite" if predicted else None,
            producer=next(iter(chosen[Kind.PRODUCER]), None),
            admitters=tuple(chosen[Kind.ADMITTER]),
            trust_request_headers=True,
        )

    def _default(self, kind: Kind, name: str) -> Choice:
        plugin = self._registry.find(kind, name, self._source)
        return Choice(plugin, plugin.config())

    def _references(
        self, entries: Any, plugins: Mapping[str, tuple[str, Choice | None]]
    ) -> list[tuple[str, float]] | None:
        """Plugin names and weights of the one profile, in order; without a profile all plugins count, with weight 1."""
        if entries is None:
            return [(name, 1.0) for name in plugins]
        if not isinstance(entries, list) or len(entries) != 1:
            found = f"{len(entries)} profiles" if isinstance(entries, list) else _shown(entries)
            self._faults.append(f"schedulingProfiles: found {found}; allowed: one (no disaggregated serving)")
            return None
        entry = entries[0]
        listed = entry.get("plugins") if isinstance(entry, dict) else None
        if not isinstance(listed, list) or not isinstance(entry, dict) or set(entry) - {"name", "plugins"}:
            self._faults.append("schedulingProfiles[0]: allowed: a mapping of name and plugins, a list")
            return None
        references: list[tuple[str, float]] = []
        for at, item in enumerate(listed):
            where = f"schedulingProfiles[0].plugins[{at}]"
            name = item.get("pluginRef") if isinstance(item, dict) else None
            weight = item.get("weight", 1) if isinstance(item, dict) else None
            if not isinstance(item, dict) or set(item) - {"pluginRef", "weight"}:
                self._faults.append(f"{where}: found {_shown(item)}; allowed: a mapping of pluginRef and weight")
            elif not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= 1_000_000:
                self._faults.append(f"{where}: weight: found {_shown(weight)}; allowed: a number from 0 to 1000000")
            elif name not in plugins:
                if not any(f"({name})" in fault or f"'{name}'" in fault for fault in self._faults):
                    self._faults.append(f"{where}: pluginRef {_shown(name)}: allowed: a name under plugins")
            else:
                references.append((str(name), float(weight)))
        return references


def _stands_alone(choice: Choice) -> bool:
    return choice.plugin.kind in {Kind.PRODUCER, Kind.ADMITTER}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:64]}…"
