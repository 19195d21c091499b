"""A process that is told to stop while it still imports its modules ends at once and cleanly."""

import subprocess
import sys

import pytest

# SIGTERM comes at the very import of a module, whatever the machine's speed.
_RUN = """
import os, runpy, signal, sys

class Signal:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signal)
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("services.router", "services.router.main"),
        ("services.collector", "services.collector.main"),
        ("services.trainer", "services.trainer.main"),
        ("services.predictor", "services.predictor.main"),
        ("sim", "sim.server"),
    ],
)
def test_sigterm_during_the_imports_ends_a_service_with_0(package, module):
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, package, module], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
