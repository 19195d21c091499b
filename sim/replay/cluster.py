"""One run: a trace through routers onto simulated pods, in virtual time.

Each router has its own `PoolState` and `DecisionCore`, scrapes the pods at the scraper's own intervals and hears of
every outcome; the pods are `JumpEngine`s; learning is the trainer's. Events are taken in order of time and, at one
instant, in order of their making; all randomness comes from the seed. So a run gives the same figures every time.

A pod that fails takes its requests with it: those without a first token go on to the next endpoint of their list, as
Envoy's retry does, the others are lost. It refuses requests until it is back, with an empty cache and a new process.

Limits: parsing, Envoy and the network are a fixed delay; prompts' token counts are known; clients don't abort.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.router.admission.holding import AT_ONCE, LOOK_EVERY_MS, LOOKS
from services.router.admission.waiting_room import Verdict, Waiter, WaitingRoom
from services.router.core import DecisionCore, Prepared
from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest, Slo
from services.router.request.tokens import TokenEstimator
from services.router.scheduling.decision import Decision
from services.router.sharing.bus import GAP_S
from services.router.sharing.share import LedgerShare
from services.router.state.errors import NoEndpoint
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.prefix_index import BlockHasher
from services.router.state.scraper import ScrapeConfig
from services.router.state.table import MAX_CANDIDATES
from services.router.state.vllm_metrics import Engine as EngineKind
from services.router.state.vllm_metrics import EngineMetrics
from shared.features import hardware_code
from shared.samples import DecisionMetadata, LatencySample, Outcome, Rung, TtftSource, completed_sample
from sim.engine import EngineRequest, RequestTooLongError
from sim.jump_engine import JumpEngine, Noise, Running
from sim.replay.learning import EPOCH_UNIX_MS, POOL, Learning, LearningOptions
from sim.replay.policies import Policy
from sim.replay.pool import PodSpec
from sim.replay.trace import ReplayRequest, Trace

_SALT: Final = b"replay"
_BYTES_PER_TOKEN: Final = 4
_LISTED: Final = 3
# How often the router's own bus looks at its peers.
_SHARE_TICK_MS: Final = 50.0


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


@dataclass(slots=True)
class Outcomes:
    """What became of each request, in order of arrival; NaN where there is no such thing."""

    arrival_ms: npt.NDArray[np.float64]
    ttft_ms: npt.NDArray[np.float64]
    tpot_ms: npt.NDArray[np.float64]
    e2e_ms: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    ttft_slo_ms: npt.NDArray[np.float64]
    tpot_slo_ms: npt.NDArray[np.float64]
    pod: npt.NDArray[np.int64]
    """-1: rejected"""
    outcome: list[Outcome]
    predicted_ttft_ms: npt.NDArray[np.float64]
    predicted_tpot_ms: npt.NDArray[np.float64]
    predicted_ttft_p90_ms: npt.NDArray[np.float64]
    propensity: npt.NDArray[np.float64]
    attempts: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, count: int) -> "Outcomes":
        def nan() -> npt.NDArray[np.float64]:
            return np.full(count, np.nan)

        def zero() -> npt.NDArray[np.int64]:
            return np.zeros(count, np.int64)

        return cls(
            nan(), nan(), nan(), nan(), zero(), zero(), zero(), nan(), nan(), zero() - 1,
            [Outcome.NO_ENDPOINT] * count, nan(), nan(), nan(), nan(), zero(),
        )  # fmt: skip


@dataclass(slots=True)
class RunResult:
    """A run's outcomes, and what learning and the routers had to say. `ledger_left`: entries at the end, which is 0."""

    policy: str
    outcomes: Outcomes
    virtual_ms: float
    ended: int
    ledger_left: int
    ledger_faults: list[str]
    faults: int
    fits: int
    fits_refused: int
    fit_cpu_ms: float
    first_bundle_ms: float | None
    preemptions: int


class _Router:
    """One router's state and decisions."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        pods: Sequence["_Pod"],
        rng: np.random.Generator,
        on_fault: Callable[[str], None],
        max_candidates: int,
        *,
        shared: bool,
    ) -> None:
        config = PoolConfig(max_candidates=max_candidates)
        self.state = PoolState(config, salt=_SALT, tokens=TokenEstimator(_BYTES_PER_TOKEN))
        for pod in pods:
            code = hardware_code(pod.spec.profile.hardware_class)
            self.state.add_endpoint(pod.address, hardware_class=code, now_ms=0.0)
        self.name = name
        self.share = LedgerShare(name, self.state, salt=_SALT) if shared else None
        self.flush_due = False
        self.core = DecisionCore(POOL, _LISTED, self.state, policy.pipeline(), rng, on_fault)
        self.room = WaitingRoom(self.core.pipeline.waiting_room)
        self.held: dict[Waiter, _Asked] = {}
        self.look_due_ms = math.inf
        self.woken = False
        self.scrape_due: dict[str, float] = {}
        self.scrape_failures: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request before its decision."""

    place: int
    request: ReplayRequest
    engine: EngineRequest
    inference: InferenceRequest
    received_ms: float


class _Pod:
    """One pod: its engine while it is up."""

    def __init__(self, place: int, spec: PodSpec) -> None:
        self.place = place
        self.spec = spec
        self.address = f"10.0.{place // 250}.{place % 250 + 1}:8000"
        self.started_s = 1.0
        self.up = True
        self.engine: JumpEngine | None = None


@dataclass(slots=True)
class _Flight:
    """One request between decision and end."""

    place: int
    request: ReplayRequest
    decision_id: str
    router: _Router
    metadata: DecisionMetadata
    received_ms: float
    attempt: int = 0
    pod: int = -1
    arrived_ms: float = 0.0


class Cluster:
    """One run in the making; `run` does it."""

    def __init__(self, trace: Trace, pods: Sequence[PodSpec], policy: Policy, options: RunOptions) -> None:
        self._trace = trace
        self._policy = policy
        self._options = options
        children = np.random.SeedSequence(options.seed).spawn(len(pods) + 1 + options.routers)
        self._rng = np.random.default_rng(children[0])
        self._pods = [_Pod(place, spec) for place, spec in enumerate(pods)]
        for pod, child in zip(self._pods, children[1 : 1 + len(pods)], strict=True):
            noise = Noise(options.noise, np.random.default_rng(child))
            pod.engine = JumpEngine(pod.spec.profile, pod.spec.limits, noise, self._first, self._finished)
        self._by_address = {pod.address: pod for pod in self._pods}
        self._routers = [
            _Router(
                f"router-{place}",
                policy,
                self._pods,
                np.random.default_rng(child),
                self._fault,
                options.max_candidates,
                shared=options.share_ledgers and options.routers > 1,
            )
            for place, child in enumerate(children[1 + len(pods) :])
        ]
        block_tokens = pods[0].limits.block_tokens
        self._hasher = BlockHasher(
            b"pods", block_bytes=block_tokens * _BYTES_PER_TOKEN, max_blocks=2 * 262_144 // block_tokens
        )
        self._learning = Learning(options.learning) if policy.learned else None
        self._scraping = ScrapeConfig()
        self._outcomes = Outcomes.empty(len(trace.requests))
        self._flights: dict[str, _Flight] = {}
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._samples: list[LatencySample] = []
        self._flush_due = False
        self._left = len(trace.requests)
        self._faults = 0
        self._now_ms = 0.0
        self._hashes: list[int] = []

    def run(self) -> RunResult:
        """Play the trace to the end of its last request."""
        self._join()
        for failure in self._options.failures:
            self._at(failure.at_ms, self._fail, failure)
        for change in self._options.speeds:
            self._at(change.at_ms, self._change_speed, change)
        for router in self._routers:
            router.state.on_upstream_failure = lambda address, router=router: self._probe_soon(router, address)
            if router.share is not None:
                router.share.on_pending = lambda router=router: self._flush_soon(router)
                self._at(_SHARE_TICK_MS, self._share_tick, router)
            for pod in self._pods:
                due_ms = float(self._rng.uniform(0.0, self._scraping.idle_interval_ms))
                self._scrape_at(router, pod, due_ms)
        if self._learning is not None:
            self._at(self._options.learning.tick_ms, self._tick, None)
        events, requests = self._events, self._trace.requests
        place, count = 0, len(requests)
        while self._left:
            next_ms = events[0][0] if events else math.inf
            if place < count and requests[place].arrival_ms <= next_ms:
                self._now_ms = requests[place].arrival_ms
                self._arrive(place, requests[place])
                place += 1
                continue
            now_ms, _, act, what = heapq.heappop(events)
            self._now_ms = now_ms
            act(now_ms, what)
        self._settle()
        faults = [fault for router in self._routers for fault in router.state.ledger.faults()]
        faults += [fault for router in self._routers if router.share for fault in router.share.faults()]
        learning = self._learning
        return RunResult(
            policy=self._policy.name,
            outcomes=self._outcomes,
            virtual_ms=self._now_ms,
            ended=count - self._left,
            ledger_left=sum(router.state.in_flight for router in self._routers),
            ledger_faults=faults,
            faults=self._faults,
            fits=learning.fits if learning else 0,
            fits_refused=learning.refused if learning else 0,
            fit_cpu_ms=learning.fit_cpu_ms if learning else 0.0,
            first_bundle_ms=learning.first_bundle_ms if learning else None,
            preemptions=sum(pod.engine.preemptions for pod in self._pods if pod.engine is not None),
        )

    def _at(self, at_ms: float, act: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), act, what))

    def _fault(self, _: str) -> None:
        self._faults += 1

    # --- what routers tell each other ---------------------------------------------------------------------------

    def _flush_soon(self, router: _Router) -> None:
        if not router.flush_due:
            router.flush_due = True
            self._at(self._now_ms, self._share_flush, router)

    def _share_flush(self, now_ms: float, router: _Router) -> None:
        """What is pending goes out at once; what comes after it waits for the bus's gap."""
        if router.share is None:
            return
        for out in router.share.flush(now_ms):
            for other in self._routers:
                if other is not router and out.to in {None, other.name}:
                    self._at(now_ms + self._options.bus_ms, self._hear, (other, out.payload))
        self._at(now_ms + GAP_S * 1e3, self._share_rested, router)

    def _share_rested(self, _: float, router: _Router) -> None:
        router.flush_due = False
        if router.share is not None and router.share.pending:
            self._flush_soon(router)

    def _hear(self, now_ms: float, what: tuple[_Router, bytes]) -> None:
        router, payload = what
        if router.share is not None:
            router.share.receive(payload, now_ms)

    def _share_tick(self, now_ms: float, router: _Router) -> None:
        if router.share is not None:
            router.share.tick(now_ms)
            self._at(now_ms + _SHARE_TICK_MS, self._share_tick, router)

    def _settle(self) -> None:
        """What routers still have to say of the last requests is heard."""
        until_ms = self._now_ms + 1_000.0
        while any(router.share for router in self._routers) and self._events[0][0] <= until_ms:
            self._now_ms, _, act, what = heapq.heappop(self._events)
            act(self._now_ms, what)

    # --- routers ------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """The routers have seen their endpoints before the first request, as a started router has."""
        for router in self._routers:
            for pod in self._pods:
                self._observe(router, pod, 0.0)

    def _arrive(self, place: int, asked: ReplayRequest) -> None:
        now_ms, outcomes = self._now_ms, self._outcomes
        router = (
            self._routers[int(self._rng.integers(len(self._routers)))] if len(self._routers) > 1 else self._routers[0]
        )
        tokens = asked.tokens(with_answer=True)
        input_tokens = len(tokens) - asked.output_tokens
        slo = self._options.slo.of(asked)
        outcomes.arrival_ms[place] = now_ms
        outcomes.input_tokens[place] = input_tokens
        outcomes.output_tokens[place] = asked.output_tokens
        outcomes.ttft_slo_ms[place] = math.nan if slo.ttft_ms is None else slo.ttft_ms
        outcomes.tpot_slo_ms[place] = math.nan if slo.tpot_ms is None else slo.tpot_ms
        text = tokens.tobytes()
        prompt = text[: input_tokens * _BYTES_PER_TOKEN]
        request = InferenceRequest(
            model=asked.model,
            prompt=prompt,
            input_tokens=router.state.tokens.estimate(asked.model, len(prompt)),
            max_tokens=asked.max_tokens,
            streamed=True,
            slo=slo,
            priority=asked.priority,
            text_bytes=len(prompt),
        )
        engine_request = EngineRequest(
            f"{place:08x}", input_tokens, asked.output_tokens, self._hasher.names(asked.model, text)
        )
        asked_now = _Asked(place, asked, engine_request, request, now_ms)
        try:
            prepared = router.core.prepare(request, None, now_ms)
        except NoEndpoint:
            self._left -= 1
            return
        prediction = self._predict(prepared, engine_request)
        decision = router.core.schedule(prepared, prediction, 0.0)
        if decision.refusal is not None:
            self._shed(asked_now)
        elif not self._held(router, asked_now, prepared, prediction, decision):
            self._dispatch(router, asked_now, prepared, prediction, decision)

    def _shed(self, asked: _Asked) -> None:
        self._outcomes.outcome[asked.place] = Outcome.SHED
        self._left -= 1

    def _dispatch(
        self, router: _Router, asked: _Asked, prepared: Prepared, prediction: Prediction | None, decision: Decision
    ) -> None:
        now_ms, decision_id = self._now_ms, asked.engine.request_id
        metadata = router.core.describe(
            decision_id,
            prepared,
            prediction,
            decision,
            received_unix_ms=EPOCH_UNIX_MS + asked.received_ms,
            decision_ms=0.0,
            queue_ms=now_ms - asked.received_ms,
        )
        router.core.dispatch(decision_id, prepared, prediction, decision, now_ms)
        self._note(asked.place, prediction, decision)
        flight = _Flight(asked.place, asked.request, decision_id, router, metadata, asked.received_ms)
        self._flights[decision_id] = flight
        self._at(now_ms + self._options.to_pod_ms, self._reach, (flight, asked.engine))

    # --- requests held on purpose, as `services.router.admission.holding` does it ---------------------------------

    def _held(
        self, router: _Router, asked: _Asked, prepared: Prepared, prediction: Prediction | None, decision: Decision
    ) -> bool:
        """Whether a request that has just come is held, or refused; else it goes."""
        config, now_ms = router.room.config, self._now_ms
        look = None if config is None else router.core.outlook(prepared, prediction, decision, 0.0, config.hungry)
        if look is None:
            return False
        slo_ms = asked.inference.slo.ttft_ms
        waiter = Waiter(
            asked.inference.priority,
            asked.inference.fairness_id,
            math.inf if slo_ms is None else now_ms + slo_ms,
            float(prepared.candidates.uncached_tokens.min()),
            now_ms,
        )
        answer = router.room.offer(waiter, look, now_ms)
        for other in answer.pushed_out:
            self._shed(router.held.pop(other))
        if answer.verdict is Verdict.GO:
            return False
        if answer.verdict is Verdict.REFUSE:
            self._shed(asked)
        else:
            router.held[waiter] = asked
            self._look_again(router)
        return True

    def _look_again(self, router: _Router, at_ms: float = math.inf) -> None:
        """Have the room looked at when it says, or at `at_ms` since something may be free then, or as soon as the
        router's task would by itself.
        """
        due_ms = router.room.next_due_ms()
        if due_ms is None:
            return
        router.woken |= at_ms < math.inf
        at_ms = max(min(due_ms, at_ms, self._now_ms + LOOK_EVERY_MS), self._now_ms)
        if at_ms < router.look_due_ms:
            router.look_due_ms = at_ms
            self._at(at_ms, self._look, router)

    def _look(self, now_ms: float, router: _Router) -> None:
        if router.look_due_ms > now_ms:  # another look was made for what this one was to be
            return
        router.look_due_ms = math.inf
        woken, router.woken = router.woken, False
        for waiter in router.room.due(now_ms):
            self._reconsider(router, waiter, is_next=False)
        seen: set[Waiter] = set()
        while len(seen) < LOOKS and (next_up := router.room.next_up(now_ms, seen)) is not None:
            if not woken and not router.room.worth_a_look(next_up, now_ms):
                break
            if self._reconsider(router, next_up, is_next=not seen):
                seen.add(next_up)
        self._look_again(router)

    def _reconsider(self, router: _Router, waiter: Waiter, *, is_next: bool) -> bool:
        """Whether it goes on waiting."""
        asked, now_ms, config = router.held[waiter], self._now_ms, router.room.config
        elapsed_ms = now_ms - asked.received_ms
        try:
            prepared = router.core.prepare(asked.inference, None, now_ms)
        except NoEndpoint:
            router.room.leave(waiter)
            del router.held[waiter]
            self._left -= 1
            return False
        prediction = self._predict(prepared, asked.engine)
        decision = router.core.schedule(prepared, prediction, elapsed_ms)
        if decision.refusal is not None:
            router.room.refuse(waiter)
            self._shed(router.held.pop(waiter))
            return False
        look = None
        if config is not None:
            look = router.core.outlook(prepared, prediction, decision, elapsed_ms, config.hungry)
        answer = router.room.reconsider(waiter, look or AT_ONCE, now_ms, is_next=is_next or look is None)
        if answer.verdict is Verdict.HOLD:
            return True
        del router.held[waiter]
        if answer.verdict is Verdict.REFUSE:
            self._shed(asked)
        else:
            self._dispatch(router, asked, prepared, prediction, decision)
        return False

    def _note(self, place: int, prediction: Prediction | None, decision: Decision) -> None:
        outcomes, first = self._outcomes, decision.order[0]
        outcomes.propensity[place] = decision.propensity
        if prediction is not None:
            for name, column in (
                ("ttft_p50", outcomes.predicted_ttft_ms),
                ("ttft_p90", outcomes.predicted_ttft_p90_ms),
                ("tpot_p50", outcomes.predicted_tpot_ms),
            ):
                values = prediction.get(name)
                if values is not None:
                    column[place] = values[first]

    def _predict(self, prepared: Prepared, request: EngineRequest) -> Prediction | None:
        if self._learning is not None:
            return self._learning.predict(prepared)
        if not self._policy.oracle:
            return None
        pods = [self._by_address[address] for address in prepared.candidates.addresses]
        arrives_ms = self._now_ms + self._options.to_pod_ms
        forecasts = [pod.engine.forecast(request, arrives_ms) for pod in pods if pod.engine is not None]
        ttft = np.fromiter((forecast.ttft_ms for forecast in forecasts), np.float32, len(pods))
        tpot = np.fromiter((forecast.tpot_ms for forecast in forecasts), np.float32, len(pods))
        ttft += np.float32(self._options.to_pod_ms)
        # A later arrival's prefill is all that can come between: a tenth of either is left for it.
        spread = np.float32(1.1)
        columns = {
            "ttft_p50": ttft, "ttft_p90": ttft * spread, "ttft_p99": ttft * spread,
            "tpot_p50": tpot, "tpot_p90": tpot * spread, "tpot_p99": tpot * spread,
        }  # fmt: skip
        return Prediction(columns, "oracle", Rung.PREDICTOR)

    def _scrape_at(self, router: _Router, pod: _Pod, due_ms: float) -> None:
        router.scrape_due[pod.address] = due_ms
        self._at(due_ms, self._scrape, (router, pod, due_ms))

    def _probe_soon(self, router: _Router, address: str) -> None:
        self._scrape_at(router, self._by_address[address], self._now_ms)

    def _scrape(self, now_ms: float, what: tuple[_Router, _Pod, float]) -> None:
        router, pod, due_ms = what
        if router.scrape_due[pod.address] != due_ms:  # another one came before it
            return
        config = self._scraping
        if router.share is not None and not router.share.owns(pod.address, now_ms):
            self._scrape_at(router, pod, now_ms + config.busy_interval_ms)  # a peer asks it, and tells
            return
        if pod.up:
            self._observe(router, pod, now_ms)
            busy = router.state.in_flight_at(pod.address) > 0
            interval_ms = config.busy_interval_ms if busy else config.idle_interval_ms
        else:
            failures = router.scrape_failures.get(pod.address, 0) + 1
            router.scrape_failures[pod.address] = failures
            router.state.set_ready(pod.address, ready=False)
            if router.share is not None:
                router.share.probed(pod.address, now_ms, ready=False, metrics=None)
            interval_ms = min(config.busy_interval_ms * 2.0 ** min(failures - 1, 16), config.max_backoff_ms)
        self._scrape_at(router, pod, now_ms + interval_ms * float(self._rng.uniform(0.9, 1.1)))

    def _observe(self, router: _Router, pod: _Pod, now_ms: float) -> None:
        engine = pod.engine
        if engine is None:
            return
        seen = engine.metrics(now_ms)
        router.scrape_failures.pop(pod.address, None)
        metrics = EngineMetrics(
            EngineKind.VLLM,
            waiting_requests=seen.waiting_requests,
            running_requests=seen.running_requests,
            kv_cache_utilization=seen.kv_used_ratio,
            prefix_hit_tokens=seen.prefix_hit_tokens,
            prefix_query_tokens=seen.prefix_queried_tokens,
            prompt_tokens=seen.prompt_tokens,
            computed_prompt_tokens=seen.prompt_tokens - seen.cached_prompt_tokens,
            generation_tokens=seen.generated_tokens,
            first_tokens=engine.first_tokens,
            preemptions=seen.preemptions,
            process_start_s=pod.started_s,
            kv_capacity_tokens=pod.spec.limits.num_blocks * pod.spec.limits.block_tokens,
            block_tokens=pod.spec.limits.block_tokens,
        )
        router.state.observe_scrape(pod.address, metrics, now_ms)
        router.state.set_ready(pod.address, ready=True)
        if router.share is not None:
            router.share.probed(pod.address, now_ms, ready=True, metrics=metrics)

    # --- pods ---------------------------------------------------------------------------------------------------

    def _reach(self, now_ms: float, what: tuple[_Flight, EngineRequest]) -> None:
        """A request arrives at the next endpoint of its list."""
        flight, request = what
        pod = self._by_address[flight.metadata.endpoints[flight.attempt].address]
        if not pod.up or pod.engine is None:
            self._retry(flight, request, now_ms)
            return
        flight.pod, flight.arrived_ms = pod.place, now_ms
        self._advance(pod, now_ms)
        try:
            pod.engine.submit(request, now_ms)
        except RequestTooLongError:
            self._end(flight, Outcome.CLIENT_ERROR, now_ms, None)
            return
        self._wake(pod)

    def _retry(self, flight: _Flight, request: EngineRequest, now_ms: float) -> None:
        if flight.attempt + 1 < len(flight.metadata.endpoints):
            flight.attempt += 1
            self._at(now_ms + self._options.to_pod_ms, self._reach, (flight, request))
        else:
            self._end(flight, Outcome.UPSTREAM_ERROR, now_ms, None)

    def _wake(self, pod: _Pod) -> None:
        if pod.engine is not None and pod.engine.wake_ms < math.inf:
            self._at(pod.engine.wake_ms, self._woken, (pod, pod.engine))

    def _woken(self, now_ms: float, what: tuple[_Pod, JumpEngine]) -> None:
        pod, engine = what
        if pod.engine is engine and engine.wake_ms <= now_ms:  # else its stretch was cut short, or it died
            self._advance(pod, now_ms)
            self._wake(pod)

    def _advance(self, pod: _Pod, now_ms: float) -> None:
        if pod.engine is not None and pod.engine.wake_ms <= now_ms:
            pod.engine.advance(now_ms)

    def _first(self, running: Running, now_ms: float) -> None:
        flight = self._flights[running.request.request_id]
        self._outcomes.ttft_ms[flight.place] = now_ms - flight.received_ms
        if self._options.first_tokens_seen:
            flight.router.state.observe_first_token(flight.decision_id, now_ms)
            self._look_again(flight.router, now_ms)

    def _finished(self, running: Running, now_ms: float) -> None:
        self._end(self._flights[running.request.request_id], Outcome.OK, now_ms, running)

    def _fail(self, now_ms: float, failure: Failure) -> None:
        pod = self._pods[failure.pod]
        if pod.engine is None:
            return
        self._advance(pod, now_ms)
        pod.up = False
        for running in pod.engine.kill():
            flight = self._flights[running.request.request_id]
            if running.first_token_ms is None:
                self._retry(flight, running.request, now_ms)
            else:
                self._end(flight, Outcome.UPSTREAM_RESET, now_ms, running)
        if failure.back_ms < math.inf:
            self._at(failure.back_ms, self._return, pod)

    def _return(self, now_ms: float, pod: _Pod) -> None:
        pod.started_s = 1.0 + now_ms / 1e3
        pod.up = True

    def _change_speed(self, _: float, change: Speed) -> None:
        """The step under way ends as it was planned."""
        pod = self._pods[change.pod]
        if pod.engine is not None:
            pod.engine.profile = pod.spec.profile.scaled(change.speed)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end(self, flight: _Flight, outcome: Outcome, now_ms: float, running: Running | None) -> None:
        """A request is over: out of the ledger at once, its sample on its way."""
        del self._flights[flight.decision_id]
        self._left -= 1
        outcomes, place = self._outcomes, flight.place
        outcomes.outcome[place] = outcome
        outcomes.pod[place] = flight.pod
        outcomes.attempts[place] = flight.attempt + 1
        flight.router.state.finish(flight.decision_id, now_ms, completed=outcome is Outcome.OK)
        self._look_again(flight.router, now_ms)
        ttft_ms = tpot_ms = None
        tokens = flight.request.output_tokens
        # Labels begin at the dispatch to the endpoint that served, latencies of the client at the request's receipt.
        dispatched_ms = flight.arrived_ms - self._options.to_pod_ms
        if running is not None and running.first_token_ms is not None and outcome is Outcome.OK:
            ttft_ms = running.first_token_ms - dispatched_ms
            outcomes.e2e_ms[place] = now_ms - flight.received_ms
            outcomes.cached_tokens[place] = running.cached_tokens
            if tokens > 1:
                tpot_ms = outcomes.tpot_ms[place] = (now_ms - running.first_token_ms) / (tokens - 1)
        served = flight.metadata.endpoints[flight.attempt]
        ok = outcome is Outcome.OK
        self._samples.append(
            completed_sample(
                flight.metadata,
                served,
                outcome=outcome,
                status=200 if ok or outcome is Outcome.UPSTREAM_RESET else 503,
                streamed=True,
                completed_unix_ms=EPOCH_UNIX_MS + now_ms,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms or None,
                e2e_ms=max(now_ms - dispatched_ms, 0.001) if ok or running is not None else None,
                ttft_source=TtftSource.ACCESS_LOG if ttft_ms is not None else None,
                input_tokens=int(outcomes.input_tokens[place]) if ok else None,
                cached_tokens=running.cached_tokens if ok and running is not None else None,
                output_tokens=tokens if ok else None,
                attempts=flight.attempt + 1,
            )
        )
        if not self._flush_due:
            self._flush_due = True
            flush = self._options.flush_ms
            self._at((now_ms // flush + 1.0) * flush + self._options.label_ms, self._flush, None)

    def _flush(self, now_ms: float, _: None) -> None:
        """Samples reach the trainer and every router."""
        self._flush_due = False
        samples, self._samples = self._samples, []
        if self._learning is not None:
            self._learning.take(samples, now_ms)
        for router in self._routers:
            for sample in samples:
                router.state.observe_outcome(sample, now_ms)

    def _tick(self, now_ms: float, _: None) -> None:
        learning = self._learning
        if learning is None:
            return
        learning.tick(now_ms)
        for router in self._routers:
            router.state.set_expected_output_tokens(learning.expected_output_tokens)
        self._at(now_ms + self._options.learning.tick_ms, self._tick, None)


def run(trace: Trace, pods: Sequence[PodSpec], policy: Policy, options: RunOptions) -> RunResult:
    """Play a trace against a pool under a policy."""
    return Cluster(trace, pods, policy, options).run()
