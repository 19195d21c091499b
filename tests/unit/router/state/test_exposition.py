from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.state.exposition import EndpointCollector
from services.router.state.pool import PoolConfig, PoolState
from tests.fakes.manual_clock import ManualClock

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def test_in_flight_requests_and_tokens_are_read_live_and_gone_endpoints_have_no_series():
    pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
    registry = CollectorRegistry()
    registry.register(EndpointCollector(pool, ManualClock(1.0)))
    for address in (A, B):
        pool.add_endpoint(address, now_ms=0.0)
        pool.set_ready(address, ready=True)
    request = InferenceRequest(model="m", prompt=b"", input_tokens=40.0, max_tokens=None, streamed=True)
    _, match = pool.snapshot(request, None, 0.0)
    pool.dispatch("1", A, request, match, predicted_ttft_ms=1e9, now_ms=0.0)

    def value(name: str, address: str) -> float | None:
        return registry.get_sample_value(f"leadtime_router_{name}", {"endpoint": address})

    assert (value("inflight_requests", A), value("inflight_tokens", A), value("endpoint_ready", A)) == (1, 40, 1)
    assert (value("inflight_requests", B), value("scrape_age_seconds", B)) == (0, None)
    pool.finish("1", 1.0)
    assert value("inflight_requests", A) == 0
    assert value("foreign_requests", A) == 0
    assert registry.get_sample_value("leadtime_router_ledger_events_total", {"event": "added"}) == 1
    pool.remove_endpoint(B)
    assert value("inflight_requests", B) is None
    assert B not in generate_latest(registry).decode()
