"""Which device a bundle runs on: what is in use is proven, never assumed, and each batch goes where it is faster."""

import dataclasses

import numpy as np
import pytest

from services.predictor.settings import Device, DevicePolicy
from services.predictor.slot import TIMED_ROWS, Slot, crossover, load_on_device, measure_ms
from shared.bundle import Bundle, BundleRefusedError, Refusal
from shared.inference import CPU_PROVIDER, CUDA, Accelerator
from tests.bundles import OUTPUTS, default_weights, linear_graph, make_bundle, rows_of
from tests.unit.predictor.serving import make_batcher

BOTH = ("tree_ensemble", "tensor")
# The tensor rendering runs on the CPU as well: what stands in for a device here.
STAND_IN = Accelerator(CPU_PROVIDER)
# Built into every ONNX Runtime, and able to run no node at all: all of them would fall to the CPU.
NO_NODES = Accelerator("AzureExecutionProvider")


def timings(cpu_ms_a_row: float, launch_ms: float):
    """A CPU whose time grows with the rows, and a device that only pays a launch."""
    return lambda model, rows: launch_ms if model.rendering == "tensor" else cpu_ms_a_row * len(rows)


USUAL = timings(1, 100)


def load(bundle=None, *, policy=DevicePolicy.PREFER, device=Device.CUDA, accelerator=STAND_IN, measure=USUAL):
    bundle = bundle or make_bundle(renderings=BOTH)
    return load_on_device(bundle, device, policy, 1, 5.0, accelerator=accelerator, measure=measure)


def test_the_cpu_takes_the_tree_rendering_alone_and_times_nothing():
    served = load(device=Device.CPU, policy=DevicePolicy.REQUIRE)
    assert [(model.rendering, model.provider) for model in served.models] == [("tree_ensemble", CPU_PROVIDER)]
    assert (served.fallback, served.crossover_rows, served.timings_ms) == (None, None, {})
    assert served.since_unix_ms == 5.0


def test_each_batch_goes_to_the_rendering_that_was_faster_at_its_size():
    served = load()
    assert served.crossover_rows == 256
    assert [served.model_for(rows).rendering for rows in (1, 255, 256, 16_384)] == [
        "tree_ensemble", "tree_ensemble", "tensor", "tensor",
    ]  # fmt: skip
    assert served.timings_ms[4] == (4, 100)
    assert tuple(served.timings_ms) == TIMED_ROWS


async def test_the_batcher_asks_the_rendering_of_the_batch(worker):
    slot = Slot("default")
    slot.current = dataclasses.replace(load(), crossover_rows=4)
    batcher = make_batcher(slot, worker)
    asked = []
    slot.current = dataclasses.replace(
        slot.current, model=_Noting(slot.current.model, asked), accelerated=_Noting(slot.current.accelerated, asked)
    )
    await batcher.predict(rows_of(1, 2, 3))
    await batcher.predict(rows_of(1, 2, 3, 4))
    assert asked == [("tree_ensemble", 3), ("tensor", 4)]


class _Noting:
    def __init__(self, model, asked):
        self._model, self._asked = model, asked

    def __getattr__(self, name):
        return getattr(self._model, name)

    def predict(self, rows):
        self._asked.append((self._model.rendering, len(rows)))
        return self._model.predict(rows)


@pytest.mark.parametrize("policy", DevicePolicy)
def test_a_device_that_is_never_faster_serves_nothing_and_says_so(policy):
    served = load(policy=policy, measure=timings(0.001, 100))
    assert [model.rendering for model in served.models] == ["tree_ensemble"]
    assert "slower than the CPU at 4096 rows" in served.fallback
    assert served.timings_ms


@pytest.mark.parametrize(
    ("device_ms", "expected"),
    [
        ((1, 1, 1, 1), 1),
        ((50, 50, 50, 50), 64),
        ((1, 50, 1, 50), 16),  # one lucky run below a size where it lost decides nothing
        ((500, 500, 500, 500), None),
        ((5, 5, 16, 65), None),
    ],
)
def test_the_crossover_is_where_the_device_begins_to_win_for_good(device_ms, expected):
    cpu_ms = (2, 4, 16, 64)
    assert crossover((1, 4, 16, 64), cpu_ms, device_ms) == expected


@pytest.mark.parametrize("accelerator", [CUDA, NO_NODES])
def test_a_device_whose_nodes_fall_to_the_cpu_is_refused_or_told(accelerator):
    """CUDA isn't on this machine; the other provider is in every ONNX Runtime and can run no node."""
    served = load(accelerator=accelerator)
    assert [model.rendering for model in served.models] == ["tree_ensemble"]
    assert accelerator.provider in served.fallback
    assert "CPU" in served.fallback
    with pytest.raises(BundleRefusedError, match="cuda is required, but") as caught:
        load(accelerator=accelerator, policy=DevicePolicy.REQUIRE)
    assert caught.value.reason is Refusal.DEVICE


def test_cuda_computes_in_whole_float32():
    """TensorFloat-32, the default, rounds sums of tokens to 10 bits."""
    assert CUDA.options == {"use_tf32": "0"}


@pytest.mark.parametrize("policy", DevicePolicy)
def test_cuda_without_a_tensor_rendering_is_said_or_refused(policy):
    if policy is DevicePolicy.PREFER:
        assert load(make_bundle(), policy=policy).fallback == "the bundle has no tensor rendering"
    else:
        with pytest.raises(BundleRefusedError, match="no tensor rendering"):
            load(make_bundle(), policy=policy)


def test_a_device_that_answers_otherwise_than_the_cpu_is_left_out():
    whole = make_bundle(renderings=BOTH)
    other = linear_graph(default_weights(len(OUTPUTS)) * np.float32(1.001), 1.0)
    astray = Bundle(whole.manifest, {**whole.graphs, "tensor": other})
    served = load(astray)
    assert [model.rendering for model in served.models] == ["tree_ensemble"]
    assert "strays by" in served.fallback


def test_a_graph_that_cannot_be_loaded_is_refused_as_such():
    with pytest.raises(BundleRefusedError) as caught:
        load(make_bundle(graph=b"no graph"), device=Device.CPU)
    assert caught.value.reason is Refusal.LOAD


def test_real_timings_are_positive_and_grow_with_the_rows():
    served = load(measure=measure_ms)
    model = served.model
    rows = np.concatenate([rows_of(*range(100))] * 100)
    assert 0 < measure_ms(model, rows[:1]) < measure_ms(model, rows) * 10
