"""`docker compose` with the real images, from the build to `down`: one story, told in this order.

Run by `make deploy-test`, not by `make test`. Only what people wait for is timed: `down`, SIGTERM, and a warm `up`.
"""

import io
import json
import re
import subprocess
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath

import pytest

from tests.deploy.compose_stack import COMPOSE, IMAGES, Answer, ComposeStack, docker, total, until

SERVICES = ("router", "collector", "predictor", "trainer")
MOST_MB = {"router": 250, "collector": 250, "predictor": 350}
PORTS = {"router": 9090, "collector": 9090, "predictor": 8080, "trainer": 9090}
FORBIDDEN = re.compile(
    r"^(?:sh|bash|dash|ash|busybox|curl|wget|nc|gcc|g\+\+|cc|ld|as|make|apt|apt-get|dpkg|apk|perl|pip\d?|ssh|su|sudo)$"
)
SECRET_FILES = re.compile(r"(?:^|/)(?:\.git|\.env|id_rsa|id_ed25519|\.netrc|\.pypirc|\.docker)(?:/|$)|\.key$")


@pytest.fixture(scope="module")
def sizes(stack: ComposeStack) -> dict[str, float]:
    """MB of each image, unpacked; 10^6 bytes, as Docker shows it."""
    found = {name: json.loads(docker("image", "inspect", image(stack, name)))[0] for name in (*SERVICES, "sim")}
    stack.facts["image_mb"] = {name: round(entry["Size"] / 1e6, 1) for name, entry in found.items()}
    return stack.facts["image_mb"]


def image(stack: ComposeStack, service: str) -> str:
    tag = re.search(r"LEADTIME_VERSION:-([^}]+)\}", stack.files[0].read_text())
    assert tag is not None
    return f"{IMAGES}/{service}:{tag[1]}"


# Images


def test_images_are_small(sizes: dict[str, float]) -> None:
    assert {name: size for name, size in sizes.items() if size > MOST_MB.get(name, 1e9)} == {}


@pytest.mark.parametrize("service", [*SERVICES, "sim"])
def test_an_image_says_what_it_is_and_runs_as_nobody(stack: ComposeStack, service: str) -> None:
    config = json.loads(docker("image", "inspect", image(stack, service)))[0]["Config"]
    assert config["User"] == "65532:65532"
    labels = {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]}
    assert {"title", "description", "version", "revision", "licenses", "vendor"} <= labels
    environment = dict(entry.partition("=")[::2] for entry in config["Env"])
    assert environment["ORT_DISABLE_TELEMETRY"] == "1"
    assert [name for name in environment if re.search(r"TOKEN|SECRET|PASSWORD|KEY|SALT", name)] == []
    assert config["Entrypoint"] is None


@pytest.mark.parametrize("service", [*SERVICES, "sim"])
def test_an_image_holds_no_shell_compiler_secret_or_setuid_file(stack: ComposeStack, service: str) -> None:
    container = docker("create", image(stack, service)).strip()
    try:
        packed = subprocess.run(["docker", "export", container], capture_output=True, check=True, timeout=120).stdout
    finally:
        docker("rm", container)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        entries = archive.getmembers()
    assert len(entries) > 1000
    programs = [entry.name for entry in entries if entry.mode & 0o111 and not entry.isdir()]
    assert [name for name in programs if FORBIDDEN.match(PurePosixPath(name).name)] == []
    assert [entry.name for entry in entries if entry.mode & 0o6000] == []
    assert [entry.name for entry in entries if SECRET_FILES.search(entry.name)] == []
    # What a service could change of its own code, were the root not read-only.
    own = [entry.name for entry in entries if entry.uid == 65532]
    assert {PurePosixPath(name).parts[0] for name in own} <= {"run", "var"}


def test_the_file_is_valid_with_every_profile_and_on_a_gpu(stack: ComposeStack) -> None:
    stack.compose("--profile", "observability", "config", "--quiet")
    stack.files += (COMPOSE / "gpu.yaml",)
    try:
        told = json.loads(stack.compose("config", "--format", "json"))["services"]
    finally:
        stack.files = stack.files[:1]
    assert told["predictor"]["build"]["target"] == "predictor-gpu"
    assert told["trainer"]["build"]["target"] == "trainer-tensor"
    assert told["predictor"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


# Up


def test_up_is_healthy_and_a_request_is_routed(stack: ComposeStack) -> None:
    stack.timed("first_up_s", "up", "--detach", "--no-build", "--wait")
    answer = until("a routed answer", lambda: routed(stack))
    assert json.loads(answer.text)["choices"][0]["message"]["content"]


def routed(stack: ComposeStack, *, stream: bool = False) -> Answer | None:
    answer = stack.ask(stream=stream)
    return answer if answer.routed else None


def test_a_streamed_answer_comes_in_events_to_its_end(stack: ComposeStack) -> None:
    answer = stack.ask(stream=True)
    assert answer.routed
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2


def test_containers_of_ours_are_confined(stack: ComposeStack) -> None:
    for service in (*SERVICES, "envoy", "nats", "redis", "sim"):
        for container in stack.containers(service):
            host = json.loads(docker("container", "inspect", container))[0]["HostConfig"]
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert host["SecurityOpt"] == ["no-new-privileges:true"], service
            bound = [entry["HostIp"] for entries in (host["PortBindings"] or {}).values() for entry in entries]
            assert set(bound) <= {"127.0.0.1"}, service


def test_a_service_cant_write_to_its_root(stack: ComposeStack) -> None:
    for service in SERVICES:
        code = "import os\ntry: open('/opt/x', 'w')\nexcept OSError as e: print(e.errno, os.getuid())"
        assert stack.compose("exec", "-T", service, "python", "-c", code).split() == ["30", "65532"], service


def test_what_discloses_asks_for_the_token(stack: ComposeStack) -> None:
    container = stack.containers("router")[0]
    with pytest.raises(Exception, match="401"):
        stack.page(container, 9090, "/v1/stats")
    assert json.loads(stack.page(container, 9090, "/v1/stats", stack.token()))


# Learning


def test_samples_reach_the_trainer(stack: ComposeStack) -> None:
    assert set(stack.load(20)) <= {"routed", "unrouted"}

    def learned() -> float:
        stack.load(2)
        (page,) = stack.metrics("trainer", 9090).values()
        return total(page, "leadtime_trainer_samples_total")

    until("samples at the trainer", lambda: learned() >= 10)


def test_a_bundle_reaches_the_predictor_and_decides(stack: ComposeStack) -> None:
    until("the predictor's bundle", lambda: all(bundles(stack).values()))

    def predicted() -> float:
        stack.load(2)
        (page,) = stack.metrics("router", 9090).values()
        return sum(
            value
            for key, value in page.items()
            if key.startswith("leadtime_router_decisions_total{") and 'rung="predictor"' in key
        )

    until("decisions by the predictor", lambda: predicted() > 0)


def bundles(stack: ComposeStack) -> dict[str, str | None]:
    """Version of each predictor's bundle, by container."""
    token = stack.token()
    found = {}
    for container in stack.containers("predictor"):
        status = json.loads(stack.page(container, 8080, "/v1/status", token))
        found[container] = (status["pools"]["default"]["bundle"] or {}).get("version")
    return found


# More of each


def test_more_replicas_share_the_load(stack: ComposeStack) -> None:
    scaled = ("--scale", "router=2", "--scale", "predictor=3", "--scale", "collector=2")
    stack.timed("scale_out_s", "up", "--detach", "--no-build", "--wait", "--no-recreate", *scaled)
    until("a bundle at each of three predictors", lambda: len(found := bundles(stack)) == 3 and all(found.values()))
    done = Counter[str]()

    def shared() -> dict[str, list[float]] | None:
        done.update(stack.load(20))
        counts = {
            "router": counted(stack, "router", "leadtime_router_decisions_total"),
            "predictor": counted(stack, "predictor", "leadtime_predictor_requests_total"),
            "collector": counted(stack, "collector", "leadtime_collector_entries_total"),
        }
        stack.facts["share_of_load"] = counts
        return counts if all(min(values) > 0 for values in counts.values()) else None

    counts = until("work for each replica", shared, deadline_s=180)
    assert {service: len(values) for service, values in counts.items()} == {"router": 2, "predictor": 3, "collector": 2}
    assert set(done) <= {"routed", "unrouted"}


def counted(stack: ComposeStack, service: str, metric: str) -> list[float]:
    return [total(page, metric) for page in stack.metrics(service, PORTS[service]).values()]


# Losses


@contextmanager
def under_load(stack: ComposeStack) -> Iterator[Counter[str]]:
    """Requests one after the other, from before to after what happens meanwhile."""
    ended, stop = Counter[str](), threading.Event()

    def send() -> None:
        while not stop.is_set():
            ended.update(stack.load(1))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        until("load", lambda: sum(ended.values()) >= 5)
        yield ended
        before = sum(ended.values())
        until("load afterwards", lambda: sum(ended.values()) >= before + 20)
    finally:
        stop.set()
        sender.join()


@pytest.mark.parametrize("service", ["router", "nats", "redis", "predictor", "collector", "trainer"])
def test_a_killed_part_costs_no_request(stack: ComposeStack, service: str) -> None:
    container = stack.containers(service)[0]
    with under_load(stack) as ended:
        docker("kill", container)
        until("it is gone", lambda: container not in stack.containers(service))
    docker("start", container)
    stack.facts.setdefault("requests_while_killed", {})[service] = dict(ended)
    assert set(ended) <= {"routed", "unrouted"}


def test_after_all_of_that_samples_go_on_reaching_the_trainer(stack: ComposeStack) -> None:
    def seen() -> float:
        (page,) = stack.metrics("trainer", 9090).values()
        return total(page, "leadtime_trainer_samples_total")

    before = until("the trainer again", lambda: (seen(),))[0]

    def more() -> bool:
        stack.load(5)
        return seen() > before

    until("new samples at the trainer", more)


# What is said of it all


def test_every_metric_of_the_dashboard_is_there(stack: ComposeStack) -> None:
    dashboard = json.loads((COMPOSE / "observability/leadtime.json").read_text())
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    asked = set(re.findall(r"\bleadtime_\w+", text))

    def missing() -> set[str]:
        # Counted from the first request with an objective on.
        stack.ask(stream=True, headers={"x-slo-ttft-ms": "5000"})
        shown = {
            series.partition("{")[0]
            for service in SERVICES
            for page in stack.metrics(service, PORTS[service]).values()
            for series in page
        }
        return asked - shown

    try:
        until("every metric of the dashboard", lambda: not missing())
    finally:
        stack.facts["dashboard_without"] = sorted(missing())


def test_neither_prompts_nor_tokens_are_in_the_logs(stack: ComposeStack) -> None:
    stack.load(2)
    said = stack.compose("logs", "--no-color")
    assert "service starting" in said
    assert "question " not in said
    assert stack.token() not in said


# Other endpoints


def test_one_variable_changes_the_endpoints_of_router_and_envoy(stack: ComposeStack) -> None:
    stack.settings["LEADTIME_ENDPOINTS"] = "http://sim:8002;hardware_class=a100"
    stack.timed("other_endpoints_s", "up", "--detach", "--no-build", "--wait")

    def served() -> list[str | None] | None:
        answers = [stack.ask() for _ in range(8)]
        return [answer.served for answer in answers] if all(answer.routed for answer in answers) else None

    assert set(until("routed answers", served)) == {"medium"}
    del stack.settings["LEADTIME_ENDPOINTS"]


# Down


@pytest.mark.parametrize("service", [*SERVICES, "sim"])
def test_sigterm_ends_a_service_cleanly_within_5_seconds(stack: ComposeStack, service: str) -> None:
    container = stack.containers(service)[0]
    took = timed(lambda: docker("stop", "--time", "10", container))
    state = json.loads(docker("container", "inspect", container))[0]["State"]
    stack.facts.setdefault("sigterm_s", {})[service] = round(took, 2)
    assert state["ExitCode"] == 0
    assert took < 5
    docker("start", container)


def timed(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_down_takes_less_than_10_seconds(stack: ComposeStack) -> None:
    stack.compose("up", "--detach", "--no-build", "--wait")
    assert stack.timed("down_s", "down") < 10


def test_a_warm_up_routes_a_request_within_20_seconds(stack: ComposeStack) -> None:
    with ThreadPoolExecutor(1) as beside:
        began = time.monotonic()
        up = beside.submit(stack.timed, "warm_up_s", "up", "--detach", "--no-build", "--wait")
        until("a routed answer", lambda: routed(stack))
        stack.facts["warm_up_to_routed_s"] = round(time.monotonic() - began, 2)
        up.result()
    assert stack.facts["warm_up_to_routed_s"] < 20
