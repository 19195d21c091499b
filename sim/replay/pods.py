"""The pool's pods on their way through a run: requests reach them, fail over from them, end there; pods die and return.

A pod that fails takes its requests with it: those without a first token go on to the next endpoint of their list, as
Envoy's retry does, the others are lost. It refuses requests until it is back, with an empty cache and a new process.
Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.samples import DecisionMetadata, Outcome
from sim.engine import EngineRequest, RequestTooLongError
from sim.jump_engine import JumpEngine, Noise, Running
from sim.replay.events import Events
from sim.replay.options import Failure, RunOptions, Speed
from sim.replay.pool import Pod, PodSpec
from sim.replay.routers import Router
from sim.replay.trace import ReplayRequest


@dataclass(slots=True)
class Flight:
    """One request between decision and end."""

    place: int
    request: ReplayRequest
    decision_id: str
    router: Router
    metadata: DecisionMetadata
    received_ms: float
    attempt: int = 0
    pod: int = -1
    arrived_ms: float = 0.0


class Pods:
    """All pods, and the requests that are with them or on their way, by the id that their engines know."""

    def __init__(
        self,
        specs: Sequence[PodSpec],
        rngs: Sequence[np.random.Generator],
        events: Events,
        options: RunOptions,
        on_first: Callable[[Flight, float], None],
        on_end: Callable[[Flight, Outcome, float, Running | None], None],
    ) -> None:
        """`rngs`: one a pod, of its steps' noise. The callbacks are told of a request's first token and of its end."""
        self._events = events
        self._to_pod_ms = options.to_pod_ms
        self._on_first = on_first
        self._on_end = on_end
        self.flights: dict[str, Flight] = {}
        self.all = [Pod(place, spec) for place, spec in enumerate(specs)]
        for pod, rng in zip(self.all, rngs, strict=True):
            noise = Noise(options.noise, rng)
            pod.engine = JumpEngine(pod.spec.profile, pod.spec.limits, noise, self._first, self._finished)
        self.by_address = {pod.address: pod for pod in self.all}

    def _first(self, running: Running, now_ms: float) -> None:
        self._on_first(self.flights[running.request.request_id], now_ms)

    def _finished(self, running: Running, now_ms: float) -> None:
        self._on_end(self.flights[running.request.request_id], Outcome.OK, now_ms, running)

    def send(self, flight: Flight, request: EngineRequest) -> None:
        """It is on its way to the first endpoint of its list."""
        self.flights[flight.decision_id] = flight
        self._events.at(self._events.now_ms + self._to_pod_ms, self._reach, (flight, request))

    def _reach(self, now_ms: float, what: tuple[Flight, EngineRequest]) -> None:
        """A request arrives at the next endpoint of its list."""
        flight, request = what
        pod = self.by_address[flight.metadata.endpoints[flight.attempt].address]
        if not pod.up or pod.engine is None:
            self._retry(flight, request, now_ms)
            return
        flight.pod, flight.arrived_ms = pod.place, now_ms
        self._advance(pod, now_ms)
        try:
            pod.engine.submit(request, now_ms)
        except RequestTooLongError:
            self._on_end(flight, Outcome.CLIENT_ERROR, now_ms, None)
            return
        self._wake(pod)

    def _retry(self, flight: Flight, request: EngineRequest, now_ms: float) -> None:
        if flight.attempt + 1 < len(flight.metadata.endpoints):
            flight.attempt += 1
            self._events.at(now_ms + self._to_pod_ms, self._reach, (flight, request))
        else:
            self._on_end(flight, Outcome.UPSTREAM_ERROR, now_ms, None)

    def _wake(self, pod: Pod) -> None:
        if pod.engine is not None and pod.engine.wake_ms < math.inf:
            self._events.at(pod.engine.wake_ms, self._woken, (pod, pod.engine))

    def _woken(self, now_ms: float, what: tuple[Pod, JumpEngine]) -> None:
        pod, engine = what
        if pod.engine is engine and engine.wake_ms <= now_ms:  # else its stretch was cut short, or it died
            self._advance(pod, now_ms)
            self._wake(pod)

    def _advance(self, pod: Pod, now_ms: float) -> None:
        if pod.engine is not None and pod.engine.wake_ms <= now_ms:
            pod.engine.advance(now_ms)

    def fail(self, now_ms: float, failure: Failure) -> None:
        pod = self.all[failure.pod]
        if pod.engine is None:
            return
        self._advance(pod, now_ms)
        pod.up = False
        for running in pod.engine.kill():
            flight = self.flights[running.request.request_id]
            if running.first_token_ms is None:
                self._retry(flight, running.request, now_ms)
            else:
                self._on_end(flight, Outcome.UPSTREAM_RESET, now_ms, running)
        if failure.back_ms < math.inf:
            self._events.at(failure.back_ms, self._return, pod)

    def _return(self, now_ms: float, pod: Pod) -> None:
        pod.started_s = 1.0 + now_ms / 1e3
        pod.up = True

    def change_speed(self, _: float, change: Speed) -> None:
        """The step under way ends as it was planned."""
        pod = self.all[change.pod]
        if pod.engine is not None:
            pod.engine.profile = pod.spec.profile.scaled(change.speed)
