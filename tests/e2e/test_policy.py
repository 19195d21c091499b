"""Policy files and objectives through the real Envoy, in both shapes: what is shed and how a client is told, and that a
change of policy costs no request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.router.offpolicy.evaluation import Metric, evaluate_profile
from services.router.offpolicy.log import Joined, join, read_lines
from services.router.scheduling.profile import Profiles, load_presets
from services.router.scheduling.registry import Registry
from tests.e2e.edge import JSON_ANSWER, Edge, chat, running_edge
from tests.fakes.fake_model_server import Script
from tests.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROFILE = """
name: mine
producer: {{plugin: predicted-latency-producer}}
admitters: [{{plugin: latency-slo-admitter}}]
scorers: [{{plugin: {scorer}}}]
picker: {{plugin: max-score-picker}}
fallback: token-load
"""
# Without headers a request counts where it was sent first, also at the endpoint that Envoy doesn't know.
HANGING = Script([], header_delay_ms=60_000.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "full_duplex"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    (directory / "profile.yaml").write_text(PROFILE.format(scorer="latency-scorer"))
    (directory / "objectives.yaml").write_text("objectives: {batch: {priority: -1, ttft_slo_ms: 200}}\n")
    environment = {
        "LEADTIME_ROUTER_PROFILE": "mine",
        "LEADTIME_ROUTER_PROFILE_FILE": str(directory / "profile.yaml"),
        "LEADTIME_ROUTER_OBJECTIVES_FILE": str(directory / "objectives.yaml"),
        "LEADTIME_ROUTER_TRUST_REQUEST_HEADERS": "true",
        # A busy machine must not take the predictions away that this is about.
        "LEADTIME_ROUTER_PREDICT_DEADLINE_MS": "300",
        "LEADTIME_ROUTER_DECISION_BUDGET_MS": "350",
        "LEADTIME_ROUTER_DECISION_LOG": str(directory / "decisions.jsonl"),
    }
    async with running_edge(request.param, directory, environment=environment) as edge:
        yield edge


@pytest_asyncio.fixture(loop_scope="module")
async def edge(running: Edge) -> AsyncIterator[Edge]:
    running.forget()
    yield running
    running.answer = lambda _, __: JSON_ANSWER
    running.predictor.offset = 1.0
    await running.idle()


def write(edge: Edge, name: str, text: str) -> None:
    """As a ConfigMap does: another file in its place."""
    path = edge.router.log_file.parent / name
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def policy(edge: Edge) -> Any:
    return await edge.router.json("/v1/profile")


async def test_what_is_shed_is_told_when_to_come_back(edge: Edge) -> None:
    edge.answer = lambda _, __: HANGING
    busy: list[asyncio.Task[httpx.Response]] = []

    async def all_busy() -> bool:
        """A request more for each look that finds an idle one: how they are spread is the policy's affair."""
        if all(endpoint["in_flight_requests"] for endpoint in await edge.endpoints()):
            return True
        if len(busy) < 100:
            busy.append(asyncio.create_task(edge.ask(chat(f"busy {len(busy)}", stream=True))))
        return False

    await until(all_busy, "no endpoint is idle", poll_s=0.02)
    edge.answer = lambda _, __: JSON_ANSWER
    edge.predictor.offset = 5_000.0
    batch = {"x-llm-d-inference-objective": "batch"}

    async def refused() -> httpx.Response | None:
        """Where the predictor misses its deadline there is no prediction, and nobody is refused."""
        answer = await edge.ask(headers=batch)
        return answer if answer.status_code != 200 else None

    shed = await until(refused, "a request is shed")
    assert shed.status_code == 429, shed.text
    assert shed.headers["x-leadtime-reason"] == "slo_unreachable"
    assert shed.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert 1 <= int(shed.headers["retry-after"]) <= 600
    assert shed.json()["error"]["type"] == "rate_limit_error"
    assert shed.json()["error"]["code"] == "slo_unreachable"
    kept = await edge.ask(headers={"x-slo-ttft-ms": "200"})
    assert kept.status_code == 200, "priority 0 is never shed"
    for request in busy:
        request.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_a_change_of_policy_costs_no_request(edge: Edge) -> None:
    stop = asyncio.Event()

    async def client() -> list[httpx.Response]:
        answers = []
        while not stop.is_set():
            answers.append(await edge.ask())
        return answers

    clients = [asyncio.create_task(client()) for _ in range(4)]
    for scorer in ("queue-scorer", "token-load-scorer", "latency-scorer"):
        write(edge, "profile.yaml", PROFILE.format(scorer=scorer))

        async def in_force(scorer: str = scorer) -> bool:
            return bool((await policy(edge))["effective"]["scorers"][0]["plugin"] == scorer)

        await until(in_force, f"{scorer} is in force")
    stop.set()
    answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
    assert len(answers) > 20
    assert {answer.status_code for answer in answers} == {200}


async def test_a_bad_file_changes_nothing_and_is_shown(edge: Edge) -> None:
    write(edge, "profile.yaml", PROFILE.format(scorer="no-such-scorer"))

    async def told() -> str | None:
        error: str | None = (await policy(edge))["files"]["profile"]["error"]
        return error

    assert "no scorer is called 'no-such-scorer'" in await until(told, "the fault is shown")
    assert (await policy(edge))["effective"]["scorers"][0]["plugin"] == "latency-scorer"
    assert (await edge.ask()).status_code == 200
    write(edge, "profile.yaml", PROFILE.format(scorer="latency-scorer"))

    async def mended() -> bool:
        return await told() is None

    await until(mended, "the mended file is in force")


async def test_objectives_are_read_again(edge: Edge) -> None:
    write(edge, "objectives.yaml", "objectives: {batch: -1, chat: {priority: 2, ttft_slo_ms: 700}}\n")

    async def there() -> bool:
        return "chat" in (await policy(edge))["objectives"]["by_name"]

    await until(there, "the new table is in force")
    assert (await edge.ask(headers={"x-llm-d-inference-objective": "chat"})).status_code == 200
    samples = await edge.settled_samples()
    assert (samples[-1].priority, samples[-1].ttft_slo_ms) == (2, 700.0)
    write(edge, "objectives.yaml", "objectives: {batch: {priority: -1, ttft_slo_ms: 200}}\n")


async def test_logged_decisions_can_be_evaluated_and_hold_no_prompt(edge: Edge) -> None:
    for i in range(12):
        assert (await edge.ask(chat(f"very secret words {i}"))).status_code == 200
    await edge.settled_samples()
    path = edge.router.log_file.parent / "decisions.jsonl"

    def joined() -> list[Joined] | None:
        with contextlib.suppress(FileNotFoundError):
            found = join(read_lines(path.read_bytes().splitlines(), "log"))
            return found if sum(entry.outcome is not None for entry in found) >= 12 else None
        return None

    found = await until(joined, "decisions and outcomes are in the log")
    assert b"secret" not in await asyncio.to_thread(path.read_bytes)
    evaluation = evaluate_profile(found, Profiles(load_presets(Registry())).pipeline("token-load"))
    assert evaluation.metrics[Metric.E2E_MS].rows >= 12
