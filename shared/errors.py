"""Errors of the contracts.

LeadtimeError
├── ContractError         a message, row or bundle breaks an agreement: the sender must change
│   ├── FieldError        one field; names it, what was found and what is allowed
│   └── IntegrityError    bytes are damaged, unsigned, or signed by another key
└── ConfigurationError    settings can't work; stops the service at start

The facts are in the fields; an edge turns them into a status and a body.
"""


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
