"""A look at real (simulated) servers over HTTP: what vLLM's flags change, and what a wrong address shows."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from deploy.local.endpoint_check import Finding, inspect_all, judge
from deploy.local.processes import ChildSpec, Supervisor
from sim.spec import ProcessSpec, ServerSpec
from tests.servers import free_port

SERVERS = ProcessSpec(
    servers=(
        ServerSpec(name="whole", models=("m",), speed=50, force_usage=True, cached_tokens_in_usage=True),
        ServerSpec(name="plain", models=("m",), speed=50, force_usage=False, cached_tokens_in_usage=False),
    )
)


@pytest.fixture
async def urls(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    (tmp_path / "spec.json").write_text(SERVERS.model_dump_json())
    command = (sys.executable, "-P", "-m", "sim.server", "--spec", str(tmp_path / "spec.json"))
    found: dict[str, str] = {}

    async def listening() -> str | None:
        for line in (tmp_path / "sim.log").read_text().splitlines():
            found.update({server["name"]: server["url"] for server in json.loads(line)["servers"]})
        return None if found else "no ready line yet"

    async with Supervisor(tmp_path, {}) as supervisor:
        await supervisor.start([(ChildSpec(name="sim", command=command), listening)])
        yield found


async def findings(*urls: str) -> list[Finding]:
    async with aiohttp.ClientSession() as http:
        return await inspect_all(http, urls)


async def test_a_server_with_both_flags_lacks_nothing(urls: dict[str, str]) -> None:
    (finding,) = await findings(urls["whole"])
    assert finding.models == ("m",)
    assert judge(finding) == []


async def test_a_server_without_flags_lacks_usage_unasked_and_cached_tokens(urls: dict[str, str]) -> None:
    (finding,) = await findings(urls["plain"])
    lacks = " ".join(judge(finding))
    assert "--enable-force-include-usage" in lacks
    assert "--enable-prompt-tokens-details" in lacks
    assert finding.usage_asked


async def test_an_address_where_nobody_listens_is_told_beside_the_others(urls: dict[str, str]) -> None:
    nobody, whole = await findings(f"http://127.0.0.1:{free_port()}", urls["whole"])
    assert judge(nobody) == ["doesn't answer: gets no requests until it does"]
    assert judge(whole) == []
