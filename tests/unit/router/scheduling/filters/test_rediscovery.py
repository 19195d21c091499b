"""rediscovery-filter: who is forgotten, how often one is tried, and when nothing is left to chance."""

import pytest

from services.router.scheduling.filters.rediscovery import RediscoveryConfig, RediscoveryFilter
from tests.unit.router.scheduling.builders import candidates, context, everyone, only


def branches(endpoints, alive=None, **config):
    plugin = RediscoveryFilter(RediscoveryConfig(**config))
    found = plugin.branches(context(endpoints), everyone(len(endpoints)) if alive is None else alive)
    return [(branch.probability, branch.keep.tolist()) for branch in found]


ALL = [(1.0, [True, True, True])]


def test_a_few_requests_go_to_the_endpoint_that_nobody_came_to():
    found = branches(candidates(3, arrivals_per_ms=[0.001, 0.001, 0.00005]))
    assert found == [(pytest.approx(0.98), [True, True, True]), (0.02, [False, False, True])]


@pytest.mark.parametrize(
    "columns",
    [
        {"arrivals_per_ms": [0.001, 0.001, 0.0005]},
        {"arrivals_per_ms": [0.001, 0.001, 0.0], "pending_requests": [0, 0, 1]},
        {"arrivals_per_ms": [0.0001, 0.0001, 0.0]},
        {"arrivals_per_ms": [0.0, 0.0, 0.0]},
    ],
    ids=["less but not forgotten", "it has a request already", "too few to tell", "no arrivals at all"],
)
def test_else_nothing_is_left_to_chance(columns):
    assert branches(candidates(3, **columns)) == ALL


def test_without_exploration_nobody_is_tried():
    assert branches(candidates(3, arrivals_per_ms=[0.001, 0.001, 0.0]), exploration_probability=0.0) == ALL


def test_one_that_another_filter_left_out_is_not_tried():
    endpoints = candidates(3, arrivals_per_ms=[0.001, 0.001, 0.0])
    assert branches(endpoints, only(3, 0, 1)) == [(1.0, [True, True, False])]
