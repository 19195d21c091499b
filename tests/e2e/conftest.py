"""One whole stack per module: real Envoy, NATS, a Redis-protocol server, the four services, fast simulated servers."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from deploy.local.api import serve_api
from deploy.local.envoy import Address
from deploy.local.layout import StackConfig
from deploy.local.stack import Stack
from sim.spec import ProcessSpec, ServerSpec
from tests.servers import until

MODEL = "sim-model"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A chat body with one user message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


class Running:
    """A running stack with a client, and the questions that the tests ask of it."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self.stack = stack
        self.client = client
        self.gateway = stack.addresses.gateway_url
        self.router = stack.addresses.router_url

    async def chat(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.client.post(f"{self.gateway}/v1/chat/completions", json=chat(text, **fields), headers=headers)

    async def router_json(self, path: str) -> Any:
        response = await self.client.get(self.router + path)
        response.raise_for_status()
        return response.json()

    async def stats(self) -> Any:
        return await self.router_json("/v1/stats")

    async def newest_decision(self) -> Any:
        return (await self.router_json("/v1/decisions?limit=1"))["decisions"][0]

    async def served_by(self) -> dict[str, int]:
        served: dict[str, int] = (await self.stats())["served_by"]
        return served

    async def inflight(self) -> int:
        return int((await self.stats())["inflight_requests"])

    async def idle(self) -> None:
        """Wait for the ledger to be empty."""

        async def empty() -> bool:
            return await self.inflight() == 0

        await until(empty, "the ledger is empty")

    async def samples(self) -> int:
        """Samples on the stream, as NATS itself counts them; 0 while there is no stream."""
        response = await self.client.get(f"http://127.0.0.1:{self.stack.addresses.nats_monitor}/jsz?streams=1")
        details = response.json().get("account_details") or [{}]
        return sum(int(s["state"]["messages"]) for s in details[0].get("stream_detail", []))

    async def metric(self, base_url: str, prefix: str) -> float:
        """Sum of the samples of a metrics page whose line begins with `prefix`."""
        page = (await self.client.get(f"{base_url}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(prefix))

    async def learn(self, count: int = 40) -> None:
        """Send streamed requests until a first bundle serves decisions."""

        async def predicted() -> bool:
            await asyncio.gather(*(self.chat(f"learn {i} {time.monotonic()}", stream=True) for i in range(count)))
            before = (await self.served_by())["predictor"]
            await self.chat("now")
            return (await self.served_by())["predictor"] > before

        await until(predicted, "a bundle serves decisions", timeout_s=60.0, poll_s=0.2)

    async def control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self.stack.addresses.sim_control_url}/control/{path}"
        response = await self.client.post(url, json=body or {})
        response.raise_for_status()
        return response.json()

    def logs(self) -> str:
        """Everything that any child wrote."""
        return "\n".join(file.read_text(errors="replace") for file in self.stack.config.run_dir.glob("*.log"))


def servers(count: int = 3, **fields: Any) -> ProcessSpec:
    """Simulated servers that answer in a few milliseconds."""
    return ProcessSpec(
        servers=tuple(
            ServerSpec(name=f"s{i}", models=(MODEL,), speed=20.0, noise=0.0, force_usage=True, seed=7, **fields)
            for i in range(count)
        )
    )


async def running(
    directory: Path,
    spec: ProcessSpec,
    environment: dict[str, str] | None = None,
    predictors: int = 1,
    routers: int = 1,
) -> AsyncIterator[Running]:
    """A stack in front of `spec`, with the demo's ordinary service under /api."""
    async with serve_api() as api, httpx.AsyncClient(timeout=30.0) as client:
        host, _, port = api.removeprefix("http://").partition(":")
        config = StackConfig(
            run_dir=directory,
            simulated=spec,
            api=Address(host, int(port)),
            environment={**os.environ, "LEADTIME_TRAINER_RETRAIN_INTERVAL_MS": "1000", **(environment or {})},
            predictors=predictors,
            routers=routers,
        )
        async with Stack(config, rng=random.Random()) as stack:
            yield Running(stack, client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: Any) -> AsyncIterator[Running]:
    """The module's stack: three servers, one predictor, a retrain every second."""
    directory: Path = tmp_path_factory.mktemp("stack")
    async for stack in running(directory, servers()):
        yield stack
