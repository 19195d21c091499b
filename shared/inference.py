"""A verified bundle → predictions, and the one place where calibration is applied.

Used by the predictor (raw model output) and by the router (its in-process rung, and calibration for both rungs: the
router alone knows the endpoint). They must run identically, hence here.

Limits: ONNX Runtime on one thread per session by default; a call blocks for its duration (≈0.4 ms for 100 rows).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from shared.bundle import GRAPH_INPUT, GRAPH_OUTPUT, Bundle, Calibration, RenderingName
from shared.errors import IntegrityError
from shared.features import FloatMatrix
from shared.prediction import IN_RANGE, QUANTILES, TARGETS, plausible

CPU_PROVIDER: Final = "CPUExecutionProvider"
# A calibration may bend a prediction by this factor at most, either way: beyond it the model is wrong, not its scale.
MAX_LOG_CORRECTION: Final = 1.5


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An ONNX Runtime provider other than the CPU's, with its options."""

    provider: str
    options: Mapping[str, str] = field(default_factory=dict)


# TensorFloat-32 keeps 10 bits of a factor: sums of tokens would fall on the wrong side of a threshold.
CUDA: Final = Accelerator("CUDAExecutionProvider", {"use_tf32": "0"})


class BundleModel:
    """An ONNX Runtime session of one rendering, checked against its manifest."""

    __slots__ = ("_session", "bundle_version", "outputs", "provider", "rendering")

    def __init__(
        self,
        bundle: Bundle,
        *,
        rendering: RenderingName = "tree_ensemble",
        accelerator: Accelerator | None = None,
        threads: int = 1,
    ) -> None:
        """Load and warm; raises IntegrityError if the graph can't run or doesn't fit its manifest.

        With an accelerator every node runs on it, or the graph isn't loaded: ONNX Runtime would put what it can't
        place, or all of it, on the CPU in silence.
        """
        on = accelerator or Accelerator(CPU_PROVIDER)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        if on.provider != CPU_PROVIDER:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            # CUDA's libraries may lie among the installed packages, where the loader doesn't look.
            ort.preload_dlls()
        try:
            provider = (on.provider, dict(on.options))
            self._session = ort.InferenceSession(bundle.graphs[rendering], options, providers=[provider])
            inputs = [(i.name, i.shape[-1]) for i in self._session.get_inputs()]
            width = len(bundle.manifest.features)
            if inputs != [(GRAPH_INPUT, width)]:
                raise IntegrityError(f"graph inputs are {inputs}, the manifest says {GRAPH_INPUT} with {width} columns")
            self.rendering = rendering
            self.provider: str = self._session.get_providers()[0]
            if self.provider != on.provider:
                raise IntegrityError(f"{on.provider} isn't in use: ONNX Runtime chose {self.provider}")
            self.bundle_version = bundle.manifest.version
            self.outputs = tuple(bundle.manifest.outputs)
            answers = [self.predict(np.stack([np.zeros(width), np.ones(width)] * n).astype(np.float32)) for n in (1, 2)]
        except IntegrityError:
            raise
        except Exception as error:  # ONNX Runtime raises bare Exceptions of many classes
            raise IntegrityError(
                f"rendering {rendering} can't be loaded on {on.provider}: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        for answer, rows in zip(answers, (2, 4), strict=True):  # two sizes: a graph may have one built in
            due = (rows, len(self.outputs))
            if answer.shape != due or answer.dtype != np.float32:
                raise IntegrityError(
                    f"graph answers {answer.dtype} {answer.shape} for {rows} rows; float32 {due} is due"
                )
            if not plausible(answer):
                raise IntegrityError("graph answers values that no latency can have")

    def predict(self, rows: FloatMatrix) -> FloatMatrix:
        """float32 (n, F) → float32 (n, K), K as `outputs`; raw model output, uncalibrated."""
        answer: FloatMatrix = self._session.run([GRAPH_OUTPUT], {GRAPH_INPUT: rows})[0]
        return answer


class CompiledCalibration:
    """A calibration laid out as arrays for one bundle's outputs: compiled once, applied to every decision.

    Compiling costs some 100 µs; applying costs 15 µs for 4 rows where walking the calibration's tables took 57.
    """

    __slots__ = ("_bin_log", "_edges", "_endpoint", "_endpoint_log", "_pairs", "calibration")

    def __init__(self, calibration: Calibration, outputs: Sequence[str]) -> None:
        self.calibration = calibration
        column = {name: k for k, name in enumerate(outputs)}
        bins = len(calibration.backlog_edges_tokens) + 1
        addresses = sorted({address for biases in calibration.endpoint_log_bias.values() for address in biases})
        self._edges = np.asarray(calibration.backlog_edges_tokens, np.float32)
        self._bin_log = np.zeros((bins, len(outputs)), np.float32)
        # Row 0 stands for every endpoint without a bias of its own.
        self._endpoint = {address: i + 1 for i, address in enumerate(addresses)}
        self._endpoint_log = np.zeros((len(addresses) + 1, len(outputs)), np.float32)
        self._pairs: list[tuple[int, int]] = []
        """Columns (lower, higher) of neighbouring quantiles of one target, lowest first."""
        for target in TARGETS:
            if f"{target}_p50" not in column:
                continue
            columns = [column[name] for quantile in QUANTILES if (name := f"{target}_{quantile}") in column]
            self._pairs += pairwise(columns)
            for k in columns:
                offsets = calibration.quantile_log_offset.get(outputs[k], [0.0] * bins)
                self._bin_log[:, k] = np.float32(calibration.log_bias.get(target, 0.0)) + np.asarray(
                    offsets, np.float32
                )
                for address, bias in calibration.endpoint_log_bias.get(target, {}).items():
                    self._endpoint_log[self._endpoint[address], k] = bias

    def apply(self, raw: FloatMatrix, backlog_tokens: npt.NDArray[np.float32], addresses: Sequence[str]) -> FloatMatrix:
        """float32 (n, K) → a new float32 (n, K); see `calibrate`."""
        logs = self._bin_log[np.searchsorted(self._edges, backlog_tokens, side="right")]
        if self._endpoint:
            known = self._endpoint
            logs += self._endpoint_log[np.fromiter((known.get(a, 0) for a in addresses), np.intp, len(addresses))]
        np.maximum(logs, -MAX_LOG_CORRECTION, out=logs)
        np.minimum(logs, MAX_LOG_CORRECTION, out=logs)
        adjusted: FloatMatrix = np.exp(logs, out=logs)
        adjusted *= raw
        for lower, higher in self._pairs:
            np.maximum(adjusted[:, higher], adjusted[:, lower], out=adjusted[:, higher])
        return adjusted


def calibrate(
    raw: FloatMatrix,
    outputs: Sequence[str],
    bundle_version: str,
    calibration: Calibration | None,
    backlog_tokens: npt.NDArray[np.float32],
    addresses: Sequence[str],
) -> FloatMatrix:
    """Apply a calibration to raw output; returns a new float32 (n, K), or `raw` itself when none applies.

    Pure. `backlog_tokens` float32 (n,): own + pending uncached tokens. `addresses` (n,): `ip:port` of each row's
    endpoint. A calibration of another bundle is ignored. Quantiles of a target never cross: p50 ≤ p90 ≤ p99.
    """
    if calibration is None or calibration.bundle_version != bundle_version:
        return raw
    return CompiledCalibration(calibration, outputs).apply(raw, backlog_tokens, addresses)


def as_columns(predictions: FloatMatrix, outputs: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
    """(n, K) → one (n,) array per output name."""
    return {name: predictions[:, k] for k, name in enumerate(outputs)}


__all__ = [
    "CPU_PROVIDER",
    "CUDA",
    "IN_RANGE",
    "MAX_LOG_CORRECTION",
    "Accelerator",
    "BundleModel",
    "CompiledCalibration",
    "as_columns",
    "calibrate",
]
