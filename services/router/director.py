"""The conductor: one request, top to bottom.

parse → snapshot → features → one prediction for all candidates → filters, scorers, picker → (held) → answer and ledger.
All its inputs are handed in; it does no I/O of its own but awaits the prediction. Where Envoy shows the response, an
observer per request makes its sample.

Fails open, and in time: whatever goes wrong, or takes longer than twice the decision budget, a request gets the least
loaded endpoint and the fault is counted. Envoy can't be left to see to that: in full duplex it keeps no deadline and
doesn't honour `failure_mode_allow`. Only a request that can't be understood, or a pool without an endpoint, is answered
by the router itself.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import structlog

from services.router.admission.holding import Holding
from services.router.admission.waiting_room import Outlook, Waiter, WaitingRoom, WaitingRoomConfig
from services.router.completion import CompletionObserver
from services.router.core import DecisionCore, Prepared, least_loaded
from services.router.decision_id import uuid7
from services.router.decisions import DecisionLog, DecisionRecord, PredictionError
from services.router.extproc.messages import RequestHead, RestoredName, Routed
from services.router.extproc.stream import ResponseObserver
from services.router.metrics import RouterMetrics
from services.router.offpolicy.log import LoggedDecision, LoggedOutcome, failure_of, logged_decision, outcome_of
from services.router.predict.ladder import Ladder
from services.router.predict.types import Prediction
from services.router.request.aliases import ModelAliases
from services.router.request.errors import RejectReason, RequestRejected, Shed, UnsupportedEncoding
from services.router.request.inference_request import InferenceRequest
from services.router.request.objectives import Objectives
from services.router.request.parse import ParseConfig, Route, parse, plain_body, route_of
from services.router.request.rewrite import replace_model
from services.router.request.slo import control_headers, steering_headers
from services.router.scheduling.decision import Decision
from services.router.scheduling.pipeline import Pipeline
from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.names import PROBE
from shared.samples import DecisionMetadata, LatencySample, encode_decision
from shared.verdicts import Reason, Unsampled, Verdict

_LOG_AGAIN_MS: Final = 10_000.0
_DEADLINE_BUDGETS: Final = 2.0
"""The whole decision's deadline in decision budgets: later than the ladder's own, whose steps come first."""


@dataclass(frozen=True, slots=True)
class DirectorOptions:
    """The conductor's part of the settings.

    `probe_user_agents`: beginnings of those whose requests teach nothing. `restored_routes`: beginnings of the paths
    whose responses name a model as the client did.
    """

    pool: str
    listed_endpoints: int
    decision_budget_ms: float
    parsing: ParseConfig
    trust_by_profile: bool = False
    aliases: ModelAliases = field(default_factory=lambda: ModelAliases({}))
    forward_control_headers: bool = False
    restored_routes: tuple[str, ...] = ()
    probe_user_agents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A request on its way to a decision. `received_ms`: monotonic, when its objectives' clock started."""

    request: InferenceRequest
    head: RequestHead
    received_ms: float
    received_unix_ms: float


@dataclass(frozen=True, slots=True)
class _Considered:
    """What there is to decide with, and what the policy makes of it."""

    prepared: Prepared
    prediction: Prediction | None
    decision: Decision


class Director:
    """Decides each request; told of its end by the edge and of its outcome by the bus."""

    def __init__(
        self,
        options: DirectorOptions,
        state: PoolState,
        ladder: Ladder,
        pipeline: Pipeline,
        metrics: RouterMetrics,
        clock: Clock,
        rng: np.random.Generator,
        completions: Callable[[LatencySample], None] | None = None,
        log: Callable[[LoggedDecision | LoggedOutcome], None] | None = None,
    ) -> None:
        """`completions` takes the samples of responses that pass through here; without it nobody looks at them. `log`
        takes decisions and outcomes for `leadtime evaluate`.
        """
        self._to_log = log
        self._completions = completions
        self._observers: dict[str, CompletionObserver] = {}
        self._options = options
        self._state = state
        self._ladder = ladder
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._log = structlog.get_logger()
        self._trust(pipeline)
        self._core = DecisionCore(options.pool, options.listed_endpoints, state, pipeline, rng, self._fault)
        self.decisions = DecisionLog()
        self.ttft_error = PredictionError()
        self._log_faults_at_ms = float("-inf")
        self.waiting_room = WaitingRoom(pipeline.waiting_room)
        self.holding: Holding[_Ticket, _Considered, Routed] = Holding(self.waiting_room, self, clock, metrics.waited)

    @property
    def pipeline(self) -> Pipeline:
        """The policy in force."""
        return self._core.pipeline

    def use_pipeline(self, pipeline: Pipeline) -> None:
        """Decide by this one from the next request on."""
        self._core.pipeline = pipeline
        self._trust(pipeline)
        self.holding.configure(pipeline.waiting_room)

    def _trust(self, pipeline: Pipeline) -> None:
        if self._options.trust_by_profile:
            parsing = replace(self._options.parsing, trust_request_headers=pipeline.trusts_headers)
            self._options = replace(self._options, parsing=parsing)

    def let_all_go(self) -> None:
        """Hold nobody any more: the router is about to stop."""
        self.holding.configure(None)

    def use_objectives(self, objectives: Objectives) -> None:
        """Read requests by this table from the next one on."""
        self._options = replace(self._options, parsing=replace(self._options.parsing, objectives=objectives))

    def use_aliases(self, aliases: ModelAliases) -> None:
        """Read clients' names of models by this table from the next request on."""
        self._options = replace(self._options, aliases=aliases)

    async def decide(
        self, head: RequestHead, body: bytes | None, on_hold: Callable[[float], Awaitable[None]] | None = None
    ) -> Routed | RequestRejected:
        """Find endpoints for one request; never raises for what a client sent.

        `on_hold` is awaited before a request is held on purpose, with the longest time that may take, ms.
        """
        received_ms = self._clock.monotonic_ms()
        received_unix_ms = self._clock.unix_ms()
        try:
            unread = head.body_hidden or (body is None and head.method != "POST")
            if unread or route_of(head.path) is Route.OTHER:
                return self._pass_through(head, received_unix_ms)
            try:
                request = self._parse(head, body or b"")
            except UnsupportedEncoding:  # the model server may know it: routed unread rather than refused
                return self._pass_through(head, received_unix_ms)
            try:
                routed = await self._route(_Ticket(request, head, received_ms, received_unix_ms), on_hold)
            except RequestRejected:
                raise
            except Exception:  # a fault of ours must not cost the request
                self._fault("decision failed")
                routed = self._pass_through(head, received_unix_ms)
            return routed if request.alias is None else self._rewritten(routed, request, head, body or b"")
        except RequestRejected as rejection:
            self.rejected(rejection.reason)
            return rejection

    def _parse(self, head: RequestHead, body: bytes) -> InferenceRequest:
        aliases = self._options.aliases
        if not aliases:
            return parse(
                head.path,
                head.headers,
                body,
                self._state.tokens,
                self._options.parsing,
                gateway_route=head.route_name,
            )
        draw = self._rng.random()
        return parse(
            head.path,
            head.headers,
            body,
            self._state.tokens,
            self._options.parsing,
            lambda name: aliases.target(name, draw),
            head.route_name,
        )

    def _rewritten(self, routed: Routed, request: InferenceRequest, head: RequestHead, body: bytes) -> Routed:
        """The answer with a body that names the model instead of its alias, as plain JSON whatever came."""
        try:
            plain = plain_body(head.headers, body, self._options.parsing.max_body_bytes)
            named = replace_model(plain, request.model)
        except ValueError:  # of JSON that was parsed: the endpoint gets what the client sent, and says what it thinks
            self._fault("model rewrite failed")
            return routed
        removed = {"content-encoding"} & head.headers.keys()
        restored = None
        if head.response_shown and head.path.startswith(self._options.restored_routes):
            restored = RestoredName(request.model, request.alias or request.model)
            removed |= {"accept-encoding"} & head.headers.keys()  # in an encoded answer no name is found
        return replace(
            routed, body=named, removed_headers=(*routed.removed_headers, *sorted(removed)), restored=restored
        )

    async def _route(self, ticket: _Ticket, on_hold: Callable[[float], Awaitable[None]] | None) -> Routed:
        self._metrics.stage("parse", self._clock.monotonic_ms() - ticket.received_ms)
        considered = await self.consider(ticket)
        if self.waiting_room.config is None:
            return self.commit(ticket, considered, 0.0)
        request = ticket.request
        slo_ms = request.slo.ttft_ms
        waiter = Waiter(
            request.priority,
            request.fairness_id,
            math.inf if slo_ms is None else ticket.received_ms + slo_ms,
            float(considered.prepared.candidates.uncached_tokens.min()),
            ticket.received_ms,
        )
        on_hold = None if on_hold is None else partial(self._hold_for, on_hold)
        return await self.holding.pass_or_wait(waiter, ticket, considered, on_hold)

    async def _hold_for(self, on_hold: Callable[[float], Awaitable[None]], ttl_ms: float) -> None:
        """What Envoy has to wait for at most: the hold, and a decision after it."""
        await on_hold(ttl_ms + 2.0 * _DEADLINE_BUDGETS * self._options.decision_budget_ms)

    async def consider(self, ticket: _Ticket) -> _Considered:
        """Everything up to the decision, as things are now; raises RequestRejected, and TimeoutError past its time."""
        # The ladder keeps to the budget; this is for what doesn't.
        async with asyncio.timeout(_DEADLINE_BUDGETS * self._options.decision_budget_ms / 1e3):
            began_ms = self._clock.monotonic_ms()
            request = ticket.request
            prepared = self._core.prepare(request, ticket.head.subset, began_ms)
            started_ms = self._clock.monotonic_ms()
            self._metrics.stage("features", started_ms - began_ms)
            prediction = None
            if request.prediction_wanted and self.pipeline.predicts:
                prediction = await self._ladder.predict(
                    prepared.rows,
                    prepared.candidates.addresses,
                    prepared.backlog_tokens,
                    self._options.decision_budget_ms - (started_ms - began_ms),
                )
            predicted_ms = self._clock.monotonic_ms()
            self._metrics.stage("predict", predicted_ms - started_ms)
            decision = self._core.schedule(prepared, prediction, predicted_ms - ticket.received_ms)
            self._metrics.stage("policy", self._clock.monotonic_ms() - predicted_ms)
        if decision.refusal is not None:
            raise Shed(RejectReason(decision.refusal.reason), decision.refusal.retry_after_ms)
        return _Considered(prepared, prediction, decision)

    def outlook(self, ticket: _Ticket, considered: _Considered, config: WaitingRoomConfig) -> Outlook | None:
        """What is predicted about holding a request; None: it isn't held."""
        elapsed_ms = self._clock.monotonic_ms() - ticket.received_ms
        return self._core.outlook(considered.prepared, considered.prediction, considered.decision, elapsed_ms, config)

    def commit(self, ticket: _Ticket, considered: _Considered, queue_ms: float) -> Routed:
        """Write the decision down, and count the request in."""
        prediction, head = considered.prediction, ticket.head
        decision_id = uuid7(ticket.received_unix_ms, secrets.randbits(74))
        metadata = self._record(decision_id, ticket, considered, queue_ms)
        # Last: an entry whose id Envoy never gets would have no end.
        self._core.dispatch(
            decision_id, considered.prepared, prediction, considered.decision, self._clock.monotonic_ms()
        )
        sent_ms = self._clock.monotonic_ms()
        self._metrics.decided(ticket.request.model, prediction, sent_ms - ticket.received_ms - queue_ms)
        if self._completions is not None and head.response_shown:
            self._observe_response(metadata, head, sent_ms)
        return Routed(
            tuple(endpoint.address for endpoint in metadata.endpoints),
            decision_id,
            encode_decision(metadata),
            removed_headers=self._removed_headers(head),
        )

    def undo(self, result: Routed) -> None:
        """The client left before it had its answer."""
        self.finished(result.decision_id, completed=False)

    def _removed_headers(self, head: RequestHead) -> tuple[str, ...]:
        steering = steering_headers(head.headers)
        return steering if self._options.forward_control_headers else (*steering, *control_headers(head.headers))

    def _observe_response(self, metadata: DecisionMetadata, head: RequestHead, sent_ms: float) -> None:
        agents = self._options.probe_user_agents
        if PROBE in head.headers or (agents and head.headers.get("user-agent", "").startswith(agents)):
            self._metrics.completed(Reason.PROBE)
            return
        self._observers[metadata.decision_id] = CompletionObserver(
            metadata,
            sent_ms=sent_ms,
            done=lambda verdict: self._completed(metadata.decision_id, verdict),
            on_first_content=self._state.observe_first_token,
        )

    def _completed(self, decision_id: str, verdict: Verdict) -> None:
        self._metrics.completed(verdict.reason, verdict.notes)
        if verdict.sample is None:
            self.observe_end(
                Unsampled(
                    decision_id=decision_id,
                    reason=verdict.reason,
                    status=verdict.status,
                    endpoint=verdict.endpoint,
                    bodiless=verdict.bodiless,
                )
            )
        elif self._completions is not None:
            self._completions(verdict.sample)

    def _fault(self, event: str) -> None:
        """Count a fault of ours, and log it once in a while: each request may meet it, and a traceback is long."""
        self._metrics.scheduling_failed()
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._log_faults_at_ms:
            self._log_faults_at_ms = now_ms + _LOG_AGAIN_MS
            self._log.exception(event)

    def _record(self, decision_id: str, ticket: _Ticket, considered: _Considered, queue_ms: float) -> DecisionMetadata:
        """Write the decision down: for those who ask the router, and for the one that learns from it."""
        prepared, prediction, decision = considered.prepared, considered.prediction, considered.decision
        decision_ms = self._clock.monotonic_ms() - ticket.received_ms - queue_ms
        metadata = self._core.describe(
            decision_id,
            prepared,
            prediction,
            decision,
            received_unix_ms=ticket.received_unix_ms,
            decision_ms=decision_ms,
            queue_ms=queue_ms,
        )
        self.decisions.add(
            DecisionRecord(
                decision_id=decision_id,
                received_unix_ms=ticket.received_unix_ms,
                model=metadata.model,
                input_tokens=prepared.request.input_tokens,
                rung=metadata.rung,
                bundle_version=metadata.bundle_version,
                decision_ms=decision_ms,
                queue_ms=queue_ms,
                addresses=prepared.candidates.addresses,
                rows=prepared.rows,
                predictions=prediction.columns if prediction else {},
                decision=decision,
            )
        )
        if self._to_log is not None:
            self._to_log(
                logged_decision(
                    decision_id,
                    prepared.request,
                    prepared.candidates,
                    prepared.rows,
                    prediction,
                    received_unix_ms=ticket.received_unix_ms,
                    profile=decision.profile,
                    propensity=decision.propensity,
                    chosen=decision.order[0],
                    elapsed_ms=decision_ms + queue_ms,
                    queue_ms=queue_ms,
                    expected_output_tokens=prepared.expected_output_tokens,
                )
            )
        return metadata

    def _pass_through(self, head: RequestHead, received_unix_ms: float) -> Routed:
        """A request that names no model (`GET /v1/models`, files): the least loaded endpoint, nothing learned."""
        candidates = self._state.any_candidates(head.subset, self._clock.monotonic_ms())
        decision = least_loaded(candidates, self._options.listed_endpoints)
        self._metrics.passed_through()
        destinations = tuple(candidates.addresses[i] for i in decision.order)
        return Routed(
            destinations,
            uuid7(received_unix_ms, secrets.randbits(74)),
            None,
            removed_headers=self._removed_headers(head),
        )

    def response_observer(self, decision_id: str) -> ResponseObserver | None:
        """Who wants to see this request's response, which passes through the edge chunk by chunk; None: nobody."""
        return self._observers.get(decision_id)

    def finished(self, decision_id: str, *, completed: bool) -> None:
        """The request is over, however it ended: out of the ledger, and a sample of what was seen of its response."""
        now_ms = self._clock.monotonic_ms()
        self._state.finish(decision_id, now_ms, completed=completed)
        self.holding.wake()
        observer = self._observers.pop(decision_id, None)
        if observer is not None:
            observer.closed(now_ms)

    def rejected(self, reason: RejectReason) -> None:
        self._metrics.rejected(reason)

    def served(self, decision_id: str, address: str) -> None:
        """Envoy says which endpoint answers; where it isn't the first one listed, the request counts there."""
        predicted = self.decisions.predicted_ttft_ms(decision_id, address)
        now_ms = self._clock.monotonic_ms()
        if self._state.observe_served(decision_id, address, now_ms, predicted_ttft_ms=predicted):
            self._metrics.passed_over()

    def answered(self, decision_id: str, address: str, status: int) -> None:
        """An endpoint's answer begins."""
        self._state.observe_answer(decision_id, address, status, self._clock.monotonic_ms())

    def observe_end(self, end: Unsampled) -> None:
        """A request has ended without a sample."""
        if end.endpoint is not None:
            self.served(end.decision_id, end.endpoint)
        self._state.observe_end(
            end.decision_id,
            self._clock.monotonic_ms(),
            endpoint=None if end.reason is Reason.SHED else end.endpoint,
            status=end.status,
            reached=end.reason is not Reason.NO_ENDPOINT,
            retried=end.attempts > 1,
            bodiless=end.bodiless,
        )
        self.decisions.observe(end)
        failure = failure_of(end)
        if failure is not None and self._to_log is not None:
            self._to_log(failure)

    def observe(self, sample: LatencySample) -> None:
        """An outcome came back."""
        self.served(sample.decision_id, sample.endpoint)
        self._state.observe_outcome(sample, self._clock.monotonic_ms())
        self.decisions.observe(sample)
        if self._to_log is not None:
            self._to_log(outcome_of(sample))
        self.holding.wake()
        predicted = (sample.prediction or {}).get("ttft_p50")
        if predicted and predicted > 0 and sample.ttft_ms:
            self.ttft_error.observe(predicted, sample.ttft_ms)
