"""session-affinity-scorer: one session, one endpoint, and little moves when the pool changes."""

from collections import Counter

import numpy as np

from services.router.scheduling.scorers.session_affinity import SessionAffinityConfig, SessionAffinityScorer
from tests.unit.router.scheduling.builders import candidates, context, everyone, only

SCORER = SessionAffinityScorer(SessionAffinityConfig())


def home(session, count=5, alive=None):
    scores = SCORER.score(context(candidates(count), session_id=session), everyone(count) if alive is None else alive)
    assert sorted(scores.tolist()) == [0.0] * (count - 1) + [1.0]
    return int(scores.argmax())


def test_a_session_stays_where_it_is():
    assert len({home("a") for _ in range(5)}) == 1


def test_without_a_session_it_has_no_opinion():
    assert SCORER.score(context(candidates(3)), everyone(3)) is None


def test_sessions_spread():
    counts = Counter(home(f"session {i}") for i in range(1_000))
    assert min(counts.values()) > 140


def test_only_the_sessions_of_an_endpoint_that_is_gone_move():
    homes = {f"session {i}": home(f"session {i}") for i in range(300)}
    alive = np.array([True, True, False, True, True])
    moved = [session for session, at in homes.items() if home(session, alive=alive) != at]
    assert set(moved) == {session for session, at in homes.items() if at == 2}


def test_a_session_goes_to_who_is_left():
    assert home("a", alive=only(5, 3)) == 3
