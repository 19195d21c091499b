"""Were bundles ever mixed? Each decision's prediction is made again from the bundle that it names, and compared.

Every bundle and calibration that the trainer publishes during the run is kept. A sample carries the features of the
decision, its prediction and the name of its bundle: the prediction must be that bundle's answer to these features, as
it is or bent by a calibration of the same bundle. One that only another bundle's answer or calibration explains is
mixed. Whoever answered, a predictor or the router itself, and whichever router asked, doesn't matter.

Calibrations are numbered. Where one was replaced before it could be read here (the trainer publishes one and, right
after it, the next bundle's), its number is missing, and what a router made of it in between can't be told: `unseen`.
Where none is missing, a prediction that nothing explains is `unexplained`, and a fault. What is published may be read
later than what was made of it: what isn't settled yet is judged again.

`Judge` is pure; `watch` is an edge: Redis. Limit: a calibration of a trainer that was cut off is not told from one
that was missed.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import numpy as np
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.bundle import Bundle, BundleGate, Calibration, unseal
from shared.cancellation import raise_if_cancelled
from shared.errors import ContractError
from shared.features import SCHEMA, FloatMatrix
from shared.inference import BundleModel, CompiledCalibration
from shared.names import BUNDLES_CHANNEL, CALIBRATIONS_CHANNEL, bundle_key, bundle_pointer_key, calibration_key
from shared.prior import is_prior
from shared.redis_connection import connect
from shared.samples import LatencySample
from shared.settings import RedisSettings

_LOOK_S: Final = 0.1
_CLOSE: Final = 1e-4
"""Relative: float32 through two runs of one graph, batches of different sizes."""


class Verdict(StrEnum):
    """`none`: no learned prediction. `unseen`: made of a calibration that was missed here, as far as can be told."""

    NONE = "none"
    AGREES = "agrees"
    MIXED = "mixed"
    UNSEEN = "unseen"
    UNEXPLAINED = "unexplained"

    @property
    def settled(self) -> bool:
        """Whether nothing that is learned later changes it."""
        return self in {Verdict.NONE, Verdict.AGREES}


class Judge:
    """Knows bundles and calibrations, and judges samples by them."""

    def __init__(self) -> None:
        self._models: dict[str, BundleModel] = {}
        self._calibrations: dict[str, list[CompiledCalibration]] = defaultdict(list)
        self._waiting: dict[str, list[Calibration]] = defaultdict(list)
        """Calibrations whose bundle isn't known yet."""
        self._last: Calibration | None = None
        self._missed: set[str] = set()
        """Bundles of which calibrations may have been missed."""
        self.wanted: set[str] = set()
        """Bundles that were named and aren't known."""

    def want(self, version: str) -> None:
        """A bundle was named."""
        if version not in self._models:
            self.wanted.add(version)

    def learn_bundle(self, bundle: Bundle) -> None:
        version = bundle.manifest.version
        if version in self._models:
            return
        self._models[version] = BundleModel(bundle)
        self.wanted.discard(version)
        for calibration in self._waiting.pop(version, []):
            self._keep(calibration)

    def learn_calibration(self, calibration: Calibration) -> None:
        """In the order of reading. A number that is missing may be one of either bundle beside it."""
        last = self._last
        if last is not None and last == calibration:
            return
        before = 0 if last is None else last.sequence
        if calibration.sequence != before + 1:
            self._missed |= {each.bundle_version for each in (last, calibration) if each is not None}
        self._last = calibration
        self._keep(calibration)

    def _keep(self, calibration: Calibration) -> None:
        version = calibration.bundle_version
        if is_prior(version):
            return
        model = self._models.get(version)
        if model is None:
            self.wanted.add(version)
            self._waiting[version].append(calibration)
        else:
            self._calibrations[version].append(CompiledCalibration(calibration, model.outputs))

    def judge(self, sample: LatencySample) -> Verdict:
        """What one decision's prediction was made of."""
        version = sample.bundle_version
        if sample.prediction is None or version is None or is_prior(version):
            return Verdict.NONE
        row = np.asarray([sample.features], np.float32)
        self.want(version)
        if version in self._models and self._explains(sample, row, version, (version,)):
            return Verdict.AGREES
        for other in self._models:
            calibrated_by = tuple(self._models) if other == version else (other,)
            if self._explains(sample, row, other, calibrated_by):
                return Verdict.MIXED
        return Verdict.UNSEEN if version in self._missed else Verdict.UNEXPLAINED

    def _explains(self, sample: LatencySample, row: FloatMatrix, version: str, calibrated_by: tuple[str, ...]) -> bool:
        """Whether a bundle's answer is the prediction, raw or by one of these bundles' calibrations."""
        model = self._models[version]
        if sample.prediction is None or set(model.outputs) != set(sample.prediction):
            return False
        told = np.array([[sample.prediction[name] for name in model.outputs]], np.float32)
        return any(
            np.allclose(answer, told, rtol=_CLOSE) for answer in self._answers(sample, row, model, calibrated_by)
        )

    def _answers(
        self, sample: LatencySample, row: FloatMatrix, model: BundleModel, calibrated_by: tuple[str, ...]
    ) -> Iterator[FloatMatrix]:
        raw = model.predict(row)
        yield raw
        index = SCHEMA.index
        backlog = row[:, index["uncached_tokens"]] + row[:, index["pending_uncached_tokens"]]
        for version in calibrated_by:
            if self._models[version].outputs == model.outputs:
                for calibration in reversed(self._calibrations[version]):
                    yield calibration.apply(raw, backlog, (sample.endpoint,))


async def watch(judge: Judge, url: str, pool: str) -> None:
    """Keep what is published, until cancelled: read at each notice, as routers do, and now and then without one."""
    redis = connect(RedisSettings(url=url), retries=0)
    gate = BundleGate(pool, None)
    try:
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with redis.pubsub() as notices:
                    await notices.subscribe(BUNDLES_CHANNEL, CALIBRATIONS_CHANNEL)
                    while True:
                        await _look(judge, redis, gate, pool)
                        await notices.get_message(timeout=_LOOK_S)
                        raise_if_cancelled()
            raise_if_cancelled()
            await asyncio.sleep(_LOOK_S)
    finally:
        await redis.aclose()


async def _look(judge: Judge, redis: Redis, gate: BundleGate, pool: str) -> None:
    sealed = _bytes(await redis.get(calibration_key(pool)))
    if sealed is not None:
        with contextlib.suppress(ContractError):
            judge.learn_calibration(Calibration.decode(unseal(sealed, None), pool=pool))
    pointer = _bytes(await redis.get(bundle_pointer_key(pool, SCHEMA.hash)))
    if pointer is not None:
        judge.want(pointer.decode())
    for version in sorted(judge.wanted):
        blob = _bytes(await redis.get(bundle_key(pool, SCHEMA.hash, version)))
        if blob is not None:
            with contextlib.suppress(ContractError):
                judge.learn_bundle(gate.open(version, blob))


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
