"""After an installation: sends requests through the gateway and says whether the routers decide on them, or why not.

    python -m deploy.k8s.check --gateway http://GATEWAY --router http://localhost:9090 --token TOKEN --model MODEL

`--router` is one router's HTTP port (`kubectl port-forward`); others decide too, so requests are sent until this one
has, or so many that it would have. It needs the standard library alone. Exit status 0: decided, answered, and the
outcome came back; 1: what is wrong is on the last line.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_TIMEOUT_S: Final = 60.0
_TRIES_PER_ROUTER: Final = 10
"""With so many a router that is one of n has had its turn: missed by chance in 1 of 20,000."""
_OUTCOME_S: Final = 15.0
_REASON: Final = "x-leadtime-reason"
_CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; status 0: nobody answered, and `body` says why. Header names in lower case."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        return json.loads(self.body)


Ask = Callable[[str, bytes | None, dict[str, str]], Answer]
"""URL, body (None: GET) and headers → answer."""


def ask(url: str, body: bytes | None, headers: dict[str, str]) -> Answer:
    """Over the network."""
    request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - the operator's own addresses
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            return Answer(response.status, response.read(), _lower(response.headers.items()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read(), _lower(error.headers.items()))
    except OSError as error:
        return Answer(0, str(error).encode())


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


class Fault(Exception):
    """What is wrong, for people."""


@dataclass(frozen=True, slots=True)
class Check:
    """One gateway, one of its routers."""

    gateway: str
    router: str
    token: str
    model: str
    ask: Ask = ask
    pause: Callable[[float], None] = time.sleep
    outcome_s: float = _OUTCOME_S

    def run(self, say: Callable[[str], None]) -> None:
        """Say each thing that holds; raises Fault at the first that doesn't."""
        ready = self._of_router("/v1/endpoints")["endpoints"]
        usable = [each["address"] for each in ready if each["ready"]]
        if not usable:
            raise Fault(
                f"the router knows {len(ready)} endpoints and none is ready: are the pods, and its selector right?"
            )
        say(f"the router knows {len(usable)} endpoints that are ready")
        routers = 1 + len(self._of_router("/v1/peers").get("peers", []))
        before = self._newest()
        for number in range(1, _TRIES_PER_ROUTER * routers + 1):
            self._send()
            newest = self._newest()
            if newest is not None and newest != before:
                say(f"it decided on one of {number} requests; {routers} routers share them")
                self._outcome(newest, say)
                return
        raise Fault(
            f"{number} answers, and the router was asked about none: the gateway goes past it, and fails open. Is its "
            "port reachable from the gateway (NetworkPolicy), is TLS the same on both sides, was the patch or policy "
            "accepted?"
        )

    def _of_router(self, path: str) -> Any:
        answer = self.ask(self.router + path, None, {"authorization": f"Bearer {self.token}"})
        if answer.status == 401:
            raise Fault("the router refuses the token: it is the Secret's key admin-token")
        if answer.status != 200:
            raise Fault(f"the router doesn't answer at {self.router}: {answer.status} {answer.body[:200]!r}")
        return answer.json()

    def _newest(self) -> str | None:
        decisions = self._of_router("/v1/decisions?limit=1")["decisions"]
        return str(decisions[0]["decision_id"]) if decisions else None

    def _send(self) -> None:
        messages = [{"role": "user", "content": "Say hello."}]
        body = {"model": self.model, "messages": messages, "max_tokens": 8, "stream": True}
        answer = self.ask(self.gateway + _CHAT, json.dumps(body).encode(), {"content-type": "application/json"})
        if answer.status == 200:
            return
        reason = answer.headers.get(_REASON)
        if answer.status == 0:
            raise Fault(f"nobody answers at {self.gateway}: {answer.body.decode(errors='replace')}")
        if reason is not None:
            raise Fault(f"the router refused the request: {answer.status} {reason}")
        if answer.status >= 500:
            raise Fault(
                f"{answer.status} by the gateway: it can't reach the routers and doesn't fail open (TLS on one side "
                f"only, a wrong port, no HTTP/2), or no endpoint answers: {answer.body[:200]!r}"
            )
        raise Fault(f"{answer.status}: {answer.body[:200]!r}")

    def _outcome(self, decision: str, say: Callable[[str], None]) -> None:
        for _ in range(max(1, round(self.outcome_s / 0.5))):
            outcome = self._of_router(f"/v1/decisions/{decision}").get("outcome")
            if outcome is not None:
                say(f"its outcome came back: {outcome.get('sample')}")
                return
            self.pause(0.5)
        raise Fault(
            "the request was decided and answered, but its outcome didn't come back: does the gateway's access log (in "
            "full duplex: the router) reach the collector, and the collector NATS?"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.k8s.check", description=(__doc__ or "").split("\n\n")[0])
    for name in ("gateway", "router", "token", "model"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args(arguments)
    try:
        Check(given.gateway.rstrip("/"), given.router.rstrip("/"), given.token, given.model).run(print)
    except Fault as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
