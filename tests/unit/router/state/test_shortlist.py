"""Which endpoints of a large pool are looked at: as many as allowed, of every class, the best by each key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.state.shortlist import shortlist
from services.router.state.table import EndpointTable


def column(values) -> np.ndarray:
    return np.asarray(values, np.float32)


def classes_of(codes) -> list[np.ndarray]:
    codes = np.asarray(codes)
    return [np.flatnonzero(codes == code) for code in np.unique(codes)]


def drawn(seed: int, count: int, kinds: int):
    rng = np.random.default_rng(seed)
    return (
        column(rng.integers(0, 3_000, count)),
        column(rng.integers(0, 20_000, count) * rng.integers(0, 2, count)),
        column(rng.integers(0, 40, count)),
        classes_of(rng.integers(0, kinds, count)),
        column(rng.random(count)),
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 6), st.integers(1, 150))
def test_it_is_a_subset_as_large_as_allowed_with_every_class_in_it(seed, count, kinds, limit):
    own, pending, requests, classes, noise = drawn(seed, count, kinds)
    places = shortlist(own, pending, requests, classes, limit, noise)
    assert len(places) == len(set(places.tolist()))
    assert places.tolist() == sorted(places.tolist())
    assert len(places) == max(min(limit, count), 0) or len(places) == len(classes) > limit
    if limit >= len(classes):
        assert all(np.isin(places, members).any() for members in classes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_best_of_each_class_by_each_key_are_in_it(seed, kinds):
    own, pending, requests, classes, noise = drawn(seed, 500, kinds)
    places = set(shortlist(own, pending, requests, classes, 128, noise).tolist())
    for members in classes:
        for key in (own + pending + noise, requests + noise, own + noise):
            best = members[np.argsort(key[members], kind="stable")[:3]]
            assert set(best.tolist()) <= places


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_who_is_left_out_has_better_ones_of_its_class_in_it(seed):
    own, pending, requests, classes, noise = drawn(seed, 400, 3)
    places = shortlist(own, pending, requests, classes, 128, noise)
    tokens = own + pending + noise
    for members in classes:
        kept = places[np.isin(places, members)]
        for place in np.setdiff1d(members, kept):
            assert (tokens[kept] <= tokens[place]).sum() >= 10
            assert (requests[kept] + noise[kept] <= requests[place] + noise[place]).sum() >= 5


def large_table(count: int, limit: int) -> EndpointTable:
    table = EndpointTable(max_candidates=limit)
    for number in range(count):
        endpoint = table.add(f"10.0.{number // 250}.{number % 250 + 1}:8000", hardware_class=number % 3, now_ms=0.0)
        table.set_models(endpoint, frozenset({"m"}))
        table.set_ready(endpoint, True)
    return table


def candidates(table: EndpointTable):
    return table.candidates("m", None, 100.0, np.zeros(table.capacity, np.float32), 0.0)


@pytest.mark.parametrize(("count", "limit", "looked_at"), [(40, 16, 16), (16, 16, 16), (40, 0, 40), (1_000, 128, 128)])
def test_a_table_gives_as_many_candidates_as_it_may(count, limit, looked_at):
    found = candidates(large_table(count, limit))
    assert len(found) == looked_at
    assert all(len(values) == looked_at for values in found.columns().values())
    table = large_table(count, limit)
    found = candidates(table)
    assert [table.get(address).slot for address in found.addresses] == found.slots.tolist()


def test_in_an_idle_pool_everybodys_turn_comes():
    table = large_table(500, 64)
    seen: set[str] = set()
    for _ in range(60):
        seen.update(candidates(table).addresses)
    assert len(seen) == 500


def test_a_busy_endpoint_is_left_out_and_a_free_one_is_not():
    table = large_table(300, 32)
    for endpoint in table:
        busy = endpoint.slot % 20 != 0
        table.set_load(
            endpoint.slot, pending_tokens=5_000 * busy, pending_requests=3 * busy, oldest_pending_ms=0.0,
            decoding_requests=0, decode_input_tokens=0, decode_since_sum_ms=0,
        )  # fmt: skip
    free = {endpoint.address for endpoint in table if endpoint.slot % 20 == 0}
    assert free <= set(candidates(table).addresses)
