"""What the endpoint state tells Prometheus, read at the moment it asks.

A collector instead of gauges that are kept up to date: an endpoint that is gone has no series, and nothing is done
per request. Labels are addresses of present endpoints and closed lists.
"""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.router.state.health import Standing
from services.router.state.pool import PoolState
from shared.clock import Clock
from shared.telemetry import seconds


class EndpointCollector(Collector):
    """Register it with the router's registry; `collect` must run on the pool's event loop."""

    def __init__(self, pool: PoolState, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """In-flight, readiness, scrape age and prefix blocks of each endpoint, and the ledger's events."""
        requests = _gauge("inflight_requests", "Requests dispatched to the endpoint and not ended.")
        tokens = _gauge("inflight_tokens", "Prompt tokens of those.")
        foreign = _gauge("foreign_requests", "Requests on the endpoint that no router dispatched, for some seconds.")
        pending = _gauge("pending_uncached_tokens", "Uncached tokens of those believed to be in prefill.")
        ready = _gauge("endpoint_ready", "1 for an endpoint that requests are sent to.")
        age = _gauge("scrape_age_seconds", "Age of the newest scrape of the endpoint.")
        aside = _gauge("endpoint_set_aside", "1 for an endpoint that is set aside, or tried, since requests failed.")
        blocks = _gauge("prefix_blocks", "Blocks that the prefix index holds for the endpoint.")
        for status in self._pool.endpoints(self._clock.monotonic_ms()):
            label = [status.address]
            requests.add_metric(label, status.in_flight_requests)
            tokens.add_metric(label, status.in_flight_tokens)
            foreign.add_metric(label, status.foreign_requests)
            pending.add_metric(label, status.pending_uncached_tokens)
            ready.add_metric(label, status.ready and not status.retired)
            aside.add_metric(label, status.health.standing != Standing.IN_USE)
            blocks.add_metric(label, status.prefix_blocks)
            if status.scrape_age_ms is not None:
                age.add_metric(label, seconds(status.scrape_age_ms))
        events = CounterMetricFamily(
            "leadtime_router_ledger_events", "Entries of the ledger by what happened to them.", labels=["event"]
        )
        for event, count in asdict(self._pool.ledger.counts).items():
            events.add_metric([event], count)
        failures = CounterMetricFamily(
            "leadtime_router_endpoint_failures", "Requests for whose failure an endpoint is to blame.", labels=["kind"]
        )
        for kind, count in self._pool.health.failures.items():
            failures.add_metric([kind.value], count)
        changes = CounterMetricFamily(
            "leadtime_router_endpoint_health_events", "Endpoints set aside, tried and back in use.", labels=["event"]
        )
        for change, count in self._pool.health.events.items():
            changes.add_metric([change.value], count)
        yield from (requests, tokens, foreign, pending, ready, aside, age, blocks, events, failures, changes)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"leadtime_router_{name}", text, labels=["endpoint"])
