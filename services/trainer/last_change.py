"""Why the version that serves is not the one that was fitted last: kept beside the succession's memory. Pure.

A rollback or a pin is a person's or the guard's doing, and the process that did it may be gone when somebody asks.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from services.trainer.succession import Memory
from shared.errors import FieldError


@dataclass(frozen=True, slots=True)
class Change:
    """When and why another version came to serve, or a pin came or went, without a fit. For people."""

    unix_ms: float
    reason: str
    detail: str
    version: str | None
    """That which serves since"""


def encode(memory: Memory, change: Change | None) -> bytes:
    """The memory's own object, with the change as one more key."""
    return orjson.dumps({**orjson.loads(memory.encode()), "last_change": change})


def decode(payload: bytes) -> tuple[Memory, Change | None]:
    """What `encode` wrote, or the memory alone. Raises FieldError."""
    memory = Memory.decode(payload)
    found = orjson.loads(payload).get("last_change")
    return memory, None if found is None else _change(found)


def _change(found: Any) -> Change:
    try:
        change = Change(float(found["unix_ms"]), found["reason"], found["detail"], found["version"])
        if not all(isinstance(text, str) for text in (change.reason, change.detail, change.version or "")):
            raise TypeError("a reason, detail or version is no text")
    except (ValueError, TypeError, KeyError) as error:
        raise FieldError("succession.last_change", type(error).__name__, "unix_ms, reason, detail, version") from None
    return change
