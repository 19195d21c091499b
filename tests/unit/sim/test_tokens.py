"""Token counting and block chains: shared text is shared blocks, and nothing else is."""

import os
import subprocess
import sys
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sim.tokens import (
    WORDS,
    GeneratedText,
    block_chain,
    fingerprint,
    render_messages,
    render_text,
    render_token_ids,
    token_count,
)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def test_words_are_1024_different_tokens_that_need_no_json_escape():
    assert len(set(WORDS)) == 1024
    assert all(
        len(word) == 4 and word.decode().isprintable() and b'"' not in word and b"\\" not in word for word in WORDS
    )


@given(text=st.text())
def test_a_text_counts_four_bytes_a_token(text):
    assert token_count(render_text(text)) == -(-len(text.encode()) // 4)


@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_a_token_id_counts_one(ids):
    assert token_count(render_token_ids(ids)) == len(ids)


@given(shared=st.binary(min_size=0, max_size=600), one=st.binary(max_size=200), other=st.binary(max_size=200))
def test_chains_agree_exactly_as_far_as_the_full_blocks_of_the_common_prefix(shared, one, other):
    first, second = shared + one, shared + other
    assert common(block_chain(first, 4), block_chain(second, 4)) == common(first, second) // 16


@given(data=st.binary(min_size=64, max_size=64))
def test_the_salt_changes_every_block(data):
    assert not set(block_chain(data, 4, b"a")) & set(block_chain(data, 4, b"b"))


@given(
    history=st.lists(st.tuples(st.sampled_from(["system", "user"]), st.text(max_size=40)), min_size=1, max_size=4),
    output_tokens=st.integers(1, 200),
    question=st.text(max_size=40),
)
def test_an_answer_sent_back_continues_the_chain_it_was_generated_in(history, output_tokens, question):
    prompt = render_messages(history)
    answer = GeneratedText.of(fingerprint(prompt, 0)).tokens(output_tokens)
    next_turn = render_messages([*history, ("assistant", answer.decode()), ("user", question)])
    assert next_turn.startswith(prompt + answer)


@given(bits=st.integers(0, 2**64 - 1), index=st.integers(0, 5000))
def test_token_by_token_is_the_whole_text(bits, index):
    text = GeneratedText.of(bits)
    assert text.tokens(index + 1)[-4:] == text.token(index)


def test_chains_and_answers_are_the_same_in_every_process():
    code = (
        "from sim.tokens import *; p = render_text('the same prompt, long enough for a block of tokens' * 3);"
        "print(block_chain(p, 16, b's'), fingerprint(p, 7))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
