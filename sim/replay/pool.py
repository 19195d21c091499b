"""The simulated pool of a replay: which accelerators serve which model, and how many of each. Pure.

`h100-8b:6,a100-8b:2` are six pods of one profile and two of another; `70b` stands for four accelerators a pod. Names of
`sim.hardware.PROFILES` are taken as they are.
"""

import re
from dataclasses import dataclass
from typing import Final

from shared.errors import ConfigurationError
from sim.engine import EngineLimits
from sim.hardware import PROFILES, HardwareProfile
from sim.jump_engine import JumpEngine

MAX_PODS: Final = 1000
# 64 tokens a block instead of vLLM's 16: a quarter of the work per prompt, and hits rounded down by at most 48 tokens.
BLOCK_TOKENS: Final = 64
_ITEM: Final = re.compile(r"([a-z0-9.-]+)(?::(\d{1,4}))?")
_SHORT: Final = re.compile(r"([a-z0-9]+)-(8b|70b)")


class PoolError(ConfigurationError):
    """A description of a pool that can't be read."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod."""

    profile: HardwareProfile
    limits: EngineLimits


def parse_hardware(text: str) -> tuple[PodSpec, ...]:
    """`h100-8b:6,a100-8b:2` → pods in that order; raises PoolError that names the item and what is known."""
    pods: list[PodSpec] = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip().lower())
        profile = _profile(found[1]) if found else None
        count = int(found[2] or 1) if found else 0
        if profile is None or not 1 <= count <= MAX_PODS:
            known = ", ".join(sorted({short_name(known) for known in PROFILES.values()}))
            raise PoolError(
                f"hardware: found '{item.strip()[:64]}'; "
                f"allowed: NAME:COUNT with COUNT 1 to {MAX_PODS}, NAME one of {known}"
            )
        pods += [PodSpec(profile, limits_of(profile))] * count
    if len(pods) > MAX_PODS:
        raise PoolError(f"hardware: found {len(pods)} pods; allowed: at most {MAX_PODS}")
    return tuple(pods)


def limits_of(profile: HardwareProfile) -> EngineLimits:
    """VLLM's limits but for the block's size; as long prompts as the cache can hold, up to 262,144 tokens."""
    blocks = max(1, profile.kv_capacity_tokens // BLOCK_TOKENS)
    return EngineLimits(blocks, block_tokens=BLOCK_TOKENS, max_model_tokens=min(262_144, blocks * BLOCK_TOKENS))


def short_name(profile: HardwareProfile) -> str:
    """`h100-8b` for `llama-8b-h100`."""
    _, size, hardware = profile.name.split("-")[:3]
    return f"{hardware}-{size}"


def describe(pods: tuple[PodSpec, ...]) -> str:
    """The text that `parse_hardware` reads back, in order of first appearance."""
    counts: dict[str, int] = {}
    for pod in pods:
        name = short_name(pod.profile)
        counts[name] = counts.get(name, 0) + 1
    return ",".join(f"{name}:{count}" for name, count in counts.items())


def uniform(pods: tuple[PodSpec, ...]) -> dict[str, int]:
    """Pods by short name of their hardware."""
    counts: dict[str, int] = {}
    for pod in pods:
        counts[short_name(pod.profile)] = counts.get(short_name(pod.profile), 0) + 1
    return counts


def _profile(name: str) -> HardwareProfile | None:
    if name in PROFILES:
        return PROFILES[name]
    short = _SHORT.fullmatch(name)
    return next((p for p in PROFILES.values() if short and short_name(p) == name), None)


class Pod:
    """One pod: its engine while it is up."""

    def __init__(self, place: int, spec: PodSpec) -> None:
        self.place = place
        self.spec = spec
        self.address = f"10.0.{place // 250}.{place % 250 + 1}:8000"
        self.started_s = 1.0
        self.up = True
        self.engine: JumpEngine | None = None
