import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.sharing.messages import Added, Ask, Batch, Beat, Ended, First, Moved, Part, Probed, decode, encode
from services.router.sharing.peers import PeerClock
from services.router.sharing.rendezvous import owner

ENTRY = Added("id", "10.0.0.1:8000", 100.0, "m", 40, 10.0, 5.0, None, 20.0, 1_000.0, [1, 2**64 - 1])
PROBE = Probed("10.0.0.1:8000", 1.0, True, "vllm", 1.0, 2.0, 0.5, 3.0, 4.0, 100.0, 1_000)
BATCH = Batch("r", 1, 2.0, [ENTRY], [First("id", 3.0)], [Ended("id", True)], [PROBE], [Moved("id", "b", None, 1.0)])


@pytest.mark.parametrize(
    "message",
    [BATCH, Beat("r", 0, 1.0, 2, 3, None, False), Ask("r", 0, 0, True), Part("r", 1, 1.0, 0, 1, [ENTRY], [], [PROBE])],
)
def test_what_is_encoded_is_decoded(message) -> None:
    assert decode(encode(message)) == message


def test_a_batch_is_on_the_wire_as_it_was_agreed() -> None:
    batch = Batch("r", 7, 2.5, [], [], [Ended("id", False)], [], [])
    assert encode(batch).hex() == "9901a17207cb400400000000000090909193a26964c2c29090"


def test_a_router_of_the_version_before_says_nothing_of_failures() -> None:
    batch = decode(bytes.fromhex("9901a17207cb400400000000000090909192a26964c29090"))
    assert isinstance(batch, Batch)
    assert batch.ended == [Ended("id", False, failed=False)]


def changed(**fields) -> bytes:
    return encode(msgspec.structs.replace(BATCH, added=[msgspec.structs.replace(ENTRY, **fields)]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x90",
        b"{}",
        encode(msgspec.structs.replace(BATCH, router="")),
        encode(msgspec.structs.replace(BATCH, sequence=-1)),
        encode(msgspec.structs.replace(BATCH, sent_ms=math.nan)),
        encode(msgspec.structs.replace(BATCH, probed=[msgspec.structs.replace(PROBE, waiting_requests=-1.0)])),
        encode(msgspec.structs.replace(BATCH, firsts=[First("id", math.inf)])),
        encode(msgspec.structs.replace(BATCH, added=[ENTRY] * 513)),
        encode(Part("r", 1, 1.0, 1, 1, [], [], [])),
        encode(Ask("r", 3, 2, False)),
        changed(input_tokens=math.nan),
        changed(uncached_tokens=-1.0),
        changed(expected_output_tokens=math.inf),
        changed(decision_id=""),
        changed(dispatched_ms=math.nan),
    ],
)
def test_what_no_router_would_send_is_no_message(payload: bytes) -> None:
    assert decode(payload) is None


@given(st.binary(max_size=300))
def test_no_bytes_do_harm(payload: bytes) -> None:
    decode(payload)
    decode(encode(BATCH)[: len(payload)] + payload)


def test_a_longer_array_of_a_newer_router_is_read() -> None:
    fields = msgspec.msgpack.decode(encode(Ask("r", 1, 2, False)))
    assert decode(msgspec.msgpack.encode([*fields, "more"])) == Ask("r", 1, 2, False)


def test_a_peers_clock_is_known_by_its_quickest_message_and_followed_when_it_drifts() -> None:
    clock = PeerClock(0.0, 1_030.0)
    clock.observe(10.0, 1_011.0)
    clock.observe(20.0, 1_095.0)
    assert clock.here_ms(100.0) == 1_101.0
    for minute in range(1, 8):
        clock.observe(60_000.0 * minute, 61_005.0 + 60_000.0 * (minute - 1))
    assert clock.here_ms(0.0) == 1_005.0


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=6), st.integers(0, 50))
def test_when_a_router_goes_only_its_own_tasks_move(routers: set[str], task: int) -> None:
    before = owner(str(task), routers)
    for gone in routers - {before}:
        assert owner(str(task), routers - {gone}) == before
