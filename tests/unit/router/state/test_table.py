import numpy as np
import pytest

from services.router.request.errors import RejectReason
from services.router.state.errors import ModelNotFound, NoEndpoint
from services.router.state.roles import Role
from services.router.state.table import Endpoint, EndpointTable


def add(table: EndpointTable, address: str, *models: str, ready: bool = True, hardware_class: int = 0) -> Endpoint:
    endpoint = table.add(address, hardware_class=hardware_class, now_ms=0.0)
    if models:
        table.set_models(endpoint, frozenset(models))
    table.set_ready(endpoint, ready)
    return endpoint


def candidates(table: EndpointTable, model="m", subset=None, *, now_ms=0.0, input_tokens=100.0, matched=None):
    tokens = np.zeros(table.capacity, np.float32)
    for slot, value in (matched or {}).items():
        tokens[slot] = value
    return table.candidates(model, subset, input_tokens, tokens, now_ms)


def test_ready_endpoints_that_serve_the_model_are_candidates():
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "m")
    add(table, "10.0.0.2:8000", "m", ready=False)
    add(table, "10.0.0.3:8000", "other")
    add(table, "10.0.0.4:8000", "m", "other", hardware_class=2)
    found = candidates(table)
    assert found.addresses == ("10.0.0.1:8000", "10.0.0.4:8000")
    assert found.hardware_class.tolist() == [0, 2]
    assert all(column.dtype == np.float32 and column.shape == (2,) for column in found.columns().values())
    assert candidates(table, "other").addresses == ("10.0.0.3:8000", "10.0.0.4:8000")
    assert table.everyone(None, 0.0).addresses == ("10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.4:8000")


def test_a_pool_without_endpoints_is_a_503():
    with pytest.raises(NoEndpoint) as caught:
        candidates(EndpointTable())
    assert (caught.value.status, caught.value.reason) == (503, RejectReason.NO_ENDPOINT)


def test_a_model_is_not_found_only_when_every_endpoint_has_told_its_models():
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "other")
    silent = add(table, "10.0.0.2:8000", ready=False)
    with pytest.raises(NoEndpoint):
        candidates(table)
    table.set_models(silent, frozenset({"other"}))
    with pytest.raises(ModelNotFound) as caught:
        candidates(table)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_an_endpoint_that_lists_no_models_is_asked_only_where_nobody_is_known_to_serve_it():
    table = EndpointTable()
    add(table, "10.0.0.1:8000")
    assert candidates(table).addresses == ("10.0.0.1:8000",)
    knowing = add(table, "10.0.0.2:8000", "m")
    assert candidates(table).addresses == ("10.0.0.2:8000",)
    table.set_ready(knowing, ready=False)
    with pytest.raises(NoEndpoint):
        candidates(table)


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        ({"10.0.0.1:8000"}, ["10.0.0.1:8000"]),
        ({"10.0.0.1"}, ["10.0.0.1:8000", "10.0.0.1:8001"]),
        ({"::1"}, ["[::1]:8000"]),
        ({"[::1]"}, ["[::1]:8000"]),
        ({"[::1]:8000", "10.0.0.9:1"}, ["[::1]:8000"]),
    ],
)
def test_the_subset_hint_names_endpoints_by_address_or_by_ip(subset, expected):
    table = EndpointTable()
    for address in ("10.0.0.1:8000", "10.0.0.1:8001", "[::1]:8000"):
        add(table, address, "m")
    assert list(candidates(table, subset=frozenset(subset)).addresses) == expected


@pytest.mark.parametrize("subset", [set(), {"10.0.0.9:8000"}])
def test_a_subset_without_a_ready_endpoint_is_a_503_of_its_own_reason(subset):
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "m")
    with pytest.raises(NoEndpoint) as caught:
        candidates(table, subset=frozenset(subset))
    assert caught.value.reason is RejectReason.SUBSET_EMPTY


def test_uncached_tokens_are_the_prompt_less_what_matches_and_never_negative():
    table = EndpointTable()
    slots = [add(table, f"10.0.0.{i}:1", "m").slot for i in range(3)]
    found = candidates(table, input_tokens=100.0, matched={slots[0]: 30.0, slots[2]: 130.0})
    by_address = dict(zip(found.addresses, found.uncached_tokens.tolist(), strict=True))
    assert by_address == {"10.0.0.0:1": 70.0, "10.0.0.1:1": 100.0, "10.0.0.2:1": 0.0}


def test_the_ledgers_sums_and_ages_are_those_of_the_moment():
    table = EndpointTable()
    slot = add(table, "10.0.0.1:1", "m").slot
    table.observe_step_time(slot, 20.0)
    table.set_load(
        slot,
        pending_tokens=500,
        pending_requests=2,
        oldest_pending_ms=1_000.0,
        decoding_requests=3,
        decode_input_tokens=900,
        decode_since_sum_ms=3 * 1_200,
    )
    found = candidates(table, now_ms=1_400.0)
    assert found.pending_uncached_tokens.tolist() == [500.0]
    assert found.pending_requests.tolist() == [2.0]
    assert found.oldest_pending_age_ms.tolist() == [400.0]
    assert found.decoding_requests.tolist() == [3.0]
    # 200 ms at 20 ms a token: each of the three has grown by ten tokens.
    assert found.decode_context_tokens.tolist() == [930.0]


def test_contexts_are_told_to_the_token_however_long_the_machine_has_been_up():
    table = EndpointTable()
    slot = add(table, "10.0.0.1:1", "m").slot
    table.observe_step_time(slot, 10.0)
    up_ms = 3.1e10  # a year: float32 steps by 2048 ms here
    table.set_load(
        slot,
        pending_tokens=0,
        pending_requests=1,
        oldest_pending_ms=up_ms - 7.0,
        decoding_requests=200,
        decode_input_tokens=1_000,
        decode_since_sum_ms=round(200 * (up_ms - 50.0)),
    )
    found = candidates(table, now_ms=up_ms)
    assert found.decode_context_tokens[0] == pytest.approx(2_000.0)
    assert found.oldest_pending_age_ms[0] == pytest.approx(7.0)


def test_a_scraped_value_counts_until_it_is_too_old():
    table = EndpointTable(scrape_limit_ms=5_000.0)
    slot = add(table, "10.0.0.1:1", "m").slot
    assert candidates(table).scrape_known.tolist() == [0.0]
    table.set_scraped(slot, waiting_requests=4.0, running_requests=5.0, kv_cache_utilization=0.5, now_ms=1_000.0)
    fresh, old = candidates(table, now_ms=6_000.0), candidates(table, now_ms=6_001.0)
    assert (fresh.waiting_requests[0], fresh.running_requests[0], fresh.kv_cache_utilization[0]) == (4.0, 5.0, 0.5)
    assert (fresh.scrape_age_ms[0], fresh.scrape_known[0]) == (5_000.0, 1.0)
    assert (old.waiting_requests[0], old.running_requests[0], old.kv_cache_utilization[0]) == (0.0, 0.0, 0.0)
    assert (old.scrape_age_ms[0], old.scrape_known[0]) == (0.0, 0.0)
    assert table.scrape_age_ms(slot, 9_000.0) == 8_000.0


def test_the_scraped_utilization_is_not_touched_by_the_ledger():
    """Two writers never share a field: 5 local changes leave the scraped 0.99 as it is."""
    table = EndpointTable()
    slot = add(table, "10.0.0.1:1", "m").slot
    table.set_scraped(slot, waiting_requests=0.0, running_requests=9.0, kv_cache_utilization=0.99, now_ms=0.0)
    for count in range(5):
        table.set_load(
            slot,
            pending_tokens=count,
            pending_requests=count,
            oldest_pending_ms=0.0,
            decoding_requests=0,
            decode_input_tokens=0,
            decode_since_sum_ms=0,
        )
    assert candidates(table).kv_cache_utilization[0] == pytest.approx(0.99)


def test_step_times_are_averaged_and_unknown_before_the_first():
    table = EndpointTable()
    slot = add(table, "10.0.0.1:1", "m").slot
    assert candidates(table).step_time_known.tolist() == [0.0]
    table.observe_step_time(slot, 10.0)
    table.observe_step_time(slot, 20.0)
    assert candidates(table).step_time_ms[0] == pytest.approx(11.0)
    assert candidates(table).step_time_known.tolist() == [1.0]


def test_a_snapshot_does_not_change_afterwards():
    table = EndpointTable()
    slot = add(table, "10.0.0.1:1", "m").slot
    before = candidates(table)
    table.set_scraped(slot, waiting_requests=4.0, running_requests=5.0, kv_cache_utilization=0.5, now_ms=0.0)
    assert before.waiting_requests.tolist() == [0.0]


def test_the_table_grows_and_uses_freed_slots_again():
    table = EndpointTable(capacity=2)
    endpoints = [add(table, f"10.0.0.{i}:1", "m") for i in range(9)]
    table.set_scraped(endpoints[0].slot, waiting_requests=7.0, running_requests=0.0, kv_cache_utilization=0, now_ms=0.0)
    assert len(candidates(table)) == 9
    assert candidates(table).waiting_requests.sum() == 7.0
    capacity = table.capacity
    for round_number in range(50):
        table.remove(endpoints.pop(0))
        endpoints.append(add(table, f"10.0.1.{round_number}:1", "m"))
    assert table.capacity == capacity
    assert len({endpoint.slot for endpoint in endpoints}) == 9
    assert candidates(table).waiting_requests.sum() == 0.0


def test_adding_a_known_endpoint_keeps_what_is_known_of_it():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:1", "m")
    table.observe_step_time(endpoint.slot, 10.0)
    assert table.add("10.0.0.1:1", hardware_class=3, now_ms=5.0) is endpoint
    assert candidates(table).step_time_ms.tolist() == [10.0]
    assert candidates(table).hardware_class.tolist() == [3.0]


def test_a_retired_endpoint_is_no_candidate_until_it_is_added_again():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:1", "m")
    table.retire(endpoint)
    with pytest.raises(NoEndpoint):
        candidates(table)
    table.add("10.0.0.1:1", hardware_class=0, now_ms=5.0)
    assert len(candidates(table)) == 1


def test_a_new_process_at_an_address_has_told_no_models_and_has_no_measured_values():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:1", "m", hardware_class=2)
    table.observe_step_time(endpoint.slot, 10.0)
    table.renew(endpoint, 123.0, 5.0)
    assert (endpoint.models, endpoint.incarnation, endpoint.incarnations) == (None, 123.0, 2)
    found = candidates(table)
    assert (found.step_time_known[0], found.hardware_class[0]) == (0.0, 2.0)


def test_models_and_subsets_that_clients_make_up_are_not_remembered_without_bound():
    table = EndpointTable()
    add(table, "10.0.0.1:1")
    for number in range(3_000):
        candidates(table, f"model-{number}")
    assert len(table._groups) <= 1_024


def load(table: EndpointTable, endpoint: Endpoint, requests: int) -> None:
    table.set_load(
        endpoint.slot,
        pending_tokens=0,
        pending_requests=0,
        oldest_pending_ms=float("inf"),
        decoding_requests=requests,
        decode_input_tokens=0,
        decode_since_sum_ms=0,
    )


def returned(table: EndpointTable, endpoint: Endpoint, now_ms: float) -> None:
    table.set_ready(endpoint, False, now_ms)
    table.set_ready(endpoint, True, now_ms)


def test_an_endpoint_that_returns_ramps_up():
    table = EndpointTable()
    steady, back = add(table, "10.0.0.1:8000", "m"), add(table, "10.0.0.2:8000", "m")
    load(table, steady, 40)
    returned(table, back, 1_000.0)
    for now_ms, requests, is_candidate in [
        (1_000.0, 0, True), (1_000.0, 1, True), (1_000.0, 2, False), (2_000.0, 3, True), (2_000.0, 4, False),
        (5_000.0, 31, True), (5_000.0, 32, False), (11_500.0, 10_000, True), (1_000.0, 5, True),
    ]:  # fmt: skip
        load(table, back, requests)
        assert ("10.0.0.2:8000" in candidates(table, now_ms=now_ms).addresses) is is_candidate


def test_a_first_appearance_does_not_ramp_up():
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "m")
    new = table.add("10.0.0.2:8000", hardware_class=0, now_ms=0.0)
    table.set_models(new, frozenset({"m"}))
    table.set_ready(new, True, 0.0)
    load(table, new, 50)
    assert len(candidates(table, now_ms=1.0)) == 2


def test_where_all_ramp_up_nobody_is_left_out():
    table = EndpointTable()
    for number in range(3):
        endpoint = add(table, f"10.0.0.{number}:8000", "m")
        returned(table, endpoint, 0.0)
        load(table, endpoint, 10)
    assert len(candidates(table, now_ms=1.0)) == 3


def test_a_new_process_at_an_address_ramps_up():
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "m")
    renewed = add(table, "10.0.0.2:8000", "m")
    table.renew(renewed, 7.0, 100.0)
    table.set_models(renewed, frozenset({"m"}))
    load(table, renewed, 3)
    assert candidates(table, now_ms=100.0).addresses == ("10.0.0.1:8000",)


ROLES = [("prefill", False), ("encode", False), ("decode", True), ("both", True)]


@pytest.mark.parametrize(("role", "is_candidate"), ROLES)
def test_only_endpoints_that_decode_are_candidates_for_a_whole_request(role, is_candidate):
    table = EndpointTable()
    add(table, "10.0.0.1:8000", "m")
    other = table.add("10.0.0.2:8000", hardware_class=0, now_ms=0.0, role=Role(role))
    table.set_models(other, frozenset({"m"}))
    table.set_ready(other, True)
    assert (len(candidates(table)) == 2) is is_candidate


def test_the_pace_of_prefill_is_tokens_over_time_and_belongs_to_the_process():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:8000")
    assert table.view(endpoint.slot, 0.0).prefill_ms_per_token.tolist() == [0.0]
    for _ in range(2000):
        table.observe_prefill(endpoint.slot, 200.0, 30.0)
        table.observe_prefill(endpoint.slot, 800.0, 70.0)
        table.observe_prefill(endpoint.slot, 3.0, 20.0)
    assert table.view(endpoint.slot, 0.0).prefill_ms_per_token.tolist() == pytest.approx([0.1], rel=0.01)
    table.renew(endpoint, 1.0, 0.0)
    assert table.view(endpoint.slot, 0.0).prefill_ms_per_token.tolist() == [0.0]
    table.observe_prefill(endpoint.slot, 200.0, 100.0)
    assert table.view(endpoint.slot, 0.0).prefill_ms_per_token.tolist() == pytest.approx([0.5])


def test_arrivals_settle_at_their_rate_and_fade():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:8000")
    for now_ms in range(0, 300_000, 100):
        table.observe_arrival(endpoint.slot, float(now_ms))
    [rate] = table.view(endpoint.slot, 300_000.0).arrivals_per_ms.tolist()
    assert rate == pytest.approx(0.01, rel=0.01)
    [later] = table.view(endpoint.slot, 330_000.0).arrivals_per_ms.tolist()
    assert later == pytest.approx(0.01 / 2.718, rel=0.02)


def test_pending_tokens_at_an_instant_are_those_that_a_decision_sees():
    table = EndpointTable()
    endpoint = add(table, "10.0.0.1:8000")
    table.set_load(
        endpoint.slot,
        pending_tokens=1000,
        pending_requests=1,
        oldest_pending_ms=0.0,
        decoding_requests=0,
        decode_input_tokens=0,
        decode_since_sum_ms=0,
        head_tokens=900.0,
        head_since_ms=0.0,
        head_tokens_per_ms=10.0,
    )
    for now_ms, left in ((0.0, 1000.0), (50.0, 500.0), (1000.0, 100.0)):
        assert table.pending_tokens(endpoint.slot, now_ms) == left
        assert table.view(endpoint.slot, now_ms).pending_uncached_tokens.tolist() == [left]
