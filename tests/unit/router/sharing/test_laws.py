"""Laws of the shared ledger over any network: nothing is counted twice, and when it is quiet all agree.

Hypothesis looks for short stories that break them; long ones come from seeds.
"""

import random
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.router.sharing.limits import ShareConfig
from tests.unit.router.sharing.network import A, B, Network, Router

CONFIG = ShareConfig(orphan_ms=5_000.0, forget_ms=20_000.0)
LEADS = {"r0": 0.0, "r1": 123_456.0, "r2": -900.0}
FATES = ("in order", "in order", "in order", "early", "twice", "lost", "late copy")


class World:
    """Three routers with clocks of their own; messages are lost, doubled, reordered and late; routers come and go."""

    def __init__(self) -> None:
        self.network = Network(*(Router(name, lead_ms=lead, config=CONFIG) for name, lead in LEADS.items()))
        self.running: dict[str, dict[str, str]] = {name: {} for name in LEADS}
        self.told: dict[tuple[str, int], frozenset[str]] = {(name, 0): frozenset() for name in LEADS}
        """What each router had under way when it sent a batch, by the batch's number."""
        self.born = len(LEADS)

    def router(self, draw: int) -> Router:
        routers = list(self.network.routers.values())
        return routers[draw % len(routers)]

    def dispatch(self, draw: int, address: str) -> None:
        router, decision_id = self.router(draw), next(self.network.ids)
        assert router.send(decision_id, address, self.network.now_ms)
        self.running[router.name][decision_id] = address

    def finish(self, draw: int, which: int, *, completed: bool) -> None:
        router = self.router(draw)
        own = self.running[router.name]
        if own:
            decision_id = list(own)[which % len(own)]
            assert router.finish(decision_id, self.network.now_ms, completed=completed)
            del own[decision_id]

    def first_token(self, draw: int, which: int) -> None:
        router = self.router(draw)
        own = self.running[router.name]
        if own:
            router.pool.observe_first_token(list(own)[which % len(own)], self.network.now_ms + router.lead_ms)

    def flush(self, draw: int) -> None:
        router = self.router(draw)
        self.network.flush(router.name)
        self.told.setdefault((router.name, router.share.sequence), frozenset(self.running[router.name]))

    def carry(self, which: int, fate: str) -> None:
        under_way = self.network.under_way
        if not under_way:
            return
        message = under_way.pop(0 if fate == "in order" else which % len(under_way))
        if fate != "lost":
            self.network.deliver(message)
        if fate == "twice":
            self.network.deliver(message)
        if fate == "late copy":
            under_way.append(message)

    def pass_time(self, ms: float) -> None:
        self.network.now_ms += ms
        for place, router in enumerate(self.network.routers.values()):
            router.share.tick(self.network.now_ms + router.lead_ms)
            self.flush(place)

    def replace(self, draw: int) -> None:
        """One dies, another comes."""
        gone = self.network.leave(self.router(draw).name)
        del self.running[gone.name]
        name = f"r{self.born}"
        self.born += 1
        self.network.join(Router(name, self.network.now_ms, lead_ms=gone.lead_ms + 7.0, config=CONFIG))
        self.running[name] = {}
        self.told[name, 0] = frozenset()

    def cut(self, draw: int, ms: float) -> None:
        """For so long nothing comes from or to a router."""
        name = self.router(draw).name
        until_ms = self.network.now_ms + ms
        while self.network.now_ms < until_ms:
            self.pass_time(60.0)
            self.network.under_way = [m for m in self.network.under_way if name not in {m.source, m.to}]
            for _ in range(len(self.network.under_way)):
                self.carry(0, "in order")

    def grow_quiet(self) -> None:
        """From here nothing is lost: all know all at once, and when orphans have gone all ledgers are the truth."""
        for place in range(len(self.network.routers)):
            self.flush(place)
        self.network.run(CONFIG.silent_ms + 600.0)
        for name, router in self.network.routers.items():
            self.told.setdefault((name, router.share.sequence), frozenset(self.running[name]))
            for other in self.network.routers.keys() - {name}:
                followed = router.share.followed(other)
                assert followed is not None
                assert followed[1] == self.running[other].keys()
        self.network.run(CONFIG.orphan_ms)
        addresses = [address for own in self.running.values() for address in own.values()]
        truth = (addresses.count(A), addresses.count(B))
        for router in self.network.routers.values():
            assert (router.name, router.loads(), router.share.orphans) == (router.name, truth, 0)
        self.check()

    def check(self) -> None:
        """What must hold at any moment."""
        assert self.network.faults() == []
        for name, router in self.network.routers.items():
            assert all(decision_id in router.pool.ledger for decision_id in self.running[name])
            for other in self.network.routers:
                followed = router.share.followed(other)
                # Whoever has followed a peer up to a batch has what the peer had when it sent it.
                if followed is not None:
                    assert followed[1] == self.told[other, followed[0]]


class Sharing(RuleBasedStateMachine):
    """Short stories."""

    @initialize()
    def start(self) -> None:
        self.world = World()

    @rule(draw=st.integers(0, 9), address=st.sampled_from([A, B]), told=st.booleans())
    def dispatch(self, draw: int, address: str, told: bool) -> None:
        self.world.dispatch(draw, address)
        if told:
            self.world.flush(draw)

    @rule(draw=st.integers(0, 9), which=st.integers(0, 99), completed=st.booleans(), told=st.booleans())
    def finish(self, draw: int, which: int, completed: bool, told: bool) -> None:
        self.world.finish(draw, which, completed=completed)
        if told:
            self.world.flush(draw)

    @rule(draw=st.integers(0, 9), which=st.integers(0, 99))
    def first_token(self, draw: int, which: int) -> None:
        self.world.first_token(draw, which)

    @rule(which=st.integers(0, 999), fate=st.sampled_from(FATES), messages=st.integers(1, 12))
    def carry(self, which: int, fate: str, messages: int) -> None:
        for _ in range(messages):
            self.world.carry(which, fate)

    @rule(ms=st.sampled_from([1.0, 60.0, 300.0, 2_000.0]))
    def pass_time(self, ms: float) -> None:
        self.world.pass_time(ms)

    @rule(draw=st.integers(0, 9), ms=st.sampled_from([600.0, 2_400.0]))
    def cut(self, draw: int, ms: float) -> None:
        self.world.cut(draw, ms)

    @rule(draw=st.integers(0, 9))
    def replace(self, draw: int) -> None:
        self.world.replace(draw)

    @rule()
    def grow_quiet(self) -> None:
        self.world.grow_quiet()

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.grow_quiet()


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def story(seed: int, steps: int) -> Counter[str]:
    """A long one; returns how often what happened at the routers, all together."""
    rng = random.Random(seed)
    world = World()
    happened: Counter[str] = Counter()

    def draw() -> int:
        return rng.randrange(1_000)

    for step in range(steps):
        act = rng.random()
        if act < 0.2:
            world.dispatch(draw(), rng.choice([A, B]))
        elif act < 0.38:
            world.finish(draw(), draw(), completed=rng.random() < 0.9)
        elif act < 0.42:
            world.first_token(draw(), draw())
        elif act < 0.55:
            world.flush(draw())
        elif act < 0.93:
            for _ in range(rng.randrange(5)):
                world.carry(draw(), rng.choice(FATES) if rng.random() < 0.5 else "in order")
        elif act < 0.99:
            world.pass_time(rng.choice([1.0, 20.0, 20.0, 60.0, 300.0]) if rng.random() < 0.98 else 2_000.0)
        elif act < 0.993:
            happened.update(asdict(world.router(0).share.counts))
            world.replace(0)
        elif act < 0.998:
            world.cut(draw(), rng.choice([600.0, 2_400.0]))
        else:
            world.grow_quiet()
        if step % 5 == 0:
            world.check()
    world.grow_quiet()
    for router in world.network.routers.values():
        happened.update(asdict(router.share.counts))
    return happened


@pytest.mark.parametrize("seed", range(4))
def test_long_stories_hold_the_laws_and_meet_every_trouble(seed: int) -> None:
    happened = story(seed, 3_000)
    troubles = ("duplicates", "gaps", "resent", "snapshots_taken", "peers_lost", "peers_returned", "orphans_by_age")
    assert {name: happened[name] > 0 for name in troubles} == dict.fromkeys(troubles, True)
