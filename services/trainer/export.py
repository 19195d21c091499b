"""A fitted model → ONNX graphs, and the proof that a graph says what the model says.

`features` float32 (N, F) → `predictions` float32 (N, K): base, trees, clip, quantiles, `in_range` in float32 operators,
in the order of operations of `LatencyModel.predict`. One graph, two renderings, which differ in their trees alone:
tree-ensemble operators (here) for CPUs, tensor operators (`tensor.py`) for accelerators.

Tree ensembles are converted straight from a booster's own JSON; where that raises, onnxmltools takes over (both make
the same predictions, tested). The library as first choice costs a cycle of 9,000 rows 0.11 s of CPU more, most of it
under the interpreter lock. Each booster stays an operator of its own: all in one operator of several outputs ran 12 %
slower. Either way the parity check decides: random rows, rows exactly on split thresholds, rows far outside, and the
window's real rows.

Limits: opset 17, ai.onnx.ml 3, IR version 8 are written explicitly, so that a newer library doesn't raise them beyond
what deployed runtimes read. Single-output boosters only (several outputs convert to wrong sums without an error).
"""

from collections.abc import Callable, Mapping, Sequence
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
    REACH_FADE_LOG,
    RESIDUAL_CLIP,
    ZERO,
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


# A booster as a graph of standard operators, and who made it; raises ValueError.
BoosterToGraph = Callable[[xgb.Booster], tuple[onnx.GraphProto, str]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A graph and the way its trees were converted."""

    model: onnx.ModelProto
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

    def splice(self, part: onnx.GraphProto, given: str) -> str:
        """Add another graph of one input and one output, fed by `given`; returns its output's name."""
        prefix = f"p{len(self.nodes)}_"
        names = {part.input[0].name: given}
        for constant in part.initializer:
            names[constant.name] = prefix + constant.name
            copy = onnx.TensorProto()
            copy.CopyFrom(constant)
            copy.name = names[constant.name]
            self.constants.append(copy)
        for node in part.node:
            copy_node = onnx.NodeProto()
            copy_node.CopyFrom(node)
            copy_node.name = prefix + node.name
            del copy_node.input[:], copy_node.output[:]
            copy_node.input.extend(names.get(name, prefix + name) for name in node.input)
            copy_node.output.extend(prefix + name for name in node.output)
            self.nodes.append(copy_node)
        return prefix + part.output[0].name


def render(model: LatencyModel, booster_to_graph: BoosterToGraph | None = None) -> Rendered:
    """Build a rendering; raises ValueError if no converter can take a booster.

    Boosters become tree-ensemble operators, or what `booster_to_graph` makes of them: a graph of standard operators
    from the trees' columns, float32 (N, F + S), to the sum of the leaves, float32 (N, 1).
    """
    graph = _Graph()
    converters: set[str] = set()

    def ensembles(boosters: Sequence[xgb.Booster | None], trees: str) -> str | None:
        """One column per booster, (N, T); 0 where there is none. None where there is no booster at all."""
        columns = []
        for booster in boosters:
            if booster is None:
                continue
            if booster_to_graph is None:
                attributes, converter = convert_booster(booster)
                columns.append(graph.op("TreeEnsembleRegressor", trees, domain="ai.onnx.ml", **attributes))
            else:
                part, converter = booster_to_graph(booster)
                columns.append(graph.splice(part, trees))
            converters.add(converter)
        if not columns:
            return None
        together = graph.op("Concat", *columns, axis=1)
        if len(columns) == len(boosters):
            return together
        places = [k for k, booster in enumerate(boosters) if booster is not None]
        return graph.op("MatMul", together, graph.constant(np.eye(len(boosters))[places]))

    _write(graph, model, ensembles)
    proto = helper.make_graph(
        graph.nodes,
        "leadtime",
        [helper.make_tensor_value_info(GRAPH_INPUT, TensorProto.FLOAT, ["N", len(SCHEMA)])],
        [helper.make_tensor_value_info(GRAPH_OUTPUT, TensorProto.FLOAT, ["N", len(model.outputs)])],
        graph.constants,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    if booster_to_graph is None:
        opsets.append(helper.make_opsetid("ai.onnx.ml", ML_OPSET))
    result = helper.make_model(proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="leadtime")
    onnx.checker.check_model(result)
    return Rendered(result, "+".join(sorted(converters)) or "none")


def _write(
    graph: _Graph, model: LatencyModel, ensembles: Callable[[Sequence[xgb.Booster | None], str], str | None]
) -> None:
    """The model in operators over all targets at once: an operator costs 1 to 2 µs beside its work."""
    features = GRAPH_INPUT
    targets = tuple(model.targets.values())
    count = len(targets)
    trees = graph.op("Concat", features, graph.op("MatMul", features, graph.constant(tree_sums())), axis=1)
    code = graph.op("Gather", features, graph.constant(SCHEMA.index["hardware_class"], np.int64), axis=1)
    code = graph.op("Cast", code, to=TensorProto.INT64)

    decisive = [SCHEMA.index[name] for name in DECISIVE]
    values = graph.op("Gather", features, graph.constant(decisive, np.int64), axis=1)
    above = graph.op("GreaterOrEqual", values, graph.constant(model.feature_low[decisive]))
    below = graph.op("LessOrEqual", values, graph.constant(model.feature_high[decisive]))
    both = graph.op("Cast", graph.op("And", above, below), to=TensorProto.FLOAT)
    within = graph.op("ReduceMin", both, axes=[1], keepdims=1)
    class_seen = graph.op("Gather", graph.constant(model.seen_classes[:, None].astype(np.float32)), code, axis=0)
    inside = graph.op("Min", within, class_seen)
    # 1 inside, OUT_OF_RANGE_WIDENING outside: exact, since `inside` is 0 or 1.
    stretch = graph.op("Mul", inside, graph.constant(np.float32(1) - OUT_OF_RANGE_WIDENING))
    widening = graph.op("Add", stretch, graph.constant(OUT_OF_RANGE_WIDENING))

    residual = ensembles([target.residual for target in targets], trees)
    log_base = _log_base(graph, targets, code)
    own = graph.constant([target.shift for target in targets])
    if residual is not None:
        clip = graph.constant(-RESIDUAL_CLIP), graph.constant(RESIDUAL_CLIP)
        own = graph.op("Add", graph.op("Clip", residual, *clip), own)
    beyond = graph.op("Sub", log_base, graph.constant([target.edge.log_reach for target in targets]))
    beyond = graph.op("Clip", beyond, graph.constant(ZERO), graph.constant(REACH_FADE_LOG))
    beyond = graph.op("Div", beyond, graph.constant(REACH_FADE_LOG))
    lack = graph.op("Sub", graph.constant([target.edge.log_factor for target in targets]), own)
    log_p50 = graph.op("Add", log_base, graph.op("Add", own, graph.op("Mul", beyond, lack)))
    log_scale = ensembles([target.spread for target in targets], trees)
    if log_scale is None:
        spread = graph.op("MatMul", widening, graph.constant(np.ones((1, count))))
    else:
        log_scale = graph.op("Clip", log_scale, graph.constant(LOG_SCALE_LOW), graph.constant(LOG_SCALE_HIGH))
        spread = graph.op("Mul", graph.op("Exp", log_scale), widening)
    # Columns p50, p90, p99 of each target: log_p50 + (0, q90, q99) · spread, as one product.
    factors = np.zeros((2 * count, 3 * count), np.float32)
    for k, target in enumerate(targets):
        factors[k, 3 * k : 3 * k + 3] = 1.0
        factors[count + k, 3 * k : 3 * k + 3] = (0.0, target.q90, target.q99)
    logs = graph.op("MatMul", graph.op("Concat", log_p50, spread, axis=1), graph.constant(factors))
    latencies = graph.op("Exp", graph.op("Min", logs, graph.constant(LOG_LATENCY_HIGH)))
    graph.op("Concat", latencies, inside, axis=1, output=GRAPH_OUTPUT)


def _log_base(graph: _Graph, targets: Sequence[TargetModel], code: str) -> str:
    """Log of every target's base: float32 (N, T). The targets' bases lie side by side in one."""
    bases = [target.base for target in targets]
    sides = []
    for side in ("left", "right"):
        weights = np.concatenate([getattr(base.basis, side) for base in bases], axis=1)
        offsets = np.concatenate([getattr(base.basis, f"{side}_offset") for base in bases])
        product = graph.op("Gemm", GRAPH_INPUT, graph.constant(weights), graph.constant(offsets))
        sides.append(graph.op("Relu", product))
    # Which row of coefficients each hardware code takes, over all targets: few differ.
    slots, slot_of_code = np.unique(np.stack([base.slots for base in bases], axis=1), axis=0, return_inverse=True)
    rows = [
        np.concatenate([base.coefficients[slot] for base, slot in zip(bases, row, strict=True)])
        for row in slots.tolist()
    ]
    slot = graph.op("Gather", graph.constant(slot_of_code.reshape(-1), np.int64), code, axis=0)
    coefficients = graph.op("Gather", graph.constant(np.stack(rows)), slot, axis=0)
    products = graph.op("Mul", graph.op("Mul", *sides), coefficients)
    owner = np.repeat(np.arange(len(bases)), [len(base.basis) for base in bases])
    total = graph.op("MatMul", products, graph.constant(owner[:, None] == np.arange(len(bases))))
    total = graph.op("Max", total, graph.constant([base.floor_ms for base in bases]))
    return graph.op("Log", total)


def serialize(model: onnx.ModelProto, metadata: Mapping[str, str]) -> bytes:
    """The graph's bytes with the given metadata beside what it has."""
    known = {item.key: item.value for item in model.metadata_props}
    helper.set_model_props(model, known | dict(metadata))
    return bytes(model.SerializeToString())


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


def parity(predict: Callable[[FloatMatrix], FloatMatrix], expected: FloatMatrix, rows: FloatMatrix) -> Parity:
    """Compare a loaded graph with the native model's answers, float32 (n, K), on every row and output.

    Small batches are asked as well: a graph may be right for the size that it was traced with and for no other.
    """
    worst = 0.0
    for count in dict.fromkeys((len(rows), 1, 7)):
        due, found = expected[:count], predict(rows[:count])
        if found.shape != due.shape or not np.isfinite(found).all() or not np.isfinite(due).all():
            return Parity(float("inf"), len(rows))
        error = np.abs(found.astype(np.float64) - due) / np.maximum(np.abs(due), 1e-3)
        worst = max(worst, float(error.max()))
    return Parity(worst, len(rows))
