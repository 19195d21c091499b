"""The HTTP edge: the model's state as JSON, behind the token where one is set."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.trainer.app import build_app
from services.trainer.lease import LeaseLostError
from services.trainer.settings import TrainerSettings
from services.trainer.trainer import NotNowError, UnknownVersionError
from shared.lifecycle import Readiness


class Model:
    """Notes what is asked of it; `fault` is raised by whoever wants to change it."""

    def __init__(self, fault=None):
        self.asked = []
        self.fault = fault

    def status(self):
        return {"state": "cold", "parity": {"max_relative_error": float("inf")}, "list": [float("nan"), 1]}

    async def pin(self, version):
        self._note("pin", version)

    async def unpin(self):
        self._note("unpin")

    async def roll_back(self, version=None):
        self._note("roll_back", version)

    def _note(self, *asked):
        self.asked.append(asked)
        if self.fault:
            raise self.fault


def client(model=None, **settings) -> httpx.AsyncClient:
    app = build_app(TrainerSettings(**settings), Readiness("redis"), CollectorRegistry(), model or Model())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://trainer")


@pytest.mark.parametrize("path", ["/v1/model", "/v1/status"])
async def test_numbers_that_json_lacks_are_absent(path):
    async with client() as http:
        answer = await http.get(path)
    assert answer.json() == {"state": "cold", "parity": {"max_relative_error": None}, "list": [None, 1]}


CHANGES = [
    ("POST", "/v1/model/pin", {"version": "v"}, ("pin", "v")),
    ("DELETE", "/v1/model/pin", None, ("unpin",)),
    ("POST", "/v1/model/rollback", {}, ("roll_back", None)),
    ("POST", "/v1/model/rollback", {"version": "v"}, ("roll_back", "v")),
]


@pytest.mark.parametrize(("method", "path", "body", "asked"), CHANGES)
async def test_a_change_is_carried_out_and_answers_the_state_and_a_token_guards_it(method, path, body, asked):
    model = Model()
    async with client(model, http_token="secret") as http:
        assert (await http.request(method, path, json=body)).status_code == 401
        assert model.asked == []
        answer = await http.request(method, path, json=body, headers={"authorization": "Bearer secret"})
    assert (answer.status_code, answer.json()["state"], model.asked) == (200, "cold", [asked])


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (UnknownVersionError("v", ["w"]), 404),
        (NotNowError("not now"), 409),
        (LeaseLostError("lease"), 409),
        (ConnectionError("redis"), 503),
        (TimeoutError(), 503),
    ],
)
async def test_what_cannot_be_done_answers_why(fault, status):
    async with client(Model(fault)) as http:
        answer = await http.post("/v1/model/rollback", json={})
    assert answer.status_code == status
    assert answer.json()["detail"]


@pytest.mark.parametrize("body", [{}, {"version": 1}, {"version": "v", "more": 1}, {"version": "v" * 65}])
async def test_a_pin_of_another_form_is_refused(body):
    async with client() as http:
        assert (await http.post("/v1/model/pin", json=body)).status_code == 422


async def test_a_token_guards_the_model_but_not_the_probes():
    async with client(http_token="secret") as http:
        assert (await http.get("/v1/model")).status_code == 401
        assert (await http.get("/v1/model", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).json()["waiting_for"] == {"redis": "not yet"}
