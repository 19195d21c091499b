"""slo-headroom-tier-filter: who meets what is asked for, and the share that tries the others."""

import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.filters.slo_headroom_tier import SloHeadroomTierConfig, SloHeadroomTierFilter
from tests.unit.router.scheduling.builders import candidates, context, everyone, prediction

PREDICTED = prediction(ttft_p50=[900, 1000, 1100], tpot_p50=[60, 50, 40])


def branches(slo, predicted=PREDICTED, exploration=0.0, elapsed_ms=0.0):
    plugin = SloHeadroomTierFilter(SloHeadroomTierConfig(exploration_probability=exploration))
    found = plugin.branches(context(candidates(3), predicted, slo=slo, elapsed_ms=elapsed_ms), everyone(3))
    return [(branch.probability, branch.keep.tolist()) for branch in found]


ALL = [(1.0, [True, True, True])]


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (Slo(), ALL),
        (Slo(ttft_ms=1000), [(1.0, [True, True, False])]),
        (Slo(tpot_ms=50), [(1.0, [False, True, True])]),
        (Slo(1000, 50), [(1.0, [False, True, False])]),
        (Slo(ttft_ms=100), ALL),
        (Slo(ttft_ms=5000), ALL),
    ],
)
def test_endpoints_that_meet_every_stated_objective_are_kept(slo, expected):
    assert branches(slo) == expected


def test_no_prediction_keeps_everyone():
    assert branches(Slo(ttft_ms=1000), None) == ALL


def test_an_objective_that_is_not_predicted_is_left_out():
    assert branches(Slo(1000, 50), prediction(ttft_p50=[900, 1000, 1100])) == [(1.0, [True, True, False])]


def test_time_already_spent_counts():
    assert branches(Slo(ttft_ms=1000), elapsed_ms=50) == [(1.0, [True, False, False])]


def test_exploration_tries_the_other_tier_alone():
    assert branches(Slo(ttft_ms=1000), exploration=0.01) == [
        (0.99, [True, True, False]),
        (0.01, [False, False, True]),
    ]
