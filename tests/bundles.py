"""Small published bundles for tests: a linear graph, whose answers tell which row and which bundle they came from."""

import hashlib

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from shared.bundle import (
    GRAPH_INPUT,
    GRAPH_OUTPUT,
    Bundle,
    BundleManifest,
    Rendering,
    RenderingName,
    bundle_version,
    pack,
    seal,
)
from shared.features import SCHEMA

OUTPUTS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "in_range")


def linear_graph(weights: npt.NDArray[np.float32], offset: float) -> bytes:
    """ONNX bytes of `rows @ weights + offset`; weights float32 (F, K)."""
    features, outputs = weights.shape
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [GRAPH_INPUT, "weights"], ["product"]),
            helper.make_node("Add", ["product", "offset"], [GRAPH_OUTPUT]),
        ],
        "linear",
        [helper.make_tensor_value_info(GRAPH_INPUT, TensorProto.FLOAT, [None, features])],
        [helper.make_tensor_value_info(GRAPH_OUTPUT, TensorProto.FLOAT, [None, outputs])],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.full(outputs, offset, np.float32), "offset"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def default_weights(outputs: int) -> npt.NDArray[np.float32]:
    """Column k is (k + 1) times the first feature (`input_tokens`) plus the second."""
    weights = np.zeros((len(SCHEMA), outputs), np.float32)
    weights[0] = np.arange(1, outputs + 1)
    weights[1] = 1.0
    return weights


def make_bundle(
    *,
    created_unix_ms: float = 1_700_000_000_000.0,
    offset: float = 1.0,
    pool: str = "default",
    outputs: tuple[str, ...] = OUTPUTS,
    graph: bytes | None = None,
    renderings: tuple[RenderingName, ...] = ("tree_ensemble",),
) -> Bundle:
    """A whole, valid bundle; `offset` is added to all its answers and tells bundles apart."""
    graph = linear_graph(default_weights(len(outputs)), offset) if graph is None else graph
    manifest = BundleManifest(
        pool=pool,
        version=bundle_version(created_unix_ms, graph),
        schema_hash=SCHEMA.hash,
        features=list(SCHEMA.names),
        outputs=list(outputs),
        created_unix_ms=created_unix_ms,
        window_samples=1_000,
        metrics={},
        feature_low=[feature.low for feature in SCHEMA.features],
        feature_high=[feature.high for feature in SCHEMA.features],
        libraries={},
        renderings=[
            Rendering(
                name=name,
                sha256=hashlib.sha256(graph).hexdigest(),
                size_bytes=len(graph),
                parity_max_relative_error=0.0,
                parity_rows=1_000,
            )
            for name in renderings
        ],
    )
    return Bundle(manifest, dict.fromkeys(renderings, graph))


def sealed(bundle: Bundle, key: bytes | None = None) -> bytes:
    """The bundle as it lies in Redis."""
    return seal(pack(bundle), key)


def expected(
    rows: npt.NDArray[np.float32], *, offset: float = 1.0, outputs: int = len(OUTPUTS)
) -> npt.NDArray[np.float32]:
    """What `make_bundle(offset=…)` answers."""
    return (rows @ default_weights(outputs) + np.float32(offset)).astype(np.float32)


def rows_of(*input_tokens: float) -> npt.NDArray[np.float32]:
    """Valid rows that differ in their first feature: float32 (n, F)."""
    return SCHEMA.rows(len(input_tokens), {"input_tokens": np.asarray(input_tokens, np.float32)})
