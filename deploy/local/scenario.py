"""What the demo plays: six simulated servers of three speeds, and conversations that share prefixes.

Pure. The servers have the step times of a 70B model on two generations of accelerators, some of them slowed: a pool as
it grows by buying. Each conversation belongs to one of 40 assistants with its own system prompt and comes back for
further turns, so whoever remembers where a prefix lies saves much of a prefill, and whoever ignores speed queues on the
slow server.

The rate is a load that round robin still bears: in virtual time its slowest server queues and recovers, with a TTFT p90
of 0.6–1.1 s, where the pool as a whole has room. It is also what two cores can simulate in time: about 1,000 tokens a
second, all processes together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from sim.spec import ProcessSpec, ServerSpec
from sim.workload import Phase, PrefixScenario, WorkloadRequest, poisson_arrivals, prefix_sharing

MODEL: Final = "demo-70b"
DEFAULT_RATE_PER_S: Final = 16.0
MAX_RATE_PER_S: Final = 60.0
DEFAULT_SECONDS: Final = 36.0
DEFAULT_SEED: Final = 1
LEARNING_SECONDS: Final = 22.0

POLICIES: Final = ("round-robin", "load-prefix", "leadtime")
"""Profiles of the router, in the order in which they are measured."""

_CHAT: Final = PrefixScenario(
    name="chat",
    groups=40,
    prompts_per_group=1000,
    system_tokens=800,
    question_tokens=400,
    question_tokens_std=200,
    output_tokens=60,
    output_tokens_std=20,
    turns=3,
    turn_gap_ms=6_000,
)
# Turns come later than their conversation's start: with this much of a past the first second is as busy as the last.
_PAST_S: Final = 30.0

_KINDS: Final = (
    # name, how many, profile, speed, hardware class as the router is told
    ("fast", 3, "llama-70b-h100-tp4", 0.7, "h100"),
    ("medium", 2, "llama-70b-a100-tp4", 1.0, "a100"),
    ("slow", 1, "llama-70b-a100-tp4", 0.7, "l40s"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The demo's load: requests a second, seconds of each measured phase, and the seed of all that is drawn."""

    rate_per_s: float = DEFAULT_RATE_PER_S
    seconds: float = DEFAULT_SECONDS
    seed: int = DEFAULT_SEED


def servers(seed: int) -> ProcessSpec:
    """The pool, its ports still open."""
    specs = [
        ServerSpec(name=f"{kind}-{number}", models=(MODEL,), profile=profile, speed=speed, seed=seed * 100 + number)
        for kind, count, profile, speed, _ in _KINDS
        for number in range(1, count + 1)
    ]
    return ProcessSpec(servers=tuple(specs))


def hardware_classes() -> dict[str, str]:
    """Server name → hardware class."""
    return {f"{kind}-{number}": label for kind, count, _, _, label in _KINDS for number in range(1, count + 1)}


def conversations(rate_per_s: float, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Requests of `seconds`, steady from the first: conversations that began before bring their later turns."""
    opening_rate = rate_per_s / _CHAT.turns
    arrivals = poisson_arrivals([Phase(opening_rate, _PAST_S + seconds)], seed)
    return list(_from(_PAST_S * 1000, seconds * 1000, prefix_sharing(_CHAT, arrivals, seed)))


def _from(start_ms: float, length_ms: float, requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    index = 0
    for request in requests:
        at_ms = request.arrival_ms - start_ms
        if at_ms >= length_ms:
            return
        if at_ms >= 0:
            yield replace(request, index=index, arrival_ms=at_ms)
            index += 1


def measured(workload: Workload) -> list[WorkloadRequest]:
    """What every measured phase sends: the same texts at the same instants."""
    return conversations(workload.rate_per_s, workload.seconds, workload.seed)


def learning(workload: Workload, seconds: float = LEARNING_SECONDS) -> list[WorkloadRequest]:
    """What the model learns from before anything is measured: other texts, other instants, the same kind of load."""
    return conversations(workload.rate_per_s, seconds, workload.seed + 1_000_003)
