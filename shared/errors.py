"""Errors of the contracts.

LeadtimeError
├── ContractError         a message, row or bundle breaks an agreement: the sender must change
│   ├── FieldError        one field; names it, what was found and what is allowed
│   └── IntegrityError    bytes are damaged, unsigned, or signed by another key
└── ConfigurationError    settings can't work; stops the service at start

The facts are in the fields; an edge turns them into a status and a body. `kind_of` and `reason_of` say what was found.
"""

import os
from typing import Any, Final

_KINDS: Final[dict[type, str]] = {
    str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", tuple: "a list",
    dict: "an object", bytes: "bytes", type(None): "nothing",
}  # fmt: skip


def kind_of(value: Any) -> str:
    """JSON's word for the kind of a value; the value itself is never shown."""
    return _KINDS.get(type(value), "a value of another kind")


def reason_of(error: Exception) -> str:
    """Why a file or a connection can't be had, in the system's words; the name of the fault where it has none."""
    if isinstance(error, UnicodeDecodeError):
        return f"not text in UTF-8 from byte {error.start} on"
    if isinstance(error, OSError) and error.errno:
        # Servers' own texts name the address again; a name that isn't found has a negative number and its own words.
        return os.strerror(error.errno) if error.errno > 0 else error.strerror or type(error).__name__
    return type(error).__name__


class LeadtimeError(Exception):
    """Root of every error that Leadtime raises on purpose."""


class ContractError(LeadtimeError):
    """A message, row or bundle that breaks an agreement."""


class FieldError(ContractError, ValueError):
    """One field has the wrong kind or lies outside its range. A ValueError, so that pydantic reports it as a fault.

    `found` describes the *kind* of the value, never a prompt's text.
    """

    def __init__(self, field: str, found: str, allowed: str) -> None:
        super().__init__(f"{field}: found {found}; allowed: {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


class IntegrityError(ContractError):
    """Bytes that are damaged, unsigned where a signature is due, or signed by another key."""


class ConfigurationError(LeadtimeError):
    """Settings that can't work. Carries every fault found, one line each."""
