"""What an endpoint may be asked to do, in the vocabulary of the label `llm-d.ai/role`. Pure."""

from enum import StrEnum

from shared.errors import FieldError


class Role(StrEnum):
    """`both` is the default. An endpoint that doesn't decode is no candidate for a whole request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"

    @property
    def decodes(self) -> bool:
        return self in {Role.DECODE, Role.BOTH}

    @classmethod
    def of(cls, text: str) -> "Role":
        """Read a role, the joint ones of earlier versions too; raises FieldError."""
        name = text.strip().lower()
        if name in {"", "prefill-decode", "encode-prefill-decode"}:
            return cls.BOTH
        if name == "encode-prefill":
            return cls.PREFILL
        try:
            return cls(name)
        except ValueError:
            raise FieldError("role", f"'{text[:32]}'", ", ".join(cls)) from None
