"""Which device a bundle runs on: what is in use is read back, never assumed."""

import pytest

from services.predictor.settings import Device, DevicePolicy
from services.predictor.slot import CUDA_PROVIDER, load_on_device
from shared.bundle import BundleRefusedError, Refusal
from shared.inference import CPU_PROVIDER
from tests.bundles import make_bundle

BOTH = ("tree_ensemble", "tensor")


def test_the_cpu_takes_the_tree_rendering():
    served = load_on_device(make_bundle(renderings=BOTH), Device.CPU, DevicePolicy.REQUIRE, 1, 5.0)
    assert (served.model.rendering, served.model.provider, served.fallback) == ("tree_ensemble", CPU_PROVIDER, None)
    assert served.since_unix_ms == 5.0


def test_where_cuda_is_preferred_but_not_in_use_the_cpu_serves_and_says_why():
    served = load_on_device(make_bundle(renderings=BOTH), Device.CUDA, DevicePolicy.PREFER, 1, 0.0)
    assert (served.model.rendering, served.model.provider) == ("tree_ensemble", CPU_PROVIDER)
    assert CUDA_PROVIDER in (served.fallback or "")


def test_where_cuda_is_required_but_not_in_use_the_bundle_is_refused_with_the_reason():
    with pytest.raises(BundleRefusedError, match="cuda is required") as caught:
        load_on_device(make_bundle(renderings=BOTH), Device.CUDA, DevicePolicy.REQUIRE, 1, 0.0)
    assert caught.value.reason is Refusal.DEVICE


@pytest.mark.parametrize("policy", DevicePolicy)
def test_cuda_without_a_tensor_rendering_is_said_or_refused(policy):
    bundle = make_bundle()
    if policy is DevicePolicy.PREFER:
        served = load_on_device(bundle, Device.CUDA, policy, 1, 0.0)
        assert served.fallback == "the bundle has no tensor rendering"
    else:
        with pytest.raises(BundleRefusedError, match="no tensor rendering"):
            load_on_device(bundle, Device.CUDA, policy, 1, 0.0)


def test_a_graph_that_cannot_be_loaded_is_refused_as_such():
    with pytest.raises(BundleRefusedError) as caught:
        load_on_device(make_bundle(graph=b"no graph"), Device.CPU, DevicePolicy.PREFER, 1, 0.0)
    assert caught.value.reason is Refusal.LOAD
