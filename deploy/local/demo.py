"""`leadtime demo`: the whole system on real parts, learning and then measured under three policies.

The conductor: start the stack, let the model learn from a first load, then send the same arrivals under each policy,
with the simulated caches emptied and the router's prefix index forgotten in between; read what came of it from the load
client, the router, the simulators and the samples. What it says is computed by `results.py`, shown by `screen.py`.

The trainer goes on learning during all phases: every phase has the same work beside it. The policies are measured in
one order, so leadtime's model is the one that has learned longest; its error is reported for each phase.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from deploy.local import scenario
from deploy.local.api import serve_api
from deploy.local.control import ControlError, RouterControl, RouterStats, SimulatorControl, call
from deploy.local.envoy import parse_endpoint
from deploy.local.layout import StackConfig
from deploy.local.results import PhaseOutcome, report
from deploy.local.sample_watch import SampleWatch, watch_samples
from deploy.local.screen import PhaseProgress, Screen
from deploy.local.stack import Stack
from sim.loadgen import LoadTarget, RequestResult, send_load, summarize
from sim.workload import WorkloadRequest

LEARNING: Final = "learning"
_DRAIN_TIMEOUT_S: Final = 30.0
_DRAIN_LOOK_S: Final = 0.1
_SAMPLES_TIMEOUT_S: Final = 3.0
_LOOK_INTERVAL_S: Final = 0.5
_FIRST_BUNDLE_TIMEOUT_S: Final = 15.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to play and where to keep the logs."""

    workload: scenario.Workload
    run_dir: Path
    environment: dict[str, str]


async def run_demo(options: DemoOptions, screen: Screen, make_stack: Callable[..., Stack]) -> dict[str, Any]:
    """Run it whole and return the report; whatever was started is stopped when this returns or raises."""
    async with serve_api() as api_url:
        config = StackConfig(
            run_dir=options.run_dir,
            simulated=scenario.servers(options.workload.seed),
            api=parse_endpoint(api_url),
            environment=options.environment,
        )
        stack = make_stack(config, hardware_classes=scenario.hardware_classes(), report=screen.step)
        async with stack, watch_samples(stack.addresses.nats_url, config.pool) as watch:
            demo = _Demo(stack, watch, screen)
            return await unless_a_child_ends(stack, demo.play(options.workload))


async def unless_a_child_ends(stack: Stack, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; raises ChildError as soon as a process of the stack ends by itself."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(stack.ended())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            await watching
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class _Demo:
    """One run on a stack that is up."""

    def __init__(self, stack: Stack, watch: SampleWatch, screen: Screen) -> None:
        self._watch = watch
        self._screen = screen
        self._http = stack.http
        self._gateway_url = stack.addresses.gateway_url
        self._router = RouterControl(stack.http, stack.addresses.router_url)
        self._simulator = SimulatorControl(stack.http, stack.addresses.sim_control_url or "")
        self._processes = {child.name: child.pid for child in stack.supervisor.children if child.pid}

    async def play(self, workload: scenario.Workload) -> dict[str, Any]:
        greeting = await call(self._http, "GET", f"{self._gateway_url}/api/hello")
        self._screen.step(f"/api beside /v1 answers: {greeting['message']}")
        requests = scenario.measured(workload)
        lessons = scenario.learning(workload)
        # The collector of Python's garbage need not walk over a thousand prepared requests while the load runs.
        gc.collect()
        gc.freeze()
        learning = await self._phase(LEARNING, "leadtime", lessons, scenario.LEARNING_SECONDS)
        await self._first_bundle()
        phases = [await self._phase(policy, policy, requests, workload.seconds) for policy in scenario.POLICIES]
        return {
            **report(learning, phases),
            "seconds": workload.seconds,
            "rate_per_s": workload.rate_per_s,
            "seed": workload.seed,
        }

    async def _phase(self, name: str, policy: str, requests: Sequence[WorkloadRequest], seconds: float) -> PhaseOutcome:
        """Prepare, send, drain; what it looked like from everywhere."""
        await self._drained()
        await self._simulator.reset()
        await self._router.forget_prefixes()
        await self._router.choose_profile(policy)
        await self._router.reset_stats()
        results: list[RequestResult] = []
        look = asyncio.ensure_future(self._look(name, results, len(requests), seconds))
        since_unix_ms = time.time() * 1000
        cpu_before, began_s = self._cpu_seconds(), time.monotonic()
        try:
            await send_load(requests, LoadTarget(self._gateway_url, scenario.MODEL), results.append)
        finally:
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)
        lasted_s = time.monotonic() - began_s
        cpu_after = self._cpu_seconds()
        load = summarize(results)
        # Envoy sends its entries every 100 ms; the samples follow.
        await self._watch.until(load.requests - load.failed, since_unix_ms, _SAMPLES_TIMEOUT_S)
        stats, simulator = await self._router.stats(), await self._simulator.stats()
        self._screen.end_phase(self._progress(name, results, len(requests), stats))
        return PhaseOutcome(
            name=name,
            load=load,
            simulator_lateness_mean_ms=simulator.lateness_mean_ms,
            simulator_lateness_p99_ms=simulator.lateness_p99_ms,
            served_by=stats.served_by,
            bundles=stats.bundles,
            samples=self._watch.received_since(since_unix_ms),
            cpu_share={
                process: round((cpu_after[process] - before) / lasted_s, 4)
                for process, before in cpu_before.items()
                if process in cpu_after
            },
        )

    async def _look(self, name: str, results: list[RequestResult], total: int, seconds: float) -> None:
        """Show how it goes, twice a second."""
        self._screen.begin_phase(name, total, seconds)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                stats = await self._router.stats()
            except ControlError:  # only the display is poorer for it; the phase itself will tell
                continue
            self._screen.show(self._progress(name, results, total, stats))

    @staticmethod
    def _progress(name: str, results: list[RequestResult], total: int, stats: RouterStats) -> PhaseProgress:
        return PhaseProgress(
            name=name,
            total=total,
            done=len(results),
            failed=sum(result.error is not None for result in results),
            ttft_ms=sorted(result.ttft_ms for result in results if result.ttft_ms is not None),
            served_by=stats.served_by,
            bundles=len(stats.bundles),
        )

    async def _drained(self) -> None:
        """Wait until the router counts no request as under way."""
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while (await self._router.stats()).inflight_requests:  # noqa: ASYNC110 - another process's event
                    await asyncio.sleep(_DRAIN_LOOK_S)
        except TimeoutError:
            raise ControlError(
                f"the router's ledger still counts requests {_DRAIN_TIMEOUT_S:g} s after the last answer"
            ) from None

    async def _first_bundle(self) -> None:
        """The measured phases begin with a model, or say at the end that there was none."""
        with_model = {"predictor", "in_process"}
        until_s = time.monotonic() + _FIRST_BUNDLE_TIMEOUT_S
        waiting = False
        while time.monotonic() < until_s:
            served_by = (await self._router.stats()).served_by
            if any(served_by.get(rung) for rung in with_model):
                return
            if not waiting:
                waiting = True
                self._screen.step("waiting for the first bundle")
            # One small request at a time shows which rung answers.
            probe = WorkloadRequest(0, 0.0, 2, "probe", "probe", messages=(("user", "ping"),))
            await send_load([probe], LoadTarget(self._gateway_url, scenario.MODEL))
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _cpu_seconds(self) -> dict[str, float]:
        """Processor time so far, by process; the load client's own under `demo`."""
        seconds = {}
        for name, pid in {**self._processes, "demo": psutil.Process().pid}.items():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            seconds[name] = times.user + times.system
        return seconds
