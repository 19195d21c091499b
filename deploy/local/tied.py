"""`python -I -S tied.py PARENT NICE COMMAND…`: becomes COMMAND, which the kernel ends when its parent dies. Edge.

Run between a child's start and its program, as a program of its own: code between fork and exec in a process with
gRPC in it meets gRPC's fork handlers, which now and then abort the child (seen with grpcio 1.85: `epoll_wait error: Bad
file descriptor`). Only what an isolated interpreter has is imported; 15 ms.

Limits: the tie is Linux's; elsewhere only the priority is set.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, nice: int, command: list[str]) -> None:
    """Doesn't return: ends with 127 where the command can't be run, with 1 where the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told to watch it
            sys.exit(1)
    if nice:
        os.nice(nice)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the caller's own command, no shell
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
