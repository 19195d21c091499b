"""Routers share their ledger over a real NATS: through its restarts, and through their own comings and goings."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.router.nats_link import NatsLink
from services.router.sharing.bus import LedgerBus
from services.router.sharing.limits import ShareConfig
from shared.clock import SystemClock
from shared.names import ledger_subject
from shared.samples import Outcome
from shared.settings import NatsSettings
from tests.samples import make_sample
from tests.servers import NatsServer, until
from tests.unit.router.sharing.network import A, B, Router, request

CLOCK = SystemClock()


@dataclass
class Sharing:
    """A router's state, its share and its connection, running."""

    router: Router
    link: NatsLink
    bus: LedgerBus
    registry: CollectorRegistry
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, decision_id: str, address: str, prompt: bytes = b"p" * 2_048) -> None:
        assert self.router.send(decision_id, address, CLOCK.monotonic_ms(), request(prompt))

    def finish(self, decision_id: str) -> None:
        assert self.router.finish(decision_id, CLOCK.monotonic_ms())

    async def stop(self) -> None:
        """As a crash: no word."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def sharing(server: NatsServer, *names: str, config: ShareConfig | None = None) -> AsyncIterator[list[Sharing]]:
    running: list[Sharing] = []
    try:
        running += [start(server, name, config) for name in names]
        await all_know_each_other(*running)
        yield running
    finally:
        for one in running:
            await one.stop()


def start(server: NatsServer, name: str, config: ShareConfig | None = None) -> Sharing:
    registry = CollectorRegistry()
    router = Router(name, CLOCK.monotonic_ms(), config=config)
    link = NatsLink(NatsSettings(servers=server.url).connect_options(), registry)
    bus = LedgerBus("default", router.share, link, CLOCK, registry, checks=True)
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(bus.run())]
    return Sharing(router, link, bus, registry, tasks)


async def all_know_each_other(*routers: Sharing) -> None:
    await until(
        lambda: all(
            one.router.share.live_peers == len(routers) - 1
            and all(not peer["behind"] for peer in one.router.share.describe(0.0) if peer["live"])
            for one in routers
        ),
        "all know each other",
    )


async def all_count(loads: tuple[int, int], *routers: Sharing) -> None:
    await until(lambda: all(one.router.loads() == loads for one in routers), f"all count {loads}")
    assert [fault for one in routers for fault in one.router.share.faults()] == []


async def test_what_one_dispatches_all_count_in_and_out(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two", "three") as routers:
        for number in range(30):
            routers[number % 3].send(str(number), A if number % 2 else B)
        await all_count((15, 15), *routers)
        for number in range(30):
            routers[number % 3].finish(str(number))
        await all_count((0, 0), *routers)
        for one in routers:
            assert one.registry.get_sample_value("leadtime_router_ledger_delay_seconds_count") > 0
            assert one.registry.get_sample_value("leadtime_router_peers") == 2


async def test_a_newcomer_is_given_a_snapshot_and_the_prefixes(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two") as routers:
        routers[0].send("a", A, b"q" * 8_192)
        routers[1].send("b", B)
        await all_count((1, 1), *routers)
        newcomer = start(nats, "three")
        try:
            await all_know_each_other(*routers, newcomer)
            await all_count((1, 1), *routers, newcomer)
            state = newcomer.router.pool

            def knows_the_prompt() -> bool:
                match = state.snapshot(request(b"q" * 8_192), None, CLOCK.monotonic_ms())[1]
                return bool(match.matched_tokens[state.table.get(A).slot] > 0)

            await until(knows_the_prompt, "it knows whose cache has the prompt")
        finally:
            await newcomer.stop()


async def test_without_nats_each_goes_on_alone_and_afterwards_all_agree(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two", config=ShareConfig(silent_ms=500.0)) as (one, two):
        one.send("before", A)
        await all_count((1, 0), one, two)
        await nats.kill()
        await until(lambda: one.router.share.live_peers + two.router.share.live_peers == 0, "both are alone")
        one.send("alone", B)
        two.send("alone too", B)
        one.finish("before")
        assert (one.router.loads(), two.router.loads()) == ((0, 1), (1, 1))
        await until(
            lambda: one.registry.get_sample_value("leadtime_router_ledger_unsent_total") > 0, "what is lost is counted"
        )
        await nats.start()
        await all_know_each_other(one, two)
        await all_count((0, 2), one, two)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CLIENT_ABORT])
async def test_requests_of_a_dead_router_count_until_their_outcome(nats: NatsServer, outcome: Outcome) -> None:
    async with sharing(nats, "one", "two", config=ShareConfig(silent_ms=500.0)) as (one, two):
        two.send("a", A)
        await all_count((1, 0), one, two)
        await two.stop()
        await until(lambda: one.router.share.orphans == 1, "its request is an orphan")
        assert one.router.loads() == (1, 0)
        for _ in range(2):
            one.router.pool.observe_outcome(make_sample("a", endpoint=A, outcome=outcome), CLOCK.monotonic_ms())
        assert one.router.loads() == (0, 0)
        assert one.router.share.counts.orphans_by_outcome == 1


async def test_a_router_that_stops_says_so(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two") as (one, two):
        await two.bus.leave()
        await two.stop()
        await until(lambda: one.router.share.live_peers == 0, "it is known to be gone", timeout_s=1.0)


async def test_the_debug_mode_finds_counts_and_names_what_is_inconsistent(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two") as (one, _):
        one.send("a", A)
        ledger, slot = one.router.pool.ledger, one.router.pool.table.get(A).slot
        tokens = {"input_tokens": 1.0, "uncached_tokens": 1.0, "expected_output_tokens": None}
        with capture_logs() as logs:
            ledger.add("nobody's", slot, predicted_ttft_ms=None, now_ms=CLOCK.monotonic_ms(), **tokens)

            def counted() -> bool:
                return bool(one.registry.get_sample_value("leadtime_router_ledger_faults_total"))

            await until(counted, "the inconsistency is counted")
        assert {
            "event": "ledger inconsistent",
            "faults": ["nobody's is nobody's"],
            "count": 1,
            "log_level": "error",
        } in logs


async def test_damage_on_the_subject_is_counted_and_does_no_harm(nats: NatsServer) -> None:
    async with sharing(nats, "one", "two") as (one, two):
        await until(lambda: one.link.connected, "connected")
        await one.link.publish(ledger_subject("default"), b"\x91\xc0")
        await until(lambda: two.router.share.counts.invalid == 1, "it is counted")
        one.send("a", A)
        await all_count((1, 0), one, two)
