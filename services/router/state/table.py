"""Every endpoint the router knows, one column per quantity, and the frozen snapshot of one decision. Pure.

Columns are rows of one float64 matrix, indexed by slot: the ledger and the scraper write single cells, a decision
copies the columns of its candidates with one `take` and never loops over candidates in Python. Which slots serve a
model is kept as an index array until an endpoint changes.

Lifecycle: `add` → not ready → `set_ready` → candidate → `retire` (gone from discovery, its requests still run) →
`remove`. A retired endpoint that comes back before its last request ends goes on with all it had.

Limits: one event loop. An endpoint whose model list is unknown counts as serving a model only where nobody is known to
serve it; a model is "not found" only when every endpoint has told its list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from services.router.request.errors import RejectReason
from services.router.state.errors import ModelNotFound, NoEndpoint
from services.router.state.snapshot import Candidates

FloatRow = npt.NDArray[np.float64]

# A client names models and a gateway subsets: neither may make these caches grow without bound.
_MAX_GROUPS: Final = 1024


class _Row(IntEnum):
    """Rows of the matrix. Ages are kept as instants (ms), −inf or +inf where there is none."""

    PENDING_UNCACHED_TOKENS = 0
    PENDING_REQUESTS = 1
    OLDEST_PENDING_MS = 2
    DECODING_REQUESTS = 3
    DECODE_INPUT_TOKENS = 4
    DECODE_SINCE_SUM_MS = 5
    STEP_TIME_MS = 6
    STEP_TIME_KNOWN = 7
    WAITING_REQUESTS = 8
    RUNNING_REQUESTS = 9
    KV_CACHE_UTILIZATION = 10
    SCRAPED_AT_MS = 11
    HARDWARE_CLASS = 12


_ROWS: Final = len(_Row)
_EMPTY: Final = np.zeros(_ROWS)
_EMPTY[_Row.OLDEST_PENDING_MS] = np.inf
_EMPTY[_Row.SCRAPED_AT_MS] = -np.inf
# Weight of the newest step time; half of an old one's weight is gone after 6 outcomes.
_STEP_TIME_GAIN: Final = 0.1


@dataclass(slots=True)
class Endpoint:
    """One address in its slot. `incarnation`: process start (unix s) where the server tells it, else first seen (ms).

    `models`: None until the server has told them. `engine`: the kind of server, "" until scraped.
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

    @property
    def incarnation(self) -> float:
        return self.first_seen_ms if self.process_start_s is None else self.process_start_s


@dataclass(frozen=True, slots=True)
class _Group:
    """Slots and addresses of the endpoints that serve one model, in slot order."""

    slots: npt.NDArray[np.intp]
    addresses: tuple[str, ...]


class EndpointTable:
    """The endpoints by slot and by address. Slots of removed endpoints are used again."""

    def __init__(self, *, scrape_limit_ms: float = 5_000.0, capacity: int = 16) -> None:
        """`scrape_limit_ms`: scraped values older than this count as unknown."""
        self.scrape_limit_ms = scrape_limit_ms
        self._by_address: dict[str, Endpoint] = {}
        self._by_slot: dict[int, Endpoint] = {}
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self._groups: dict[tuple[str | None, frozenset[str] | None], _Group] = {}
        self._matrix = np.tile(_EMPTY[:, None], (1, capacity))
        self._bind()

    def _bind(self) -> None:
        rows = list(self._matrix)
        self._pending_tokens: FloatRow = rows[_Row.PENDING_UNCACHED_TOKENS]
        self._pending: FloatRow = rows[_Row.PENDING_REQUESTS]
        self._oldest_ms: FloatRow = rows[_Row.OLDEST_PENDING_MS]
        self._decoding: FloatRow = rows[_Row.DECODING_REQUESTS]
        self._decode_input: FloatRow = rows[_Row.DECODE_INPUT_TOKENS]
        self._decode_since: FloatRow = rows[_Row.DECODE_SINCE_SUM_MS]

    @property
    def capacity(self) -> int:
        """Slots there are; every slot number is below it."""
        return int(self._matrix.shape[1])

    def __len__(self) -> int:
        return len(self._by_address)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_address.values())

    def get(self, address: str) -> Endpoint | None:
        return self._by_address.get(address)

    def at(self, slot: int) -> Endpoint | None:
        return self._by_slot.get(slot)

    # --- the set of endpoints -----------------------------------------------------------------------------------

    def add(self, address: str, *, hardware_class: int, now_ms: float) -> Endpoint:
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
            self._matrix[:, slot] = _EMPTY
        endpoint.retired = False
        endpoint.hardware_class = hardware_class
        self._matrix[_Row.HARDWARE_CLASS, endpoint.slot] = hardware_class
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
        self._matrix[:, endpoint.slot] = _EMPTY
        self._free.append(endpoint.slot)
        self._groups.clear()

    def _grow(self) -> None:
        old = self.capacity
        matrix = np.tile(_EMPTY[:, None], (1, 2 * old))
        matrix[:, :old] = self._matrix
        self._matrix = matrix
        self._free = list(range(2 * old - 1, old - 1, -1))
        self._bind()

    def set_ready(self, endpoint: Endpoint, ready: bool) -> bool:
        """Whether this changed it."""
        if endpoint.ready == ready:
            return False
        endpoint.ready = ready
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
        self._matrix[:, endpoint.slot] = _EMPTY
        self._matrix[_Row.HARDWARE_CLASS, endpoint.slot] = endpoint.hardware_class
        self._groups.clear()

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
    ) -> None:
        """The ledger's sums over one endpoint. `oldest_pending_ms`: when it was dispatched, +inf for none.

        `decode_since_sum_ms`: sum of the instants at which the decoding requests had their first token.
        """
        self._pending_tokens[slot] = pending_tokens
        self._pending[slot] = pending_requests
        self._oldest_ms[slot] = oldest_pending_ms
        self._decoding[slot] = decoding_requests
        self._decode_input[slot] = decode_input_tokens
        self._decode_since[slot] = decode_since_sum_ms

    def set_scraped(
        self, slot: int, *, waiting_requests: float, running_requests: float, kv_cache_utilization: float, now_ms: float
    ) -> None:
        """What the server said at `now_ms`."""
        column = self._matrix[:, slot]
        column[_Row.WAITING_REQUESTS] = max(waiting_requests, 0.0)
        column[_Row.RUNNING_REQUESTS] = max(running_requests, 0.0)
        column[_Row.KV_CACHE_UTILIZATION] = kv_cache_utilization
        column[_Row.SCRAPED_AT_MS] = now_ms

    def step_time_ms(self, slot: int) -> float | None:
        """The moving average of the time per output token; None before the first outcome."""
        known = self._matrix[_Row.STEP_TIME_KNOWN, slot]
        return float(self._matrix[_Row.STEP_TIME_MS, slot]) if known else None

    def observe_step_time(self, slot: int, tpot_ms: float) -> None:
        """Fold one outcome's time per output token into the endpoint's moving average."""
        column = self._matrix[:, slot]
        if column[_Row.STEP_TIME_KNOWN]:
            column[_Row.STEP_TIME_MS] += _STEP_TIME_GAIN * (tpot_ms - column[_Row.STEP_TIME_MS])
        else:
            column[_Row.STEP_TIME_MS] = tpot_ms
            column[_Row.STEP_TIME_KNOWN] = 1.0

    def scrape_age_ms(self, slot: int, now_ms: float) -> float | None:
        """Age of the newest scrape, however old; None if there was none."""
        at = float(self._matrix[_Row.SCRAPED_AT_MS, slot])
        return None if at == -np.inf else max(0.0, now_ms - at)

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
        return self._view(group, input_tokens, matched_tokens, now_ms)

    def everyone(self, subset: frozenset[str] | None, now_ms: float) -> Candidates:
        """The ready endpoints in the subset hint, whatever they serve, for an empty prompt. Raises NoEndpoint."""
        group = self._groups.get((None, subset)) or self._group(None, subset)
        return self._view(group, 0.0, np.zeros(self.capacity, np.float32), now_ms)

    def view(self, slot: int, now_ms: float) -> Candidates:
        """One endpoint's columns, ready or not, for an empty prompt: for the admin pages."""
        group = _Group(np.array([slot], np.intp), (self._by_slot[slot].address,))
        return self._view(group, 0.0, np.zeros(self.capacity, np.float32), now_ms)

    def _view(
        self, group: _Group, input_tokens: float, matched_tokens: npt.NDArray[np.float32], now_ms: float
    ) -> Candidates:
        slots = group.slots
        values = self._matrix.take(slots, axis=1)
        scrape_age = now_ms - values[_Row.SCRAPED_AT_MS]
        known = (scrape_age <= self.scrape_limit_ms).astype(np.float64)
        values[_Row.WAITING_REQUESTS : _Row.KV_CACHE_UTILIZATION + 1] *= known
        scrape_age[known == 0.0] = 0.0
        oldest_age = now_ms - values[_Row.OLDEST_PENDING_MS]
        # A request in decode has grown by one token per step since its first: the sum needs no loop over requests.
        decode = values[_Row.DECODING_REQUESTS] * now_ms - values[_Row.DECODE_SINCE_SUM_MS]
        decode *= values[_Row.STEP_TIME_KNOWN]
        decode /= np.maximum(values[_Row.STEP_TIME_MS], 1e-3)
        np.maximum(decode, 0.0, out=decode)
        decode += values[_Row.DECODE_INPUT_TOKENS]
        columns = values.astype(np.float32)
        return Candidates(
            addresses=group.addresses,
            slots=slots,
            uncached_tokens=np.maximum(np.float32(input_tokens) - matched_tokens.take(slots), np.float32(0.0)),
            pending_uncached_tokens=columns[_Row.PENDING_UNCACHED_TOKENS],
            pending_requests=columns[_Row.PENDING_REQUESTS],
            oldest_pending_age_ms=np.maximum(oldest_age, 0.0).astype(np.float32),
            decoding_requests=columns[_Row.DECODING_REQUESTS],
            decode_context_tokens=decode.astype(np.float32),
            step_time_ms=columns[_Row.STEP_TIME_MS],
            step_time_known=columns[_Row.STEP_TIME_KNOWN],
            waiting_requests=columns[_Row.WAITING_REQUESTS],
            running_requests=columns[_Row.RUNNING_REQUESTS],
            kv_cache_utilization=columns[_Row.KV_CACHE_UTILIZATION],
            scrape_age_ms=np.maximum(scrape_age, 0.0).astype(np.float32),
            scrape_known=known.astype(np.float32),
            hardware_class=columns[_Row.HARDWARE_CLASS],
        )

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
        group = _Group(np.array([e.slot for e in able], np.intp), tuple(e.address for e in able))
        if len(self._groups) >= _MAX_GROUPS:
            self._groups.clear()
        self._groups[model, subset] = group
        return group

    def _serving(self, model: str | None) -> list[Endpoint]:
        present = [endpoint for endpoint in self if not endpoint.retired]
        if model is None:
            return present
        serving = [endpoint for endpoint in present if endpoint.models is not None and model in endpoint.models]
        silent = [endpoint for endpoint in present if endpoint.models is None]
        if present and not serving and not silent:
            raise ModelNotFound(model)
        return serving or silent
