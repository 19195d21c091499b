"""What the conductor writes to a store that was emptied when nobody looked."""

import pytest
from prometheus_client import CollectorRegistry

from services.trainer import last_change
from services.trainer.champion import Champion
from services.trainer.metrics import TrainerMetrics
from services.trainer.settings import TrainerSettings
from services.trainer.succession import Good, LiveErrors
from services.trainer.trainer import STORE, WINDOW, Trainer
from shared.inference import BundleModel
from shared.lifecycle import Readiness
from tests.bundles import make_bundle
from tests.fakes.manual_clock import ManualClock


class Store:
    """A store that can be emptied."""

    def __init__(self):
        self.empty()

    def empty(self):
        self.blobs, self.pointer, self.memory, self.change = set(), None, None, None

    async def put(self, bundle):
        self.blobs.add(bundle.manifest.version)

    async def keeps(self, version):
        return version in self.blobs

    async def holds(self, version):
        return self.pointer == version and await self.keeps(version)

    async def publish(self, bundle, keep=()):
        await self.put(bundle)
        self.pointer = bundle.manifest.version

    async def save_memory(self, memory, change):
        self.memory, self.change = memory, change


def champion(at_ms: float) -> Champion:
    bundle = make_bundle(created_unix_ms=1_800_000_000_000.0 + at_ms)
    return Champion(bundle, BundleModel(bundle), saved=False)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def trainer(store):
    metrics = TrainerMetrics(CollectorRegistry())
    trainer = Trainer(TrainerSettings(), None, store, metrics, Readiness(STORE, WINDOW), ManualClock(1.0))
    yield trainer
    trainer._worker.shutdown()


async def test_what_goes_with_a_version_is_written_with_it_whatever_the_store_held_before(trainer, store):
    """Emptied after the memory was saved and before the version was: a pin would be gone for good."""
    trainer._learner.choose(champion(1))
    await trainer._publish_bundle()
    trainer._learner.choose(second := champion(2))
    trainer._learner.succession.pinned = second.version
    trainer._learner.succession.good = Good(champion(0), trainer._learner.calibrator, {}, LiveErrors(50))
    await trainer._save_memory()
    store.empty()
    await trainer._publish_bundle()
    await trainer._save_memory()
    assert store.pointer == second.version
    assert store.memory.pinned == second.version
    assert store.memory.good in store.blobs


async def test_why_a_version_serves_is_written_and_told_by_the_next_trainer(trainer, store):
    trainer._learner.choose(champion(1))
    trainer._changed("rolled_back_by_operator", "from x")
    await trainer._save_memory()
    assert store.change.reason == "rolled_back_by_operator"
    memory, change = last_change.decode(last_change.encode(store.memory, store.change))
    assert (memory, change) == (store.memory, store.change)
