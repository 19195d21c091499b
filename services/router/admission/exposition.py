"""What the waiting room tells Prometheus, read at the moment it asks. Labels are closed lists."""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.router.admission.waiting_room import WaitingRoom


class WaitingRoomCollector(Collector):
    """Register it with the router's registry; `collect` must run on the room's event loop."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room

    def collect(self) -> Iterator[Metric]:
        """Who waits, by whether they may be shed, and what became of all who came."""
        waiting = GaugeMetricFamily(
            "leadtime_router_waiting_requests", "Requests held on purpose at present.", labels=["sheddable"]
        )
        by_priority = self._room.waiting_by_priority()
        sheddable = sum(count for priority, count in by_priority.items() if priority < 0)
        waiting.add_metric(["true"], sheddable)
        waiting.add_metric(["false"], sum(by_priority.values()) - sheddable)
        events = CounterMetricFamily(
            "leadtime_router_waiting_room_events", "Requests by what happened to them there.", labels=["event"]
        )
        for event, count in asdict(self._room.counts).items():
            events.add_metric([event], count)
        yield from (waiting, events)
