"""What a vLLM server says of its KV cache: the payload of one message → events. Pure.

A payload is msgpack: `[timestamp, [event, …], data-parallel rank]`, an event a map with a `type` (vLLM 0.32) or an
array that begins with it (older, and SGLang). Read are `BlockStored`, `BlockRemoved` and `AllBlocksCleared`, of the
GPU's cache and its first group alone; other kinds are left out, as readers of a growing interface do.

Token ids are prompts: they leave this module only towards a keyed hash, and stand in no `repr` and no error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shared.errors import FieldError, kind_of

BlockHash = int | bytes
MAX_BLOCKS: Final = 100_000
"""Of one event; a prompt of a million tokens in blocks of 16 has 62,500."""
_STORED_FIELDS: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx",
)  # fmt: skip
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_DEVICES: Final = frozenset({None, "GPU"})
_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that continue `parent` (None: a prompt's beginning), in order, each `block_tokens` tokens."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...] = field(repr=False)
    block_tokens: int
    salt: str = field(default="", repr=False)
    """What else tells the blocks from others with these tokens: an adapter, a cache salt, a picture's digest."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def decode_events(payload: bytes) -> list[KvEvent]:
    """The events of one message, in order; raises FieldError for what isn't one."""
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FieldError("kv events", f"{len(payload)} bytes that aren't msgpack", "a batch of events") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise FieldError("kv events", kind_of(batch), "[timestamp, [event, …], rank]")
    events = [_event(event) for event in batch[1]]
    return [event for event in events if event is not None]


def _event(event: Any) -> KvEvent | None:
    if isinstance(event, Mapping):
        kind, values = event.get("type"), event
    elif isinstance(event, Sequence) and event and not isinstance(event, str | bytes):
        kind = event[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        values = dict(zip(names, event[1:], strict=False))
    else:
        raise FieldError("kv events", kind_of(event), "a map, or an array that begins with a type")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind not in {"BlockStored", "BlockRemoved"}:
        return None
    hashes = _hashes(values.get("block_hashes"))
    if values.get("medium") not in _DEVICES or values.get("group_idx") not in {None, 0}:
        return None
    return BlockRemoved(hashes) if kind == "BlockRemoved" else _stored(values, hashes)


def _stored(values: Mapping[str, Any], hashes: tuple[BlockHash, ...]) -> BlockStored:
    size, tokens, parent = values.get("block_size"), values.get("token_ids"), values.get("parent_block_hash")
    if not isinstance(size, int) or not 0 < size <= 65_536:
        raise FieldError("kv events.block_size", kind_of(size), "tokens a block, 1 to 65536")
    if not isinstance(tokens, list) or len(tokens) != size * len(hashes):
        found = f"{len(tokens)} of them" if isinstance(tokens, list) else kind_of(tokens)
        raise FieldError("kv events.token_ids", found, f"{size} for each of {len(hashes)} blocks")
    if not all(isinstance(token, int) and 0 <= token < 1 << 32 for token in tokens):
        raise FieldError("kv events.token_ids", "what is no id", "whole numbers below 2^32")
    if not isinstance(parent, int | bytes | None):
        raise FieldError("kv events.parent_block_hash", kind_of(parent), "a hash or nil")
    extra = values.get("extra_keys")
    told = [values.get("lora_name") or values.get("lora_id"), extra if extra and any(extra) else None]
    salt = "" if not any(told) else repr(told)
    return BlockStored(hashes, parent, tuple(tokens), size, salt)


def _hashes(values: Any) -> tuple[BlockHash, ...]:
    if not isinstance(values, list) or not 0 < len(values) <= MAX_BLOCKS:
        found = f"{len(values)} of them" if isinstance(values, list) else kind_of(values)
        raise FieldError("kv events.block_hashes", found, f"a list of 1 to {MAX_BLOCKS}")
    if not all(isinstance(value, int | bytes) and not isinstance(value, bool) for value in values):
        raise FieldError("kv events.block_hashes", "what is no hash", "whole numbers or bytes")
    return tuple(values)
