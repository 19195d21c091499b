"""A cancellation that a library dropped is raised after all.

`asyncio.wait_for` of Python 3.11 returns its result and drops a cancellation that arrives in the same turn of the
loop; nats-py waits by it for every message. An endless loop around such a call would then never end, and with it
neither the service (seen in 1 of 10 stops of a busy trainer).
"""

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was told to end and goes on nevertheless."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
