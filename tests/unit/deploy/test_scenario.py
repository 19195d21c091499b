"""The demo's load is fixed by its seed, steady, and within what the machine can simulate."""

import pytest

from deploy.local import scenario
from deploy.local.scenario import Workload
from shared.features import HARDWARE_CLASSES


def test_the_same_seed_gives_the_same_requests() -> None:
    assert scenario.measured(Workload(seed=3)) == scenario.measured(Workload(seed=3))


def test_another_seed_gives_other_requests() -> None:
    assert scenario.measured(Workload(seed=3)) != scenario.measured(Workload(seed=4))


def test_the_lessons_are_not_the_exam() -> None:
    texts = {request.messages for request in scenario.measured(Workload())}
    assert not texts & {request.messages for request in scenario.learning(Workload())}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_rate_is_as_asked_from_the_first_second_to_the_last(seed: int) -> None:
    workload = Workload(rate_per_s=30, seconds=60, seed=seed)
    arrivals = [request.arrival_ms for request in scenario.measured(workload)]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] < arrivals[-1] < 60_000
    halves = [sum(at < 30_000 for at in arrivals), sum(at >= 30_000 for at in arrivals)]
    assert all(0.75 * 900 < half < 1.25 * 900 for half in halves)


def test_turns_of_a_conversation_share_their_prefix() -> None:
    by_session: dict[str, list[tuple[tuple[str, str], ...]]] = {}
    for request in scenario.measured(Workload()):
        by_session.setdefault(request.session, []).append(request.messages)
    longer = [turns for turns in by_session.values() if len(turns) > 1]
    assert longer
    assert all(later[: len(earlier)] == earlier for earlier, later in (turns[:2] for turns in longer))


def test_the_default_load_is_within_what_two_cores_simulate() -> None:
    workload = Workload()
    tokens = sum(request.max_tokens for request in scenario.measured(workload))
    assert tokens / workload.seconds < 2_500


def test_there_are_six_servers_of_three_speeds_each_with_a_known_hardware_class() -> None:
    servers, classes = scenario.servers(1).servers, scenario.hardware_classes()
    assert len(servers) == 6
    assert {server.name for server in servers} == set(classes)
    assert len({(server.profile, server.speed) for server in servers}) == 3
    assert set(classes.values()) <= set(HARDWARE_CLASSES)
