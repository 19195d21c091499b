"""Policies by name for a replay: presets and profile files of the router, and what predicts for them. Pure.

`NAME` is a preset, `FILE.yaml` a profile of one's own; `NAME+oracle` gives that policy true service times instead of a
model's, and `oracle` alone takes the pod with the least true TTFT: greedy, without look-ahead, so no upper bound.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.router.scheduling.pipeline import Pipeline
from services.router.scheduling.profile import Profile, Profiles, load_presets, parse_profile
from services.router.scheduling.profile_file import load_profile_file
from services.router.scheduling.registry import Registry
from shared.errors import ConfigurationError

# Plugins that read predictions: a policy with none of them learns no model, which a replay needn't pay for.
PREDICTING: Final = frozenset(
    {
        "predicted-cost-scorer",
        "latency-scorer",
        "slo-headroom-tier-filter",
        "latency-slo-admitter",
        "predicted-latency-producer",
    }
)
_ORACLE: Final = """
name: oracle
description: Least true TTFT.
scorers:
  - plugin: predicted-cost-scorer
    config: {waiting_weight: 0, stall_weight: 0, decode_weight: 0, slo_risk_ms: 0}
picker: {plugin: max-score-picker}
fallback: token-load
"""
_SUFFIX: Final = "+oracle"


@dataclass(frozen=True, slots=True)
class Policy:
    """`learned`: decides by a model's predictions; `oracle`: by true service times. Neither: by state alone."""

    name: str
    profiles: Profiles
    profile: str
    learned: bool
    oracle: bool

    def pipeline(self) -> Pipeline:
        """A fresh one for each router."""
        return self.profiles.pipeline(self.profile)


def policy(name: str) -> Policy:
    """Raises ConfigurationError for a name that is none of these, and for a profile file that can't be used."""
    registry = Registry()
    presets = list(load_presets(registry))
    oracle = name.endswith(_SUFFIX) or name == "oracle"
    wanted = name.removesuffix(_SUFFIX)
    if wanted == "oracle":
        presets.append(parse_profile(_ORACLE, "oracle", registry))
    elif wanted.endswith((".yaml", ".yml")):
        own = load_profile_file(Path(wanted), registry).profile
        presets = [profile for profile in presets if profile.name != own.name] + [own]
        wanted = own.name
    profiles = Profiles(presets)
    if wanted not in profiles.names:
        known = ", ".join(profiles.names)
        raise ConfigurationError(
            f"policy: found '{name[:64]}'; allowed: {known}, a profile file (.yaml), oracle, or any with {_SUFFIX}"
        )
    return Policy(name, profiles, wanted, not oracle and _predicting(profiles.get(wanted)), oracle)


def _predicting(profile: Profile) -> bool:
    return any(choice.plugin.name in PREDICTING for choice in (*profile.filters, *profile.scorers))
