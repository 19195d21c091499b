"""The Compose file, driven as a user drives it: `docker compose` as a child, requests to Envoy's published port.

Everything has a project name of its own, and `close` removes containers, networks, volumes and images of it, however
far a run came.
"""

import json
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from tests.deploy.engine import REPOSITORY

COMPOSE: Final = REPOSITORY / "deploy/compose"
IMAGES: Final = "leadtime-test"
DECISION: Final = "x-leadtime-decision-id"
DEADLINE_S: Final = 120.0
_COMMAND_S: Final = 900
T = TypeVar("T")


@dataclass(slots=True)
class Answer:
    """What a client sees of one request."""

    status: int
    decision: str | None
    served: str | None
    """The simulated server that answered."""
    text: str

    @property
    def routed(self) -> bool:
        return self.status == 200 and self.decision is not None


@dataclass(slots=True)
class ComposeStack:
    """One project. `facts` gathers what is reported at the end."""

    name: str
    port: int
    files: tuple[Path, ...] = (COMPOSE / "compose.yaml",)
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def compose(self, *words: str, check: bool = True, timeout_s: float = _COMMAND_S) -> str:
        """`docker compose …` with the demo's profile; stdout."""
        files = [word for file in self.files for word in ("--file", str(file))]
        command = ["docker", "compose", *files, "--project-name", self.name, "--profile", "demo", *words]
        return run(command, environment=self.settings, check=check, timeout_s=timeout_s)

    def timed(self, fact: str, *words: str) -> float:
        began = time.monotonic()
        self.compose(*words)
        took = time.monotonic() - began
        self.facts[fact] = round(took, 2)
        return took

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers, in order of their number."""
        found = self.compose("ps", "--format", "json", "--status", "running", service)
        listed = [json.loads(line) for line in found.splitlines() if line.strip()]
        return [entry["ID"] for entry in sorted(listed, key=lambda entry: entry["Name"])]

    def metrics(self, service: str, port: int) -> dict[str, dict[str, float]]:
        """Each running replica's metrics by series, by container."""
        return {container: series(self.page(container, port, "/metrics")) for container in self.containers(service)}

    def page(self, container: str, port: int, path: str, token: str | None = None) -> str:
        """A page of a replica, by its published port."""
        published = docker("port", container, f"{port}/tcp").split()[0]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(f"http://{published}{path}", headers=headers, timeout=10)
        answer.raise_for_status()
        return answer.text

    def ask(
        self, *, stream: bool = False, text: str = "hello", tokens: int = 4, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One chat completion through Envoy; a connection that fails is status 0."""
        body = {
            "model": "demo-70b",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": stream,
        }
        try:
            got = httpx.post(
                f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, headers=headers, timeout=60
            )
        except httpx.HTTPError as error:
            return Answer(0, None, None, repr(error))
        return Answer(got.status_code, got.headers.get(DECISION), got.headers.get("x-sim-server"), got.text)

    def load(self, count: int) -> Counter[str]:
        """Requests one after the other, every other one streamed: how many were routed, unrouted, failed.

        Unrouted: answered by a server of Envoy's own choice, where a router took more than a second.
        """
        ended: Counter[str] = Counter()
        for number in range(count):
            answer = self.ask(stream=number % 2 == 0, text=f"question {number} of {time.monotonic()}")
            ended["routed" if answer.routed else "unrouted" if answer.status == 200 else f"status {answer.status}"] += 1
        return ended

    def token(self) -> str:
        words = ("python", "-m", "deploy.compose.setup", "--secrets", "/run/leadtime/secrets", "--show-token")
        return self.compose("exec", "-T", "router", *words).strip()

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60", check=False) + self.compose(
            "ps", "--all", check=False
        )

    def close(self) -> None:
        """Containers, networks, volumes and images of this project, whatever of them there is."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1", check=False)
        images = docker("image", "ls", "--quiet", "--filter", f"reference={IMAGES}/*").split()
        if images:
            run(["docker", "image", "rm", "--force", *dict.fromkeys(images)], check=False)


def open_stack() -> ComposeStack:
    port = free_port()
    settings = {
        "LEADTIME_IMAGES": IMAGES,
        "LEADTIME_PORT": str(port),
        "COMPOSE_PROGRESS": "quiet",
        "BUILDKIT_PROGRESS": "plain",
    }
    return ComposeStack(f"leadtime-test-{os.getpid()}", port, settings=settings)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def docker(*words: str) -> str:
    return run(["docker", *words])


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    timeout_s: float = _COMMAND_S,
) -> str:
    """A child's stdout; its stderr goes into the error."""
    ended = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if check and ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def series(page: str) -> dict[str, float]:
    """Prometheus' text: series with its labels → value."""
    lines = [line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def total(page: Mapping[str, float], name: str) -> float:
    """A counter, all its labels together."""
    return sum(value for key, value in page.items() if key == name or key.startswith(name + "{"))


def until(what: str, look: Callable[[], T], *, deadline_s: float = DEADLINE_S, pause_s: float = 0.2) -> T:
    """What `look` returns as soon as it is true; AssertionError that says what it last was.

    A page that isn't served yet is one more "not yet": a container runs before its service listens.
    """
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while True:
        last: object
        try:
            found = last = look()
        except httpx.HTTPError as error:
            found, last = None, error
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline_s:g} s; last seen: {last!r}")
        pause.wait(pause_s)
