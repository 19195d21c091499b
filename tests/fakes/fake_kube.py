"""A Kubernetes API server as far as a reader sees it: lists, and watches that stream over real HTTP.

It keeps resource versions, so that a watch from a version sends what came after it, answers 410 for those it has
forgotten, sends bookmarks when told to, and can break: refuse, cut a line, end or hang watches. `requests` holds every
call with its parameters and credentials.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.servers import free_port

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/ns/inferenceobjectives"
REWRITES = "/apis/llm-d.ai/v1alpha2/namespaces/ns/inferencemodelrewrites"
PODS = "/api/v1/namespaces/ns/pods"


def make_pod(
    name: str,
    ip: str = "10.0.0.1",
    *,
    phase: str = "Running",
    ready: bool = True,
    terminating: bool = False,
    labels: dict[str, Any] | None = None,
    started: str = "2026-11-30T10:00:00Z",
    reason: str | None = None,
) -> dict[str, Any]:
    """A pod as the API shows it, with what readers look at."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "labels": {"app": "vllm", **(labels or {})},
    }
    if terminating:
        metadata["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    status: dict[str, Any] = {
        "phase": phase,
        "podIP": ip,
        "startTime": started,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    if reason:
        status["reason"] = reason
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}


@dataclass(slots=True)
class Call:
    path: str
    query: dict[str, str]
    authorization: str


@dataclass(slots=True)
class _Collection:
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeKube:
    """The state; change it with `put`, `delete` and the switches."""

    def __init__(self, *installed: str) -> None:
        self.collections = {path: _Collection() for path in (installed or (PODS, POOLS, OBJECTIVES, REWRITES))}
        self.version = 100
        self.forgotten = 0
        """Watches from this version or an earlier one get 410."""
        self.gone_as_event = False
        self.refuse: int | None = None
        """Status that every request gets."""
        self.calls: list[Call] = []
        self.port = free_port()
        self._epoch = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def watches(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path and "watch" in call.query]

    def lists(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path and "watch" not in call.query]

    async def put(self, path: str, document: dict[str, Any]) -> None:
        key = document["metadata"]["name"]
        kind = "MODIFIED" if key in self.collections[path].objects else "ADDED"
        await self._publish(path, kind, document)
        self.collections[path].objects[key] = document

    async def delete(self, path: str, name: str) -> None:
        await self._publish(path, "DELETED", self.collections[path].objects.pop(name))

    async def bookmark(self, path: str) -> None:
        await self._publish(path, "BOOKMARK", {"kind": "Pod", "metadata": {}})

    async def raw(self, path: str, line: bytes) -> None:
        """Send bytes to all watches as they are."""
        collection = self.collections[path]
        async with collection.news:
            collection.events.append((self.version, {"raw": line.decode()}))
            collection.news.notify_all()

    async def end_watches(self) -> None:
        """Close every watch as a server does at its time-out."""
        self._epoch += 1
        for collection in self.collections.values():
            async with collection.news:
                collection.news.notify_all()

    async def _publish(self, path: str, kind: str, document: dict[str, Any]) -> None:
        collection = self.collections[path]
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        async with collection.news:
            collection.events.append((self.version, {"type": kind, "object": json.loads(json.dumps(document))}))
            collection.news.notify_all()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(Call(request.path, dict(request.query), request.headers.get("authorization", "")))
        if self.refuse is not None:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        collection = self.collections.get(request.path)
        if collection is None:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if "watch" in request.query:
            return await self._watch(request, collection)
        wanted = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [item for name, item in collection.objects.items() if not wanted or name == wanted]
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, collection: _Collection) -> web.StreamResponse:
        since, epoch = int(request.query["resourceVersion"]), self._epoch
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        if since <= self.forgotten and not self.gone_as_event:
            return web.json_response(gone, status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if since <= self.forgotten:
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        sent = 0
        while self._epoch == epoch:
            for version, event in collection.events[sent:]:
                if "raw" in event:
                    await response.write(event["raw"].encode())
                elif version > since:
                    data = json.dumps(event).encode() + b"\n"
                    await response.write(data[: len(data) // 2])  # events don't come in whole chunks
                    await response.write(data[len(data) // 2 :])
            sent = len(collection.events)
            async with collection.news:
                if self._epoch == epoch and sent == len(collection.events):
                    await collection.news.wait()
        return response

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


@contextlib.asynccontextmanager
async def fake_kube(*installed: str) -> AsyncIterator[FakeKube]:
    """A running one on a free loopback port; `installed` are the collections that it has."""
    kube = FakeKube(*installed)
    await kube.start()
    try:
        yield kube
    finally:
        await kube.stop()
