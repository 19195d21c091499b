"""What routers of a pool tell each other, as msgpack arrays. Pure.

Everything goes by one subject, what is for one router by another of its own (`shared/names.py`). Times are the sender's
monotonic milliseconds: a receiver turns them into its own by the smallest difference that it sees (`peers.py`), so no
wall clock matters. Ids of decisions, addresses, token counts and keyed hashes of prompts travel; no content does.

Limits: `decode` checks kinds, sizes and numbers, so that whatever comes from the bus is either usable or `None`.
Readers ignore fields at the end of an array that they don't know; a breaking change takes a new subject.
"""

import math
from typing import Final

import msgspec

MAX_ENTRIES: Final = 512
"""Of one batch or part: what is more goes into the next."""
MAX_NAMES: Final = 8_192
"""Prefix blocks of one message."""
_MAX_ID: Final = 64
_MAX_TOKENS: Final = 1e9


class Added(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request was dispatched. `start_s`: the process that its sender believed to be at `address` (unix s), if known.

    `names`: of the prompt's prefix blocks; None where the sender has no salt that others share.
    """

    decision_id: str
    address: str
    start_s: float | None
    model: str
    text_bytes: int
    input_tokens: float
    uncached_tokens: float
    expected_output_tokens: float | None
    predicted_ttft_ms: float | None
    dispatched_ms: float
    names: list[int] | None


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request is over; `completed`: its answer came to its end. `failed`: its endpoint's status was seen, and is an
    error's.
    """

    decision_id: str
    completed: bool
    failed: bool = False


class First(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request's first token was seen."""

    decision_id: str
    first_ms: float


class Moved(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request is served by another endpoint than the one that it was dispatched to."""

    decision_id: str
    address: str
    predicted_ttft_ms: float | None
    moved_ms: float


class Probed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a probe of an endpoint said. Without `engine` there was no page of metrics."""

    address: str
    at_ms: float
    ready: bool
    engine: str | None
    waiting_requests: float | None
    running_requests: float | None
    kv_cache_utilization: float | None
    prompt_tokens: float | None
    first_tokens: float | None
    process_start_s: float | None
    kv_capacity_tokens: int | None


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """What happened at a router since its batch before, which has the number before."""

    router: str
    sequence: int
    sent_ms: float
    added: list[Added]
    firsts: list[First]
    ended: list[Ended]
    probed: list[Probed]
    moved: list[Moved]


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A router lives: the number of its last batch, and count and digest of the requests that it has under way then.

    `salt`: a few bits by which different salts are seen. `leaving`: its last word.
    """

    router: str
    sequence: int
    sent_ms: float
    entries: int
    digest: int
    salt: int | None
    leaving: bool


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Send me your batches from `first` to `last` again; a snapshot where `first` is 0. `prefixes`: your index too."""

    router: str
    first: int
    last: int
    prefixes: bool


class Part(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """One part of a snapshot: all requests that a router has under way after its batch `sequence`."""

    router: str
    sequence: int
    sent_ms: float
    part: int
    parts: int
    entries: list[Added]
    firsts: list[First]
    probed: list[Probed]


class Prefixes(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Some of the blocks that a router believes an endpoint to hold, least recently used first."""

    router: str
    sent_ms: float
    address: str
    start_s: float | None
    names: list[int]


Message = Batch | Beat | Ask | Part | Prefixes

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One message's bytes."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message | None:
    """The message in `payload`; None for what no router of ours would send."""
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return message if _sound(message) else None


def _sound(message: Message) -> bool:
    if not 0 < len(message.router) <= _MAX_ID:
        return False
    if isinstance(message, Ask):
        return 0 <= message.first <= message.last
    if not math.isfinite(message.sent_ms):
        return False
    if isinstance(message, Prefixes):
        return len(message.names) <= MAX_NAMES
    if message.sequence < 0:
        return False
    if isinstance(message, Beat):
        return True
    if isinstance(message, Part) and not 0 <= message.part < message.parts:
        return False
    added = message.added if isinstance(message, Batch) else message.entries
    return (
        len(added) <= MAX_ENTRIES
        and all(_sound_entry(entry) for entry in added)
        and all(math.isfinite(first.first_ms) for first in message.firsts)
        and all(_sound_probe(probe) for probe in message.probed)
        and (isinstance(message, Part) or all(math.isfinite(move.moved_ms) for move in message.moved))
    )


def _sound_entry(entry: Added) -> bool:
    expected, predicted = entry.expected_output_tokens, entry.predicted_ttft_ms
    # A comparison with NaN is false, so it fails each of these.
    return (
        0 < len(entry.decision_id) <= _MAX_ID
        and 0.0 <= entry.input_tokens <= _MAX_TOKENS
        and 0.0 <= entry.uncached_tokens <= _MAX_TOKENS
        and 0 <= entry.text_bytes <= 1 << 40
        and (expected is None or 0.0 <= expected <= _MAX_TOKENS)
        and (predicted is None or 0.0 <= predicted <= _MAX_TOKENS)
        and math.isfinite(entry.dispatched_ms)
        and (entry.start_s is None or math.isfinite(entry.start_s))
        and (entry.names is None or len(entry.names) <= MAX_NAMES)
    )


def _sound_probe(probe: Probed) -> bool:
    numbers = (
        probe.waiting_requests,
        probe.running_requests,
        probe.kv_cache_utilization,
        probe.prompt_tokens,
        probe.first_tokens,
        probe.process_start_s,
    )
    capacity = probe.kv_capacity_tokens
    return (
        math.isfinite(probe.at_ms)
        and all(number is None or 0.0 <= number < math.inf for number in numbers)
        and (capacity is None or 0 <= capacity <= 1 << 40)
    )
