"""Endpoints from Kubernetes, against a fake API server that lists and watches over real HTTP."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.router.discovery.follow import Discovery
from services.router.discovery.kube_client import KubeConfig
from services.router.discovery.kube_objects import PoolSpec
from services.router.discovery.kubernetes import KubernetesOptions, KubernetesSource
from services.router.request.tokens import TokenEstimator
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.scraper import ScrapeConfig, Scraper
from shared.clock import SystemClock
from shared.lifecycle import Readiness
from shared.samples import decode_decision
from sim.extproc_client import ExtProcClient
from sim.model_server import ModelServer
from sim.spec import ServerSpec
from tests.fakes.fake_kube import OBJECTIVES, PODS, POOLS, REWRITES, FakeKube, fake_kube, make_pod
from tests.integration.test_life_of_services import Service
from tests.servers import until

SELECTED = KubernetesOptions("ns", fixed=PoolSpec("app=vllm", (8000,)))
OF_POOL = KubernetesOptions("ns", pool="llm")


def pool_of(port: int = 8000, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "llm"},
        "spec": {"selector": {"matchLabels": labels or {"app": "vllm"}}, "targetPorts": [{"number": port}]},
    }


class Bed:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pool = PoolState(PoolConfig(), salt=b"s", tokens=TokenEstimator())
        self.readiness = Readiness()
        self.objectives: list[Any] = []
        self.rewrites: list[Any] = []

    def listed(self) -> set[str]:
        return {endpoint.address for endpoint in self.pool.table if not endpoint.retired}

    async def settles(self, *addresses: str) -> None:
        await until(lambda: self.listed() == set(addresses), f"{addresses} are listed")

    def events(self, event: str, kind: str = "pod") -> float:
        labels = {"kind": kind, "event": event}
        return self.registry.get_sample_value("leadtime_router_kubernetes_events_total", labels) or 0.0


@contextlib.asynccontextmanager
async def discovering(kube: FakeKube, options: KubernetesOptions = SELECTED, **config: Any) -> AsyncIterator[Bed]:
    bed, clock = Bed(), SystemClock()
    chosen = {"token_file": None, "ca_file": None, "watch_s": 30.0, "first_pause_s": 0.05, "absent_pause_s": 0.1}
    source = KubernetesSource(
        options,
        KubeConfig(url=kube.url, **{**chosen, **config}),
        clock=clock,
        registry=bed.registry,
        rng=random.Random(1),
    )
    source.on_objectives = bed.objectives.append
    source.on_rewrites = bed.rewrites.append
    discovery = Discovery(
        bed.pool, [source], clock=clock, registry=bed.registry, readiness=bed.readiness, old_after_ms=300.0
    )
    task = asyncio.create_task(discovery.run())
    try:
        yield bed
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_pods_that_come_and_go_are_followed_by_one_watch():
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            await kube.put(PODS, make_pod("b", "10.0.0.2", ready=False))
            await kube.put(PODS, make_pod("c", "10.0.0.3"))
            await bed.settles("10.0.0.1:8000", "10.0.0.3:8000")
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
            await kube.put(PODS, make_pod("a", "10.0.0.1", terminating=True))
            await kube.put(PODS, make_pod("c", "10.0.0.3", phase="Failed", reason="Evicted"))
            await bed.settles("10.0.0.2:8000")
            await kube.delete(PODS, "b")
            await bed.settles()
            assert len(kube.lists(PODS)) == len(kube.watches(PODS)) == 1
            (call,) = kube.watches(PODS)
            assert call.query["labelSelector"] == "app=vllm"
            assert call.query["allowWatchBookmarks"] == "true"


async def test_an_ended_watch_goes_on_from_the_last_bookmark():
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            kube.version = 500
            await kube.bookmark(PODS)
            await until(lambda: bed.events("bookmark") == 1, "the bookmark was seen")
            await kube.end_watches()
            await until(lambda: len(kube.watches(PODS)) == 2, "another watch")
            assert kube.watches(PODS)[1].query["resourceVersion"] == "501"
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8000")
            assert len(kube.lists(PODS)) == 1


@pytest.mark.parametrize("as_event", [False, True])
async def test_an_expired_version_is_followed_by_a_list_without_one(as_event):
    async with fake_kube(PODS) as kube:
        kube.gone_as_event = as_event
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            kube.collections[PODS].objects.pop("a")  # its event is lost
            kube.version += 10
            kube.forgotten = kube.version - 1
            await kube.end_watches()
            await bed.settles()
            assert bed.events("gone") == 1
            assert "resourceVersion" not in kube.lists(PODS)[1].query
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await bed.settles("10.0.0.2:8000")


async def test_a_server_that_forgets_every_version_is_not_stormed():
    async with fake_kube(PODS) as kube:
        kube.forgotten = 10**9
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube, first_pause_s=0.2) as bed:
            await bed.settles("10.0.0.1:8000")
            await asyncio.sleep(1.0)
            assert len(kube.calls) < 20


@pytest.mark.parametrize(
    "line", [b"not json\n", b"{}\n", b'{"type":"ADDED","object":{"metadata":{}}}\n', b"[]\n", b"7\n"]
)
async def test_a_line_that_cannot_be_read_costs_the_watch_and_nothing_else(line):
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            await kube.raw(PODS, line)
            await until(lambda: bed.events("unreadable") >= 1, "the line was refused")
            kube.collections[PODS].events.clear()
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8000")


@pytest.mark.parametrize("status", [401, 403, 500, 504])
async def test_an_api_that_refuses_keeps_the_endpoints_and_is_told(status):
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            kube.refuse = status
            await kube.end_watches()
            await until(lambda: "degraded" in bed.readiness.report(), "the age is told")
            assert bed.listed() == {"10.0.0.1:8000"}
            assert bed.readiness.ready
            kube.refuse = None
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await bed.settles("10.0.0.1:8000", "10.0.0.2:8000")
            await until(lambda: "degraded" not in bed.readiness.report(), "all is well again")


async def test_an_api_server_that_is_away_at_the_start_and_restarts_later_is_waited_for():
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        await kube.stop()
        async with discovering(kube) as bed:
            await until(lambda: bed.events("disconnected") >= 2, "it was tried")
            await kube.start()
            await bed.settles("10.0.0.1:8000")
            await kube.stop()
            await kube.delete(PODS, "a")
            await kube.put(PODS, make_pod("b", "10.0.0.2"))
            await kube.start()
            await bed.settles("10.0.0.2:8000")


async def test_another_pod_at_the_same_address_is_another_endpoint():
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube) as bed:
            await bed.settles("10.0.0.1:8000")
            bed.pool.set_ready("10.0.0.1:8000", True)
            before = bed.pool.table.get("10.0.0.1:8000").incarnations
            await kube.put(PODS, make_pod("b", "10.0.0.1", started="2026-11-30T11:00:00Z"))
            await until(lambda: bed.pool.table.get("10.0.0.1:8000").identity == "uid-b", "the new pod has the address")
            endpoint = bed.pool.table.get("10.0.0.1:8000")
            assert (endpoint.ready, endpoint.incarnations) == (False, before + 1)
            await kube.delete(PODS, "a")
            await kube.put(PODS, make_pod("c", "10.0.0.3"))
            await bed.settles("10.0.0.1:8000", "10.0.0.3:8000")


async def test_a_watch_that_lost_an_event_is_put_right_by_the_resync():
    async with fake_kube(PODS) as kube:
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube, resync_s=0.3, watch_s=1.0) as bed:
            await bed.settles("10.0.0.1:8000")
            kube.collections[PODS].objects.pop("a")
            await asyncio.sleep(0.4)
            await kube.end_watches()
            await bed.settles()


async def test_an_inference_pool_tells_which_pods_and_ports_and_may_change():
    async with fake_kube() as kube, discovering(kube, OF_POOL) as bed:
        await until(lambda: kube.watches(POOLS), "the pool is watched, which isn't there yet")
        assert kube.lists(POOLS)[0].query["fieldSelector"] == "metadata.name=llm"
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        await kube.put(POOLS, pool_of(8000))
        await bed.settles("10.0.0.1:8000")
        await kube.put(POOLS, pool_of(9000, app="vllm", tier="chat"))
        await bed.settles("10.0.0.1:9000")
        assert kube.lists(PODS)[-1].query["labelSelector"] == "app=vllm,tier=chat"
        await kube.delete(POOLS, "llm")
        await bed.settles()


async def test_objectives_and_rewrites_are_told_with_each_change():
    async with fake_kube() as kube:
        await kube.put(OBJECTIVES, {"metadata": {"name": "chat"}, "spec": {"priority": 7, "poolRef": {"name": "llm"}}})
        async with discovering(kube, OF_POOL) as bed:
            await until(lambda: bed.objectives == [{"chat": 7}], "the objective is known")
            rule = {"matches": [{"model": {"value": "chat"}}], "targets": [{"modelRewrite": "llama"}]}
            await kube.put(REWRITES, {"metadata": {"name": "r"}, "spec": {"poolRef": {"name": "llm"}, "rules": [rule]}})
            await until(lambda: bed.rewrites[-1:] == [({"chat": {"llama": 1}}, None)], "the rewrite is known")
            await kube.delete(OBJECTIVES, "chat")
            await until(lambda: bed.objectives[-1] == {}, "the objective is gone")


async def test_kinds_that_are_not_installed_are_no_fault_and_may_come_later():
    async with fake_kube(PODS, POOLS) as kube:
        await kube.put(POOLS, pool_of())
        await kube.put(PODS, make_pod("a", "10.0.0.1"))
        async with discovering(kube, OF_POOL) as bed:
            await bed.settles("10.0.0.1:8000")
            await until(lambda: bed.events("not_installed", "objective") >= 2, "it was looked for again")
            assert "degraded" not in bed.readiness.report()
            kube.collections[OBJECTIVES] = type(kube.collections[PODS])()
            document = {"metadata": {"name": "chat"}, "spec": {"priority": 1, "poolRef": {"name": "llm"}}}
            await kube.put(OBJECTIVES, document)
            await until(lambda: bed.objectives[-1:] == [{"chat": 1}], "installed since")


async def test_the_token_is_read_again_for_each_request(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("first\n")
    async with fake_kube(PODS) as kube, discovering(kube, token_file=token) as bed:
        await until(lambda: kube.watches(PODS), "it is watched")
        token.write_text("second")
        await kube.end_watches()
        await until(lambda: len(kube.watches(PODS)) == 2, "another watch")
        assert [call.authorization for call in kube.watches(PODS)] == ["Bearer first", "Bearer second"]
        token.unlink()
        await kube.end_watches()
        await until(lambda: bed.events("refused") >= 1, "without a token nothing is asked")


@contextlib.contextmanager
def scraping(bed: Bed) -> Iterator[None]:
    config = ScrapeConfig(idle_interval_ms=30.0, busy_interval_ms=30.0, max_backoff_ms=50.0)
    scraper = Scraper(bed.pool, clock=SystemClock(), registry=bed.registry, rng=random.Random(1), config=config)
    task = asyncio.create_task(scraper.run())
    try:
        yield
    finally:
        task.cancel()


async def test_a_pod_joins_after_health_and_models_and_leaves_at_once_when_it_terminates():
    spec = ServerSpec(name="s", models=("m",))
    async with fake_kube(PODS) as kube:
        server = ModelServer(spec, asyncio.get_running_loop())
        await server.start()
        host, port = "127.0.0.1", server.port
        options = KubernetesOptions("ns", fixed=PoolSpec("app=vllm", (port,)))
        async with discovering(kube, options) as bed:
            with scraping(bed):
                await kube.put(PODS, make_pod("a", host))
                await until(lambda: bed.pool.ready_endpoints == 1, "ready")
                assert bed.pool.table.get(f"{host}:{port}").models == {"m"}
                await kube.put(PODS, make_pod("a", host, terminating=True))
                await until(lambda: bed.pool.ready_endpoints == 0, "no candidate any more")
        server.close()


async def test_a_router_process_serves_an_inference_pool_with_its_rewrites_and_priorities(tmp_path: Path):
    """All of it together: the settings, the pool, its pods, an objective and a rewrite."""
    server = ModelServer(ServerSpec(name="s", models=("llama",)), asyncio.get_running_loop())
    await server.start()
    (tmp_path / "token").write_text("secret")
    async with fake_kube() as kube:
        await kube.put(POOLS, pool_of(server.port))
        await kube.put(PODS, make_pod("a", "127.0.0.1"))
        spec = {"priority": 7, "poolRef": {"name": "llm"}}
        await kube.put(OBJECTIVES, {"metadata": {"name": "urgent"}, "spec": spec})
        rule = {"matches": [{"model": {"value": "chat"}}], "targets": [{"modelRewrite": "llama"}]}
        await kube.put(REWRITES, {"metadata": {"name": "r"}, "spec": {"poolRef": {"name": "llm"}, "rules": [rule]}})
        router = Service(
            "router",
            tmp_path,
            LEADTIME_ROUTER_KUBERNETES_POOL="llm",
            LEADTIME_ROUTER_KUBERNETES_NAMESPACE="ns",
            LEADTIME_ROUTER_KUBERNETES_API=kube.url,
            LEADTIME_ROUTER_KUBERNETES_TOKEN_FILE=str(tmp_path / "token"),
            LEADTIME_ROUTER_TRUST_REQUEST_HEADERS="true",
            LEADTIME_ROUTER_PREDICTORS="",
        )
        body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()
        try:
            await router.start()
            await until(router.is_ready, "the pod has joined")
            assert kube.calls[-1].authorization == "Bearer secret"
            await until(lambda: kube.watches(REWRITES), "the rewrites are known")
            async with ExtProcClient(f"127.0.0.1:{router.extproc}") as client:
                headers = {"x-llm-d-inference-objective": "urgent"}
                answer = await client.pick("/v1/chat/completions", body, headers)
                assert answer.destinations == (f"127.0.0.1:{server.port}",)
                decision = decode_decision(answer.metadata or "")
                assert (decision.model, decision.priority) == ("llama", 7)
                await kube.put(PODS, make_pod("a", "127.0.0.1", terminating=True))

                async def gone() -> bool:
                    return (await client.pick("/v1/chat/completions", body)).status == 503

                await until(gone, "a terminating pod gets nothing any more")
        finally:
            await router.kill()
            server.close()
