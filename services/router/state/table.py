"""Every endpoint the router knows, one column per quantity, and the frozen snapshot of one decision. Pure.

Columns are rows of two matrices (values in float32, instants and what grows with time in float64), indexed by slot: the
ledger and the scraper write single cells, a decision copies the columns of its candidates with one `take` of each and
never loops over candidates in Python. Which slots serve a model is kept as an index array until an endpoint changes.

Lifecycle: `add` → not ready → `set_ready` → candidate → `retire` (gone from discovery, its requests still run) →
`remove`. A retired endpoint that comes back before its last request ends goes on with all it had.

An endpoint that was ready before and is again (or has a new process) ramps up; one that only prefills or encodes is no
candidate for a whole request; one that is held back (`health.py`) is none until an instant, unless that left too few.

Limits: one event loop. An endpoint whose model list is unknown counts as serving a model only where nobody is known to
serve it; a model is "not found" only when every endpoint has told its list.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.request.errors import RejectReason
from services.router.state.errors import ModelNotFound, NoEndpoint
from services.router.state.roles import Role
from services.router.state.shortlist import shortlist
from services.router.state.snapshot import Candidates

# A client names models and a gateway subsets: neither may make these caches grow without bound.
_MAX_GROUPS: Final = 1024


class _Value(IntEnum):
    """Rows of the float32 matrix: what a decision reads as it is."""

    PENDING_UNCACHED_TOKENS = 0
    PENDING_REQUESTS = 1
    DECODING_REQUESTS = 2
    STEP_TIME_MS = 3
    STEP_TIME_KNOWN = 4
    HARDWARE_CLASS = 5
    PREFILL_MS_PER_TOKEN = 6
    KV_CAPACITY_TOKENS = 7
    SEQUENCE_LIMIT = 8
    WAITING_REQUESTS = 9
    RUNNING_REQUESTS = 10
    KV_CACHE_UTILIZATION = 11


class _Instant(IntEnum):
    """Rows of the float64 matrix: what depends on the time of the decision. Instants in monotonic ms."""

    OLDEST_PENDING = 0
    SCRAPED = 1
    DECODE_SINCE_MEAN = 2
    HEAD_SINCE = 3
    DECODE_INPUT_TOKENS = 4
    TOKENS_PER_MS = 5
    HEAD_TOKENS = 6
    HEAD_TOKENS_PER_MS = 7
    ARRIVALS = 8
    ARRIVED = 9


# Not infinity: an age times 0 must be 0.
_NEVER_MS: Final = 1e18
_EMPTY_VALUES: Final = np.zeros((len(_Value), 1), np.float32)
_EMPTY_INSTANTS: Final = np.array([[_NEVER_MS], [-_NEVER_MS], [0.0], [0.0], [0.0], [0.0], [0.0], [0.0], [0.0], [0.0]])
# Weight of the newest step time; half of an old one's weight is gone after 6 outcomes.
_STEP_TIME_GAIN: Final = 0.1
_MIN_STEP_MS: Final = 0.1
# Less to compute says more about a step than about a token.
_PREFILL_LEAST_TOKENS: Final = 128.0
# An outcome's weight in the endpoint's time per token halves every 138 outcomes.
_PREFILL_KEPT: Final = 0.995
# Over how long arrivals are counted; older ones fade.
_ARRIVALS_MS: Final = 30_000.0
# An endpoint that returns takes two requests at once, and twice as many with every second: its empty ledger would draw
# the whole pool's traffic onto a server that may not bear it.
_RAMP_FIRST_REQUESTS: Final = 2.0
_RAMP_DOUBLING_MS: Final = 1_000.0
_RAMP_MS: Final = 10_000.0
MAX_CANDIDATES: Final = 128
_TURN_STRIDE: Final = 389


@dataclass(slots=True)
class Endpoint:
    """One address in its slot. `incarnation`: process start (unix s) where the server tells it, else first seen (ms).

    `models`: None until the server has told them. `engine`: the kind of server, "" until scraped. `identity`: of what
    stands behind the address, "" where discovery has none. `has_been_ready`: a return is not a first appearance.
    """

    address: str
    host: str
    slot: int
    hardware_class: int
    first_seen_ms: float
    process_start_s: float | None = None
    incarnations: int = 1
    models: frozenset[str] | None = None
    ready: bool = False
    retired: bool = False
    engine: str = ""
    role: Role = Role.BOTH
    identity: str = ""
    has_been_ready: bool = False

    @property
    def incarnation(self) -> float:
        return self.first_seen_ms if self.process_start_s is None else self.process_start_s


@dataclass(frozen=True, slots=True)
class _Group:
    """Slots and addresses of the endpoints that serve one model, in slot order."""

    slots: npt.NDArray[np.intp]
    addresses: tuple[str, ...]
    classes: tuple[npt.NDArray[np.intp], ...] = ()
    """Places by hardware class."""


class EndpointTable:
    """The endpoints by slot and by address. Slots of removed endpoints are used again."""

    def __init__(
        self,
        *,
        scrape_limit_ms: float = 5_000.0,
        capacity: int = 16,
        max_candidates: int = MAX_CANDIDATES,
        may_be_held: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`scrape_limit_ms`: scraped values older than this count as unknown. `max_candidates`: of one decision, found
        by `shortlist`; 0: all. `may_be_held`: how many of so many endpoints `hold` may keep from a decision.
        """
        self._may_be_held = may_be_held
        self._held: set[int] = set()
        self._held_until = np.full(capacity, -_NEVER_MS)
        """By slot: from when on it is a candidate, monotonic ms."""
        self.max_candidates = max_candidates
        self._turn = 0
        self._noise = np.random.default_rng(1).random(1, np.float32)
        self.scrape_limit_ms = scrape_limit_ms
        self._by_address: dict[str, Endpoint] = {}
        self._by_slot: dict[int, Endpoint] = {}
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self._groups: dict[tuple[str | None, frozenset[str] | None], _Group] = {}
        self._ramps: dict[int, float] = {}
        """When an endpoint returned, by slot, for those that are not yet up to their full share."""
        self._prefilled: dict[int, list[float]] = {}
        """Decaying sums by slot: TTFT in ms, and the tokens that stood before it."""
        self._values = np.tile(_EMPTY_VALUES, (1, capacity))
        self._instants = np.tile(_EMPTY_INSTANTS, (1, capacity))
        self._bind()

    def _bind(self) -> None:
        """Row views for the writes of every dispatch and end."""
        values, instants = self._values, self._instants
        self._pending_tokens = values[_Value.PENDING_UNCACHED_TOKENS]
        self._pending = values[_Value.PENDING_REQUESTS]
        self._decoding = values[_Value.DECODING_REQUESTS]
        self._oldest = instants[_Instant.OLDEST_PENDING]
        self._decode_since = instants[_Instant.DECODE_SINCE_MEAN]
        self._decode_input = instants[_Instant.DECODE_INPUT_TOKENS]
        self._head_since = instants[_Instant.HEAD_SINCE]
        self._head_tokens = instants[_Instant.HEAD_TOKENS]
        self._head_rate = instants[_Instant.HEAD_TOKENS_PER_MS]

    def _blank(self, slot: int) -> None:
        self._values[:, slot] = _EMPTY_VALUES[:, 0]
        self._instants[:, slot] = _EMPTY_INSTANTS[:, 0]
        self._prefilled.pop(slot, None)
        self._held.discard(slot)
        self._held_until[slot] = -_NEVER_MS

    @property
    def capacity(self) -> int:
        """Slots there are; every slot number is below it."""
        return int(self._values.shape[1])

    def __len__(self) -> int:
        return len(self._by_address)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_address.values())

    def get(self, address: str) -> Endpoint | None:
        return self._by_address.get(address)

    def at(self, slot: int) -> Endpoint | None:
        return self._by_slot.get(slot)

    # --- the set of endpoints -----------------------------------------------------------------------------------

    def add(
        self, address: str, *, hardware_class: int, now_ms: float, role: Role = Role.BOTH, identity: str = ""
    ) -> Endpoint:
        """Add `ip:port`, not ready; an endpoint that is there already is kept as it is, and un-retired."""
        endpoint = self._by_address.get(address)
        if endpoint is None:
            if not self._free:
                self._grow()
            slot = self._free.pop()
            host = address.rpartition(":")[0].strip("[]")
            endpoint = Endpoint(address, host, slot, hardware_class, now_ms)
            self._by_address[address] = endpoint
            self._by_slot[slot] = endpoint
            self._blank(slot)
        endpoint.retired = False
        endpoint.role = role
        endpoint.identity = identity
        endpoint.hardware_class = hardware_class
        self._values[_Value.HARDWARE_CLASS, endpoint.slot] = hardware_class
        self._groups.clear()
        return endpoint

    def retire(self, endpoint: Endpoint) -> None:
        """Discovery no longer lists it: no candidate any more, but its requests go on."""
        endpoint.retired = True
        self._groups.clear()

    def remove(self, endpoint: Endpoint) -> None:
        """Forget it; its slot is free for another. Its ledger entries must be gone."""
        if self._by_address.get(endpoint.address) is not endpoint:
            return
        del self._by_address[endpoint.address]
        del self._by_slot[endpoint.slot]
        self._blank(endpoint.slot)
        self._ramps.pop(endpoint.slot, None)
        self._free.append(endpoint.slot)
        self._groups.clear()

    def _grow(self) -> None:
        old = self.capacity
        self._values = np.hstack([self._values, np.tile(_EMPTY_VALUES, (1, old))])
        self._instants = np.hstack([self._instants, np.tile(_EMPTY_INSTANTS, (1, old))])
        self._held_until = np.append(self._held_until, np.full(old, -_NEVER_MS))
        self._free = list(range(2 * old - 1, old - 1, -1))
        self._bind()

    def set_ready(self, endpoint: Endpoint, ready: bool, now_ms: float | None = None) -> bool:
        """Whether this changed it. One that returns at `now_ms` ramps up; without an instant it is there at once."""
        if endpoint.ready == ready:
            return False
        endpoint.ready = ready
        if ready and endpoint.has_been_ready and now_ms is not None:
            self._ramps[endpoint.slot] = now_ms
        endpoint.has_been_ready = endpoint.has_been_ready or ready
        self._groups.clear()
        return True

    def set_models(self, endpoint: Endpoint, models: frozenset[str] | None) -> None:
        """What `/v1/models` lists; None where the server has no such list."""
        if endpoint.models != models:
            endpoint.models = models
            self._groups.clear()

    def renew(self, endpoint: Endpoint, process_start_s: float | None, now_ms: float) -> None:
        """A new process answers at this address: what was measured of the old one is forgotten, the slot stays."""
        endpoint.process_start_s = process_start_s
        endpoint.first_seen_ms = now_ms
        endpoint.incarnations += 1
        endpoint.models = None
        self._ramps[endpoint.slot] = now_ms
        self._blank(endpoint.slot)
        self._values[_Value.HARDWARE_CLASS, endpoint.slot] = endpoint.hardware_class
        self._groups.clear()

    def hold(self, slot: int, until_ms: float) -> None:
        """No candidate until an instant, and none for requests of which nothing is learned until `release`."""
        self._held.add(slot)
        self._held_until[slot] = until_ms

    def release(self, slot: int, now_ms: float) -> None:
        """It is a candidate as any other again, once it has ramped up."""
        self._held.discard(slot)
        self._held_until[slot] = -_NEVER_MS
        self._ramps[slot] = now_ms

    # --- cells --------------------------------------------------------------------------------------------------

    def set_load(
        self,
        slot: int,
        *,
        pending_tokens: int,
        pending_requests: int,
        oldest_pending_ms: float,
        decoding_requests: int,
        decode_input_tokens: int,
        decode_since_sum_ms: int,
        head_tokens: float = 0.0,
        head_since_ms: float = 0.0,
        head_tokens_per_ms: float = 0.0,
    ) -> None:
        """The ledger's sums over one endpoint. `oldest_pending_ms`: when it was dispatched, +inf for none.

        `decode_since_sum_ms`: sum of the instants at which the decoding requests had their first token. `head_…`: of
        the uncached tokens of the request whose turn it is, this many can have been computed, since when and how fast.
        """
        self._pending_tokens[slot] = pending_tokens
        self._pending[slot] = pending_requests
        self._oldest[slot] = oldest_pending_ms
        self._decoding[slot] = decoding_requests
        self._decode_input[slot] = decode_input_tokens
        self._decode_since[slot] = decode_since_sum_ms / decoding_requests if decoding_requests else 0.0
        self._head_tokens[slot] = head_tokens
        self._head_since[slot] = head_since_ms
        self._head_rate[slot] = head_tokens_per_ms

    def set_scraped(
        self, slot: int, *, waiting_requests: float, running_requests: float, kv_cache_utilization: float, now_ms: float
    ) -> None:
        """What the server said at `now_ms`."""
        column = self._values[:, slot]
        column[_Value.WAITING_REQUESTS] = max(waiting_requests, 0.0)
        column[_Value.RUNNING_REQUESTS] = max(running_requests, 0.0)
        column[_Value.KV_CACHE_UTILIZATION] = kv_cache_utilization
        self._instants[_Instant.SCRAPED, slot] = now_ms

    def step_time_ms(self, slot: int) -> float | None:
        """The moving average of the time per output token; None before the first outcome."""
        known = self._values[_Value.STEP_TIME_KNOWN, slot]
        return float(self._values[_Value.STEP_TIME_MS, slot]) if known else None

    def observe_step_time(self, slot: int, tpot_ms: float) -> None:
        """Fold one outcome's time per output token into the endpoint's moving average."""
        known = self.step_time_ms(slot)
        average = tpot_ms if known is None else known + _STEP_TIME_GAIN * (tpot_ms - known)
        self._values[_Value.STEP_TIME_MS, slot] = average
        self._values[_Value.STEP_TIME_KNOWN, slot] = 1.0
        self._instants[_Instant.TOKENS_PER_MS, slot] = 1.0 / max(average, _MIN_STEP_MS)

    def observe_arrival(self, slot: int, now_ms: float) -> None:
        """A request was dispatched to the endpoint, by whichever router."""
        instants = self._instants[:, slot]
        since_ms = max(now_ms - float(instants[_Instant.ARRIVED]), 0.0)
        instants[_Instant.ARRIVALS] = 1.0 + float(instants[_Instant.ARRIVALS]) * math.exp(-since_ms / _ARRIVALS_MS)
        instants[_Instant.ARRIVED] = now_ms

    def observe_prefill(self, slot: int, tokens: float, ttft_ms: float) -> None:
        """Fold one outcome into the endpoint's time per token until the first token, a ratio of decaying sums.

        `tokens`: that had to be computed before its first one, its own among them.
        """
        if tokens < _PREFILL_LEAST_TOKENS:
            return
        sums = self._prefilled.setdefault(slot, [0.0, 0.0])
        sums[0] = sums[0] * _PREFILL_KEPT + ttft_ms
        sums[1] = sums[1] * _PREFILL_KEPT + tokens
        self._values[_Value.PREFILL_MS_PER_TOKEN, slot] = sums[0] / sums[1]

    def set_kv_capacity(self, slot: int, tokens: float) -> None:
        """Tokens that the endpoint's KV cache holds, as its server tells."""
        self._values[_Value.KV_CAPACITY_TOKENS, slot] = tokens

    def set_sequence_limit(self, slot: int, sequences: int) -> None:
        """Requests that the endpoint's server computes at once; 0: unknown."""
        self._values[_Value.SEQUENCE_LIMIT, slot] = sequences

    def pending_tokens(self, slot: int, now_ms: float) -> float:
        """Uncached tokens before a request that comes at `now_ms`, as a decision sees them."""
        instants = self._instants[:, slot]
        done = max(now_ms - float(instants[_Instant.HEAD_SINCE]), 0.0) * float(instants[_Instant.HEAD_TOKENS_PER_MS])
        return float(self._pending_tokens[slot]) - min(done, float(instants[_Instant.HEAD_TOKENS]))

    def scrape_age_ms(self, slot: int, now_ms: float) -> float | None:
        """Age of the newest scrape, however old; None if there was none."""
        at_ms = float(self._instants[_Instant.SCRAPED, slot])
        return None if at_ms == -_NEVER_MS else max(0.0, now_ms - at_ms)

    # --- the snapshot -------------------------------------------------------------------------------------------

    def candidates(
        self,
        model: str,
        subset: frozenset[str] | None,
        input_tokens: float,
        matched_tokens: npt.NDArray[np.float32],
        now_ms: float,
    ) -> Candidates:
        """The endpoints that are ready, serve the model and lie in the subset hint, as they are at `now_ms`.

        `matched_tokens`: float32 (at least `capacity`,), tokens of the prompt in the endpoint's prefix cache, by slot.
        `subset`: `ip:port` or bare `ip`; None is everyone. Raises NoEndpoint or ModelNotFound.
        """
        group = self._groups.get((model, subset)) or self._group(model, subset)
        if self._held:
            group = self._without_held(group, now_ms)
        if self._ramps:
            group = self._without_ramping(group, now_ms)
        if 0 < self.max_candidates < len(group.addresses):
            group = self._shortlisted(group, input_tokens, matched_tokens)
        return self._view(group, input_tokens, matched_tokens, now_ms)

    def everyone(self, subset: frozenset[str] | None, now_ms: float) -> Candidates:
        """The ready endpoints in the subset hint, whatever they serve, for an empty prompt. Raises NoEndpoint."""
        group = self._groups.get((None, subset)) or self._group(None, subset)
        if self._held:
            group = self._without_held(group, -_NEVER_MS)
        return self._view(group, 0.0, np.zeros(self.capacity, np.float32), now_ms)

    def _without_held(self, group: _Group, now_ms: float) -> _Group:
        """Leave out those that are held back at this instant; nobody, if that were too many of this group."""
        free = self._held_until.take(group.slots) <= now_ms
        held = len(free) - int(np.count_nonzero(free))
        if not 0 < held <= self._may_be_held(len(free)):
            return group
        return self._part(group, np.flatnonzero(free))

    def _without_ramping(self, group: _Group, now_ms: float) -> _Group:
        """Leave those out that have returned of late and have their share already; nobody, if that were everyone."""
        for slot, returned_ms in list(self._ramps.items()):
            if now_ms - returned_ms > _RAMP_MS:
                del self._ramps[slot]
        full = {
            slot
            for slot, returned_ms in self._ramps.items()
            if self._pending[slot] + self._decoding[slot]
            >= _RAMP_FIRST_REQUESTS * 2.0 ** (max(0.0, now_ms - returned_ms) / _RAMP_DOUBLING_MS)
        }
        if not full:
            return group
        kept = np.flatnonzero(~np.isin(group.slots, list(full)))
        return self._part(group, kept) if len(kept) else group

    def _shortlisted(self, group: _Group, input_tokens: float, matched_tokens: npt.NDArray[np.float32]) -> _Group:
        count = len(group.addresses)
        if len(self._noise) < 2 * count:
            self._noise = np.random.default_rng(1).random(2 * count, np.float32)
        # Far from its neighbours' place in the turn before: the same endpoints must not stay together.
        self._turn = (self._turn + _TURN_STRIDE) % count
        slots = group.slots
        own = np.float32(input_tokens) - matched_tokens.take(slots)
        places = shortlist(
            np.maximum(own, np.float32(0.0), out=own),
            self._pending_tokens.take(slots),
            self._pending.take(slots) + self._decoding.take(slots),
            group.classes or self._classes(slots),
            self.max_candidates,
            self._noise[self._turn : self._turn + count],
        )
        return self._part(group, places)

    def _classes(self, slots: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], ...]:
        hardware = self._values[_Value.HARDWARE_CLASS].take(slots)
        return tuple(np.flatnonzero(hardware == code) for code in np.unique(hardware))

    @staticmethod
    def _part(group: _Group, places: npt.NDArray[np.intp]) -> _Group:
        addresses = group.addresses
        return _Group(group.slots[places], tuple([addresses[i] for i in places.tolist()]))

    def view(self, slot: int, now_ms: float) -> Candidates:
        """One endpoint's columns, ready or not, for an empty prompt: for the admin pages."""
        group = _Group(np.array([slot], np.intp), (self._by_slot[slot].address,))
        return self._view(group, 0.0, np.zeros(self.capacity, np.float32), now_ms)

    def _view(
        self, group: _Group, input_tokens: float, matched_tokens: npt.NDArray[np.float32], now_ms: float
    ) -> Candidates:
        slots = group.slots
        values = self._values.take(slots, axis=1)
        instants = self._instants.take(slots, axis=1)
        ages = np.maximum(now_ms - instants[: _Instant.DECODE_INPUT_TOKENS], 0.0)
        known = ages[_Instant.SCRAPED] <= self.scrape_limit_ms
        ages[_Instant.SCRAPED] *= known
        values[_Value.WAITING_REQUESTS :] *= known
        pending_tokens, pending, decoding, step, step_known, hardware, pace, capacity, limit, waiting, running, kv = (
            values
        )
        # A request in decode has grown by one token per step since its first: the mean needs no loop over requests.
        growth = ages[_Instant.DECODE_SINCE_MEAN]
        growth *= decoding
        growth *= instants[_Instant.TOKENS_PER_MS]
        growth += instants[_Instant.DECODE_INPUT_TOKENS]
        # The request whose turn it is has been worked on since: what is left of it grows smaller without an event.
        computed = ages[_Instant.HEAD_SINCE]
        computed *= instants[_Instant.HEAD_TOKENS_PER_MS]
        np.minimum(computed, instants[_Instant.HEAD_TOKENS], out=computed)
        oldest_age, scrape_age, decode_tokens, done = ages.astype(np.float32)
        pending_tokens -= done
        uncached = np.float32(input_tokens) - matched_tokens.take(slots)
        return Candidates(
            group.addresses,
            slots,
            np.maximum(uncached, np.float32(0.0), out=uncached),
            pending_tokens,
            pending,
            oldest_age,
            decoding,
            decode_tokens,
            step,
            step_known,
            waiting,
            running,
            kv,
            scrape_age,
            known.astype(np.float32),
            hardware,
            pace,
            capacity,
            limit,
            self._arrival_rate(instants, now_ms),
        )

    @staticmethod
    def _arrival_rate(instants: npt.NDArray[np.float64], now_ms: float) -> npt.NDArray[np.float32]:
        since = np.maximum(now_ms - instants[_Instant.ARRIVED], 0.0)
        rate: npt.NDArray[np.float32] = (
            instants[_Instant.ARRIVALS] * np.exp(since * (-1.0 / _ARRIVALS_MS)) * (1.0 / _ARRIVALS_MS)
        ).astype(np.float32)
        return rate

    def _group(self, model: str | None, subset: frozenset[str] | None) -> _Group:
        """Find who serves the model (None: any); kept until an endpoint changes."""
        able = [endpoint for endpoint in self._serving(model) if endpoint.ready]
        if not able:
            raise NoEndpoint
        if subset is not None:
            wanted = {entry.strip("[]") for entry in subset}
            able = [e for e in able if e.address in subset or e.host in wanted]
            if not able:
                raise NoEndpoint(RejectReason.SUBSET_EMPTY)
        able.sort(key=lambda endpoint: endpoint.slot)
        slots = np.array([e.slot for e in able], np.intp)
        group = _Group(slots, tuple(e.address for e in able), self._classes(slots))
        if len(self._groups) >= _MAX_GROUPS:
            self._groups.clear()
        self._groups[model, subset] = group
        return group

    def _serving(self, model: str | None) -> list[Endpoint]:
        present = [endpoint for endpoint in self if not endpoint.retired and endpoint.role.decodes]
        if model is None:
            return present
        serving = [endpoint for endpoint in present if endpoint.models is not None and model in endpoint.models]
        silent = [endpoint for endpoint in present if endpoint.models is None]
        if present and not serving and not silent:
            raise ModelNotFound(model)
        return serving or silent
