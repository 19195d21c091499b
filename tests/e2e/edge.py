"""The edge alone, for failures at it: real Envoy in either shape, a router process, a collector with a real NATS, and
model servers and a predictor that play scripts. The router knows one endpoint that Envoy doesn't, as where one has
vanished between a decision and its dispatch.
"""

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, Shape, of_router, render
from shared.samples import LatencySample
from tests.fakes.fake_model_server import FakeModelServer, Script, Seen, event, fake_model_server, stream_script
from tests.fakes.fake_predictor import FakePredictor
from tests.integration.collector.running import RunningCollector, running_collector, stored
from tests.servers import EnvoyProxy, NatsServer, ServerProcess, envoy, fetch, free_port, nats_server, until

CAP_BYTES = 8 * 1024 * 1024
CHAT = "/v1/chat/completions"
RESTORED = "/restored/"
"""Beginning of the paths whose responses name the model as the client did."""
ALIAS, MODEL = "an alias", "m"
OTHER = "/v1/files"
JSON_ANSWER = Script(
    [(0.0, json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode())],
    content_type="application/json",
)
QUICK_STREAM = stream_script(((20.0, event({"choices": [{"delta": {"content": "a"}}]})),), (), tokens=4, gap_ms=5.0)
NOT_FOUND = Script([(0.0, b"{}")], status=404, content_type="application/json")
PROBED = frozenset({"/metrics", "/health", "/v1/models"})


class RouterProcess(ServerProcess):
    """`python -m services.router`, on the same ports from start to start."""

    def __init__(self, run_dir: Path, environment: dict[str, str]) -> None:
        self.extproc_port, self.health_port, self.http_port = free_port(), free_port(), free_port()
        ports = {"EXTPROC_PORT": self.extproc_port, "HEALTH_PORT": self.health_port, "HTTP_PORT": self.http_port}
        own = {f"LEADTIME_ROUTER_{name}": str(port) for name, port in ports.items()}
        super().__init__("router", run_dir / "router.log", {**environment, **own})

    async def start(self) -> None:
        self.spawn([sys.executable, "-P", "-m", "services.router"])

        async def ready() -> bool:
            return (await fetch(f"http://127.0.0.1:{self.http_port}/readyz"))[0] == 200

        await self.ready(ready)

    async def json(self, path: str) -> Any:
        status, body = await fetch(f"http://127.0.0.1:{self.http_port}{path}")
        assert status == 200, (status, body)
        return json.loads(body)


@dataclass
class Edge:
    """Everything that runs, and the questions that tests ask."""

    shape: Shape
    router: RouterProcess
    proxy: EnvoyProxy
    servers: list[FakeModelServer]
    unknown: FakeModelServer
    """The endpoint that Envoy doesn't know."""
    predictor: FakePredictor
    collector: RunningCollector
    nats: NatsServer
    client: httpx.AsyncClient
    answer: Callable[[int, Seen], Script] = field(default=lambda _, __: JSON_ANSWER)
    """What the server of a number plays for a request that isn't a probe."""
    _markers: int = 0

    async def ask(self, body: Any = None, *, path: str = CHAT, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body or chat()).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return await self.client.post(path, content=content, headers=headers, **options)

    def seen(self, path: str = CHAT) -> list[Seen]:
        """Requests that reached a server, in no order."""
        return [request for server in self.servers for request in server.requests if request.path.startswith(path)]

    def forget_requests(self) -> None:
        for server in self.servers:
            server.requests.clear()

    def forget(self) -> None:
        self.forget_requests()
        self.answer = lambda _, __: JSON_ANSWER

    async def inflight(self) -> int:
        return int((await self.router.json("/v1/stats"))["inflight_requests"])

    async def idle(self) -> None:
        """The ledger and the streams are back to zero."""

        async def empty() -> bool:
            return await self.inflight() == 0

        await until(empty, "the ledger is empty")

        async def no_stream() -> bool:
            _, page = await fetch(f"http://127.0.0.1:{self.router.http_port}/metrics")
            return b"\nleadtime_router_extproc_streams 0.0" in page

        await until(no_stream, "no ext-proc stream is open")

    async def ready_endpoints(self, count: int) -> None:
        async def ready() -> bool:
            return sum(bool(endpoint["ready"]) for endpoint in await self.endpoints()) == count

        await until(ready, f"{count} endpoints are ready")

    async def endpoints(self) -> list[dict[str, Any]]:
        """As the router sees them."""
        found: list[dict[str, Any]] = (await self.router.json("/v1/endpoints"))["endpoints"]
        return found

    async def metric(self, name: str) -> float:
        """One of the router's metrics without labels."""
        _, page = await fetch(f"http://127.0.0.1:{self.router.http_port}/metrics")
        line = next(line for line in page.decode().splitlines() if line.startswith(f"{name} "))
        return float(line.rpartition(" ")[2])

    async def picker_known_healthy(self) -> None:
        async def healthy() -> bool:
            return (await self.proxy.stats("cluster.picker.membership_healthy")).popitem()[1] == 1

        await until(healthy, "Envoy knows that the router is there")

    async def decided(self) -> int:
        """Decisions so far."""
        return sum((await self.router.json("/v1/stats"))["served_by"].values())

    async def samples(self) -> list[LatencySample]:
        return [sample for _, sample in await stored(self.nats.url)]

    async def settled_samples(self) -> list[LatencySample]:
        """Every sample of the requests so far: a marked request is sent after them, and its sample awaited."""
        self._markers += 1
        model = f"marker-{self._markers}"
        answer, self.answer = self.answer, lambda _, __: JSON_ANSWER
        try:
            assert (await self.ask(chat(model=model))).status_code == 200
        finally:
            self.answer = answer

        async def there() -> list[LatencySample] | None:
            found = await self.samples()
            return found if any(sample.model == model for sample in found) else None

        found: list[LatencySample] = await until(there, "the marked request's sample is on the stream", poll_s=0.05)
        return [sample for sample in found if not sample.model.startswith("marker-")]


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def chat_of(size: int) -> bytes:
    """A chat body of exactly so many bytes."""
    empty = len(json.dumps(chat("")).encode())
    return json.dumps(chat("x" * (size - empty))).encode()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.asynccontextmanager
async def running_edge(
    shape: Shape,
    directory: Path,
    servers: int = 3,
    *,
    by_response_stream: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Edge]:
    """Everything, started and awaited. `by_response_stream`: completions come from the router, none from Envoy.

    `environment`: the router's, over what stands here.
    """
    edge: Edge | None = None

    def play(number: int) -> Callable[[Seen], Script]:
        def choose(seen: Seen) -> Script:
            if seen.path in PROBED or edge is None:
                return NOT_FOUND
            return edge.answer(number, seen)

        return choose

    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(directory / "nats"))
        collector = await stack.enter_async_context(running_collector(nats.url))
        fakes = [await stack.enter_async_context(fake_model_server(play(i))) for i in range(servers + 1)]
        predictor = FakePredictor()
        await predictor.start()
        stack.push_async_callback(predictor.stop)
        settings = {
            "LEADTIME_ROUTER_MAX_BODY_BYTES": str(CAP_BYTES),
            "LEADTIME_ROUTER_MODEL_ALIASES": json.dumps({ALIAS: MODEL}),
            "LEADTIME_ROUTER_RESTORED_ROUTES": RESTORED,
        }
        router = RouterProcess(
            directory,
            {
                **settings,
                "LEADTIME_ROUTER_ENDPOINTS": ",".join(f"http://{fake.address}" for fake in fakes),
                "LEADTIME_ROUTER_PREDICTORS": predictor.url,
                "LEADTIME_ROUTER_PROFILE": "round-robin",
                "LEADTIME_NATS_SERVERS": nats.url,
                "LEADTIME_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
                "LEADTIME_ROUTER_COLLECTORS": collector.url if by_response_stream else "",
                "ORT_DISABLE_TELEMETRY": "1",
                **(environment or {}),
            },
        )
        stack.push_async_callback(router.stop, grace_s=2.0)
        await router.start()
        config = EnvoyConfig(
            endpoints=tuple(Address("127.0.0.1", int(fake.address.rpartition(":")[2])) for fake in fakes[:servers]),
            routers=(RouterAddress(Address("127.0.0.1", router.extproc_port), router.health_port),),
            collectors=() if by_response_stream else (Address("127.0.0.1", collector.settings.als_port),),
            completions="response_stream" if by_response_stream else "access_log",
            **of_router(settings),
            shape=shape,
            log_flush_s=0.05,
        )
        proxy = await stack.enter_async_context(envoy(render(config), directory / "envoy"))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=proxy.url, timeout=20.0, limits=httpx.Limits(max_keepalive_connections=0))
        )
        edge = Edge(shape, router, proxy, fakes[:servers], fakes[servers], predictor, collector, nats, client)
        await edge.picker_known_healthy()
        await edge.ready_endpoints(servers + 1)
        yield edge


async def timed(wait: Any) -> tuple[Any, float]:
    """A result and the seconds it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await wait, loop.time() - began
