import random
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.state.prefix_index import BlockHasher, PrefixIndex

BLOCK = 16
SLOTS = 6


def hasher(salt: bytes = b"salt", **options) -> BlockHasher:
    return BlockHasher(salt, block_bytes=BLOCK, **options)


def common_bytes(first: bytes, second: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def shared_blocks(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_prompts_share_exactly_the_names_of_their_common_leading_blocks(first, second):
    common = common_bytes(first, second) // BLOCK
    names = hasher()
    assert shared_blocks(names.names("m", first), names.names("m", second)) == common


@given(st.binary(min_size=BLOCK * 3, max_size=200), st.integers(0, 3 * BLOCK - 1), st.integers(0, 7))
def test_one_changed_bit_changes_its_block_and_all_after_it(prompt, place, bit):
    changed = bytearray(prompt)
    changed[place] ^= 1 << bit
    before, after = hasher().names("m", prompt), hasher().names("m", bytes(changed))
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < place // BLOCK for i in range(len(before))]


def test_the_top_bits_of_two_words_do_not_cancel():
    """A hash that is only linear modulo 2**64 is blind to 0x80 in the last byte of two words."""
    prompt = bytes(BLOCK)
    changed = bytearray(prompt)
    changed[7] ^= 0x80
    changed[15] ^= 0x80
    assert hasher().names("m", prompt) != hasher().names("m", bytes(changed))


def test_equal_blocks_at_different_places_have_different_names():
    names = hasher().names("m", b"x" * BLOCK * 50)
    assert len(set(names)) == 50


def test_models_and_salts_never_share_a_name():
    prompt = random.Random(1).randbytes(BLOCK * 10)
    first = hasher().names("a", prompt)
    assert not set(first) & set(hasher().names("b", prompt))
    assert not set(first) & set(hasher(b"other").names("a", prompt))
    assert first == hasher().names("a", prompt)


def test_ten_thousand_near_equal_blocks_have_as_many_names():
    rng = random.Random(2)
    base = bytearray(rng.randbytes(512))
    names = set()
    big = BlockHasher(b"salt")
    for number in range(10_000):
        block = bytearray(base)
        block[number % 512] ^= 1 + number // 512
        names.add(big.names("m", bytes(block))[0])
    assert len(names) == 10_000


def test_a_prompt_is_looked_at_up_to_a_number_of_blocks():
    assert len(hasher(max_blocks=3).names("m", bytes(BLOCK * 10))) == 3
    assert hasher().names("m", bytes(BLOCK - 1)) == []


@pytest.mark.parametrize("size", [0, 7, 12, -8])
def test_a_block_size_that_is_no_multiple_of_eight_is_refused(size):
    with pytest.raises(ValueError, match="block_bytes"):
        BlockHasher(b"salt", block_bytes=size)


def index(**options) -> PrefixIndex:
    return PrefixIndex(hasher(), **options)


def matched(prefixes: PrefixIndex, prompt: bytes) -> list[float]:
    return (prefixes.lookup(prefixes.hasher.names("m", prompt), SLOTS) / BLOCK).tolist()


def test_each_endpoint_has_as_many_leading_blocks_as_it_was_sent():
    prefixes = index()
    prompt = random.Random(3).randbytes(BLOCK * 8)
    names = prefixes.hasher.names("m", prompt)
    for slot, blocks in ((0, 8), (2, 3), (3, 1)):
        prefixes.insert(names[:blocks], slot)
    assert matched(prefixes, prompt) == [8, 0, 3, 1, 0, 0]
    match = prefixes.match("m", prompt, 64.0, SLOTS)
    assert match.matched_tokens.dtype == np.float32
    assert match.matched_tokens.tolist() == [64, 0, 24, 8, 0, 0]


def test_a_full_endpoint_forgets_the_least_recently_used_prompt_from_its_tail():
    prefixes = index(default_blocks=10)
    old, new = (random.Random(seed).randbytes(BLOCK * 6) for seed in (4, 5))
    for prompt in (old, new):
        prefixes.insert(prefixes.hasher.names("m", prompt), 1)
    assert matched(prefixes, new)[1] == 6
    assert matched(prefixes, old)[1] == 4
    assert len(prefixes) == 10
    prefixes.set_capacity(1, 7)
    assert (matched(prefixes, new)[1], matched(prefixes, old)[1]) == (6, 1)


def test_the_bound_over_all_endpoints_is_shared_evenly():
    prefixes = index(default_blocks=100, max_blocks_total=30)
    for slot in range(3):
        prefixes.insert(prefixes.hasher.names("m", random.Random(slot).randbytes(BLOCK * 50)), slot)
    for slot in range(3):
        prefixes.insert(prefixes.hasher.names("m", random.Random(slot).randbytes(BLOCK * 50)), slot)
    assert len(prefixes) <= 30


def test_a_dropped_endpoint_matches_nothing_and_starts_cold_when_it_is_back():
    prefixes = index()
    prompt = random.Random(6).randbytes(BLOCK * 5)
    names = prefixes.hasher.names("m", prompt)
    for slot in (0, 1):
        prefixes.insert(names, slot)
    prefixes.drop(0)
    assert matched(prefixes, prompt) == [0, 5, 0, 0, 0, 0]
    prefixes.set_capacity(0, 50)
    assert matched(prefixes, prompt)[0] == 0
    prefixes.insert(names[:2], 0)
    assert matched(prefixes, prompt)[:2] == [2, 5]


def test_a_thousand_endpoints_that_come_and_go_leave_nothing():
    prefixes = index()
    names = prefixes.hasher.names("m", random.Random(7).randbytes(BLOCK * 20))
    for slot in range(1_000):
        prefixes.insert(names, slot)
        prefixes.drop(slot)
    prefixes.purge(1_000_000)
    assert len(prefixes) == 0
    prefixes.insert(names, 0)
    assert prefixes.lookup(names, 1).tolist() == [20 * BLOCK]


class AgainstBruteForce(RuleBasedStateMachine):
    """Without evictions the index answers what a list of all prompts ever sent would."""

    def __init__(self):
        super().__init__()
        self.prefixes = index()
        self.sent: dict[int, list[bytes]] = {}

    prompts = st.lists(st.sampled_from([b"a" * BLOCK, b"b" * BLOCK]), max_size=6).map(b"".join)
    slots = st.integers(0, SLOTS - 1)

    @rule(prompt=prompts, slot=slots)
    def send(self, prompt, slot):
        self.prefixes.insert(self.prefixes.hasher.names("m", prompt), slot)
        self.sent.setdefault(slot, []).append(prompt)

    @rule(slot=slots)
    def drop(self, slot):
        self.prefixes.drop(slot)
        self.sent.pop(slot, None)

    @rule(portion=st.integers(1, 5))
    def purge(self, portion):
        self.prefixes.purge(portion)

    @rule(prompt=prompts)
    def look_up(self, prompt):
        expected = [
            max((common_bytes(prompt, other) // BLOCK for other in self.sent.get(slot, [])), default=0)
            for slot in range(SLOTS)
        ]
        assert matched(self.prefixes, prompt) == expected

    @invariant()
    def bits_are_reused(self):
        assert self.prefixes._bits <= 2 * SLOTS + len(self.prefixes._dying)


TestAgainstBruteForce = AgainstBruteForce.TestCase
TestAgainstBruteForce.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


HASHER = BlockHasher(b"salt")


def test_the_bound_over_all_endpoints_holds_when_endpoints_come_one_after_the_other():
    index = PrefixIndex(HASHER, default_blocks=10**9, max_blocks_total=1_000)
    for slot in range(6):
        for seed in range(40):
            index.insert([slot << 32 | seed << 16 | at for at in range(50)], slot)
    assert len(index) <= 1_000
    assert min(index.held_blocks(slot) for slot in range(6)) >= 100


def test_blocks_may_be_added_and_taken_away_one_by_one():
    index = PrefixIndex(HASHER)
    index.add([1, 2, 3], 0)
    index.add([2, 3, 4], 0)
    assert index.lookup([1, 2, 3, 4], 1).tolist() == [4 * HASHER.block_bytes]
    index.discard([2, 99], 0)
    index.discard([1], 7)
    assert index.lookup([1, 2, 3, 4], 1).tolist() == [HASHER.block_bytes]
    index.discard([1, 3, 4], 0)
    assert len(index) == 0
    assert index.lookup([1], 1).tolist() == [0]
