"""A fitted model → one ONNX graph, and the proof that the graph says what the model says.

`features` float32 (N, F) → `predictions` float32 (N, K): base, tree ensembles, clip, quantiles, `in_range` in float32
operators, in the same order of operations as `LatencyModel.predict`. This is the rendering for CPUs (tree-ensemble
operators); `renderings` in the manifest has room for others.

Boosters are converted straight from their own JSON; where that raises, onnxmltools takes over (both make the same
predictions, tested). The library as first choice costs a cycle of 9,000 rows 0.11 s of CPU more, most of it under the
interpreter lock. Either way the parity check decides: random rows, rows exactly on split thresholds, rows far outside,
and the window's real rows.

Limits: opset 17, ai.onnx.ml 3, IR version 8 are written explicitly, so that a newer library doesn't raise them beyond
what deployed runtimes read. Single-output boosters only (several outputs convert to wrong sums without an error).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import orjson
import xgboost as xgb
from onnx import TensorProto, helper, numpy_helper
from onnxmltools.convert import convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType

from services.trainer.basis import tree_sums
from services.trainer.train import (
    DECISIVE,
    LOG_LATENCY_HIGH,
    LOG_SCALE_HIGH,
    LOG_SCALE_LOW,
    OUT_OF_RANGE_WIDENING,
    RESIDUAL_CLIP,
    LatencyModel,
    TargetModel,
)
from shared.bundle import GRAPH_INPUT, GRAPH_OUTPUT
from shared.features import SCHEMA, FloatMatrix

OPSET: Final = 17
ML_OPSET: Final = 3
IR_VERSION: Final = 8
_CONVERTER_OPSET: Final = 15

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A graph and the way its trees were converted."""

    graph: bytes
    converter: str


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a graph strays from the native model; infinite where shapes differ or a value isn't finite."""

    max_relative_error: float
    rows: int


class _Graph:
    """Nodes and constants under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: npt.ArrayLike, kind: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    def op(self, kind: str, *inputs: str, domain: str = "", output: str = "", **attributes: Any) -> str:
        name = output or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name


def render(model: LatencyModel, metadata: Mapping[str, str]) -> Rendered:
    """Build the tree-ensemble rendering; raises ValueError if no converter can take a booster."""
    graph = _Graph()
    converters: set[str] = set()
    zero, one = graph.constant(0.0), graph.constant(1.0)
    features = GRAPH_INPUT
    trees = graph.op("Concat", features, graph.op("MatMul", features, graph.constant(tree_sums())), axis=1)
    codes = graph.op("Cast", _column(graph, "hardware_class"), to=TensorProto.INT64)

    decisive = [SCHEMA.index[name] for name in DECISIVE]
    values = graph.op("Gather", features, graph.constant(decisive, np.int64), axis=1)
    above = graph.op("GreaterOrEqual", values, graph.constant(model.feature_low[decisive]))
    below = graph.op("LessOrEqual", values, graph.constant(model.feature_high[decisive]))
    both = graph.op("Cast", graph.op("And", above, below), to=TensorProto.FLOAT)
    within = graph.op("ReduceMin", both, axes=[1], keepdims=0)
    class_seen = graph.op("Gather", graph.constant(model.seen_classes.astype(np.float32)), codes, axis=0)
    inside = graph.op("Min", within, class_seen)
    outside = graph.op("Equal", inside, zero)
    widening = graph.op("Where", outside, graph.constant(OUT_OF_RANGE_WIDENING), one)

    columns = []
    for target in model.targets.values():
        log_p50 = _log_p50(graph, target, trees, codes, converters)
        spread = widening
        if target.spread is not None:
            raw = _ensemble(graph, target.spread, trees, converters)
            bounded = graph.op("Max", raw, graph.constant(LOG_SCALE_LOW))
            bounded = graph.op("Min", bounded, graph.constant(LOG_SCALE_HIGH))
            spread = graph.op("Mul", graph.op("Exp", bounded), widening)
        for factor in (np.float32(0), target.q90, target.q99):
            value = graph.op("Add", log_p50, graph.op("Mul", spread, graph.constant(factor))) if factor else log_p50
            columns.append(graph.op("Exp", graph.op("Min", value, graph.constant(LOG_LATENCY_HIGH))))
    axis = graph.constant([1], np.int64)
    stacked = [graph.op("Unsqueeze", column, axis) for column in (*columns, inside)]
    graph.op("Concat", *stacked, axis=1, output=GRAPH_OUTPUT)

    proto = helper.make_graph(
        graph.nodes,
        "leadtime",
        [helper.make_tensor_value_info(features, TensorProto.FLOAT, ["N", len(SCHEMA)])],
        [helper.make_tensor_value_info(GRAPH_OUTPUT, TensorProto.FLOAT, ["N", len(model.outputs)])],
        graph.constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    result = helper.make_model(proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="leadtime")
    helper.set_model_props(result, dict(metadata))
    onnx.checker.check_model(result)
    return Rendered(result.SerializeToString(), "+".join(sorted(converters)) or "none")


def stamp(graph: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same graph with more metadata."""
    model = onnx.load_model_from_string(graph)
    known = {item.key: item.value for item in model.metadata_props}
    helper.set_model_props(model, known | dict(metadata))
    return bytes(model.SerializeToString())


def _column(graph: _Graph, name: str) -> str:
    """One column of the rows as (N,)."""
    return graph.op("Gather", GRAPH_INPUT, graph.constant(SCHEMA.index[name], np.int64), axis=1)


def _log_p50(graph: _Graph, target: TargetModel, trees: str, codes: str, converters: set[str]) -> str:
    zero = graph.constant(0.0)
    basis, base = target.base.basis, target.base
    left = graph.op("MatMul", GRAPH_INPUT, graph.constant(basis.left))
    left = graph.op("Max", graph.op("Add", left, graph.constant(basis.left_offset)), zero)
    right = graph.op("MatMul", GRAPH_INPUT, graph.constant(basis.right))
    right = graph.op("Max", graph.op("Add", right, graph.constant(basis.right_offset)), zero)
    slots = graph.op("Gather", graph.constant(base.slots, np.int64), codes, axis=0)
    coefficients = graph.op("Gather", graph.constant(base.coefficients), slots, axis=0)
    products = graph.op("Mul", graph.op("Mul", left, right), coefficients)
    total = graph.op("ReduceSum", products, graph.constant([1], np.int64), keepdims=0)
    total = graph.op("Max", total, graph.constant(base.floor_ms))
    value = graph.op("Add", graph.op("Log", total), graph.constant(target.shift))
    if target.residual is None:
        return value
    residual = _ensemble(graph, target.residual, trees, converters)
    residual = graph.op("Max", residual, graph.constant(-RESIDUAL_CLIP))
    residual = graph.op("Min", residual, graph.constant(RESIDUAL_CLIP))
    return graph.op("Add", value, residual)


def _ensemble(graph: _Graph, booster: xgb.Booster, trees: str, converters: set[str]) -> str:
    attributes, converter = convert_booster(booster)
    converters.add(converter)
    answer = graph.op("TreeEnsembleRegressor", trees, domain="ai.onnx.ml", **attributes)
    return graph.op("Reshape", answer, graph.constant([-1], np.int64))


def convert_booster(booster: xgb.Booster) -> tuple[Attributes, str]:
    """Attributes of a TreeEnsembleRegressor, and who made them; raises ValueError with both converters' reasons."""
    reasons = []
    converters: tuple[tuple[str, Callable[[xgb.Booster], Attributes]], ...] = (
        ("direct", directly),
        ("onnxmltools", by_onnxmltools),
    )
    for name, convert in converters:
        try:
            return convert(booster), name
        except Exception as error:  # a converter fails in many ways, and each is a reason to try the next
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    raise ValueError("; ".join(reasons))


def by_onnxmltools(booster: xgb.Booster) -> Attributes:
    """Conversion by the library."""
    kind = FloatTensorType([None, booster.num_features()])
    converted = convert_xgboost(booster, initial_types=[("x", kind)], target_opset=_CONVERTER_OPSET)
    (node,) = (node for node in converted.graph.node if node.op_type == "TreeEnsembleRegressor")
    if len(converted.graph.node) != 1:
        raise ValueError(f"{len(converted.graph.node)} nodes where one tree ensemble is due")
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def directly(booster: xgb.Booster) -> Attributes:
    """Conversion from the booster's JSON: squared error, one output."""
    learner = orjson.loads(bytes(booster.save_raw("json")))["learner"]
    if learner["objective"]["name"] != "reg:squarederror":
        raise ValueError(f"objective {learner['objective']['name']}; only reg:squarederror is converted")
    table: dict[str, list[Any]] = {
        "nodes_treeids": [], "nodes_nodeids": [], "nodes_featureids": [], "nodes_modes": [], "nodes_values": [],
        "nodes_truenodeids": [], "nodes_falsenodeids": [], "nodes_missing_value_tracks_true": [],
        "target_treeids": [], "target_nodeids": [], "target_ids": [], "target_weights": [],
    }  # fmt: skip
    for number, tree in enumerate(learner["gradient_booster"]["model"]["trees"]):
        for node, (left, right) in enumerate(zip(tree["left_children"], tree["right_children"], strict=True)):
            leaf = left == -1
            table["nodes_treeids"].append(number)
            table["nodes_nodeids"].append(node)
            table["nodes_featureids"].append(0 if leaf else tree["split_indices"][node])
            table["nodes_modes"].append("LEAF" if leaf else "BRANCH_LT")
            table["nodes_values"].append(0.0 if leaf else tree["split_conditions"][node])
            table["nodes_truenodeids"].append(0 if leaf else left)
            table["nodes_falsenodeids"].append(0 if leaf else right)
            table["nodes_missing_value_tracks_true"].append(0 if leaf else int(tree["default_left"][node]))
            if leaf:
                table["target_treeids"].append(number)
                table["target_nodeids"].append(node)
                table["target_ids"].append(0)
                table["target_weights"].append(tree["split_conditions"][node])
    base_score = float(learner["learner_model_param"]["base_score"].strip("[]"))
    return {**table, "n_targets": 1, "post_transform": "NONE", "base_values": [base_score]}


def parity_rows(
    model: LatencyModel, real: FloatMatrix, rng: np.random.Generator, *, at_most: int = 5000
) -> FloatMatrix:
    """Rows to compare on, float32 (n, F): the newest real ones, random ones in and far out of range, and on splits."""
    real = real[-at_most:]
    low, high = model.feature_low, model.feature_high
    whole = np.array([feature.unit not in {"ms", "ratio"} for feature in SCHEMA.features])

    def drawn(count: int, stretch: float) -> FloatMatrix:
        values = rng.uniform(low, low + (high - low) * stretch, size=(count, len(SCHEMA)))
        values[:, whole] = np.round(values[:, whole])
        limits = np.array([(feature.low, feature.high) for feature in SCHEMA.features])
        return np.clip(values, limits[:, 0], limits[:, 1]).astype(np.float32)

    on_splits = drawn(256, 1.0)
    splits = [
        (column, value)
        for target in model.targets.values()
        for booster in (target.residual, target.spread)
        if booster is not None
        for column, value in split_points(booster)
        if column < len(SCHEMA)
    ]
    if splits:
        for row, pick in enumerate(rng.integers(len(splits), size=len(on_splits))):
            column, value = splits[pick]
            on_splits[row, column] = value
    return np.concatenate([real, drawn(512, 1.0), drawn(256, 8.0), on_splits])


def split_points(booster: xgb.Booster) -> list[tuple[int, float]]:
    """Every split of a booster: column of the tree matrix, threshold."""
    trees = orjson.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
    return [
        (tree["split_indices"][node], tree["split_conditions"][node])
        for tree in trees
        for node, left in enumerate(tree["left_children"])
        if left != -1
    ]


def parity(predict: Callable[[FloatMatrix], FloatMatrix], model: LatencyModel, rows: FloatMatrix) -> Parity:
    """Compare a loaded graph with the native model on every row and output."""
    expected, found = model.predict(rows), predict(rows)
    if found.shape != expected.shape or not np.isfinite(found).all() or not np.isfinite(expected).all():
        return Parity(float("inf"), len(rows))
    error = np.abs(found.astype(np.float64) - expected) / np.maximum(np.abs(expected), 1e-3)
    return Parity(float(error.max()), len(rows))
