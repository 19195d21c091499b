"""How the C library keeps memory that large bodies have used: for the next one, instead of giving it back at once.

A body of some MB is copied a few times on its way (gRPC's message, the protobuf, the text of the prompt). glibc maps
such blocks anew, or cuts the heap off behind them, and the kernel fills each page with zeros again: with its defaults
that made a KB of body cost twice as much from 1 MB on as below. Above 32 MiB glibc maps always.

Limits: glibc only; elsewhere nothing happens. A router keeps about what its busiest moment took (24 bodies of 5 MB at
once: 324 MB then and after; by default 360 and 195).
"""

import ctypes
from typing import Final

# <malloc.h>
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

KEPT_BYTES: Final = 64 * 1024 * 1024
MAPPED_BYTES: Final = 32 * 1024 * 1024
"""The largest value that glibc takes."""
ARENAS: Final = 2
"""Heaps side by side: gRPC's threads and Python's hardly ever allocate at once, and each heap would keep its own."""


def keep_freed_memory() -> bool:
    """Set the thresholds, for the whole process, before its threads begin; whether all were taken."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES), (_ARENA_MAX, ARENAS))
    results = [mallopt(option, value) for option, value in wanted]
    return all(result == 1 for result in results)
