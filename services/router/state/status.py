"""One endpoint as people see it on the admin pages. Pure."""

from dataclasses import dataclass

from services.router.state.cache_book import CacheBook
from services.router.state.foreign import ForeignRequests
from services.router.state.health import EndpointHealth, Standing
from services.router.state.ledger import Ledger
from services.router.state.prefix_index import PrefixIndex
from services.router.state.table import Endpoint, EndpointTable
from shared.features import HARDWARE_CLASSES


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """What came of requests to it: see `health.py`. `failures`: by kind, since it or its process came.

    `set_aside_ms`: for how long it hasn't been in use; `tried_in_ms`: until it is sent a request again, 0 while it is
    tried. Both None, as is `reason`, the last failure's kind, while it is in use.
    """

    standing: str
    failures: dict[str, int]
    failures_in_a_row: int
    set_aside_ms: float | None
    tried_in_ms: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """One endpoint for the admin pages; None is unknown. `scrape_age_ms` is told however old it is."""

    address: str
    ready: bool
    retired: bool
    engine: str
    hardware_class: str
    role: str
    models: list[str] | None
    incarnation: float
    incarnations: int
    in_flight_requests: int
    in_flight_tokens: int
    foreign_requests: int
    pending_requests: int
    pending_uncached_tokens: int
    oldest_pending_age_ms: float
    decoding_requests: int
    decode_context_tokens: float
    step_time_ms: float | None
    waiting_requests: float | None
    running_requests: float | None
    kv_cache_utilization: float | None
    scrape_age_ms: float | None
    sequence_limit: int | None
    prefix_blocks: int
    prefix_capacity_blocks: int
    tells_of_its_cache: bool
    health: HealthStatus


def status_of(
    endpoint: Endpoint,
    table: EndpointTable,
    ledger: Ledger,
    prefixes: PrefixIndex,
    cache_book: CacheBook,
    foreign: ForeignRequests,
    health: EndpointHealth,
    now_ms: float,
) -> EndpointStatus:
    """What is known of an endpoint at this instant."""
    slot = endpoint.slot
    view = table.view(slot, now_ms)
    scraped = bool(view.scrape_known[0])
    pending, pending_tokens = ledger.pending(slot)
    return EndpointStatus(
        address=endpoint.address,
        ready=endpoint.ready,
        retired=endpoint.retired,
        engine=endpoint.engine,
        hardware_class=HARDWARE_CLASSES[endpoint.hardware_class],
        role=endpoint.role.value,
        models=None if endpoint.models is None else sorted(endpoint.models),
        incarnation=endpoint.incarnation,
        incarnations=endpoint.incarnations,
        in_flight_requests=ledger.in_flight(slot),
        in_flight_tokens=ledger.in_flight_tokens(slot),
        foreign_requests=foreign.requests(slot),
        pending_requests=pending,
        pending_uncached_tokens=pending_tokens,
        oldest_pending_age_ms=float(view.oldest_pending_age_ms[0]),
        decoding_requests=ledger.in_flight(slot) - pending,
        decode_context_tokens=float(view.decode_context_tokens[0]),
        step_time_ms=table.step_time_ms(slot),
        waiting_requests=float(view.waiting_requests[0]) if scraped else None,
        running_requests=float(view.running_requests[0]) if scraped else None,
        kv_cache_utilization=float(view.kv_cache_utilization[0]) if scraped else None,
        scrape_age_ms=table.scrape_age_ms(slot, now_ms),
        sequence_limit=int(view.sequence_limit[0]) or None,
        prefix_blocks=prefixes.held_blocks(slot),
        prefix_capacity_blocks=prefixes.capacity(slot),
        tells_of_its_cache=cache_book.live(slot),
        health=_health(slot, health, now_ms),
    )


def _health(slot: int, health: EndpointHealth, now_ms: float) -> HealthStatus:
    case = health.case(slot)
    if case is None:
        return HealthStatus(Standing.IN_USE.value, {}, 0, None, None, None)
    aside = case.since_ms is not None
    return HealthStatus(
        case.standing(now_ms).value,
        {kind.value: count for kind, count in case.counts.items()},
        case.in_a_row,
        None if case.since_ms is None else now_ms - case.since_ms,
        max(0.0, case.until_ms - now_ms) if aside else None,
        case.reason.value if aside and case.reason is not None else None,
    )
