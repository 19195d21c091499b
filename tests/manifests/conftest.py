"""Where the CustomResourceDefinitions are: LEADTIME_CRDS, by default beside the checkout. The project has none."""

import os
from pathlib import Path

import pytest

from tests.manifests.schemas import Crds

DEFAULT = Path(__file__).parents[3] / "shared" / "deploy-crds"


@pytest.fixture(scope="session")
def crds() -> Crds:
    folder = Path(os.environ.get("LEADTIME_CRDS") or DEFAULT)
    assert folder.is_dir(), f"{folder}: no such folder; LEADTIME_CRDS names one with CustomResourceDefinitions"
    return Crds(folder)
