"""Counts in sentences. Pure."""


def counted(count: int, noun: str) -> str:
    """`1 sample`, `2 samples`, `1,200 samples`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
