"""The table of plugins: name, config, class. A profile can use what stands here and nothing else.

A name that is not in the table, or stands in it twice, stops the service at start.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from services.router.scheduling.admitters.latency_slo import LatencySloAdmitter, LatencySloConfig
from services.router.scheduling.config import StrictConfig
from services.router.scheduling.filters.prefix_cache_affinity import (
    PrefixCacheAffinityConfig,
    PrefixCacheAffinityFilter,
)
from services.router.scheduling.filters.rediscovery import RediscoveryConfig, RediscoveryFilter
from services.router.scheduling.filters.slo_headroom_tier import SloHeadroomTierConfig, SloHeadroomTierFilter
from services.router.scheduling.pickers.max_score import MaxScoreConfig, MaxScorePicker
from services.router.scheduling.pickers.random import RandomConfig, RandomPicker
from services.router.scheduling.pickers.round_robin import RoundRobinConfig, RoundRobinPicker
from services.router.scheduling.pickers.weighted_random import WeightedRandomConfig, WeightedRandomPicker
from services.router.scheduling.producers.predicted_latency import PredictedLatencyConfig, PredictedLatencyProducer
from services.router.scheduling.scorers.composite import CompositeConfig, CompositeScorer
from services.router.scheduling.scorers.kv_cache_utilization import (
    KvCacheUtilizationConfig,
    KvCacheUtilizationScorer,
)
from services.router.scheduling.scorers.latency import LatencyConfig, LatencyScorer
from services.router.scheduling.scorers.lmetric import LmetricConfig, LmetricScorer
from services.router.scheduling.scorers.predicted_cost import PredictedCostConfig, PredictedCostScorer
from services.router.scheduling.scorers.prefix import PrefixConfig, PrefixScorer
from services.router.scheduling.scorers.queue import QueueConfig, QueueScorer
from services.router.scheduling.scorers.running_requests import RunningRequestsConfig, RunningRequestsScorer
from services.router.scheduling.scorers.session_affinity import SessionAffinityConfig, SessionAffinityScorer
from services.router.scheduling.scorers.token_load import TokenLoadConfig, TokenLoadScorer
from shared.errors import ConfigurationError


class Kind(StrEnum):
    """Where in the pipeline a plugin stands."""

    PRODUCER = "producer"
    ADMITTER = "admitter"
    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One row: `build` takes an instance of `config` and returns a plugin of this kind."""

    kind: Kind
    name: str
    config: type[StrictConfig]
    build: Callable[[Any], Any]


PLUGINS: Final[tuple[Plugin, ...]] = (
    Plugin(Kind.PRODUCER, "predicted-latency-producer", PredictedLatencyConfig, PredictedLatencyProducer),
    Plugin(Kind.ADMITTER, "latency-slo-admitter", LatencySloConfig, LatencySloAdmitter),
    Plugin(Kind.FILTER, "prefix-cache-affinity-filter", PrefixCacheAffinityConfig, PrefixCacheAffinityFilter),
    Plugin(Kind.FILTER, "rediscovery-filter", RediscoveryConfig, RediscoveryFilter),
    Plugin(Kind.FILTER, "slo-headroom-tier-filter", SloHeadroomTierConfig, SloHeadroomTierFilter),
    Plugin(Kind.SCORER, "predicted-cost-scorer", PredictedCostConfig, PredictedCostScorer),
    Plugin(Kind.SCORER, "latency-scorer", LatencyConfig, LatencyScorer),
    Plugin(Kind.SCORER, "queue-scorer", QueueConfig, QueueScorer),
    Plugin(Kind.SCORER, "kv-cache-utilization-scorer", KvCacheUtilizationConfig, KvCacheUtilizationScorer),
    Plugin(Kind.SCORER, "prefix-cache-scorer", PrefixConfig, PrefixScorer),
    Plugin(Kind.SCORER, "token-load-scorer", TokenLoadConfig, TokenLoadScorer),
    Plugin(Kind.SCORER, "lmetric-scorer", LmetricConfig, LmetricScorer),
    Plugin(Kind.SCORER, "running-requests-scorer", RunningRequestsConfig, RunningRequestsScorer),
    Plugin(Kind.SCORER, "composite-scorer", CompositeConfig, CompositeScorer),
    Plugin(Kind.SCORER, "session-affinity-scorer", SessionAffinityConfig, SessionAffinityScorer),
    Plugin(Kind.PICKER, "max-score-picker", MaxScoreConfig, MaxScorePicker),
    Plugin(Kind.PICKER, "weighted-random-picker", WeightedRandomConfig, WeightedRandomPicker),
    Plugin(Kind.PICKER, "round-robin-picker", RoundRobinConfig, RoundRobinPicker),
    Plugin(Kind.PICKER, "random-picker", RandomConfig, RandomPicker),
)


class Registry:
    """Plugins by name; built once, read only."""

    __slots__ = ("_plugins",)

    def __init__(self, plugins: Iterable[Plugin] = PLUGINS) -> None:
        """Raises ConfigurationError for a name that stands in the table twice."""
        by_name: dict[str, Plugin] = {}
        for plugin in plugins:
            if plugin.name in by_name:
                raise ConfigurationError(f"plugin {plugin.name}: stands in the table twice; allowed: once")
            by_name[plugin.name] = plugin
        self._plugins: Mapping[str, Plugin] = by_name

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self._plugins.values())

    def find(self, kind: Kind, name: str, where: str) -> Plugin:
        """The plugin of this kind and name; raises ConfigurationError that names the known ones."""
        plugin = self._plugins.get(name)
        if plugin is None or plugin.kind is not kind:
            known = ", ".join(known.name for known in self._plugins.values() if known.kind is kind)
            raise ConfigurationError(f"{where}: no {kind} is called '{name[:64]}'; allowed: {known}")
        return plugin
