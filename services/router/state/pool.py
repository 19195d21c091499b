"""`PoolState`: all that the router knows about its endpoints, behind one facade. Pure.

The director asks for a `snapshot`, counts its choice in with `dispatch` and out with `finish`; the scraper and
discovery report what they see; finished requests come back through `observe_outcome` and teach bytes per token, step
times, the timer's pace and how much of a prefix cache is really there. What failed at an endpoint counts against it
(`health.py`). Nothing here waits, and nothing grows without bound.

Where routers share what they know, a `Journal` is told what happens here, and what peers dispatched is counted in with
`count_in` and out with `count_out`: a decision sees their requests as its own.

Limits: one event loop.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator, expected_output_tokens
from services.router.state.cache_book import CacheBook, TextChange
from services.router.state.cache_room import CacheRoom
from services.router.state.dispatch_records import DispatchRecord, DispatchRecords
from services.router.state.foreign import ForeignRequests
from services.router.state.health import Change, EndpointHealth, FailureKind, HealthConfig, failure_of_status
from services.router.state.journal import Journal
from services.router.state.kv_events import KvEvent
from services.router.state.ledger import Ledger
from services.router.state.prefix_index import BlockHasher, PrefixIndex, PrefixMatch
from services.router.state.roles import Role
from services.router.state.sequence_limit import SequenceLimits
from services.router.state.snapshot import Candidates
from services.router.state.status import EndpointStatus, status_of
from services.router.state.table import MAX_CANDIDATES, Endpoint, EndpointTable
from services.router.state.vllm_metrics import EngineMetrics
from shared.samples import LatencySample, Outcome

# Process starts closer than this are one process: exporters round to clock ticks.
_SAME_START_S: Final = 0.02
_CAPACITY_TOLERANCE: Final = 0.05
_NOTHING_MATCHED: Final = np.zeros(0, np.float32)
# An event may be on its way a little longer than the end of its request, or be stamped earlier.
_EVENT_SLACK_MS: Final = 100.0
_FAILED_UPSTREAM: Final = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_RESET, Outcome.TIMEOUT})
_SERVER_ERROR: Final = 500
# How many failures in a row have an endpoint's health asked at once.
_DOUBTED_AT: Final = range(2, 6)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """`scrape_limit_ms`: scraped values older than this are unknown. `prefix_block_bytes`: a multiple of 8.

    `prefix_max_blocks`: of one prompt. `prefix_default_blocks`: of an endpoint that hasn't told its cache's size.
    `prefix_total_blocks`: of all endpoints. `max_candidates`: of one decision; 0: all. `max_request_age_ms`: an entry
    without an end is given up after it.
    """

    scrape_limit_ms: float = 5_000.0
    prefix_block_bytes: int = 512
    prefix_max_blocks: int = 2_048
    prefix_default_blocks: int = 4_096
    prefix_total_blocks: int = 500_000
    max_request_age_ms: float = 3_600_000.0
    max_candidates: int = MAX_CANDIDATES


class PoolState:
    """See the module. `tokens` is the estimator that requests are parsed with."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        salt: bytes,
        tokens: TokenEstimator,
        health: HealthConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`salt`: secret of the prefix hashes, the same in all routers that share state. `rng`: for jitter."""
        self.tokens = tokens
        health = health or HealthConfig()
        self.table = EndpointTable(
            scrape_limit_ms=config.scrape_limit_ms, max_candidates=config.max_candidates, may_be_held=health.allowed
        )
        self.health = EndpointHealth(health, rng or random.Random(1), self._usable_slots)  # noqa: S311 - jitter
        self.ledger = Ledger(self.table, max_age_ms=config.max_request_age_ms)
        self.prefixes = PrefixIndex(
            BlockHasher(salt, block_bytes=config.prefix_block_bytes, max_blocks=config.prefix_max_blocks),
            default_blocks=config.prefix_default_blocks,
            max_blocks_total=config.prefix_total_blocks,
        )
        self.cache_book = CacheBook(salt)
        self.on_upstream_failure: Callable[[str], None] | None = None
        """Called with an endpoint's address when a request to it failed, or a peer sees it otherwise than we do:
        whoever probes can do so at once.
        """
        self.on_first_request: Callable[[str], None] | None = None
        """Called with an endpoint's address when a request comes to it while it has none."""
        self.on_endpoints_changed: Callable[[], None] | None = None
        """Called when an endpoint was added, retired or removed."""
        self.on_health: Callable[[tuple[str, ...], Change], None] | None = None
        """Called with addresses when they were set aside, or are in use again."""
        self.journal: Journal | None = None
        self._block_bytes = config.prefix_block_bytes
        self._learned_output_tokens: Mapping[str, float] = {}
        self._records = DispatchRecords()
        self._room = CacheRoom()
        self._foreign = ForeignRequests()
        self._sequences = SequenceLimits()

    # --- the director's part ------------------------------------------------------------------------------------

    def snapshot(
        self, request: InferenceRequest, subset: frozenset[str] | None, now_ms: float
    ) -> tuple[Candidates, PrefixMatch]:
        """The candidates for a request at this instant, and its prefix; raises NoEndpoint or ModelNotFound.

        `subset`: `ip:port` or bare `ip` of the endpoints a gateway allows; None allows all.
        """
        self.advance(now_ms)
        match = self.prefixes.match(request.model, request.prompt, request.input_tokens, self.table.capacity)
        candidates = self.table.candidates(request.model, subset, request.input_tokens, match.matched_tokens, now_ms)
        return candidates, match

    def any_candidates(self, subset: frozenset[str] | None, now_ms: float) -> Candidates:
        """Every ready endpoint, whatever it serves: for requests that name no model. Raises NoEndpoint."""
        self.advance(now_ms)
        return self.table.everyone(subset, now_ms)

    def forget_prefixes(self) -> None:
        """The servers' caches were emptied: believe nothing of them."""
        for endpoint in self.table:
            self.prefixes.drop(endpoint.slot)

    def expected_output_tokens(self, request: InferenceRequest) -> float | None:
        """The answer's expected length by the client's cap and the learned lengths; None where neither is known."""
        return expected_output_tokens(request, self._learned_output_tokens)

    def dispatch(
        self,
        decision_id: str,
        address: str,
        request: InferenceRequest,
        match: PrefixMatch,
        *,
        predicted_ttft_ms: float | None,
        now_ms: float,
    ) -> bool:
        """Count a request in that is being sent to `address`; `match` is its snapshot's.

        False (nothing is changed) if the endpoint has gone since the snapshot, or the id is in already.
        """
        endpoint = self.table.get(address)
        if endpoint is None:
            return False
        slot = endpoint.slot
        matched = float(match.matched_tokens[slot]) if slot < len(match.matched_tokens) else 0.0
        uncached = max(request.input_tokens - matched, 0.0)
        expected = self.expected_output_tokens(request)
        added = self._count_in(
            decision_id,
            endpoint,
            request.model,
            request.text_bytes,
            request.input_tokens,
            uncached,
            expected,
            predicted_ttft_ms,
            match,
            now_ms,
            own=True,
        )
        if added and self.journal is not None:
            self.journal.dispatched(
                decision_id,
                endpoint,
                request,
                uncached_tokens=uncached,
                expected_output_tokens=expected,
                predicted_ttft_ms=predicted_ttft_ms,
                names=match.names,
                now_ms=now_ms,
            )
        return added

    def _count_in(
        self,
        decision_id: str,
        endpoint: Endpoint,
        model: str,
        text_bytes: int,
        input_tokens: float,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        match: PrefixMatch,
        dispatched_ms: float,
        *,
        own: bool,
    ) -> bool:
        slot = endpoint.slot
        backlog_tokens = self.table.pending_tokens(slot, dispatched_ms) + uncached_tokens
        added = self.ledger.add(
            decision_id,
            slot,
            input_tokens=input_tokens,
            uncached_tokens=uncached_tokens,
            expected_output_tokens=expected_output_tokens,
            predicted_ttft_ms=predicted_ttft_ms,
            now_ms=dispatched_ms,
        )
        if not added:
            return False
        self.table.observe_arrival(slot, dispatched_ms)
        if self.on_first_request is not None and self.ledger.in_flight(slot) == 1:
            self.on_first_request(endpoint.address)
        pending, ahead_tokens = self.ledger.pending(slot)
        record = DispatchRecord(
            endpoint.address,
            slot,
            endpoint.incarnations,
            model,
            text_bytes,
            ahead_tokens,
            max(input_tokens - uncached_tokens, 0.0),
            pending == 1,
            input_tokens,
            own,
            dispatched_ms,
            backlog_tokens,
        )
        self._records.add(decision_id, record, match)
        self.prefixes.insert(match.names, slot)
        if self.health.case(slot) is not None:
            self._follow_health(slot, self.health.dispatched(slot, decision_id, dispatched_ms), dispatched_ms)
        return True

    def observe_served(
        self, decision_id: str, address: str, now_ms: float, *, predicted_ttft_ms: float | None = None
    ) -> bool:
        """Envoy says which endpoint answers, or has answered. True, once, if it passed over the one that this router
        dispatched the request to: then its entry in the ledger is the served endpoint's, and that one's cache has its
        prompt.
        """
        record = self._records.get(decision_id)
        if record is None or record.passed_over or record.address == address:
            return False
        record.passed_over = True
        if record.own and self.journal is not None:
            self.journal.moved(decision_id, address, predicted_ttft_ms, now_ms)
        picked, served = self.table.get(record.address), self.table.get(address)
        if served is None:  # nobody that we know: it stays counted where it is until it ends
            return record.own
        match = self._records.match(decision_id)
        matched = 0.0
        if match is not None:
            self.prefixes.insert(match.names, served.slot)
            matched = float(match.matched_tokens[served.slot]) if served.slot < len(match.matched_tokens) else 0.0
        self.ledger.move(
            decision_id,
            served.slot,
            uncached_tokens=max(record.input_tokens - matched, 0.0),
            predicted_ttft_ms=predicted_ttft_ms,
            now_ms=now_ms,
        )
        record.slot, record.incarnations = served.slot, served.incarnations
        if picked is not None:
            self._forget_if_empty(picked.slot)
        return record.own

    # --- what peers do ------------------------------------------------------------------------------------------

    def count_in(
        self,
        decision_id: str,
        address: str,
        *,
        process_start_s: float | None,
        model: str,
        text_bytes: int,
        input_tokens: float,
        uncached_tokens: float,
        expected_output_tokens: float | None,
        predicted_ttft_ms: float | None,
        names: list[int],
        dispatched_ms: float,
        now_ms: float,
    ) -> bool:
        """Count a request in that another router dispatched. `process_start_s`: the process that it was sent to.

        False if the endpoint isn't known here, or has a newer process, or the id is in. A process newer than the one
        known here renews the endpoint.
        """
        endpoint = self.table.get(address)
        if endpoint is None:
            return False
        known = endpoint.process_start_s
        if process_start_s is not None and known is not None:
            if process_start_s < known - _SAME_START_S:
                return False
            if process_start_s > known + _SAME_START_S:
                self._renew(endpoint, process_start_s, now_ms)
                self.doubt(address)  # its models are unknown
        return self._count_in(
            decision_id,
            endpoint,
            model,
            text_bytes,
            input_tokens,
            uncached_tokens,
            expected_output_tokens,
            predicted_ttft_ms,
            PrefixMatch(names, _NOTHING_MATCHED),
            dispatched_ms,
            own=False,
        )

    def count_out(self, decision_id: str, now_ms: float, *, completed: bool, failed: bool = False) -> bool:
        """Another router's request is over; it `failed` where that router has seen so. False (counted) if it isn't in
        the ledger.
        """
        slot = self.ledger.slot_of(decision_id)
        if failed and slot is not None and (endpoint := self.table.at(slot)) is not None:
            self.observe_answer(decision_id, endpoint.address, _SERVER_ERROR, now_ms)
        removed = self.ledger.remove(decision_id, now_ms, completed=completed)
        self._end_trial(decision_id, now_ms)
        if slot is not None:
            self._forget_if_empty(slot)
        return removed

    def count_first_token(self, decision_id: str, now_ms: float) -> bool:
        """Another router has seen its request's first token. False if the request isn't in the ledger."""
        return self.ledger.observe_first_token(decision_id, now_ms)

    def observe_first_token(self, decision_id: str, now_ms: float) -> bool:
        """Its first content has been seen on its way through. False if the request isn't in the ledger."""
        if self.journal is not None:
            self.journal.first_token(decision_id, now_ms)
        return self.ledger.observe_first_token(decision_id, now_ms)

    def finish(self, decision_id: str, now_ms: float, *, completed: bool = True) -> bool:
        """Count a request out, however it ended; once. False (counted) if it isn't in the ledger.

        `completed`: the answer came to its end; False for an abort, a reset or a refused connection.
        """
        record = self._records.get(decision_id)
        uncomputed = not completed and self.ledger.in_prefill(decision_id)
        slot = self.ledger.slot_of(decision_id)
        removed = self.ledger.remove(decision_id, now_ms, completed=completed)
        if removed and record is not None:
            record.finished_ms = now_ms
            if uncomputed:
                self._take_back(decision_id, record)
        self._end_trial(decision_id, now_ms)
        if self.journal is not None:
            self.journal.ended(decision_id, completed=completed, failed=record is not None and record.judged)
        if slot is not None:
            self._forget_if_empty(slot)
        return removed

    def _take_back(self, decision_id: str, record: DispatchRecord) -> None:
        """What a request was to compute, and didn't: the endpoint's cache hasn't got it."""
        match = self._records.match(decision_id)
        if match is None or match.block_tokens <= 0.0:
            return
        had = round(record.matched_tokens / match.block_tokens)
        self.prefixes.discard(match.names[had:], record.slot)

    def _forget_if_empty(self, slot: int) -> None:
        endpoint = self.table.at(slot)
        if endpoint is not None and endpoint.retired and not self.ledger.in_flight(slot):
            self._forget(endpoint)

    def advance(self, now_ms: float) -> None:
        """Let the ledger's timers run. `snapshot` does it too; a ticker keeps metrics and quiet pools up to date."""
        self.ledger.advance(now_ms)

    # --- outcomes -----------------------------------------------------------------------------------------------

    def observe_outcome(self, sample: LatencySample, now_ms: float) -> None:
        """Learn from a completed request, ours or another router's."""
        self.advance(now_ms)
        match = self._records.match(sample.decision_id)
        if sample.outcome in _FAILED_UPSTREAM and (failed := self._records.get(sample.decision_id)) is not None:
            self._take_back(sample.decision_id, failed)
        record = self._records.settle(sample.decision_id)
        served = self.table.get(sample.endpoint)
        if self.journal is not None:
            self.journal.outcome(sample.decision_id, completed=sample.outcome is Outcome.OK, now_ms=now_ms)
        # Where the response passed through here, nobody knows whether another endpoint served after a failure.
        retried = sample.attempts > 1 and sample.e2e_ms is not None
        self._judge(record, sample.endpoint, *_blame(sample), now_ms, retried=retried)
        if sample.outcome in _FAILED_UPSTREAM:
            self.doubt(sample.endpoint)
        if sample.outcome is not Outcome.OK or served is None:
            return
        if sample.tpot_ms is not None:
            self.table.observe_step_time(served.slot, sample.tpot_ms)
        if record is None:
            return
        if sample.input_tokens is not None:
            self.tokens.observe(record.model, record.text_bytes, sample.input_tokens)
        if record.passed_over or record.slot != served.slot or record.incarnations != served.incarnations:
            return  # another endpoint served it in the end, or this one has restarted
        if sample.ttft_ms is not None:
            self.ledger.learn_ttft(record.slot, record.ahead_tokens, sample.ttft_ms)
            step_ms = self.table.step_time_ms(record.slot) or 0.0
            self.table.observe_prefill(record.slot, record.backlog_tokens, max(sample.ttft_ms - step_ms, 0.0))
        if sample.input_tokens is not None and match is not None and self.cache_book.live(record.slot):
            self._learn_chain(record, match, sample.input_tokens, now_ms)
        elif sample.cached_tokens is not None and record.alone:
            self._learn_cache(served, record, sample.cached_tokens)

    def observe_end(
        self,
        decision_id: str,
        now_ms: float,
        *,
        endpoint: str | None = None,
        status: int = 0,
        reached: bool = True,
        retried: bool = False,
        bodiless: bool = False,
    ) -> None:
        """A finished request of which there is nothing to learn but how it ended.

        `endpoint`: the one that answered, or that was tried last and not `reached`; None where nobody says. `retried`:
        others were tried before it. `bodiless`: its answer was whole, good, and without a byte.
        """
        failure = failure_of_status(status) if reached else FailureKind.UNREACHABLE
        if bodiless:
            failure = FailureKind.EMPTY
        if failure is not None and (failed := self._records.get(decision_id)) is not None:
            self._take_back(decision_id, failed)
        record = self._records.settle(decision_id)
        self._judge(record, endpoint, 200 <= status < 300, failure, now_ms, retried=retried)
        if self.journal is not None:
            self.journal.outcome(decision_id, completed=False, now_ms=now_ms)

    def observe_answer(self, decision_id: str, address: str, status: int, now_ms: float) -> None:
        """A response's headers pass, from an endpoint: where it is to blame for them, that counts at once."""
        failure = failure_of_status(status)
        record = self._records.get(decision_id)
        if failure is None or record is None or record.judged:
            return
        self._judge(record, address, False, failure, now_ms)
        record.judged = True

    def _judge(
        self,
        record: DispatchRecord | None,
        address: str | None,
        answered: bool,
        failure: FailureKind | None,
        now_ms: float,
        *,
        retried: bool = False,
    ) -> None:
        """Count a request for or against its endpoint. `record`: of its dispatch, None where nothing is left of it."""
        if retried and record is not None and record.address != address:
            self._count(record, record.address, FailureKind.RETRIED, now_ms)
        judged = record is not None and record.judged
        if address is not None and not judged and (answered or failure is not None):
            self._count(record, address, failure, now_ms)

    def _count(self, record: DispatchRecord | None, address: str, failure: FailureKind | None, now_ms: float) -> None:
        endpoint = self.table.get(address)
        if endpoint is None:
            return
        slot = endpoint.slot
        if record is not None and record.slot == slot and record.incarnations != endpoint.incarnations:
            return  # of the process before
        if failure is None and self.health.case(slot) is None:
            return
        sent_ms = None if record is None else record.dispatched_ms
        self._follow_health(slot, self.health.observe(slot, failure, now_ms, dispatched_ms=sent_ms), now_ms)
        # A dead engine says so itself. Not at each failure: one prompt may fail at all endpoints.
        if failure is FailureKind.ERROR and self.health.in_a_row(slot) in _DOUBTED_AT:
            self.doubt(address)

    def _end_trial(self, decision_id: str, now_ms: float) -> None:
        if not self.health.watching:
            return
        record = self._records.get(decision_id)
        first = None if record is None else self.table.get(record.address)
        if first is not None and self.health.ended(first.slot, decision_id, now_ms):
            self._follow_health(first.slot, None, now_ms)

    def _follow_health(self, slot: int, change: Change | None, now_ms: float) -> None:
        """Who may be sent requests, by what has just been learned of one endpoint."""
        for number in {slot, *(change.slots if change is not None else ())}:
            case = self.health.case(number)
            if case is not None and case.since_ms is not None:
                self.table.hold(number, self.health.held_until_ms(number, now_ms))
            elif change is not None and number in change.slots:
                self.table.release(number, now_ms)
        if change is not None and self.on_health is not None:
            endpoints = (self.table.at(number) for number in change.slots)
            self.on_health(tuple(endpoint.address for endpoint in endpoints if endpoint is not None), change)

    def _usable_slots(self) -> list[int]:
        return [endpoint.slot for endpoint in self.table if endpoint.ready and not endpoint.retired]

    def doubt(self, address: str) -> None:
        """Somebody has seen an endpoint otherwise than we do: whoever probes is to ask it now."""
        if self.on_upstream_failure is not None:
            self.on_upstream_failure(address)

    def set_expected_output_tokens(self, learned: Mapping[str, float]) -> None:
        """Usual answer lengths in tokens by model, from the trainer's calibration."""
        self._learned_output_tokens = dict(learned)

    def _learn_chain(self, record: DispatchRecord, match: PrefixMatch, input_tokens: int, now_ms: float) -> None:
        """Which blocks of the server's cache the request's prompt became."""
        if match.block_tokens <= 0.0:  # a peer's: how its text is cut isn't told
            return
        changes = self.cache_book.learn(
            record.slot,
            match.names,
            match.block_tokens * input_tokens / max(record.input_tokens, 1.0),
            input_tokens,
            record.dispatched_ms - _EVENT_SLACK_MS,
            (now_ms if record.finished_ms is None else record.finished_ms) + _EVENT_SLACK_MS,
        )
        for slot, change in changes.items():
            self._correct_prefixes(slot, change)

    def _correct_prefixes(self, slot: int, change: TextChange) -> None:
        self.prefixes.discard(change.gone, slot)
        if change.held:
            self.prefixes.add(change.held, slot)

    def _learn_cache(self, endpoint: Endpoint, record: DispatchRecord, cached_tokens: int) -> None:
        """Less found than believed: the cache holds less than it says, or others use it. Asked only of requests that
        found the endpoint's queue empty: blocks that are still being computed can't be hit.
        """
        if record.matched_tokens < 2 * self._block_tokens(record.model):
            return
        self._room.learn(endpoint.slot, found=cached_tokens >= record.matched_tokens / 2)
        self._size_shelf(endpoint)

    def _block_tokens(self, model: str) -> float:
        return self._block_bytes / self.tokens.bytes_per_token(model)

    def _size_shelf(self, endpoint: Endpoint) -> None:
        model = min(endpoint.models) if endpoint.models else ""
        blocks = self._room.blocks(endpoint.slot, self._block_tokens(model))
        if blocks is not None:
            present = self.prefixes.capacity(endpoint.slot)
            if abs(blocks - present) > _CAPACITY_TOLERANCE * present:
                self.prefixes.set_capacity(endpoint.slot, blocks)

    # --- discovery's part ---------------------------------------------------------------------------------------

    def add_endpoint(
        self,
        address: str,
        *,
        hardware_class: int = 0,
        now_ms: float,
        role: Role = Role.BOTH,
        identity: str = "",
    ) -> Endpoint:
        """Discovery lists `ip:port`. It isn't ready until the scraper says so; a known one keeps all it has.

        Another `identity` at a known address is another endpoint: nothing of the old one is believed of it.
        """
        known = self.table.get(address)
        replaced = known is not None and known.identity != identity
        endpoint = self.table.add(address, hardware_class=hardware_class, now_ms=now_ms, role=role, identity=identity)
        if replaced:
            self._renew(endpoint, None, now_ms)
            self.table.set_ready(endpoint, False)
            self.doubt(address)  # whoever probes must ask anew, and at once
        if self.journal is not None:
            self.journal.endpoint_added(address, now_ms)
        self._changed()
        return endpoint

    def remove_endpoint(self, address: str) -> None:
        """Discovery no longer lists it: no candidate from here on; it goes when its last request has ended."""
        endpoint = self.table.get(address)
        if endpoint is None:
            return
        self.table.retire(endpoint)
        self.prefixes.drop(endpoint.slot)
        if not self.ledger.in_flight(endpoint.slot):
            self._forget(endpoint)
        self._changed()

    def _forget(self, endpoint: Endpoint) -> None:
        self._reset(endpoint)
        self.table.remove(endpoint)
        self._changed()

    def _changed(self) -> None:
        if self.on_endpoints_changed is not None:
            self.on_endpoints_changed()

    def _renew(self, endpoint: Endpoint, process_start_s: float | None, now_ms: float) -> None:
        self._reset(endpoint)
        self.table.renew(endpoint, process_start_s, now_ms)

    def _reset(self, endpoint: Endpoint) -> None:
        self.ledger.drop(endpoint.slot)
        self.prefixes.drop(endpoint.slot)
        self.cache_book.forget(endpoint.slot)
        self._room.forget(endpoint.slot)
        self._foreign.forget(endpoint.slot)
        self._sequences.forget(endpoint.slot)
        self.health.forget(endpoint.slot)

    # --- the scraper's part -------------------------------------------------------------------------------------

    def observe_scrape(self, address: str, metrics: EngineMetrics, now_ms: float) -> bool:
        """What an endpoint's server says. True if it is another process than before: its models must be asked anew."""
        endpoint = self.table.get(address)
        if endpoint is None:
            return False
        self.advance(now_ms)
        start = metrics.process_start_s
        known = endpoint.process_start_s
        # Only a later start is another process: behind one port there may be several, each with its own start.
        renewed = start is not None and known is not None and start > known + _SAME_START_S
        if renewed:
            self._renew(endpoint, start, now_ms)
        elif known is None:
            endpoint.process_start_s = start
        endpoint.engine = metrics.engine.value
        if metrics.waiting_requests is not None and metrics.running_requests is not None:
            self.table.set_scraped(
                endpoint.slot,
                waiting_requests=metrics.waiting_requests,
                running_requests=metrics.running_requests,
                kv_cache_utilization=metrics.kv_cache_utilization or 0.0,
                now_ms=now_ms,
            )
            limit = self._sequences.seen(
                endpoint.slot,
                running=metrics.running_requests,
                waiting=metrics.waiting_requests,
                kv_cache_utilization=metrics.kv_cache_utilization or 0.0,
                progress=metrics.prompt_tokens if metrics.first_tokens is None else metrics.first_tokens,
            )
            self.table.set_sequence_limit(endpoint.slot, limit)
            requests = metrics.waiting_requests + metrics.running_requests
            self._foreign.seen(endpoint.slot, requests - self.ledger.in_flight(endpoint.slot), now_ms)
            self.ledger.correct(endpoint.slot, metrics, now_ms)
            if self.journal is not None:
                self.journal.load_seen(address, requests, now_ms)
        if metrics.kv_capacity_tokens:
            self._room.told(endpoint.slot, metrics.kv_capacity_tokens)
            self.table.set_kv_capacity(endpoint.slot, float(metrics.kv_capacity_tokens))
            self._size_shelf(endpoint)
        return renewed

    def observe_kv_events(self, address: str, events: Iterable[KvEvent], now_ms: float) -> bool:
        """What an endpoint's server says of its KV cache. False if nobody is known there."""
        endpoint = self.table.get(address)
        if endpoint is None:
            return False
        change = self.cache_book.apply(endpoint.slot, events, now_ms)
        if change is None:
            self.prefixes.drop(endpoint.slot)
        else:
            self._correct_prefixes(endpoint.slot, change)
        return True

    def forget_kv_events(self, address: str) -> None:
        """Events of it were missed: its word no longer holds, the index goes on as without it."""
        endpoint = self.table.get(address)
        if endpoint is not None:
            self.cache_book.forget(endpoint.slot)

    def set_ready(self, address: str, ready: bool, now_ms: float | None = None) -> bool:
        """Whether the endpoint answers its probes, at `now_ms` if it may have to ramp up. True if that is a change."""
        endpoint = self.table.get(address)
        return endpoint is not None and self.table.set_ready(endpoint, ready, now_ms)

    def set_models(self, address: str, models: frozenset[str] | None) -> None:
        """What `/v1/models` lists; None where the server has no such list: then it may serve anything."""
        endpoint = self.table.get(address)
        if endpoint is not None:
            self.table.set_models(endpoint, models)

    def in_flight_at(self, address: str) -> int:
        """Requests on their way to, or on, one endpoint."""
        endpoint = self.table.get(address)
        return 0 if endpoint is None else self.ledger.in_flight(endpoint.slot)

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def ready_endpoints(self) -> int:
        return sum(endpoint.ready and not endpoint.retired for endpoint in self.table)

    @property
    def in_flight(self) -> int:
        """Requests in the ledger."""
        return len(self.ledger)

    @property
    def foreign_requests(self) -> int:
        """Requests on the endpoints' servers that no router dispatched, for some seconds at least."""
        return sum(self._foreign.requests(endpoint.slot) for endpoint in self.table)

    @property
    def held_blocks(self) -> int:
        """Block names kept for requests whose outcome isn't known."""
        return self._records.held_blocks

    def endpoints(self, now_ms: float) -> list[EndpointStatus]:
        """Every endpoint, ready or not, for the admin pages."""
        self.advance(now_ms)
        return [
            status_of(
                endpoint, self.table, self.ledger, self.prefixes, self.cache_book, self._foreign, self.health, now_ms
            )
            for endpoint in self.table
        ]


def _blame(sample: LatencySample) -> tuple[bool, FailureKind | None]:
    """Whether the endpoint that served a request answered it well, and what it is to blame for.

    Neither, where a client left, or where time ran out after the answer's headers: the client may not have read on.
    """
    if sample.outcome is Outcome.UPSTREAM_RESET:
        return False, FailureKind.RESET
    if sample.outcome is Outcome.TIMEOUT and sample.status >= _SERVER_ERROR:
        return False, FailureKind.TIMEOUT
    return sample.outcome is Outcome.OK, None
