"""The conductor: samples → window and calibration → fit when due → champion → Redis.

Holds the state of one pool's training and the order of things; the work is done in the modules named after it. While
another trainer holds the pool's lease this one stands by. Fits run in one worker thread, so that intake, probes and
calibrations go on (XGBoost and ONNX Runtime release the interpreter lock). All writes to Redis are made by one task, so
that a bundle always comes before its calibrations; what can't be written is kept and written when Redis is back.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final

import structlog
from redis.exceptions import RedisError

from services.trainer.champion import Champion
from services.trainer.consumer import SampleConsumer
from services.trainer.cycle import CycleReport, TensorOutcome, run_cycle
from services.trainer.export import BoosterToGraph
from services.trainer.intake import Intake, Taken
from services.trainer.last_change import Change
from services.trainer.learner import Learner
from services.trainer.lease import Lease, LeaseLostError
from services.trainer.metrics import TrainerMetrics
from services.trainer.publish import KEEP_BUNDLES, BundleStore
from services.trainer.settings import TrainerSettings
from services.trainer.succession import Memory
from services.trainer.views import bundle_view, report_view, version_view
from shared.cancellation import raise_if_cancelled
from shared.clock import Clock
from shared.errors import ContractError, LeadtimeError
from shared.features import SCHEMA
from shared.lifecycle import Readiness
from shared.prediction import TARGETS
from shared.prior import PRIOR_PREFIX, is_prior

STORE: Final = "redis"
WINDOW: Final = "window"
_RETRY_S: Final = 0.5
_DECISIONS_KEPT: Final = 50


class NotNowError(LeadtimeError):
    """An operator's wish that can't be met in the present state."""


class UnknownVersionError(LeadtimeError):
    """A version that isn't kept; `kept` lists those that are."""

    def __init__(self, version: str, kept: Sequence[str]) -> None:
        super().__init__(f"version {version[:64]} isn't kept; kept are: {', '.join(kept) or 'none'}")


class Trainer:
    """One pool's trainer. `run` is its one task."""

    def __init__(
        self,
        settings: TrainerSettings,
        lease: Lease,
        store: BundleStore,
        metrics: TrainerMetrics,
        readiness: Readiness,
        clock: Clock,
        tensor: BoosterToGraph | None = None,
    ) -> None:
        """`readiness` has the conditions STORE and WINDOW. `tensor` makes the tensor rendering, where there is one."""
        self._settings = settings
        self._lease = lease
        self._store = store
        self._metrics = metrics
        self._readiness = readiness
        self._clock = clock
        self._log = structlog.get_logger()
        self._learner = Learner(
            settings.cycle_options(tensor),
            settings.cadence(),
            window_recent_rows=settings.window_recent_rows,
            window_bin_rows=settings.window_bin_rows,
        )
        self._consumer = SampleConsumer(
            settings,
            Intake(settings.pool, remembered=settings.remembered_ids),
            self.take,
            self._on_rebuilt,
            metrics,
            clock,
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="fit")
        self._active = False
        self._store_failing = False
        self._published: str | None = None
        self._sequence = 0
        self._calibrated_samples = -1
        self._next_store_check_ms = 0.0
        self._adopted = asyncio.Event()
        self._report: CycleReport | None = None
        # By version, of those that may serve again.
        self._fits: dict[str, CycleReport] = {}
        self._remembered: tuple[Memory, Change | None] | None = None
        self._last_change: Change | None = None
        self._told_alarm: str | None = None
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_DECISIONS_KEPT)
        metrics.watch(
            window_rows=self._learner.window.known,
            calibration_sequence=lambda: self._sequence,
            active=lambda: self._active,
            bundle_age_ms=self._bundle_age_ms,
            degenerate_share=lambda: self._learner.health.degenerate_share,
            pinned=lambda: self._learner.succession.pinned is not None,
        )

    async def run(self) -> None:
        """Train while the lease is held, stand by while it isn't, until cancelled."""
        try:
            while True:
                await self._until_leased()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._hold(), name="lease")
                        tasks.create_task(self._consumer.run(), name="samples")
                        tasks.create_task(self._train(), name="train")
                        tasks.create_task(self._publish(), name="publish")
                except* LeaseLostError:
                    self._log.warning("another trainer holds the lease; standing by")
                finally:
                    self._active = False
        finally:
            self._worker.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._lease.release()

    # Lease

    async def _until_leased(self) -> None:
        standing_by = False
        while True:
            try:
                held = await self._lease.claim()
                if held:
                    await self._restore()
                    self._active = True
                    return
            except (RedisError, OSError, TimeoutError) as error:
                self._store_failed(error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._store_answered()
            self._readiness.met(WINDOW)
            if not standing_by:
                standing_by = True
                self._log.info("another trainer is active; standing by")
            await asyncio.sleep(self._lease.interval_s)

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self._lease.interval_s)
            try:
                if not await self._lease.claim():
                    raise LeaseLostError(self._lease.key)
                self._store_answered()
            except (RedisError, OSError, TimeoutError) as error:
                self._store_failed(error)
            raise_if_cancelled()

    async def _restore(self) -> None:
        """Take what Redis holds as champion; a bundle that can't be used is left, and a new one replaces it."""
        try:
            saved = await self._store.load()
        except ContractError as error:
            self._log.warning("saved bundle refused", reason=str(error))
            saved = None
        self._sequence = max(self._sequence, await self._store.calibration_sequence())
        await self._store.kept()
        memory, change = await self._store.load_memory()
        good = await self._kept(memory.good) if memory.good else None
        if memory.pinned is not None and (saved is None or saved.version != memory.pinned):
            saved = await self._kept(memory.pinned) or saved
        self._store_answered()
        self._readiness.unmet(WINDOW, "rebuilding from the stream")
        if saved is not None and self._learner.restore(saved):
            self._published = saved.version if saved.version != memory.pinned else None
            self._log.info("saved bundle loaded", version=saved.version, pinned=memory.pinned)
        self._learner.remember(memory, good)
        self._last_change = change
        if change is not None and (told := _told(change)) not in self._decisions:
            self._decisions.appendleft(told)

    async def _kept(self, version: str) -> Champion | None:
        try:
            return await self._store.load_version(version)
        except ContractError as error:
            self._log.warning("kept bundle refused", version=version, reason=str(error))
            return None

    # Intake

    def take(self, batch: Sequence[Taken], replayed: bool) -> None:
        """Put a batch into the window and let the calibration see it; `replayed` ones are seen when all are in."""
        self._learner.take(batch, self._clock.monotonic_ms(), replayed=replayed)
        censored = sum(taken.censored_ms is not None for taken in batch)
        self._metrics.censored.inc(censored)
        self._metrics.samples.inc(len(batch) - censored)
        if not replayed:
            self._guard()

    def _guard(self) -> None:
        """Leave a champion whose live error has doubled; while one is pinned, say it and leave it."""
        before, alarm = self._learner.champion, self._learner.succession.alarm()
        if alarm is None or before is None:
            self._told_alarm = None
            return
        if self._learner.guard() is None:
            if self._told_alarm != before.version:
                self._told_alarm = before.version
                self._log.warning("live error has doubled, but the version is pinned", detail=alarm)
            return
        self._metrics.rolled_back("live_error")
        self._changed("rolled_back", f"from {before.version}: {alarm}")

    def _on_rebuilt(self) -> None:
        self._readiness.met(WINDOW)
        self._learner.rebuilt()

    # Training

    async def _train(self) -> None:
        pause_s = min(0.5, self._settings.retrain_interval_ms / 4e3)
        while True:
            await asyncio.sleep(pause_s)
            if self._consumer.rebuilt and self._learner.due(self._clock.monotonic_ms()):
                await self._cycle()

    async def _cycle(self) -> None:
        began_ms = self._clock.monotonic_ms()
        snapshot, created_unix_ms = self._learner.begin(began_ms, self._clock.unix_ms())
        loop = asyncio.get_running_loop()
        try:
            report = await loop.run_in_executor(
                self._worker, run_cycle, snapshot, self._learner.champion, self._learner.options, created_unix_ms
            )
        except Exception:  # whatever a library raises on these rows: the champion stays, and new rows get a new try
            self._metrics.cycle_ended("error", self._clock.monotonic_ms() - began_ms, 0.0)
            self._log.exception("cycle failed", samples=len(snapshot))
            return
        self._report = report = self._learner.permitted(report)
        self._record(report)
        if not self._learner.adopt(report, snapshot) or report.champion is None:
            return
        self._fits[report.champion.version] = replace(report, champion=None, calibrator=None)
        for version in list(self._fits)[:-KEEP_BUNDLES]:
            if version not in self._to_keep():
                del self._fits[version]
        for target in TARGETS:
            if target in report.metrics:
                self._metrics.champion_error(target, report.metrics[target].mape)
        self._adopted.set()

    def _record(self, report: CycleReport) -> None:
        verdict = report.verdict
        self._metrics.cycle_ended(verdict.reason, report.wall_ms, report.cpu_ms)
        for target, rows in report.disbelieved.items():
            self._metrics.disbelieved(target, rows)
        if report.parity is not None:
            self._metrics.parity_checked("tree_ensemble", report.parity.max_relative_error)
        if report.tensor is not None:
            self._tensor_made(report.tensor)
        errors = {
            target: {"challenger": ours, "champion": theirs} for target, (ours, theirs) in verdict.log_error.items()
        }
        self._decisions.appendleft(
            {
                "unix_ms": report.created_unix_ms,
                "accepted": verdict.accepted,
                "reason": verdict.reason,
                "detail": verdict.detail,
                "version": report.champion.version if report.champion else None,
                "mean_log_error": errors,
            }
        )
        self._log.info(
            "cycle ended",
            verdict=verdict.reason,
            detail=verdict.detail,
            samples=report.window_samples,
            wall_ms=round(report.wall_ms),
            cpu_ms=round(report.cpu_ms),
        )

    def _tensor_made(self, outcome: TensorOutcome) -> None:
        self._metrics.tensor_rendering(listed=outcome.listed)
        if outcome.parity is not None:
            self._metrics.parity_checked("tensor", outcome.parity.max_relative_error)
        if not outcome.listed:
            self._log.warning("tensor rendering not listed", detail=outcome.detail)

    # Whose word is above the gate's

    async def pin(self, version: str) -> None:
        """Serve this version until `unpin`: nothing follows it, its calibration goes on.

        Raises UnknownVersionError, NotNowError, or RedisError where the pin could not be kept.
        """
        self._must_be_active()
        chosen = await self._named(version)
        memory = replace(self._learner.succession.memory(), pinned=version)
        await self._store.save_memory(memory, self._last_change)
        self._learner.succession.pinned = version
        self._learner.choose(chosen)
        self._changed("pinned_by_operator", version)

    async def unpin(self) -> None:
        """Let challengers follow again. Raises NotNowError or RedisError."""
        self._must_be_active()
        if self._learner.succession.pinned is None:
            raise NotNowError("no version is pinned")
        await self._store.save_memory(replace(self._learner.succession.memory(), pinned=None), self._last_change)
        was, self._learner.succession.pinned = self._learner.succession.pinned, None
        self._changed("unpinned_by_operator", was)

    async def roll_back(self, version: str | None = None) -> None:
        """Go back to a version, by default the last good one, else the one before; challengers wait as always then.

        Raises UnknownVersionError, NotNowError or RedisError.
        """
        self._must_be_active()
        succession, before = self._learner.succession, self._learner.champion
        if succession.pinned is not None:
            raise NotNowError(f"version {succession.pinned} is pinned: unpin it first")
        if before is None:
            raise NotNowError("there is no bundle yet")
        if version is None:
            version = succession.good.champion.version if succession.good else None
            older = [kept for kept in await self._store.kept() if PRIOR_PREFIX < kept < before.version]
            version = version or (older[-1] if older else None)
        if version is None or version == before.version:
            raise NotNowError("there is no other version to go back to")
        chosen = await self._named(version)
        self._learner.choose(chosen)
        succession.hold(before.version, self._learner.window.total)
        self._metrics.rolled_back("operator")
        self._changed("rolled_back_by_operator", f"from {before.version}")

    def _must_be_active(self) -> None:
        if not self._active:
            raise NotNowError("this trainer isn't the active one of its pool")

    async def _named(self, version: str) -> Champion:
        champion = self._learner.champion
        if champion is not None and champion.version == version:
            return champion
        kept = await self._store.kept()
        if version not in kept or version.startswith(PRIOR_PREFIX):
            raise UnknownVersionError(version, [name for name in kept if not name.startswith(PRIOR_PREFIX)])
        try:
            return await self._store.load_version(version)
        except ContractError as error:
            raise NotNowError(f"version {version} can't be served: {error}") from None

    def _changed(self, reason: str, detail: str) -> None:
        """Another version serves, or a pin came or went, without a fit."""
        champion = self._learner.champion
        change = Change(self._clock.unix_ms(), reason, detail, champion.version if champion else None)
        self._last_change = change
        self._decisions.appendleft(_told(change))
        self._log.warning("succession changed", reason=reason, detail=detail, version=change.version)
        self._adopted.set()

    def _to_keep(self) -> set[str]:
        """Versions that may serve again."""
        memory, champion = self._learner.succession.memory(), self._learner.champion
        return {version for version in (memory.pinned, memory.good, champion and champion.version) if version}

    # Publishing

    async def _publish(self) -> None:
        while True:
            try:
                await self._publish_bundle()
                await self._publish_calibration()
                await self._save_memory()
            except (RedisError, OSError, TimeoutError) as error:
                self._store_failed(error)
            self._adopted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.calibration_interval_ms / 1e3):
                    await self._adopted.wait()
            raise_if_cancelled()

    async def _publish_bundle(self) -> None:
        champion = self._learner.champion
        if champion is None:
            return
        now_ms = self._clock.monotonic_ms()
        if champion.version == self._published:
            if now_ms < self._next_store_check_ms:
                return
            self._next_store_check_ms = now_ms + self._settings.store_check_interval_ms
            if await self._store.holds(champion.version):
                return
            self._log.warning("redis lost the bundle; publishing it again", version=champion.version)
        # Redis may have been emptied since it was last written to, also between two versions, with nobody looking.
        self._remembered = None
        if (good := self._learner.succession.good) is not None and not await self._store.keeps(good.champion.version):
            await self._store.put(good.champion.bundle)
        await self._store.publish(champion.bundle, self._to_keep())
        self._published = champion.version
        self._next_store_check_ms = now_ms + self._settings.store_check_interval_ms
        self._calibrated_samples = -1
        self._metrics.bundles.inc()
        self._store_answered()
        self._log.info("bundle published", version=champion.version, outputs=champion.model.outputs)

    async def _publish_calibration(self) -> None:
        calibrator = self._learner.calibrator
        if calibrator is None:
            return
        if is_prior(calibrator.bundle_version):
            if not calibrator.samples:
                return  # nothing was measured of the prior yet
        elif calibrator.bundle_version != self._published:
            return
        if calibrator.samples == self._calibrated_samples:
            return
        samples = calibrator.samples
        calibration = self._learner.calibration(self._settings.pool, self._sequence + 1, self._clock.unix_ms())
        if calibration is None:
            return
        await self._store.publish_calibration(calibration)
        self._sequence = calibration.sequence
        self._calibrated_samples = samples
        self._metrics.calibrations.inc()

    async def _save_memory(self) -> None:
        due = self._learner.succession.memory(), self._last_change
        if due != self._remembered:
            await self._store.save_memory(*due)
            self._remembered = due

    def _store_failed(self, error: Exception) -> None:
        self._metrics.store_failed()
        if not self._store_failing:
            self._store_failing = True
            self._log.warning("redis is away; what is due is kept", error=type(error).__name__)
        self._readiness.unmet(STORE, type(error).__name__)

    def _store_answered(self) -> None:
        if self._store_failing:
            self._store_failing = False
            self._log.info("redis answers again")
        self._readiness.met(STORE)

    # For people

    @property
    def state(self) -> str:
        """`cold` without a bundle, `warming` on a saved one or one from few rows, else `ready`."""
        return self._learner.state

    def status(self) -> dict[str, Any]:
        """What `/v1/model` shows."""
        learner, report = self._learner, self._report
        champion, calibrator, window = learner.champion, learner.calibrator, learner.window
        fitted = self._fits.get(champion.version) if champion else None
        return {
            "pool": self._settings.pool,
            "state": self.state,
            "active": self._active,
            "schema": SCHEMA.hash,
            "samples_needed": learner.cadence.needed(saved=champion is not None and champion.saved),
            "prior": learner.prior.bundle_version if learner.prior else None,
            "bundle": bundle_view(champion, self._bundle_age_ms(), self._published) if champion else None,
            "live": {t: asdict(e) for t, e in calibrator.live().items()} if calibrator else {},
            "champion_fit": report_view(fitted) if fitted else None,
            "last_cycle": report_view(report) if report else None,
            "succession": {
                **learner.succession.view(window.total),
                "last_change": None if self._last_change is None else asdict(self._last_change),
            },
            "versions": [
                version_view(version, champion, learner.succession.memory(), self._store.held_out.get(version))
                for version in reversed(self._store.versions)
            ],
            "decisions": list(self._decisions),
            "window": {
                "rows": len(window),
                "taken": window.total,
                "changed_at": window.changed_at,
                "by_target": {target: window.known(target) for target in TARGETS},
                **window.composition(),
            },
            "calibration": {"sequence": self._sequence, "expected_output_tokens": learner.lengths.tokens()},
            "labels": {
                "healthy": learner.health.healthy,
                "ttft_nearly_e2e_share": learner.health.degenerate_share,
            },
            "stream_connected": self._consumer.connected,
        }

    def _bundle_age_ms(self) -> float | None:
        champion = self._learner.champion
        if champion is None:
            return None
        return max(0.0, self._clock.unix_ms() - champion.bundle.manifest.created_unix_ms)


def _told(change: Change) -> dict[str, Any]:
    """As one of the decisions."""
    return {**asdict(change), "accepted": False, "mean_log_error": {}}
