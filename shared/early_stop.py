"""What a service does with SIGTERM until it has a handler of its own: it ends at once, with 0.

Process 1 of a container has no default for signals: one that comes while modules are imported, a second or two on a
busy machine, would be lost, and the container killed after the whole of its grace. So this is the first thing that a
`__main__` calls. Imports nothing of ours.
"""

import os
import signal


def end_at_sigterm() -> None:
    """Nothing has begun that would have to be ended: no clean-up is run."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
