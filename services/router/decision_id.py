"""UUIDv7 (RFC 9562): ids that sort by time, made by the router. The standard library has them from 3.14. Pure."""

import uuid


def uuid7(unix_ms: float, random_bits: int) -> str:
    """Time in the first 48 bits, then version, variant and 74 of `random_bits`."""
    value = (int(unix_ms) & ((1 << 48) - 1)) << 80
    value |= 0x7 << 76 | ((random_bits >> 62) & 0xFFF) << 64
    value |= 0b10 << 62 | (random_bits & ((1 << 62) - 1))
    return str(uuid.UUID(int=value))
