"""A Docker engine with the images that the compose file names: the machine's own, or stand-ins.

Where a registry can be reached nothing is done here: compose pulls. Elsewhere a script makes stand-ins (and an engine,
where none runs): `LEADTIME_STANDIN_IMAGES`, by default beside the checkout. What was started is stopped, and nothing
else.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
BASE_IMAGES: Final = ("python:3.11-slim", "envoyproxy/envoy:v1.40-latest", "nats:2", "redis:7")
"""The defaults of compose.yaml and of the Dockerfile; a test compares them."""
_PULL_S: Final = 60
_SCRIPT_S: Final = 600


@contextmanager
def engine() -> Iterator[str]:
    """While it is open `docker` works and the base images are there; yields where they come from."""
    running = works("info")
    if running and all(works("image", "inspect", image) for image in BASE_IMAGES):
        yield "already there"
        return
    if running and all(works("pull", "--quiet", image) for image in BASE_IMAGES):
        yield "pulled"
        return
    script = Path(os.environ.get("LEADTIME_STANDIN_IMAGES", REPOSITORY / "../shared/tools/standin-images.sh"))
    if not script.is_file():
        raise RuntimeError(
            f"no {'image can be pulled' if running else 'Docker engine answers'}, and no script for stand-ins"
            f" at {script} (LEADTIME_STANDIN_IMAGES names another)"
        )
    environment = {**os.environ, "ENVOY_TAG": BASE_IMAGES[1].partition(":")[2]}
    try:
        subprocess.run(["bash", str(script), "all"], env=environment, check=True, timeout=_SCRIPT_S)
        yield "stand-ins"
    finally:
        if not running:
            subprocess.run(["bash", str(script), "stop"], env=environment, check=False, timeout=_SCRIPT_S)


def works(*command: str) -> bool:
    """Whether a docker command succeeds; one that hangs doesn't."""
    try:
        ended = subprocess.run(["docker", *command], capture_output=True, check=False, timeout=_PULL_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
