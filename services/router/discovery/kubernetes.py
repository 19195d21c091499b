"""Endpoints, priorities and model names from Kubernetes: an InferencePool, or pods by a label selector.

Pods come and go at once: one that is being deleted is listed no longer from the event on, and the same address with
another pod behind it is another endpoint. An InferencePool that is deleted lists nothing; one that can't be read keeps
what it said. InferenceObjective and InferenceModelRewrite (`llm-d.ai/v1alpha2`) are read where they are installed.

Needs: list and watch of pods; for a pool also of inferencepools, inferenceobjectives and inferencemodelrewrites.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry

from services.router.discovery.endpoints import Listing
from services.router.discovery.kube_client import (
    SERVICE_ACCOUNT,
    KubeClient,
    KubeConfig,
    Reflector,
    event_counter,
)
from services.router.discovery.kube_objects import (
    Pod,
    PoolSpec,
    Rewrite,
    alias_rules,
    endpoints,
    objective,
    pod,
    pool_spec,
    rewrite,
)
from shared.clock import Clock
from shared.errors import ConfigurationError

_POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_OBJECTIVES: Final = "/apis/llm-d.ai/v1alpha2/namespaces/{}/inferenceobjectives"
_REWRITES: Final = "/apis/llm-d.ai/v1alpha2/namespaces/{}/inferencemodelrewrites"
_PODS: Final = "/api/v1/namespaces/{}/pods"

Rules = tuple[Mapping[str, Mapping[str, int]], Mapping[str, int] | None]
"""Models by weight for each name, and those for every other name."""


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """What to look for: `pool` (an InferencePool's name), or `fixed` (a selector and ports)."""

    namespace: str
    pool: str = ""
    fixed: PoolSpec | None = None
    hardware_label: str = "leadtime.ai/hardware-class"


def own_namespace(file: Path = SERVICE_ACCOUNT / "namespace") -> str:
    """The namespace of this pod; raises ConfigurationError outside of one."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigurationError("KUBERNETES_NAMESPACE: needed, since this is no pod with a service account") from None


class KubernetesSource:
    """One pool's endpoints. `run` until cancelled."""

    name = "kubernetes"

    def __init__(
        self,
        options: KubernetesOptions,
        config: KubeConfig,
        *,
        clock: Clock,
        registry: CollectorRegistry,
        rng: random.Random,
    ) -> None:
        self._options = options
        self._config = config
        self._clock = clock
        self._rng = rng
        self._events = event_counter(registry)
        self._pods: Reflector[Pod] | None = None
        self._spec: PoolSpec | None = options.fixed
        self._log = structlog.get_logger()
        self.listing: Listing = {}
        self.on_objectives: Callable[[Mapping[str, int]], None] | None = None
        """Called with priority by objective name after each change."""
        self.on_rewrites: Callable[[Rules], None] | None = None
        """Called with the rules after each change."""

    @property
    def confirmed_ms(self) -> float | None:
        return self._pods.confirmed_ms if self._pods is not None else None

    async def run(self, changed: Callable[[], None]) -> None:
        async with KubeClient(self._config) as client, asyncio.TaskGroup() as tasks:
            if self._options.pool:
                tasks.create_task(self._follow_objectives(client))
                tasks.create_task(self._follow_rewrites(client))
                await self._follow_pool(client, changed)
            else:
                await self._follow_pods(client, changed)

    def _reflector(self, client: KubeClient, path: str, convert: Callable[[Any], Any], kind: str, **more: Any) -> Any:
        return Reflector(
            client,
            path.format(self._options.namespace),
            convert,
            clock=self._clock,
            rng=self._rng,
            events=self._events,
            kind=kind,
            **more,
        )

    async def _follow_pool(self, client: KubeClient, changed: Callable[[], None]) -> None:
        """Watch the InferencePool; its pods are watched anew whenever it selects others."""
        other = asyncio.Event()
        pools: Reflector[PoolSpec] = self._reflector(
            client, _POOLS, pool_spec, "pool", field_selector=f"metadata.name={self._options.pool}"
        )
        watching = asyncio.create_task(pools.run(other.set), name="kubernetes pool")
        try:
            while True:
                await other.wait()
                other.clear()
                self._spec = next(iter(pools.objects.values()), None)
                if self._spec is None:
                    self._log.warning("no such InferencePool, or it selects nothing", pool=self._options.pool)
                    self.listing = {}
                    changed()
                    continue
                following = asyncio.create_task(self._follow_pods(client, changed), name="kubernetes pods")
                waiting = asyncio.create_task(other.wait())
                try:
                    # A pool that is changed in what doesn't concern us is converted to the same and wakes nobody.
                    await asyncio.wait({following, waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                for task in (watching, following):
                    if task.done() and not task.cancelled():
                        task.result()  # both are endless: one that ended has failed in a way nobody foresaw
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _follow_pods(self, client: KubeClient, changed: Callable[[], None]) -> None:
        spec = self._spec
        if spec is None:
            return
        pods: Reflector[Pod] = self._reflector(
            client,
            _PODS,
            lambda document: pod(document, self._options.hardware_label),
            "pod",
            label_selector=spec.selector,
        )

        def on_change() -> None:
            self.listing = endpoints(pods.objects.values(), spec.ports)
            changed()

        self._pods = pods
        await pods.run(on_change)

    async def _follow_objectives(self, client: KubeClient) -> None:
        found: Reflector[tuple[str, int]] = self._reflector(
            client, _OBJECTIVES, lambda document: objective(document, self._options.pool), "objective", optional=True
        )

        def on_change() -> None:
            if self.on_objectives is not None:
                self.on_objectives(dict(found.objects.values()))

        await found.run(on_change)

    async def _follow_rewrites(self, client: KubeClient) -> None:
        found: Reflector[Rewrite] = self._reflector(
            client, _REWRITES, lambda document: rewrite(document, self._options.pool), "rewrite", optional=True
        )

        def on_change() -> None:
            if self.on_rewrites is not None:
                self.on_rewrites(alias_rules(found.objects.values()))

        await found.run(on_change)
