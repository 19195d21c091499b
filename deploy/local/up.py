"""`leadtime up`: the same stack in front of a user's own OpenAI-compatible servers, until it is stopped.

It looks at each server first and says what is lacking, starts everything, prints where to send requests and where to
look, and then only watches: a process that ends by itself is started again, with its last lines shown.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from deploy.local.endpoint_check import Finding, inspect_all, judge
from deploy.local.envoy import Address
from deploy.local.layout import StackConfig, endpoint_address
from deploy.local.ports import check_free
from deploy.local.processes import ChildError
from deploy.local.stack import Stack
from shared.errors import ConfigurationError

_RESTART_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What to stand in front of, and where."""

    endpoints: tuple[str, ...]
    """`http://host:port[;hardware_class=…]`"""
    listen: Address
    api: Address | None
    profile: str | None
    """None: that of `LEADTIME_ROUTER_PROFILE_FILE`, else the default."""
    predictors: int
    routers: int
    run_dir: Path
    state_dir: Path
    environment: dict[str, str]
    drain_s: float
    """How long requests under way may go on at the stop."""


async def run_up(options: UpOptions, say: Callable[[str], None], make_stack: Callable[..., Stack]) -> None:
    """Run until cancelled."""
    listen_at(options.listen)
    with owned(options.state_dir):
        async with aiohttp.ClientSession() as http:
            urls = [f"http://{endpoint_address(endpoint)}" for endpoint in options.endpoints]
            findings = await inspect_all(http, urls)
        for line in finding_lines(findings):
            say(line)
        config = StackConfig(
            run_dir=options.run_dir,
            endpoints=options.endpoints,
            listen=options.listen,
            api=options.api,
            profile=options.profile,
            predictors=options.predictors,
            routers=options.routers,
            state_dir=options.state_dir,
            environment=options.environment,
            drain_s=options.drain_s,
        )
        async with make_stack(config, report=say) as stack:
            for line in where_lines(stack, findings):
                say(line)
            try:
                await watch(stack, say)
            finally:
                say("stopping")


async def watch(stack: Stack, say: Callable[[str], None]) -> None:
    """Start again what ends by itself, for ever. Requests go on meanwhile, each part's README says how.

    Each part by itself: a trainer is ready only with Redis, so while one was awaited the other would stay dead.
    """
    async with asyncio.TaskGroup() as parts:
        for child in stack.supervisor.children:
            parts.create_task(_keep(stack, child.name, say), name=f"keep {child.name}")


async def _keep(stack: Stack, name: str, say: Callable[[str], None]) -> None:
    while True:
        try:
            await stack.ended(name)
        except ChildError as fault:
            say(str(fault))
        # A part that ends at once again and again must not keep the machine busy with starting it.
        await asyncio.sleep(_RESTART_PAUSE_S)
        try:
            await stack.restart(name)
            say(f"{name}: started again")
        except ChildError as again:
            say(str(again))


def listen_at(address: Address) -> None:
    """Raise ConfigurationError at once, and not from Envoy when all else has started."""
    try:
        check_free(address.host, address.port)
    except OSError as error:
        raise ConfigurationError(
            f"--host {address.host} --port {address.port}: can't listen there: {error.strerror}; "
            "name another port (0 takes a free one) or an address of this machine"
        ) from None


@contextlib.contextmanager
def owned(state_dir: Path) -> Iterator[None]:
    """Make the state directory and keep a second stack off it; raises ConfigurationError when another has it."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"--state {state_dir}: can't be written to ({error.strerror}); name another directory"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f"--state {state_dir}: another `leadtime up` keeps its samples and bundles there; name another one"
            ) from None
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Per server: what it serves, then what it lacks."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.url}: {', '.join(finding.models) if finding.models else 'no model seen'}")
        lines += [f"  {lack}" for lack in judge(finding)]
    if not any(finding.reachable for finding in findings):
        lines.append("no server answers yet: requests get a 503 until one does")
    return lines


def where_lines(stack: Stack, findings: Sequence[Finding]) -> list[str]:
    """Where to send requests, and where to look."""
    at = stack.addresses
    # Of one router the name says nothing.
    routers = [
        (url, f"  ({name})" if len(at.router_urls) > 1 else "")
        for name, url in zip(stack.router_names, at.router_urls, strict=True)
    ]
    names = stack.router_names
    model = next((finding.models[0] for finding in findings if finding.models), "MODEL")
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines = [
        "",
        f"send requests to {at.gateway_url}/v1, for example:",
        f"  curl -N {at.gateway_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        "and look at",
        *(f"  endpoints as the router sees them   {url}/v1/endpoints{which}" for url, which in routers),
        *(f"  the newest decisions, and why       {url}/v1/decisions{which}" for url, which in routers),
        *(f"  counts by rung, bundles, error      {url}/v1/stats{which}" for url, which in routers),
        *(f"  its word from the other routers     {url}/v1/peers{which}" for url, which in routers if which),
        f"  the model                           {at.trainer_url}/v1/model",
        *(f"  the bundle that answers             {url}/v1/status" for url in at.predictor_urls),
        f"/metrics and /readyz of               {at.router_url} ({names[0]})  {at.collector_url} (collector)",
        *(
            f"                                      {url} ({name})"
            for name, url in zip(names[1:], at.router_urls[1:], strict=True)
        ),
        f"                                      {at.trainer_url} (trainer)"
        + "".join(f"  {url} (predictor)" for url in at.predictor_urls),
        f"Envoy's own                           {at.envoy_admin_url}/stats/prometheus",
        f"NATS, for `leadtime samples --nats`   {at.nats_url}",
        f"logs: {stack.config.run_dir}",
        "Ctrl-C stops everything.",
    ]
    if stack.config.api:
        lines.insert(2, f"  and {at.gateway_url}/api goes to http://{stack.config.api}, past the router")
    return lines
