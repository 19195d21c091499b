"""Fixtures of the predictor's unit tests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    """The model's worker thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
