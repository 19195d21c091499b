"""Readiness, probes, the bearer token and the refusals at start; no socket is opened."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic_settings import SettingsConfigDict

from shared.errors import ConfigurationError
from shared.lifecycle import EXIT_CONFIGURATION, Readiness, probe_app, require_token, run
from shared.settings import ServiceSettings


class Example(ServiceSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_EXAMPLE_")


async def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.get(path, headers=headers)


def test_a_service_without_conditions_is_ready():
    assert Readiness().ready
    assert Readiness().report() == {"ready": True, "waiting_for": {}}


def test_a_service_is_ready_when_nothing_is_unmet_and_says_what_it_waits_for():
    readiness = Readiness("bundle", "endpoints")
    assert readiness.report() == {"ready": False, "waiting_for": {"bundle": "not yet", "endpoints": "not yet"}}
    readiness.met("bundle")
    readiness.unmet("endpoints", "none answers")
    assert readiness.report() == {"ready": False, "waiting_for": {"endpoints": "none answers"}}
    readiness.met("endpoints")
    readiness.met("endpoints")
    assert readiness.ready


def test_a_condition_can_be_lost_again():
    readiness = Readiness()
    readiness.unmet("redis", "gone")
    assert not readiness.ready


def test_a_stopping_service_is_not_ready():
    readiness = Readiness()
    readiness.stopping = True
    assert readiness.report() == {"ready": False, "waiting_for": {"service": "stopping"}}


class Choice(BaseModel):
    name: str


class Strict(Choice):
    model_config = ConfigDict(extra="forbid")


@pytest.mark.parametrize(
    "body", [b'{"name":"\xff', b'{"name": {"secret": 1}}', b"", b"[" * 100_000, b'{"name": 1e999, "x": "secret"}']
)
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/octet-stream"])
async def test_a_body_that_a_route_cannot_take_is_the_callers_fault_and_is_not_repeated(body, content_type):
    app = probe_app("example", Readiness(), CollectorRegistry())

    @app.put("/choice")
    async def choose(choice: Choice) -> Choice:
        return choice

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        response = await client.put("/choice", content=body, headers={"content-type": content_type})
    assert response.status_code in ({400, 422} if content_type == "application/json" or not body else {415})
    assert response.json()["detail"]
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("body", "content_type", "status", "field", "message"),
    [
        (b'{"name": "a"}', None, 415, "content-type", "found none; allowed: application/json"),
        (
            b'{"name": "a"}',
            "application/x-www-form-urlencoded",
            415,
            "content-type",
            "found application/x-www-form-urlencoded; allowed: application/json",
        ),
        (b'{"name": 5}', "application/json", 422, "body.name", "found an integer; allowed: a valid string"),
        (b"{}", "application/json", 422, "body.name", "found nothing; allowed: a value"),
        (b'{"name": "a", "mane": 1}', "application/json", 422, "body.mane", "no such key; allowed: name"),
        (b'{"name"', "application/json", 422, "body", "not JSON: Expecting ':' delimiter"),
        (b"", None, 422, "body", "found nothing; allowed: an object as JSON"),
    ],
)
async def test_what_is_wrong_with_a_body_is_told_by_field_kind_and_range(body, content_type, status, field, message):
    app = probe_app("example", Readiness(), CollectorRegistry())

    @app.put("/choice")
    async def choose(choice: Strict) -> Strict:
        return choice

    headers = {} if content_type is None else {"content-type": content_type}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        response = await client.put("/choice", content=body, headers=headers)
    assert (response.status_code, response.json()["detail"]) == (status, [{"field": field, "message": message}])


async def test_the_three_routes_that_every_service_has():
    readiness, registry = Readiness("bundle"), CollectorRegistry()
    Counter("leadtime_example_events", "Events.", registry=registry).inc()
    app = probe_app("example", readiness, registry)
    assert (await get(app, "/healthz")).json() == {"status": "ok"}
    waiting = await get(app, "/readyz")
    assert (waiting.status_code, waiting.json()["waiting_for"]) == (503, {"bundle": "not yet"})
    readiness.met("bundle")
    assert (await get(app, "/readyz")).status_code == 200
    metrics = await get(app, "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "leadtime_example_events_total 1.0" in metrics.text


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/"])
async def test_nothing_else_is_open(path):
    app = probe_app("example", Readiness(), CollectorRegistry())
    assert (await get(app, path)).status_code == 404


def guarded(settings: ServiceSettings) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/secret", dependencies=[require_token(settings)])
    async def secret() -> str:
        return "told"

    return app


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "right-token", "Bearer right-token x"])
async def test_a_guarded_route_refuses_what_is_not_the_token(authorization):
    app = guarded(Example(http_token=SecretStr("right-token")))
    headers = {} if authorization is None else {"authorization": authorization}
    answer = await get(app, "/v1/secret", **headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "right-token" not in answer.text


async def test_a_guarded_route_opens_to_the_token():
    answer = await get(
        guarded(Example(http_token=SecretStr("right-token"))), "/v1/secret", authorization="Bearer right-token"
    )
    assert answer.json() == "told"


async def test_without_a_token_setting_the_route_is_open_since_the_listener_is_on_loopback():
    assert (await get(guarded(Example()), "/v1/secret")).status_code == 200


async def never(settings: Example, stop: asyncio.Event) -> None:
    raise AssertionError("a service that can't be configured must not be built")


def test_a_bad_configuration_stops_the_start_with_its_faults(monkeypatch, capsys):
    monkeypatch.setenv("LEADTIME_EXAMPLE_HTTP_PORT", "x")
    assert run("example", Example, never) == EXIT_CONFIGURATION
    told = capsys.readouterr().err
    assert "leadtime example: the configuration can't work" in told
    assert "LEADTIME_EXAMPLE_HTTP_PORT" in told


def test_a_fault_found_while_the_service_is_built_is_told_in_the_same_way(capsys):
    async def build(settings: Example, stop: asyncio.Event) -> None:
        raise ConfigurationError("profile: found 'leadtme'; allowed: leadtime")

    assert run("example", Example, build) == EXIT_CONFIGURATION
    told = capsys.readouterr().err
    assert "leadtime example: the configuration can't work\nprofile: found 'leadtme'; allowed: leadtime\n" in told


def test_a_listener_beyond_loopback_needs_a_token(monkeypatch, capsys):
    monkeypatch.setenv("LEADTIME_EXAMPLE_HTTP_HOST", "0.0.0.0")
    assert run("example", Example, never) == EXIT_CONFIGURATION
    assert "LEADTIME_EXAMPLE_HTTP_TOKEN: needed" in capsys.readouterr().err


async def test_a_wrong_method_is_told_with_those_that_the_path_has():
    app = probe_app("example", Readiness(), CollectorRegistry())

    @app.put("/choice/{name}")
    async def choose(name: str) -> str:
        return name

    @app.delete("/choice/{name}")
    async def drop(name: str) -> str:
        return name

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        response = await client.post("/choice/a")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, PUT")
    assert response.json() == {"detail": "method: found POST; allowed: DELETE, PUT"}
