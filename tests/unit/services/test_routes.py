"""Every HTTP route of every service stands in one table with who may call it, and holds to that."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from starlette.routing import Route

from services.collector.api import add_sample_routes
from services.collector.settings import CollectorSettings
from services.predictor.app import Edge
from services.predictor.app import build_app as predictor_app
from services.predictor.metrics import PredictorMetrics
from services.predictor.settings import PredictorSettings
from services.router.admin import admin_app
from services.router.settings import RouterSettings
from services.trainer.app import build_app as trainer_app
from services.trainer.settings import TrainerSettings
from shared.clock import SystemClock
from shared.lifecycle import Readiness, probe_app

TOKEN = SecretStr("a-token-of-the-test")
ANYONE = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics")}
TOKEN_NEEDED = {
    "router": {
        ("GET", "/v1/endpoints"),
        ("GET", "/v1/decisions"),
        ("GET", "/v1/decisions/{decision_id}"),
        ("GET", "/v1/peers"),
        ("GET", "/v1/stats"),
        ("POST", "/v1/stats/reset"),
        ("GET", "/v1/profile"),
        ("PUT", "/v1/profile"),
        ("POST", "/v1/forget"),
    },
    "collector": {("POST", "/v1/samples")},
    "trainer": {
        ("GET", "/v1/model"),
        ("GET", "/v1/status"),
        ("POST", "/v1/model/pin"),
        ("DELETE", "/v1/model/pin"),
        ("POST", "/v1/model/rollback"),
    },
    "predictor": {("POST", "/v1/predict"), ("GET", "/v1/status")},
}
NOTHING: Any = None
"""In place of what a route would use: a caller without the token never gets so far."""


def router() -> FastAPI:
    parts = [NOTHING] * 7
    return admin_app(RouterSettings(http_token=TOKEN), Readiness(), CollectorRegistry(), *parts)


def collector() -> FastAPI:
    app = probe_app("collector", Readiness(), CollectorRegistry())
    add_sample_routes(app, NOTHING, NOTHING, CollectorSettings(http_token=TOKEN))
    return app


def trainer() -> FastAPI:
    return trainer_app(TrainerSettings(http_token=TOKEN), Readiness(), CollectorRegistry(), NOTHING)


def predictor() -> Edge:
    registry, clock = CollectorRegistry(), SystemClock()
    settings = PredictorSettings(http_token=TOKEN)
    return predictor_app(settings, {}, PredictorMetrics(registry, clock), Readiness(), registry, clock)


APPS: dict[str, Callable[[], Any]] = {
    "router": router, "collector": collector, "trainer": trainer, "predictor": predictor,
}  # fmt: skip


def routes(app: Any) -> set[tuple[str, str]]:
    found = (app.app if isinstance(app, Edge) else app).routes
    assert all(isinstance(route, Route) for route in found), "a mount would have routes of its own"
    return {(method, route.path) for route in found for method in route.methods or () if method != "HEAD"}


@pytest.mark.parametrize("service", APPS)
def test_every_route_stands_in_the_table(service: str) -> None:
    assert routes(APPS[service]()) == ANYONE | TOKEN_NEEDED[service]


@pytest.mark.parametrize("service", APPS)
@pytest.mark.parametrize("authorization", [None, "Bearer another", TOKEN.get_secret_value()])
async def test_without_the_token_a_route_is_closed_but_to_probes(service: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    transport = httpx.ASGITransport(app=APPS[service]())
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        for method, path in sorted(TOKEN_NEEDED[service]):
            answer = await client.request(method, path.replace("{decision_id}", "any"))
            assert answer.status_code == 401, (method, path)
            assert TOKEN.get_secret_value() not in answer.text
        for method, path in sorted(ANYONE):
            assert (await client.request(method, path)).status_code in {200, 503}, (method, path)
