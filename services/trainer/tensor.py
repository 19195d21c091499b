"""Boosters as tensor operators, by Hummingbird: the trees of the rendering for accelerators. Pure but for its imports.

ONNX Runtime has no CUDA kernel for tree ensembles; Hummingbird's perfect-tree traversal walks all trees level by level
with gathers and compares, which any accelerator has. It is wrong in silence in four cases, and each is kept out here:
NaN (none enters a row, and none is trained on), several outputs at once and link functions (refused), a graph traced
with one row (it is traced with several; this traversal is right for every batch size, and parity asks for 1 and 7).

Hummingbird 0.4.12 can't read what XGBoost writes since 3.1 (`base_score` as text of a vector), hence `_Readable`. Its
own ONNX way needs one package more and fails with PyTorch's present exporter, so its PyTorch module is exported here,
by the older exporter. Neither writes a file.

Limits: a booster costs 0.1 s of CPU, the first one 0.4 s more; importing costs 1.7 s and 250 MB.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed
from types import ModuleType
from typing import Any, Final

import numpy as np
import onnx
import xgboost as xgb
from onnx import helper, numpy_helper

from services.trainer.export import OPSET

LIBRARIES: Final = ("hummingbird-ml", "torch")
STRATEGY: Final = "perf_tree_trav"
# Perfect trees have 2^depth leaves each.
MAX_DEPTH: Final = 10
_TRACED_ROWS: Final = 8


class _Readable:
    """What Hummingbird asks of a booster, in the form that it can read."""

    feature_names: Final = None

    def __init__(self, booster: xgb.Booster) -> None:
        self._booster = booster

    def get_dump(self) -> list[str]:
        dump: list[str] = self._booster.get_dump()
        return dump

    def save_config(self) -> str:
        config = json.loads(self._booster.save_config())
        parameters = config["learner"]["learner_model_param"]
        parameters["base_score"] = parameters["base_score"].strip("[]")
        return json.dumps(config)


@dataclass(frozen=True, slots=True)
class Hummingbird:
    """The library, loaded. Called with a booster it gives a graph and the converter's name; raises ValueError."""

    module: ModuleType
    torch: ModuleType
    name: str

    def __call__(self, booster: xgb.Booster) -> tuple[onnx.GraphProto, str]:
        _check(booster)
        columns = booster.num_features()
        rows = np.zeros((_TRACED_ROWS, columns), np.float32)
        regressor = xgb.XGBRegressor()
        # Set on the instance: Hummingbird asks for the type by its exact class.
        regressor.get_booster = lambda: _Readable(booster)
        try:
            converted = self.module.convert(
                regressor, "torch", rows, extra_config={"tree_implementation": STRATEGY, "n_features": columns}
            )
            written = io.BytesIO()
            self.torch.onnx.export(
                converted.model,
                (self.torch.from_numpy(rows),),
                written,
                input_names=["trees"],
                output_names=["sum"],
                dynamic_axes={"trees": {0: "N"}, "sum": {0: "N"}},
                opset_version=OPSET,
                dynamo=False,
            )
        except Exception as error:  # two libraries, many kinds of errors; the bundle does without this rendering
            raise ValueError(f"{self.name}: {type(error).__name__}: {str(error)[:200]}") from error
        return _with_constants_apart(onnx.load_model_from_string(written.getvalue()).graph), self.name


def load_hummingbird(threads: int) -> Hummingbird:
    """Import Hummingbird and PyTorch; raises ImportError where one is missing or can't be loaded."""
    import hummingbird.ml  # noqa: PLC0415 - heavy, and there only where it was installed
    import torch  # noqa: PLC0415

    torch.set_num_threads(threads)
    name = " ".join(f"{library} {installed(library)}" for library in LIBRARIES)
    return Hummingbird(hummingbird.ml, torch, name)


def _check(booster: xgb.Booster) -> None:
    learner = json.loads(booster.save_config())["learner"]
    objective = learner["objective"]["name"]
    if objective != "reg:squarederror":
        raise ValueError(f"objective {objective}; only reg:squarederror is converted")
    parameters: Mapping[str, Any] = learner["learner_model_param"]
    outputs = max(int(parameters.get("num_target", 1)), int(parameters.get("num_class", 0)))
    if outputs > 1:
        raise ValueError(f"{outputs} outputs; a booster with one is converted")
    depth = int(learner["gradient_booster"]["tree_train_param"]["max_depth"])
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth {depth}; 1 to {MAX_DEPTH} is converted")


def _with_constants_apart(graph: onnx.GraphProto) -> onnx.GraphProto:
    """The same graph with its constant nodes as initializers."""
    constants = [node for node in graph.node if node.op_type == "Constant"]
    rest = [node for node in graph.node if node.op_type != "Constant"]
    tensors = [
        numpy_helper.from_array(numpy_helper.to_array(helper.get_attribute_value(node.attribute[0])), node.output[0])
        for node in constants
    ]
    return helper.make_graph(rest, graph.name, graph.input, graph.output, [*graph.initializer, *tensors])
