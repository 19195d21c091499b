"""The HTTP edge: the model's state as JSON, behind the token where one is set."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.trainer.app import build_app
from services.trainer.settings import TrainerSettings
from shared.lifecycle import Readiness


def client(**settings) -> httpx.AsyncClient:
    status = {"state": "cold", "parity": {"max_relative_error": float("inf")}, "list": [float("nan"), 1]}
    app = build_app(TrainerSettings(**settings), Readiness("redis"), CollectorRegistry(), lambda: status)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://trainer")


@pytest.mark.parametrize("path", ["/v1/model", "/v1/status"])
async def test_numbers_that_json_lacks_are_absent(path):
    async with client() as http:
        answer = await http.get(path)
    assert answer.json() == {"state": "cold", "parity": {"max_relative_error": None}, "list": [None, 1]}


async def test_a_token_guards_the_model_but_not_the_probes():
    async with client(http_token="secret") as http:
        assert (await http.get("/v1/model")).status_code == 401
        assert (await http.get("/v1/model", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).json()["waiting_for"] == {"redis": "not yet"}
