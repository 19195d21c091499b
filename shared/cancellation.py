"""A cancellation that a library dropped is raised after all. Pure but for the look at the running task.

Endless loops around these calls would outlive their cancellation, and with them a service its stop: `asyncio.wait_for`
of Python 3.11 returns its result and drops a cancellation that arrives in the same turn of the loop, and nats-py waits
by it for every message (a busy trainer hung at 1 of 10 stops); redis-py 8.1 turns one that meets it while it connects
into an error of its own. Every such loop calls this once a round, in all services alike, hence here.
"""

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was told to end and goes on nevertheless."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
