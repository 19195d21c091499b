"""The `leadtime` command: `demo` shows the whole system at work, `up` stands it in front of your own servers.

The composition root of `deploy/local`: it reads the command line and the environment, and turns faults into a message
and an exit status. 0: done; 1: a request failed, or a part did; 2: bad arguments; 130 or 143: stopped by a signal.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from secrets import SystemRandom
from typing import Annotated, Any

import typer
import uvloop
from pydantic import ValidationError
from rich.console import Console

from deploy.local import scenario
from deploy.local.arguments import Command
from deploy.local.children import unknown_variables
from deploy.local.control import ControlError
from deploy.local.demo import DemoOptions, run_demo
from deploy.local.envoy import Address, parse_endpoint
from deploy.local.layout import StackConfig, endpoint_address
from deploy.local.output_file import fault_of
from deploy.local.ports import LOOPBACK
from deploy.local.processes import ChildError
from deploy.local.progress import progress
from deploy.local.run_dir import new_run_dir
from deploy.local.sample_export import export_samples
from deploy.local.screen import Screen
from deploy.local.stack import Stack
from deploy.local.up import UpOptions, run_up
from deploy.local.words import counted
from services.router.discovery.endpoints import parse_endpoints
from shared.errors import ConfigurationError, FieldError
from shared.names import validate_pool
from shared.settings import NatsSettings, is_loopback

app = typer.Typer(
    name="leadtime",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"leadtime {importlib.metadata.version('leadtime')}")
        raise typer.Exit


@app.callback()
def leadtime(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Routes each request for a language model to the endpoint that will answer it best, by learned latency."""


@app.command(cls=Command)
def demo(
    seconds: Annotated[
        float, typer.Option(min=5, max=600, help="Length of each of the three measured phases, in seconds.")
    ] = scenario.DEFAULT_SECONDS,
    rate: Annotated[
        float, typer.Option(min=1, max=scenario.MAX_RATE_PER_S, help="Requests a second, open loop.")
    ] = scenario.DEFAULT_RATE_PER_S,
    seed: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Of the arrivals, the texts and the simulated servers.")
    ] = scenario.DEFAULT_SEED,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Show the whole system at work on simulated servers.

    Starts real NATS, Envoy and a Redis-protocol server, the four services, and six simulated model servers of three
    speeds. Sends the same conversations under round robin, under the hand-tuned load-prefix score and under Leadtime,
    which learns from them as they pass, and ends with a table. Takes about two and a half minutes.
    """
    console = Console()
    _refuse_unknown_variables()
    if json_file is not None:
        _refuse_unwritable(json_file, "--json")
    run_dir = _run_dir("demo")
    options = DemoOptions(scenario.Workload(rate, seconds, seed), run_dir, dict(os.environ))

    async def play() -> int:
        with Screen(console) as screen:
            report = await run_demo(options, screen, _make_stack)
        screen.table(report, str(run_dir))
        if json_file is not None:
            await asyncio.to_thread(json_file.write_text, json.dumps(report, indent=1) + "\n")
        return 1 if report["failed"] else 0

    sys.exit(run(play))


@app.command(cls=Command)
def up(
    endpoint: Annotated[
        list[str],
        typer.Option(
            metavar="URL", help="A model server, http://host:port[;hardware_class=h100]. Repeat it for each server."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Where to take requests; 0 takes a free port.")] = 8080,
    host: Annotated[str, typer.Option(help="IP address to take requests on.")] = LOOPBACK,
    api: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An ordinary service, http://host:port, to answer /api beside the models."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            envvar="LEADTIME_ROUTER_PROFILE",
            help="The routing policy: a preset (leadtime, load-prefix, round-robin, …: services/router/scheduling). "
            "Without it that of LEADTIME_ROUTER_PROFILE_FILE, else leadtime.",
        ),
    ] = None,
    predictors: Annotated[int, typer.Option(min=0, max=16, help="Predictor processes.")] = 1,
    routers: Annotated[
        int, typer.Option(min=1, max=16, help="Router processes, all active; they share their ledger over NATS.")
    ] = 1,
    state: Annotated[
        Path, typer.Option(help="Directory that keeps samples and bundles from one run to the next.")
    ] = Path(".run/state"),
    drain: Annotated[
        float, typer.Option(min=0, max=3_600, help="Seconds that requests under way may go on at the stop.")
    ] = 10.0,
) -> None:
    """Run Leadtime in front of your own OpenAI-compatible servers.

    Looks at each server first and says what it lacks; prints where to send requests and where to look; runs until it
    is stopped.
    """
    console = Console(soft_wrap=True)
    _refuse_unknown_variables()
    for each in endpoint:
        with _refusing(f"--endpoint '{each}'"):
            endpoint_address(each)
            parse_endpoints(each)
    with _refusing(f"--api '{api}'"):
        api_address = parse_endpoint(api) if api else None
    if not Address(host, port).is_ip:
        raise typer.BadParameter(f"found '{host}'; allowed: an IP address of this machine", param_hint="--host")
    _refuse_unknown_profile(profile)
    if not is_loopback(host):
        console.print(f"{host}: whoever reaches this address can use your servers; Envoy asks for no key")
    options = UpOptions(
        endpoints=tuple(endpoint),
        listen=Address(host, port),
        api=api_address,
        profile=profile,
        predictors=predictors,
        routers=routers,
        run_dir=_run_dir("up"),
        state_dir=state.absolute(),
        environment=dict(os.environ),
        drain_s=drain,
    )

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    async def serve() -> int:
        await run_up(options, say, _make_stack)
        return 0

    sys.exit(run(serve))


@app.command(name="evaluate", cls=Command, short_help="Estimate another policy from logged decisions.")
def evaluate_command(
    log: Annotated[
        list[Path],
        typer.Argument(help="Decision logs of routers (LEADTIME_ROUTER_DECISION_LOG), and files of samples."),
    ],
    profile: Annotated[list[str], typer.Option(help="A preset or a profile file (.yaml). Repeat it.")],
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the intervals.")] = 0.95,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Estimate what another policy would have done with logged decisions, with intervals.

    Weighs each logged outcome by how probably the other policy would have taken that decision, corrected by the logged
    predictions (doubly robust). Says so where the log overlaps too little with it: a policy that draws no lots shows
    nothing of what it doesn't do. One decision at a time: how another policy would have changed the queues is what
    `leadtime replay` shows.
    """
    from deploy.local import evaluate  # noqa: PLC0415 - numpy and the policies: other commands need not wait

    console = Console(soft_wrap=True)
    if json_file is not None:
        _refuse_unwritable(json_file, "--json")
    try:
        evaluations = evaluate.evaluate_logs(log, profile, confidence)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="LOG") from None
    for evaluation in evaluations:
        console.print(evaluate.report_of(evaluation), highlight=False, markup=False)
        for remark in evaluate.remarks_of(evaluation):
            console.print(remark, highlight=False, markup=False)
        for warning in evaluate.warnings_of(evaluation):
            console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(evaluate.as_json(evaluations), indent=2), "utf-8")


@app.command(name="samples", cls=Command, short_help="Write the stream's samples to a file.")
def samples_command(
    file: Annotated[Path, typer.Argument(help="Where to write them, one JSON object a line.")],
    pool: Annotated[str, typer.Option(help="Whose samples.")] = "default",
    nats: Annotated[str, typer.Option(envvar="LEADTIME_NATS_SERVERS", help="NATS servers, comma-separated.")] = (
        "nats://127.0.0.1:4222"
    ),
) -> None:
    """Write the samples that the stream still holds to a file, for `replay` and `evaluate`.

    Credentials and TLS come from the same variables as the services' (LEADTIME_NATS_…).
    """
    console = Console(soft_wrap=True)
    _refuse_unwritable(file, "FILE")
    try:
        settings = NatsSettings(servers=nats)
    except ValidationError as error:
        raise typer.BadParameter(str(error.errors()[0]["msg"]), param_hint="--nats") from None
    with _refusing("--pool"):
        validate_pool(pool)

    async def export() -> int:
        written = await export_samples(settings, pool, file)
        console.print(f"{counted(written, 'sample')} of pool {pool}", highlight=False, markup=False)
        return 0

    sys.exit(run(export))


@app.command(name="replay", cls=Command, short_help="Show what policies would do with a trace.")
def replay_command(
    trace: Annotated[
        str,
        typer.Argument(
            help="A made trace (A, B, C, D, sharegpt), a public one (mooncake, azure, in --data), or a file: your own "
            "JSON lines, samples of Leadtime, Mooncake's or Azure's form."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset, a profile file, `oracle`, or any of them with +oracle for true service times. Repeat it. "
            "Without it load-prefix, token-load and leadtime."
        ),
    ] = None,
    load: Annotated[str, typer.Option(help="Shares of the pool's capacity, as 0.5,0.8.")] = "0.5,0.7,0.85,0.95",
    hardware: Annotated[
        str,
        typer.Option(
            help="The pool, as h100-8b:6,a100-8b:2. Of a100, h100, h200 with -8b or -70b (four devices), and l40s-8b."
        ),
    ] = "h100-8b:8",
    slo_ttft_ms: Annotated[float, typer.Option(min=1, help="Objective for the time to the first token.")] = 1_000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0.1, help="Objective for the time per token after it.")] = 40.0,
    slo_ttft_tokens: Annotated[
        int, typer.Option(min=1, help="Prompts longer than this have proportionally more time to the first token.")
    ] = 4_096,
    requests: Annotated[int, typer.Option(min=100, max=1_000_000, help="At most so many of the trace.")] = 5_000,
    seed: Annotated[int, typer.Option(min=0, max=1_000_000, help="Of the arrivals and the pods' noise.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=64, help="Routers.")] = 1,
    share_ledgers: Annotated[
        bool, typer.Option(help="Whether they tell each other what they dispatch; else each has a view of its own.")
    ] = True,
    capacity: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second at 100 % load; measured where it isn't given.")
    ] = None,
    data: Annotated[Path, typer.Option(envvar="LEADTIME_DATA", help="Folder of the public traces.")] = Path(
        "../shared/data"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Draw TTFT and goodput over load here.")] = None,
) -> None:
    """Show what policies would do with a trace, in virtual time, before one is turned on.

    Runs the router's own decisions and the trainer's own learning against simulated servers. The same arguments give
    the same figures. Ends with a table: latencies of the measured part, the share of requests within their objectives,
    the share of prompt tokens found cached.
    """
    # Fits and graphs: a second of imports that the other commands need not wait for.
    from deploy.local import replay  # noqa: PLC0415
    from sim.replay.options import SloRule  # noqa: PLC0415

    console = Console(soft_wrap=True)
    for file, argument in ((json_file, "--json"), (svg_file, "--svg")):
        if file is not None:
            _refuse_unwritable(file, argument)
    with _refusing("--load"):
        loads = replay.parse_loads(load)
    command = replay.ReplayCommand(
        trace=trace,
        policies=tuple(policy or replay.DEFAULT_POLICIES),
        loads=loads,
        hardware=hardware,
        slo=SloRule(slo_ttft_ms, slo_tpot_ms, slo_ttft_tokens),
        requests=requests,
        seed=seed,
        routers=routers,
        share_ledgers=share_ledgers,
        capacity_per_s=capacity,
        data=data,
    )

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    try:
        with progress(Console(stderr=True)) as told:
            report = replay.replay(command, say, told)
        say(replay.table(report))
        replay.write_report(report, json_file, svg_file)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"leadtime: {error}\n")
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run to the end, or until SIGINT, SIGTERM or SIGHUP, which cancel it; a second signal ends the process at once.

    Cancelled, it still stops what it started. Faults that a user can mend are told in words, without a traceback.
    """
    received: list[int] = []

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main())

        def on_signal(number: int) -> None:
            if received:  # the kernel ends the children of a process that ends
                os._exit(128 + number)
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await task
        except asyncio.CancelledError:
            return 128 + received[0] if received else 1

    try:
        # Its timers keep a load client twice as punctual as asyncio's own loop.
        return int(uvloop.run(guarded()))
    except (ChildError, ControlError, ConfigurationError, FieldError, OSError) as error:
        sys.stderr.write(f"leadtime: {error}\n")
        return 1


@contextlib.contextmanager
def _refusing(argument: str) -> Iterator[None]:
    """A field's fault is the argument's."""
    try:
        yield
    except FieldError as error:
        raise typer.BadParameter(str(error), param_hint=argument) from None


def _refuse_unwritable(file: Path, argument: str) -> None:
    """Minutes of measuring must not end in a file that can't be written."""
    if (fault := fault_of(file)) is not None:
        raise typer.BadParameter(fault, param_hint=argument)


def _refuse_unknown_profile(profile: str | None) -> None:
    """Before a stack is started for it. A profile file may add a name: the router reads it, and refuses by itself."""
    if profile is None or "LEADTIME_ROUTER_PROFILE_FILE" in os.environ:
        return
    # numpy and the policies: a command that names none need not wait.
    from services.router.scheduling.profile import Profiles, load_presets  # noqa: PLC0415
    from services.router.scheduling.registry import Registry  # noqa: PLC0415

    try:
        Profiles(load_presets(Registry())).get(profile)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from None


def _refuse_unknown_variables() -> None:
    """Those of a service's own prefix are that service's to refuse."""
    if unknown := unknown_variables(os.environ):
        raise typer.BadParameter("\n".join(unknown), param_hint="environment")


def _make_stack(config: StackConfig, **options: Any) -> Stack:
    return Stack(config, rng=SystemRandom(), **options)


def _run_dir(command: str) -> Path:
    return new_run_dir(Path.cwd(), command, time.strftime("%Y%m%d-%H%M%S"), os.getpid())


if __name__ == "__main__":
    app()
