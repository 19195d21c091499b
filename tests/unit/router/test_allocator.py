"""Memory that a large body used is there for the next one, without a page asked of the kernel."""

import subprocess
import sys

# In a process of its own: the thresholds hold for all of it. A block of 8 MB has 2,048 pages.
_FAULTS = """
import resource
from services.router.allocator import keep_freed_memory
if {kept}:
    assert keep_freed_memory()
body = b"x" * 8_388_608
del body
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    blocks = [b"x" * 8_388_608 for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, kept: bool) -> int:
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS.format(kept=kept)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(run.stdout)


def test_large_blocks_are_used_again() -> None:
    assert faults(kept=True) < 3 * 2_048 < faults(kept=False)
