"""What a router makes of its peers' words, case by case, on a network that loses nothing unless the test does."""

import pytest

from services.router.request.inference_request import InferenceRequest
from services.router.sharing.limits import ShareConfig
from services.router.sharing.messages import MAX_ENTRIES
from shared.samples import Outcome
from tests.samples import make_sample
from tests.unit.router.sharing.network import SALT, A, B, Network, Router, metrics, request


def pair(**options) -> tuple[Network, Router, Router]:
    one, two = Router("one", **options), Router("two", lead_ms=5_000.0, **options)
    network = Network(one, two)
    network.run(600.0)
    return network, one, two


def test_a_peers_request_weighs_as_ones_own_with_its_tokens_age_and_prefix() -> None:
    network, one, two = pair()
    what = request(b"q" * 8_192, tokens=2_000.0)
    one.send("a", A, network.now_ms, what)
    network.run(50.0)
    candidates, match = two.pool.snapshot(what, None, network.now_ms + two.lead_ms)
    its_own, _ = one.pool.snapshot(what, None, network.now_ms)
    assert candidates.pending_requests.tolist() == [1, 0]
    assert candidates.oldest_pending_age_ms[0] == pytest.approx(50.0, abs=1.0)
    for name, column in its_own.columns().items():
        assert candidates.columns()[name].tolist() == pytest.approx(column.tolist(), abs=1.0), name
    assert match.matched_tokens[two.pool.table.get(A).slot] > 0


def test_an_outcome_of_a_live_peers_request_counts_nothing_out_but_teaches() -> None:
    network, one, two = pair()
    one.send("a", A, network.now_ms)
    network.run(100.0)
    sample = make_sample("a", endpoint=A, input_tokens=700)
    before = two.pool.tokens.bytes_per_token("m")
    two.pool.observe_outcome(sample, network.now_ms + two.lead_ms)
    assert two.loads() == (1, 0)
    assert two.pool.tokens.bytes_per_token("m") != before
    one.finish("a", network.now_ms)
    network.run(100.0)
    assert two.loads() == (0, 0)


def test_a_first_token_seen_by_one_is_known_to_all() -> None:
    network, one, two = pair()
    one.send("a", A, network.now_ms)
    network.run(20.0, 10.0)
    one.pool.observe_first_token("a", network.now_ms)
    network.run(20.0, 10.0)
    assert two.pool.ledger.pending(two.pool.table.get(A).slot)[0] == 0
    assert two.loads() == (1, 0)


def test_a_request_that_another_endpoint_serves_moves_everywhere_once() -> None:
    network, one, two = pair()
    one.send("a", A, network.now_ms)
    network.run(100.0)
    assert one.pool.observe_served("a", B, network.now_ms)
    network.run(100.0)
    assert one.loads() == two.loads() == (0, 1)
    assert not two.pool.observe_served("a", B, network.now_ms)
    newcomer = Router("three")
    network.join(newcomer)
    network.run(600.0)
    assert newcomer.loads() == (0, 1)
    one.finish("a", network.now_ms)
    network.run(100.0)
    assert {router.loads() for router in (one, two, newcomer)} == {(0, 0)}


def test_failures_that_one_router_sees_set_the_endpoint_aside_for_all_each_once() -> None:
    network, one, two = pair()
    for number in range(5):
        one.send(str(number), A, network.now_ms)
    network.run(50.0)
    for number in range(5):
        one.pool.observe_answer(str(number), A, 500, network.now_ms)
        one.finish(str(number), network.now_ms)
    network.run(50.0)
    for router in (one, two):
        now_ms = network.now_ms + router.lead_ms
        assert router.pool.snapshot(request(), None, now_ms)[0].addresses == (B,)
        for number in range(5):
            router.pool.observe_end(str(number), now_ms, endpoint=A, status=500)
        assert router.pool.endpoints(now_ms)[0].health.failures == {"error": 5}


def test_two_routers_agree_on_where_repeated_prefixes_are_and_a_newcomer_soon_does() -> None:
    """Each prompt is sent by one of them alone, to an endpoint that the other can only have heard of."""
    network, one, two = pair()
    prompts = [request(bytes([number]) * 4_096, tokens=1_000.0) for number in range(100)]
    for number, prompt in enumerate(prompts):
        (one, two)[number % 2].send(str(number), A if number % 3 else B, network.now_ms, prompt)
        network.run(100.0)
    newcomer = Router("three")
    network.join(newcomer)
    network.run(10_000.0)

    def warm(router: Router, prompt: InferenceRequest) -> list[bool]:
        _, match = router.pool.snapshot(prompt, None, network.now_ms + router.lead_ms)
        return [bool(match.matched_tokens[router.pool.table.get(address).slot] > 0) for address in (A, B)]

    for number, prompt in enumerate(prompts):
        expected = [number % 3 > 0, number % 3 == 0]
        assert warm(one, prompt) == warm(two, prompt) == warm(newcomer, prompt) == expected


def test_with_different_salts_requests_are_shared_and_prefixes_are_not() -> None:
    one, two = Router("one", salt=b"a"), Router("two", salt=b"b")
    network = Network(one, two)
    network.run(600.0)
    one.send("a", A, network.now_ms)
    network.run(100.0)
    assert two.loads() == (1, 0)
    assert two.pool.prefixes.held_blocks(two.pool.table.get(A).slot) == 0
    assert not two.share.describe(network.now_ms)[0]["same_salt"]


def test_without_a_common_salt_no_hash_leaves_the_router() -> None:
    one, two = Router("one", salt=None), Router("two", salt=SALT)
    network = Network(one, two)
    network.run(600.0)
    one.send("a", A, network.now_ms)
    assert not one.share.sharing_prefixes
    assert one.share._telling._new_added[0].names is None


# --- endpoints --------------------------------------------------------------------------------------------------


def test_a_request_to_an_endpoint_that_is_not_known_yet_counts_once_it_is() -> None:
    one, two = Router("one"), Router("two", addresses=(A,))
    network = Network(one, two)
    network.run(600.0)
    one.send("a", B, network.now_ms)
    network.run(100.0)
    assert two.pool.in_flight == 0
    two.list(B, network.now_ms)
    assert two.loads() == (0, 1)
    one.finish("a", network.now_ms)
    network.run(100.0)
    assert two.loads() == (0, 0)


def test_a_new_process_at_an_endpoint_empties_it_in_all_ledgers_whoever_sees_it_first() -> None:
    network, one, two = pair()
    for router in (one, two):
        router.probe(A, network.now_ms, metrics(running=1.0, start_s=100.0))
    one.send("a", A, network.now_ms)
    two.send("b", A, network.now_ms)
    network.run(100.0)
    assert one.loads() == two.loads() == (2, 0)
    one.probe(A, network.now_ms, metrics(start_s=200.0))
    network.run(100.0)
    assert one.loads() == two.loads() == (0, 0)
    assert two.doubts == [A]
    for router, decision_id in ((one, "a"), (two, "b")):
        assert not router.finish(decision_id, network.now_ms)
    network.run(300.0)
    assert network.faults() == []


def test_a_request_that_was_sent_to_an_older_process_is_not_counted() -> None:
    network, one, two = pair()
    one.probe(A, network.now_ms, metrics(start_s=100.0))
    network.under_way.clear()
    two.probe(A, network.now_ms, metrics(start_s=200.0))
    one.send("late", A, network.now_ms)
    network.flush("one")
    for message in network.under_way:
        network.deliver(message)
    assert two.loads() == (0, 0)
    assert two.share.describe(network.now_ms)[0]["requests"] == 1


def test_a_request_that_was_sent_to_a_newer_process_renews_the_endpoint() -> None:
    network, one, two = pair()
    for router in (one, two):
        router.probe(A, network.now_ms, metrics(start_s=100.0))
    two.send("old", A, network.now_ms)
    network.run(100.0)
    one.pool.observe_scrape(A, metrics(start_s=200.0), network.now_ms)  # told to nobody
    one.send("new", A, network.now_ms)
    network.run(100.0)
    assert two.loads() == (1, 0)
    assert two.pool.table.get(A).process_start_s == 200.0
    assert two.doubts == [A]


# --- who is gone ------------------------------------------------------------------------------------------------


def orphaned(**options) -> tuple[Network, Router]:
    """Router one, alone with two requests at A of a router that has died."""
    network, one, two = pair(**options)
    two.send("a", A, network.now_ms)
    two.send("b", A, network.now_ms + 1.0)
    network.run(100.0)
    network.leave("two")
    network.run(ShareConfig().silent_ms + 200.0)
    assert one.share.orphans == 2
    return network, one


def test_orphans_count_until_the_server_has_had_fewer_requests_for_a_while() -> None:
    network, one = orphaned()
    one.probe(A, network.now_ms, metrics(running=1.0))
    assert one.loads() == (2, 0)  # one scrape may have met a moment
    one.probe(A, network.now_ms + 100.0, metrics(running=1.0))
    assert one.loads() == (2, 0)
    one.probe(A, network.now_ms + 250.0, metrics(running=1.0))
    assert one.loads() == (1, 0)
    one.probe(A, network.now_ms + 300.0, metrics(running=0.0))
    one.probe(A, network.now_ms + 400.0, metrics(running=1.0))
    one.probe(A, network.now_ms + 600.0, metrics(running=0.0))
    assert one.loads() == (1, 0)
    assert one.share.counts.orphans_by_load == 1


def test_ones_own_requests_are_never_given_up_for_what_a_server_says() -> None:
    network, one = orphaned()
    one.send("own", A, network.now_ms)
    for step in range(5):
        one.probe(A, network.now_ms + 200.0 * step, metrics(running=0.0))
    assert one.loads() == (1, 0)
    assert "own" in one.pool.ledger


def test_orphans_end_with_their_outcome_once_and_at_the_latest_after_a_time() -> None:
    network, one = orphaned(config=ShareConfig(orphan_ms=10_000.0))
    one.pool.observe_outcome(make_sample("a", endpoint=A, outcome=Outcome.OK), network.now_ms)
    one.pool.observe_outcome(make_sample("a", endpoint=A, outcome=Outcome.OK), network.now_ms)
    assert one.loads() == (1, 0)
    network.run(10_000.0)
    assert one.loads() == (0, 0)
    counts = one.share.counts
    assert (counts.orphans_by_outcome, counts.orphans_by_age) == (1, 1)


def test_a_frozen_router_does_not_take_its_own_silence_for_its_peers() -> None:
    network, one, two = pair()
    two.send("a", A, network.now_ms)
    network.run(300.0)
    one.share.tick(network.now_ms + 10_000.0)
    assert one.share.live_peers == 1


def test_a_peer_that_returns_is_the_authority_on_its_requests_again() -> None:
    network, one, two = pair()
    two.send("ends while silent", A, network.now_ms)
    two.send("goes on", B, network.now_ms)
    network.run(100.0)
    away = network.leave("two")
    network.run(3_000.0)
    one.pool.observe_outcome(make_sample("goes on", endpoint=B), network.now_ms)  # its router knows better
    away.finish("ends while silent", network.now_ms)
    network.join(away)
    network.run(1_000.0)
    assert one.loads() == two.loads() == (0, 1)
    assert one.share.counts.peers_returned == 1


def test_a_peer_that_says_farewell_is_gone_at_once() -> None:
    network, one, two = pair()
    for out in two.share.leave(network.now_ms + two.lead_ms):
        one.share.receive(out.payload, network.now_ms)
    assert one.share.live_peers == 0


def test_thousands_of_requests_fit_into_batches_and_snapshots() -> None:
    network, one, two = pair()
    count = 3 * MAX_ENTRIES + 1
    for number in range(count):
        one.send(str(number), A, network.now_ms, request(b"q" * 16_384))
    network.run(100.0)
    newcomer = Router("three")
    network.join(newcomer)
    network.run(1_000.0)
    assert one.loads() == two.loads() == newcomer.loads() == (count, 0)
    for number in range(count):
        one.finish(str(number), network.now_ms)
    network.run(100.0)
    assert two.loads() == newcomer.loads() == (0, 0)
    assert network.faults() == []


def test_alone_a_router_queues_nothing() -> None:
    one = Router("one")
    network = Network(one)
    network.run(600.0)
    for number in range(1_000):
        one.send(str(number), A, network.now_ms)
        one.finish(str(number), network.now_ms)
    assert not one.share.pending
    assert one.share.sequence == 0


# --- scrapes ----------------------------------------------------------------------------------------------------


def test_every_endpoint_is_scraped_by_one_router_and_by_another_when_that_is_gone() -> None:
    addresses = tuple(f"10.0.0.{number}:8000" for number in range(60))
    routers = [Router(name, addresses=addresses) for name in ("one", "two", "three")]
    network = Network(*routers)
    network.run(600.0)
    for router in routers:
        for address in addresses:
            router.probe(address, network.now_ms, metrics())
    network.run(100.0)
    shares = [{address for address in addresses if router.share.owns(address, network.now_ms)} for router in routers]
    assert sorted(address for share in shares for address in share) == sorted(addresses)
    assert all(10 <= len(share) <= 30 for share in shares)
    network.leave("three")
    for _ in range(5):
        for router, share in zip(routers[:2], shares[:2], strict=True):
            for address in share:
                router.probe(address, network.now_ms, metrics())
        network.run(500.0)
    left = [{address for address in addresses if router.share.owns(address, network.now_ms)} for router in routers[:2]]
    assert left[0] | left[1] == set(addresses)
    assert left[0] >= shares[0]
    assert left[1] >= shares[1]


def test_a_told_value_has_its_age_and_corrects_the_ledger() -> None:
    network, one, two = pair()
    one.send("a", A, network.now_ms)
    network.run(100.0)
    one.probe(A, network.now_ms - 40.0, metrics(waiting=3.0, running=7.0))
    network.run(50.0)
    status = next(s for s in two.pool.endpoints(network.now_ms + two.lead_ms) if s.address == A)
    assert (status.waiting_requests, status.running_requests) == (3.0, 7.0)
    assert status.scrape_age_ms == pytest.approx(90.0, abs=1.0)


def in_prefill(router: Router) -> int:
    return router.pool.ledger.pending(router.pool.table.get(A).slot)[0]


def test_a_request_that_a_scrape_counted_before_its_router_told_of_it_is_not_in_prefill_for_ever() -> None:
    network, one, two = pair()
    two.probe(A, network.now_ms, metrics(first_tokens=10.0))
    network.run(50.0)
    one.send("a", A, network.now_ms)
    network.now_ms += 40.0
    two.probe(A, network.now_ms, metrics(running=1.0, first_tokens=11.0))
    network.run(250.0)
    assert two.loads() == (1, 0)
    for _ in range(3):
        two.probe(A, network.now_ms, metrics(running=1.0, first_tokens=11.0))
        assert in_prefill(two) == 0
        network.run(250.0)
    assert network.faults() == []


def test_a_router_that_joins_knows_which_requests_decode_long_since() -> None:
    one = Router("one")
    network = Network(one)
    for number in range(3):
        one.send(f"r{number}", A, network.now_ms)
    network.run(2_000.0)
    two = Router("two", network.now_ms)
    network.join(two)
    two.probe(A, network.now_ms, metrics(running=3.0, first_tokens=13.0))
    network.run(500.0)
    assert two.loads() == (3, 0)
    for _ in range(3):
        two.probe(A, network.now_ms, metrics(running=3.0, first_tokens=13.0))
        assert in_prefill(two) == 0
        network.run(250.0)
    assert network.faults() == []


def test_what_nobody_has_told_for_a_while_each_scrapes_itself() -> None:
    network, one, two = pair()
    assert one.share.owns(A, network.now_ms)
    assert two.share.owns(A, network.now_ms + two.lead_ms)


def test_a_peers_word_on_readiness_makes_a_router_look_and_no_more() -> None:
    network, one, two = pair()
    one.probe(A, network.now_ms, metrics())
    network.run(100.0)
    assert two.doubts == []
    one.share.probed(A, network.now_ms, ready=False, metrics=None)
    network.run(100.0)
    assert two.doubts == [A]
    assert two.pool.ready_endpoints == 2
    one.share.probed(A, network.now_ms, ready=False, metrics=None)
    network.run(100.0)
    assert two.doubts == [A]


def test_addresses_that_come_and_go_are_forgotten() -> None:
    network, one, two = pair()
    for number in range(300):
        address = f"10.1.{number // 250}.{number % 250}:8000"
        for router in (one, two):
            router.list(address, network.now_ms)
            router.probe(address, network.now_ms, metrics())
        network.run(50.0)
        for router in (one, two):
            router.share.owns(address, network.now_ms)
            router.pool.remove_endpoint(address)
    network.run(600.0)
    probes = one.share._probes
    kept = (one.share._telling.probes, probes._told_ms, probes._owners, probes._said_ready)
    assert max(map(len, kept)) <= 80
