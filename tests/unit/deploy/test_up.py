"""What `leadtime up` says of where to look."""

from types import SimpleNamespace
from typing import Any

import pytest

from deploy.local.up import where_lines


def stack(*routers: str) -> Any:
    names = ("router",) if len(routers) == 1 else tuple(f"router-{place}" for place in range(1, len(routers) + 1))
    addresses = SimpleNamespace(
        gateway_url="http://g", router_urls=routers, router_url=routers[0], trainer_url="http://t",
        collector_url="http://c", predictor_urls=("http://p",), envoy_admin_url="http://e", nats_url="nats://n",
    )  # fmt: skip
    return SimpleNamespace(addresses=addresses, router_names=names, config=SimpleNamespace(run_dir="logs", api=None))


def test_links_of_several_routers_say_which_is_which() -> None:
    lines = where_lines(stack("http://a", "http://b"), [])
    for path in ("endpoints", "decisions", "stats", "peers"):
        assert any(line.endswith(f"http://a/v1/{path}  (router-1)") for line in lines)
        assert any(line.endswith(f"http://b/v1/{path}  (router-2)") for line in lines)
    assert any(line.endswith("http://a (router-1)  http://c (collector)") for line in lines)
    assert any(line.strip() == "http://b (router-2)" for line in lines)


@pytest.mark.parametrize("path", ["endpoints", "decisions", "stats"])
def test_the_link_of_one_router_is_the_end_of_its_line(path: str) -> None:
    assert any(line.endswith(f"http://a/v1/{path}") for line in where_lines(stack("http://a"), []))
