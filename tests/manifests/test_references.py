"""Names, ports, labels, variables and paths agree across manifests, settings and code, in every overlay."""

import pytest

from tests.manifests.overlays import OVERLAYS, STACKS, stack
from tests.manifests.references import faults


def test_the_overlays_are_those_that_are_promised() -> None:
    assert OVERLAYS == ("envoy-gateway", "istio", "istio-envoyfilter", "plain-envoy")


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_everything_refers_to_what_is_there(names: tuple[str, ...]) -> None:
    assert faults(stack(*names)) == []
