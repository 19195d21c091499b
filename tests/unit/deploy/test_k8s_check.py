"""The check after an installation names the cause of what it finds."""

import json
from typing import Any

import pytest

from deploy.k8s.check import Answer, Check, Fault, main

GATEWAY, ROUTER = "http://gateway", "http://router"
READY = [{"address": "10.0.0.1:8000", "ready": True}]


class Cluster:
    """Answers as a gateway and a router would: `chat` to requests, of which each `share`-th meets this router."""

    def __init__(self, **changes: Any) -> None:
        self.endpoints: list[dict[str, Any]] = READY
        self.chat = Answer(200, b"data: [DONE]\n\n")
        self.share: int | None = 1
        self.outcome: dict[str, Any] | None = {"sample": "accepted"}
        self.peers: list[Any] = []
        self.refuses = False
        self.sent = 0
        self.pauses = 0
        for name, value in changes.items():
            setattr(self, name, value)

    def __call__(self, url: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        if url.startswith(GATEWAY):
            assert json.loads(body or b"")["model"] == "m"
            self.sent += 1
            return self.chat
        if self.refuses:
            return Answer(401)
        assert headers["authorization"] == "Bearer t"
        decided = 0 if self.share is None else self.sent // self.share
        pages: dict[str, Any] = {
            "/v1/endpoints": {"endpoints": self.endpoints},
            "/v1/peers": {"peers": self.peers},
            "/v1/decisions?limit=1": {"decisions": [{"decision_id": f"d{decided}"}] if decided else []},
            f"/v1/decisions/d{decided}": {"outcome": self.outcome},
        }
        return Answer(200, json.dumps(pages[url.removeprefix(ROUTER)]).encode())

    def pause(self, _: float) -> None:
        self.pauses += 1

    def check(self) -> list[str]:
        said: list[str] = []
        Check(GATEWAY, ROUTER, "t", "m", self, self.pause).run(said.append)
        return said


def test_a_request_that_is_decided_and_comes_back_is_well() -> None:
    said = Cluster().check()
    assert said[0] == "the router knows 1 endpoints that are ready"
    assert said[1] == "it decided on one of 1 requests; 1 routers share them"
    assert "accepted" in said[2]


def test_a_router_among_others_gets_its_turn() -> None:
    assert "one of 7 requests; 3 routers" in Cluster(share=7, peers=["a", "b"]).check()[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoints": [{"address": "10.0.0.1:8000", "ready": False}]}, "knows 1 endpoints and none is ready"),
        ({"share": None}, "the gateway goes past it, and fails open"),
        ({"chat": Answer(0, b"refused")}, "nobody answers at http://gateway: refused"),
        ({"chat": Answer(500)}, "it can't reach the routers and doesn't fail open"),
        ({"chat": Answer(503, headers={"x-leadtime-reason": "no_endpoint"})}, "refused the request: 503 no_endpoint"),
        ({"chat": Answer(404, b"no such model")}, "404: b'no such model'"),
        ({"outcome": None}, "its outcome didn't come back"),
        ({"refuses": True}, "the Secret's key admin-token"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Fault, match=words):
        Cluster(**changes).check()


def test_it_waits_for_the_outcome_within_limits() -> None:
    cluster = Cluster(outcome=None)
    with pytest.raises(Fault):
        cluster.check()
    assert cluster.pauses == 30


def test_nobody_there_is_status_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--gateway", "http://127.0.0.1:1", "--router", "http://127.0.0.1:1", "--token", "t", "--model", "m"]
    assert main(given) == 1
    assert "the router doesn't answer at http://127.0.0.1:1" in capsys.readouterr().err
