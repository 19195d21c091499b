"""Routers that share a ledger over a network which a test holds in its hands: no sockets, no clock of its own."""

import itertools
from dataclasses import dataclass

from services.router.request.inference_request import InferenceRequest
from services.router.request.tokens import TokenEstimator
from services.router.sharing.limits import ShareConfig
from services.router.sharing.share import LedgerShare
from services.router.state.pool import PoolConfig, PoolState
from services.router.state.vllm_metrics import Engine, EngineMetrics

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
SALT = b"a salt that all have"


def request(prompt: bytes = b"p" * 2_048, tokens: float = 500.0) -> InferenceRequest:
    return InferenceRequest(
        model="m", prompt=prompt, input_tokens=tokens, max_tokens=50, streamed=True, text_bytes=len(prompt)
    )


def metrics(waiting: float = 0.0, running: float = 0.0, start_s: float = 100.0, **more) -> EngineMetrics:
    return EngineMetrics(Engine.VLLM, waiting, running, 0.25, process_start_s=start_s, **more)


class Router:
    """One router's state and its share. `lead_ms`: how far its clock is before the network's."""

    def __init__(
        self,
        name: str,
        now_ms: float = 0.0,
        *,
        addresses=(A, B),
        salt: bytes | None = SALT,
        lead_ms: float = 0.0,
        config: ShareConfig | None = None,
    ) -> None:
        self.name = name
        self.lead_ms = lead_ms
        self.pool = PoolState(PoolConfig(), salt=salt or name.encode(), tokens=TokenEstimator())
        self.share = LedgerShare(name, self.pool, salt=salt, config=config)
        self.doubts: list[str] = []
        self.pool.on_upstream_failure = self.doubts.append
        for address in addresses:
            self.list(address, now_ms)

    def list(self, address: str, now_ms: float) -> None:
        self.pool.add_endpoint(address, now_ms=now_ms + self.lead_ms)
        self.pool.set_models(address, frozenset({"m"}))
        self.pool.set_ready(address, ready=True)

    def send(self, decision_id: str, address: str, now_ms: float, what: InferenceRequest | None = None) -> bool:
        what = what or request()
        now_ms += self.lead_ms
        _, match = self.pool.snapshot(what, None, now_ms)
        return self.pool.dispatch(decision_id, address, what, match, predicted_ttft_ms=100.0, now_ms=now_ms)

    def finish(self, decision_id: str, now_ms: float, *, completed: bool = True) -> bool:
        return self.pool.finish(decision_id, now_ms + self.lead_ms, completed=completed)

    def probe(self, address: str, now_ms: float, seen: EngineMetrics, *, ready: bool = True) -> None:
        self.pool.observe_scrape(address, seen, now_ms + self.lead_ms)
        self.share.probed(address, now_ms + self.lead_ms, ready=ready, metrics=seen)

    def loads(self) -> tuple[int, int]:
        return self.pool.in_flight_at(A), self.pool.in_flight_at(B)


@dataclass
class Message:
    source: str
    to: str
    payload: bytes


class Network:
    """Holds what is under way, one message a receiver; a test delivers, loses, doubles and reorders it."""

    def __init__(self, *routers: Router, now_ms: float = 1_000.0) -> None:
        self.now_ms = now_ms
        self.routers = {router.name: router for router in routers}
        self.under_way: list[Message] = []
        self.ids = map(str, itertools.count())

    def join(self, router: Router) -> None:
        self.routers[router.name] = router

    def leave(self, name: str) -> Router:
        """As a crash: it says nothing and hears nothing any more."""
        self.under_way = [message for message in self.under_way if message.to != name]
        return self.routers.pop(name)

    def flush(self, name: str) -> None:
        router = self.routers[name]
        for out in router.share.flush(self.now_ms + router.lead_ms):
            for to in self.routers:
                if to != name and out.to in {None, to}:
                    self.under_way.append(Message(name, to, out.payload))

    def deliver(self, message: Message) -> None:
        router = self.routers.get(message.to)
        if router is not None:
            router.share.receive(message.payload, self.now_ms + router.lead_ms)

    def run(self, ms: float, step_ms: float = 50.0) -> None:
        """Let time pass on a network that loses nothing."""
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms += step_ms
            for name, router in self.routers.items():
                router.share.tick(self.now_ms + router.lead_ms)
                router.pool.advance(self.now_ms + router.lead_ms)
                self.flush(name)
            while self.under_way:
                self.deliver(self.under_way.pop(0))

    def faults(self) -> list[str]:
        return [f"{router.name}: {fault}" for router in self.routers.values() for fault in router.share.faults()]
