"""A port that somebody takes between its release and its child's grasp costs a start, and no more."""

import random
import socket
from pathlib import Path

import pytest

from deploy.local import stack as stack_module
from deploy.local.layout import StackConfig
from deploy.local.ports import LOOPBACK, Ports
from deploy.local.stack import Stack
from sim.spec import ProcessSpec, ServerSpec

SPEC = ProcessSpec(servers=(ServerSpec(name="s0", models=("m",), speed=50),))


@pytest.mark.parametrize("child", ["sim", "router"])
async def test_a_stolen_port_makes_the_stack_start_anew_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    stolen: list[socket.socket] = []
    wanted: list[int] = []

    class Watched(Ports):
        """Somebody else is quicker, once."""

        def release(self, port: int) -> int:
            super().release(port)
            if port in wanted and not stolen:
                thief = socket.create_server((LOOPBACK, port))
                stolen.append(thief)
            return port

    monkeypatch.setattr(stack_module, "Ports", Watched)
    said: list[str] = []
    config = StackConfig(run_dir=tmp_path, simulated=SPEC, predictors=0)
    stack = Stack(config, rng=random.Random(), report=said.append)
    assert stack.simulated is not None
    before = stack.simulated.servers[0].port if child == "sim" else stack.addresses.router_extproc
    wanted.append(before)
    try:
        async with stack as running:
            assert running.simulated is not None
            after = running.simulated.servers[0].port if child == "sim" else running.addresses.router_extproc
            assert after != before
    finally:
        for thief in stolen:
            thief.close()
    # At least once: somebody else may take another as well.
    assert {line for line in said if "its port was taken meanwhile" in line} == {
        f"{child}: its port was taken meanwhile; starting anew"
    }
