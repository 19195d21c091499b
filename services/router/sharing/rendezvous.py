"""Which router does what all could do: the one with the highest hash of router and task. Pure.

Every router that knows the same routers comes to the same answer, and when one goes only its own tasks move.
"""

from collections.abc import Iterable
from hashlib import blake2b


def owner(task: str, routers: Iterable[str]) -> str:
    """The router of `routers` (one at least) that a task falls to."""
    return max(routers, key=lambda router: (blake2b(f"{router} {task}".encode(), digest_size=8).digest(), router))
