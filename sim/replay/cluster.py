"""One run: a trace through routers onto simulated pods, in virtual time.

Each router has its own `PoolState` and `DecisionCore`, scrapes the pods at the scraper's own intervals and hears of
every outcome; the pods are `JumpEngine`s; learning is the trainer's. Events are taken in order of time and, at one
instant, in order of their making; all randomness comes from the seed. So a run gives the same figures every time.

This is the conductor: a request arrives, is decided on, held or sent, and ends. `events.py` is the clock, `routers.py`
what routers scrape and tell each other, `pods.py` what becomes of a request that was sent.

Limits: parsing, Envoy and the network are a fixed delay; prompts' token counts are known; clients don't abort.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from services.router.admission.holding import AT_ONCE, LOOK_EVERY_MS, LOOKS
from services.router.admission.waiting_room import Verdict, Waiter
from services.router.core import Prepared
from services.router.predict.types import Prediction
from services.router.request.inference_request import InferenceRequest
from services.router.scheduling.decision import Decision
from services.router.state.errors import NoEndpoint
from services.router.state.prefix_index import BlockHasher
from services.router.state.scraper import ScrapeConfig
from shared.samples import LatencySample, Outcome, Rung, TtftSource, completed_sample
from sim.engine import EngineRequest
from sim.jump_engine import Running
from sim.replay.events import Events
from sim.replay.learning import EPOCH_UNIX_MS, Learning
from sim.replay.options import RunOptions
from sim.replay.outcomes import Outcomes, RunResult
from sim.replay.pods import Flight, Pods
from sim.replay.policies import Policy
from sim.replay.pool import PodSpec
from sim.replay.routers import BYTES_PER_TOKEN, Asked, Bus, Router, Scrapes
from sim.replay.trace import ReplayRequest, Trace

_TELL_EVERY: Final = 100


class Cluster:
    """One run in the making; `run` does it."""

    def __init__(self, trace: Trace, pods: Sequence[PodSpec], policy: Policy, options: RunOptions) -> None:
        self._trace = trace
        self._policy = policy
        self._options = options
        children = np.random.SeedSequence(options.seed).spawn(len(pods) + 1 + options.routers)
        self._rng = np.random.default_rng(children[0])
        self._events = Events()
        noise_rngs = [np.random.default_rng(child) for child in children[1 : 1 + len(pods)]]
        self._pods = Pods(pods, noise_rngs, self._events, options, self._first, self._end)
        self._routers = [
            Router(
                f"router-{place}",
                policy,
                self._pods.all,
                np.random.default_rng(child),
                self._fault,
                options.max_candidates,
                shared=options.share_ledgers and options.routers > 1,
            )
            for place, child in enumerate(children[1 + len(pods) :])
        ]
        self._bus = Bus(self._routers, self._events, options.bus_ms)
        self._scrapes = Scrapes(self._pods.by_address, self._events, self._rng, ScrapeConfig())
        block_tokens = pods[0].limits.block_tokens
        self._hasher = BlockHasher(
            b"pods", block_bytes=block_tokens * BYTES_PER_TOKEN, max_blocks=2 * 262_144 // block_tokens
        )
        self._learning = Learning(options.learning) if policy.learned else None
        self._outcomes = Outcomes.empty(len(trace.requests))
        self._samples: list[LatencySample] = []
        self._flush_due = False
        self._left = len(trace.requests)
        self._faults = 0

    def run(self, progress: Callable[[float], None] | None = None) -> RunResult:
        """Play the trace to the end of its last request; `progress` hears which share of them has arrived."""
        events = self._events
        # The routers have seen their endpoints before the first request, as a started router has.
        for router in self._routers:
            for pod in self._pods.all:
                self._scrapes.observe(router, pod, 0.0)
        for failure in self._options.failures:
            events.at(failure.at_ms, self._pods.fail, failure)
        for change in self._options.speeds:
            events.at(change.at_ms, self._pods.change_speed, change)
        for router in self._routers:
            self._bus.begin(router)
            self._scrapes.begin(router)
        if self._learning is not None:
            events.at(self._options.learning.tick_ms, self._tick, None)
        requests = self._trace.requests
        place, count = 0, len(requests)
        while self._left:
            if place < count and requests[place].arrival_ms <= events.next_ms:
                events.now_ms = requests[place].arrival_ms
                self._arrive(place, requests[place])
                place += 1
                if progress is not None and place % _TELL_EVERY == 0:
                    progress(place / count)
            else:
                events.step()
        self._bus.settle()
        faults = [fault for router in self._routers for fault in router.state.ledger.faults()]
        faults += [fault for router in self._routers if router.share for fault in router.share.faults()]
        learning = self._learning
        return RunResult(
            policy=self._policy.name,
            outcomes=self._outcomes,
            virtual_ms=events.now_ms,
            ended=count - self._left,
            ledger_left=sum(router.state.in_flight for router in self._routers),
            ledger_faults=faults,
            faults=self._faults,
            fits=learning.fits if learning else 0,
            fits_refused=learning.refused if learning else 0,
            fit_cpu_ms=learning.fit_cpu_ms if learning else 0.0,
            first_bundle_ms=learning.first_bundle_ms if learning else None,
            preemptions=sum(pod.engine.preemptions for pod in self._pods.all if pod.engine is not None),
        )

    def _fault(self, _: str) -> None:
        self._faults += 1

    # --- decisions ----------------------------------------------------------------------------------------------

    def _arrive(self, place: int, asked: ReplayRequest) -> None:
        now_ms, outcomes = self._events.now_ms, self._outcomes
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
        prompt = text[: input_tokens * BYTES_PER_TOKEN]
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
        asked_now = Asked(place, asked, engine_request, request, now_ms)
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

    def _shed(self, asked: Asked) -> None:
        self._outcomes.outcome[asked.place] = Outcome.SHED
        self._left -= 1

    def _dispatch(
        self, router: Router, asked: Asked, prepared: Prepared, prediction: Prediction | None, decision: Decision
    ) -> None:
        now_ms, decision_id = self._events.now_ms, asked.engine.request_id
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
        flight = Flight(asked.place, asked.request, decision_id, router, metadata, asked.received_ms)
        self._pods.send(flight, asked.engine)

    # --- requests held on purpose, as `services.router.admission.holding` does it ---------------------------------

    def _held(
        self, router: Router, asked: Asked, prepared: Prepared, prediction: Prediction | None, decision: Decision
    ) -> bool:
        """Whether a request that has just come is held, or refused; else it goes."""
        config, now_ms = router.room.config, self._events.now_ms
        look = None if config is None else router.core.outlook(prepared, prediction, decision, 0.0, config)
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

    def _look_again(self, router: Router, at_ms: float = math.inf) -> None:
        """Have the room looked at when it says, or at `at_ms` since something may be free then, or as soon as the
        router's task would by itself.
        """
        due_ms = router.room.next_due_ms()
        if due_ms is None:
            return
        router.woken |= at_ms < math.inf
        at_ms = max(min(due_ms, at_ms, self._events.now_ms + LOOK_EVERY_MS), self._events.now_ms)
        if at_ms < router.look_due_ms:
            router.look_due_ms = at_ms
            self._events.at(at_ms, self._look, router)

    def _look(self, now_ms: float, router: Router) -> None:
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

    def _reconsider(self, router: Router, waiter: Waiter, *, is_next: bool) -> bool:
        """Whether it goes on waiting."""
        asked, now_ms, config = router.held[waiter], self._events.now_ms, router.room.config
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
            look = router.core.outlook(prepared, prediction, decision, elapsed_ms, config)
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
        pods = [self._pods.by_address[address] for address in prepared.candidates.addresses]
        arrives_ms = self._events.now_ms + self._options.to_pod_ms
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

    # --- ends ---------------------------------------------------------------------------------------------------

    def _first(self, flight: Flight, now_ms: float) -> None:
        self._outcomes.ttft_ms[flight.place] = now_ms - flight.received_ms
        if self._options.first_tokens_seen:
            flight.router.state.observe_first_token(flight.decision_id, now_ms)
            self._look_again(flight.router, now_ms)

    def _end(self, flight: Flight, outcome: Outcome, now_ms: float, running: Running | None) -> None:
        """A request is over: out of the ledger at once, its sample on its way."""
        del self._pods.flights[flight.decision_id]
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
            self._events.at((now_ms // flush + 1.0) * flush + self._options.label_ms, self._flush, None)

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
        self._events.at(now_ms + self._options.learning.tick_ms, self._tick, None)


def run(
    trace: Trace,
    pods: Sequence[PodSpec],
    policy: Policy,
    options: RunOptions,
    progress: Callable[[float], None] | None = None,
) -> RunResult:
    """Play a trace against a pool under a policy; `progress` hears which share of its requests has arrived."""
    return Cluster(trace, pods, policy, options).run(progress)
