"""The request path's side of the sink: bounded, and it never waits."""

import random

import pytest
from prometheus_client import CollectorRegistry

from services.router.sample_sink import SampleSink, SinkConfig, parse_collectors
from shared.errors import FieldError
from tests.contract.test_samples import SAMPLE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" , ", ()),
        ("http://a:8090", ("http://a:8090",)),
        ("http://a:8090/, https://[::1]:443", ("http://a:8090", "https://[::1]:443")),
        ("http://collector", ("http://collector",)),
    ],
)
def test_collectors_are_urls_separated_by_commas(text: str, expected: tuple[str, ...]) -> None:
    assert parse_collectors(text) == expected


@pytest.mark.parametrize(
    "text", ["a:8090", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a/v1/samples", "http://u:p@a"]
)
def test_what_is_no_collector_s_url_stops_the_start(text: str) -> None:
    with pytest.raises(FieldError, match="collectors: found"):
        parse_collectors(text)


async def test_the_oldest_makes_room_and_is_counted() -> None:
    registry = CollectorRegistry()
    sink = SampleSink(["http://127.0.0.1:1"], registry, random.Random(1), config=SinkConfig(capacity=3))
    for _ in range(10):
        sink.offer(SAMPLE)
    assert sink.waiting == 3
    assert registry.get_sample_value("leadtime_router_samples_total", {"fate": "pushed_out"}) == 7.0
    assert registry.get_sample_value("leadtime_router_samples_waiting") == 3.0


def test_a_sink_without_a_collector_is_refused() -> None:
    with pytest.raises(FieldError, match="at least one URL"):
        SampleSink([], CollectorRegistry(), random.Random(1))
