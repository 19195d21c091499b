"""Ports that are held until their server binds them."""

import random
import socket
from pathlib import Path

import pytest

from deploy.local.ports import LOOPBACK, Ports, check_free, outgoing_range


def test_a_reserved_port_is_taken_until_it_is_released() -> None:
    ports = Ports(random.Random(1))
    port = ports.reserve()
    with socket.socket() as rival, pytest.raises(OSError, match="in use"):
        rival.bind((LOOPBACK, port))
    assert ports.release(port) == port
    with socket.socket() as server:
        server.bind((LOOPBACK, port))


def test_reserved_ports_differ_and_lie_outside_the_range_of_outgoing_connections() -> None:
    ports = Ports(random.Random(2), outgoing=(20_000, 60_000))
    try:
        found = [ports.reserve() for _ in range(50)]
    finally:
        ports.close()
    assert len(set(found)) == 50
    assert all(not 20_000 <= port <= 60_000 for port in found)


def test_when_every_port_is_for_outgoing_connections_the_kernel_chooses() -> None:
    ports = Ports(random.Random(3), outgoing=(1, 65_535))
    port = ports.reserve()
    ports.close()
    assert port > 0


def test_a_port_is_free_unless_somebody_listens_there() -> None:
    check_free(LOOPBACK, 0)
    with socket.create_server((LOOPBACK, 0), reuse_port=True) as server, pytest.raises(OSError, match="in use"):
        check_free(LOOPBACK, server.getsockname()[1])
    with pytest.raises(OSError, match="assign"):
        check_free("192.0.2.1", 0)


def test_a_taken_port_is_passed_over() -> None:
    first = Ports(random.Random(4)).reserve  # the same seed tries the same ports in the same order
    taken = first()
    other = Ports(random.Random(4))
    try:
        assert other.reserve() != taken
    finally:
        other.close()


def test_an_unreadable_range_is_taken_as_the_usual_one(tmp_path: Path) -> None:
    assert outgoing_range(tmp_path / "absent") == (32_768, 60_999)
    (tmp_path / "range").write_text("1000 2000\n")
    assert outgoing_range(tmp_path / "range") == (1_000, 2_000)
