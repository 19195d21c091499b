"""How a run is played: objectives, delays, failures, noise, how many routers, what they share. Pure data."""

import math
from dataclasses import dataclass, field

from services.router.request.inference_request import Slo
from services.router.state.table import MAX_CANDIDATES
from sim.replay.learning import LearningOptions
from sim.replay.trace import ReplayRequest


@dataclass(frozen=True, slots=True)
class SloRule:
    """Objectives for requests that bring none of their own, ms; None: none. `ttft_grows_after_tokens`: a prompt longer
    than that has proportionally more time to its first token.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttft_grows_after_tokens: int | None = None

    def of(self, request: ReplayRequest) -> Slo:
        ttft_ms, tpot_ms = request.ttft_slo_ms, request.tpot_slo_ms
        if ttft_ms is None and self.ttft_ms is not None:
            after = self.ttft_grows_after_tokens
            ttft_ms = self.ttft_ms * (max(1.0, request.input_tokens / after) if after else 1.0)
        return Slo(ttft_ms, self.tpot_ms if tpot_ms is None else tpot_ms)


@dataclass(frozen=True, slots=True)
class Failure:
    """A pod (by its place in the pool) that dies at `at_ms` and is back at `back_ms`; infinity: never."""

    pod: int
    at_ms: float
    back_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class Speed:
    """From `at_ms` on a pod computes `speed` times as fast as its hardware's profile says."""

    pod: int
    at_ms: float
    speed: float


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`to_pod_ms`: from the router's decision to the pod. `flush_ms`: Envoy's access log is written so often, and
    `label_ms` later its samples are with trainer and routers. `noise`: relative deviation of a step's time.
    `first_tokens_seen`: routers see responses pass (the ledger is then exact). `max_candidates`: that a decision looks
    at; 0: all. `share_ledgers`: several routers tell each other what they dispatch and scrape, `bus_ms` on its way.
    """

    seed: int = 0
    routers: int = 1
    slo: SloRule = field(default_factory=SloRule)
    failures: tuple[Failure, ...] = ()
    speeds: tuple[Speed, ...] = ()
    to_pod_ms: float = 1.0
    flush_ms: float = 100.0
    label_ms: float = 50.0
    noise: float = 0.04
    first_tokens_seen: bool = False
    share_ledgers: bool = True
    bus_ms: float = 1.0
    max_candidates: int = MAX_CANDIDATES
    learning: LearningOptions = field(default_factory=LearningOptions)
