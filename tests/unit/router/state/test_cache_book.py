"""The cache book: texts become anchored to a server's blocks, and its word then corrects the index."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.state.cache_book import CacheBook
from services.router.state.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 16


class Server:
    """Publishes what a vLLM would of prompts given as token ids; a text block is 8 tokens here."""

    def __init__(self, book: CacheBook, slot: int, seed: int) -> None:
        self.book, self.slot = book, slot
        self.hashes: dict[tuple[int, ...], int] = {}
        self._next = itertools.count(seed * 1_000_000)

    def store(self, tokens: list[int], now_ms: float, skip: int = 0):
        """A prompt is computed, but for its first `skip` blocks, which it has."""
        whole = len(tokens) // BLOCK
        fresh = range(skip, whole)
        for at in fresh:
            self.hashes.setdefault(tuple(tokens[: (at + 1) * BLOCK]), next(self._next))
        if not fresh:
            return None
        hashes = tuple(self.hashes[tuple(tokens[: (at + 1) * BLOCK])] for at in fresh)
        parent = self.hashes[tuple(tokens[: skip * BLOCK])] if skip else None
        event = BlockStored(hashes, parent, tuple(tokens[skip * BLOCK : whole * BLOCK]), BLOCK)
        return self.book.apply(self.slot, [event], now_ms)

    def remove(self, tokens: list[int], block: int):
        return self.book.apply(self.slot, [BlockRemoved((self.hashes[tuple(tokens[: (block + 1) * BLOCK])],))], 0.0)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 31, count).tolist()


def texts(seed: int, count: int) -> list[int]:
    return [seed * 1_000 + i for i in range(count)]


def learned(book, slot, seed, count, *, since=0.0, until=10.0):
    return book.learn(slot, texts(seed, count // 8), 8.0, count, since, until)


def test_a_request_alone_anchors_its_text_to_the_blocks_that_it_left():
    book = CacheBook(b"salt")
    Server(book, 0, 1).store(tokens(1, 70), 5.0)
    changes = learned(book, 0, 1, 70)
    assert set(changes[0].held) == set(texts(1, 8))
    assert changes[0].gone == ()
    assert book.anchors == 8


def test_a_removed_block_takes_its_texts_with_it_and_a_stored_one_brings_them():
    book = CacheBook(b"salt")
    server, prompt = Server(book, 0, 1), tokens(1, 64)
    server.store(prompt, 5.0)
    learned(book, 0, 1, 64)
    gone = server.remove(prompt, 3).gone
    assert set(gone) == {1007}, "the text that ends in the last block alone"
    assert set(server.remove(prompt, 2).gone) == {1005, 1006}
    back = server.store(prompt, 9.0, skip=2)
    assert set(back.held) == {1005, 1006, 1007}


def test_what_one_server_taught_holds_for_another_with_other_hashes():
    book = CacheBook(b"salt")
    Server(book, 0, 1).store(tokens(1, 64), 5.0)
    learned(book, 0, 1, 64)
    change = Server(book, 1, 2).store(tokens(1, 64), 6.0)
    assert set(change.held) == set(texts(1, 8)), "though nobody here sent it there"


def test_an_endpoint_that_has_lost_it_already_is_corrected_when_the_text_is_anchored():
    book = CacheBook(b"salt")
    other = Server(book, 1, 2)
    other.store(tokens(9, 64), 1.0)
    Server(book, 0, 1).store(tokens(1, 64), 5.0)
    changes = learned(book, 0, 1, 64)
    assert set(changes[1].gone) == set(texts(1, 8))


def test_two_chains_of_one_length_at_once_are_let_be():
    book = CacheBook(b"salt")
    server = Server(book, 0, 1)
    server.store(tokens(1, 64), 5.0)
    server.store(tokens(2, 64), 5.0)
    assert learned(book, 0, 1, 64) == {}
    assert (book.anchors, book.ambiguous) == (0, 1)
    assert learned(book, 0, 1, 64, since=20.0, until=30.0) == {}, "and so is none"


def test_a_common_beginning_is_anchored_once_for_both():
    book = CacheBook(b"salt")
    server, first = Server(book, 0, 1), tokens(1, 64)
    second = first[:32] + tokens(2, 64)
    server.store(first, 5.0)
    learned(book, 0, 1, 64)
    server.store(second, 15.0, skip=2)
    book.learn(0, [*texts(1, 4), *texts(2, 8)], 8.0, 96, 11.0, 20.0)
    assert book.anchors == 16
    assert set(server.remove(second, 5).gone) == {2007}
    assert set(server.remove(first, 1).gone) == {1003, 1004, 2000}, "of both texts: they share the block"


def test_copies_are_counted():
    book = CacheBook(b"salt")
    server, prompt = Server(book, 0, 1), tokens(1, 32)
    server.store(prompt, 5.0)
    learned(book, 0, 1, 32)
    server.store(prompt, 6.0)
    assert server.remove(prompt, 1).gone == ()
    assert server.remove(prompt, 1).gone != ()


def test_everything_cleared_is_everything_gone():
    book = CacheBook(b"salt")
    Server(book, 0, 1).store(tokens(1, 64), 5.0)
    assert book.apply(0, [AllBlocksCleared()], 6.0) is None
    assert len(book) == 0
    assert book.live(0)


def test_a_chain_whose_start_was_missed_is_left_out():
    book = CacheBook(b"salt")
    event = BlockStored((5,), 4, tuple(tokens(1, BLOCK)), BLOCK)
    assert book.apply(0, [event], 1.0).held == ()
    assert len(book) == 0


def test_adapters_never_share():
    book = CacheBook(b"salt")
    prompt = tuple(tokens(1, BLOCK))
    book.apply(0, [BlockStored((1,), None, prompt, BLOCK)], 5.0)
    book.learn(0, texts(1, 2), 8.0, BLOCK, 0.0, 9.0)
    assert book.apply(1, [BlockStored((1,), None, prompt, BLOCK, salt="adapter")], 6.0).held == ()


def test_a_server_that_says_too_much_is_forgotten_whole():
    book = CacheBook(b"salt", max_blocks=4)
    Server(book, 0, 1).store(tokens(1, BLOCK * 5), 1.0)
    assert (len(book), book.overflows, book.live(0)) == (0, 1, False)


def test_anchors_are_bounded_and_the_oldest_go_first():
    book = CacheBook(b"salt", max_anchors=10)
    server = Server(book, 0, 1)
    for seed in range(1, 6):
        server.store(tokens(seed, 64), 10.0 * seed)
        learned(book, 0, seed, 64, since=10.0 * seed - 5, until=10.0 * seed + 5)
        assert book.anchors <= 10
    assert book.anchors > 0


def test_forgetting_leaves_what_was_learned():
    book = CacheBook(b"salt")
    server = Server(book, 0, 1)
    server.store(tokens(1, 64), 5.0)
    learned(book, 0, 1, 64)
    book.forget(0)
    assert not book.live(0)
    assert set(server.store(tokens(1, 64), 9.0).held) == set(texts(1, 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()), min_size=1, max_size=25))
def test_what_is_held_is_what_was_stored_and_not_removed(played):
    """Texts that the book says an endpoint has are those whose last block is in the server's own cache."""
    book = CacheBook(b"salt")
    server, cached, index, now = Server(book, 0, 1), set(), set(), 0.0
    for seed, blocks, store in played:
        now += 100.0
        prompt = tokens(seed, blocks * BLOCK)
        chains = [tuple(prompt[: (at + 1) * BLOCK]) for at in range(blocks)]
        have = sum(1 for _ in itertools.takewhile(cached.__contains__, chains))
        if store:
            change = server.store(prompt, now, skip=have)
            cached |= set(chains)
            if change is not None:
                index = (index - set(change.gone)) | set(change.held)
            for other in book.learn(0, texts(seed, blocks * 2), 8.0, blocks * BLOCK, now - 1, now + 1).values():
                index = (index - set(other.gone)) | set(other.held)
        elif have == blocks and not any(chain[: blocks * BLOCK] == chains[-1] != chain for chain in cached):
            index -= set(server.remove(prompt, blocks - 1).gone)
            cached.discard(chains[-1])
        for text in index:
            seed_, place = divmod(text, 1_000)
            depth = max((place + 1) * 8 // BLOCK, 1)
            assert tuple(tokens(seed_, 6 * BLOCK)[: depth * BLOCK]) in cached
