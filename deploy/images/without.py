"""A hash lock on stdin without one package, on stdout: `without.py onnxruntime < predictor.lock`.

For an image where another build of the same library takes its place. The package must be there: a lock that has lost it
would end up with both.
"""

import re
import sys
from typing import Final

_ENTRY: Final = re.compile(r"^(?=\S)", re.MULTILINE)


def without(lock: str, package: str) -> str:
    """The lock without `package`; ValueError where it has none."""
    entries = _ENTRY.split(lock)
    kept = [entry for entry in entries if not entry.startswith(f"{package}==")]
    if len(kept) != len(entries) - 1:
        raise ValueError(f"{len(entries) - len(kept)} entries of {package}; allowed: one")
    return "".join(kept)


if __name__ == "__main__":
    sys.stdout.write(without(sys.stdin.read(), sys.argv[1]))
