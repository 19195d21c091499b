"""Encoded bodies are unpacked as they come, large documents keep their end, and nothing that a server sends raises."""

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.response_body import (
    MAX_DOCUMENT_BYTES,
    MAX_PLAIN_BYTES,
    DocumentObserver,
    Inflater,
)
from shared.labels import TAIL_BYTES, Usage

TEXT = b"".join(b"data: {%d}\n\n" % number for number in range(400))
WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15, "raw deflate": -15}


def packed(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


def unpack(inflater: Inflater, *chunks: bytes) -> bytes:
    return b"".join(piece for chunk in chunks for piece in inflater.feed(chunk))


def split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("kind", WBITS)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_body_is_unpacked_in_whatever_chunks_it_comes(kind: str, size: int) -> None:
    inflater = Inflater(kind.removeprefix("raw "))
    assert unpack(inflater, *split(packed(TEXT, WBITS[kind]), size)) == TEXT
    assert not inflater.lost


def test_each_flushed_event_comes_out_at_its_chunk() -> None:
    packer = zlib.compressobj(wbits=31)
    inflater = Inflater("gzip")
    for event in (b"data: one\n\n", b"data: two\n\n"):
        assert unpack(inflater, packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)) == event


def test_members_of_one_gzip_body_follow_each_other() -> None:
    body = packed(b"one", 31) + packed(b"two", 31)
    assert unpack(Inflater("gzip"), body) == b"onetwo"
    assert unpack(Inflater("gzip"), *split(body, 1)) == b"onetwo"
    endless = Inflater("gzip")
    unpack(endless, packed(b"x", 31) * 100)
    assert endless.lost


def test_a_truncated_body_gives_what_there_is() -> None:
    inflater = Inflater("gzip")
    body = packed(TEXT, 31)
    assert TEXT.startswith(unpack(inflater, body[: len(body) // 2]))
    assert not inflater.lost


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "?"])
def test_an_encoding_that_is_not_known_is_lost_from_the_start(encoding: str) -> None:
    inflater = Inflater(encoding)
    assert inflater.lost
    assert unpack(inflater, TEXT) == b""


def test_damage_is_lost_from_there_on() -> None:
    inflater = Inflater("gzip")
    unpack(inflater, b"no gzip at all")
    assert inflater.lost
    assert unpack(inflater, packed(TEXT, 31)) == b""


def test_a_bomb_is_stopped_and_never_held() -> None:
    inflater = Inflater("gzip")
    bomb = packed(bytes(2 * MAX_PLAIN_BYTES), 31)
    largest = total = 0
    for piece in inflater.feed(bomb):
        largest = max(largest, len(piece))
        total += len(piece)
    assert inflater.lost
    assert largest <= 65_536
    assert total <= MAX_PLAIN_BYTES


@settings(max_examples=200, deadline=None)
@given(encoding=st.sampled_from(["gzip", "deflate", "br"]), chunks=st.lists(st.binary(max_size=50), max_size=8))
def test_no_bytes_raise(encoding: str, chunks: list[bytes]) -> None:
    unpack(Inflater(encoding), *chunks)


USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}


def answer(text: str = "hi", **more: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": USAGE, **more}).encode()


def document(*chunks: bytes) -> DocumentObserver:
    observer = DocumentObserver()
    for chunk in chunks:
        observer.feed(chunk)
    return observer


@pytest.mark.parametrize("size", [1, 1_000, 20_000, 10_000_000])
@pytest.mark.parametrize("length", [2, MAX_DOCUMENT_BYTES, 400_000])
def test_usage_is_found_at_the_end_of_an_answer_of_any_size(length: int, size: int) -> None:
    body = answer('"usage": {"prompt_tokens": 1}' + "x" * length, model="m")
    observer = document(*split(body, max(size, length // 2_000)))
    assert observer.usage() == Usage(5, 7, 3)
    assert observer.size_bytes == len(body)
    assert len(observer._kept) <= max(MAX_DOCUMENT_BYTES, 2 * TAIL_BYTES)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"Service Unavailable",
        answer()[:-1],
        answer("x" * 400_000)[:-40],
        b"x" * 400_000,
        b"x" * 400_000 + b'"usage": {',
        b"x" * 400_000 + b'"usage": ' + b'{"a":' * 3_000,
        answer("x" * 400_000, usage=None),
        answer("x" * 10, tail="y" * 400_000),
    ],
)
def test_what_is_cut_or_holds_none_has_no_usage(body: bytes) -> None:
    assert document(body).usage() is None
