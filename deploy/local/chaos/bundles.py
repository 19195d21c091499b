"""Were bundles ever mixed? Each decision's prediction is made again from the bundle that it names, and compared.

Every bundle and calibration that the trainer publishes during the run is kept. A sample carries the features of the
decision, its prediction and the name of its bundle: the prediction must be that bundle's answer to these features, as
it is or bent by a calibration of the same bundle. One that only another bundle's answer or calibration explains is
mixed. Whoever answered, a predictor or the router itself, and whichever router asked, doesn't matter.

`Judge` is pure; `watch` is an edge: Redis. Limits: a calibration that was published and replaced between two looks at
Redis, or while Redis was away, is unknown here, and so may be what explains a prediction: `unexplained`, no fault.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import numpy as np
from redis.exceptions import RedisError

from shared.bundle import Bundle, BundleGate, Calibration, unseal
from shared.errors import ContractError
from shared.features import SCHEMA, FloatMatrix
from shared.inference import BundleModel, CompiledCalibration
from shared.names import bundle_key, bundle_pointer_key, calibration_key
from shared.prior import is_prior
from shared.redis_connection import connect
from shared.samples import LatencySample
from shared.settings import RedisSettings

_LOOK_S: Final = 0.1
_CLOSE: Final = 1e-4
"""Relative: float32 through two runs of one graph, batches of different sizes."""


class Verdict(StrEnum):
    """`none`: no learned prediction."""

    NONE = "none"
    AGREES = "agrees"
    MIXED = "mixed"
    UNEXPLAINED = "unexplained"


class Judge:
    """Knows bundles and calibrations, and judges samples by them."""

    def __init__(self) -> None:
        self._models: dict[str, BundleModel] = {}
        self._calibrations: dict[str, list[CompiledCalibration]] = defaultdict(list)
        self._waiting: dict[str, list[Calibration]] = defaultdict(list)
        """Calibrations whose bundle isn't known yet."""

    def knows(self, version: str) -> bool:
        """Whether this bundle was learned."""
        return version in self._models

    def learn_bundle(self, bundle: Bundle) -> None:
        version = bundle.manifest.version
        self._models[version] = BundleModel(bundle)
        for calibration in self._waiting.pop(version, []):
            self.learn_calibration(calibration)

    def learn_calibration(self, calibration: Calibration) -> None:
        model = self._models.get(calibration.bundle_version)
        if model is None:
            self._waiting[calibration.bundle_version].append(calibration)
        else:
            self._calibrations[calibration.bundle_version].append(CompiledCalibration(calibration, model.outputs))

    def judge(self, sample: LatencySample) -> Verdict:
        """What one decision's prediction was made of."""
        version = sample.bundle_version
        if sample.prediction is None or version is None or is_prior(version):
            return Verdict.NONE
        row = np.asarray([sample.features], np.float32)
        if version in self._models and self._explains(sample, row, version, (version,)):
            return Verdict.AGREES
        for other in self._models:
            calibrated_by = tuple(self._models) if other == version else (other,)
            if self._explains(sample, row, other, calibrated_by):
                return Verdict.MIXED
        return Verdict.UNEXPLAINED

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
    """Keep what is published, until cancelled."""
    redis = connect(RedisSettings(url=url), retries=0)
    gate = BundleGate(pool, None)
    last = b""
    try:
        while True:
            with contextlib.suppress(RedisError, ContractError, OSError, TimeoutError):
                sealed = _bytes(await redis.get(calibration_key(pool)))
                if sealed is not None and sealed != last:
                    last = sealed
                    judge.learn_calibration(Calibration.decode(unseal(sealed, None), pool=pool))
                pointer = _bytes(await redis.get(bundle_pointer_key(pool, SCHEMA.hash)))
                version = pointer.decode() if pointer else None
                if version is not None and not judge.knows(version):
                    blob = _bytes(await redis.get(bundle_key(pool, SCHEMA.hash, version)))
                    judge.learn_bundle(gate.open(version, blob))
            await asyncio.sleep(_LOOK_S)
    finally:
        await redis.aclose()


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
