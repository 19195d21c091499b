"""The chaos suite: parts of a whole local stack die, freeze and restart under steady load; what that costs is measured.

Three routers, two predictors, three model servers of a process each, behind the real Envoy. For each fault: the load
goes on, the fault is there for a while and is undone, and the load goes on a little. Then it pauses, and every ledger
must be empty at every endpoint. The endpoint that is harmed is the busiest at that moment.

- *Ledger*: ten times a second every router's requests under way are held against those that the client had under way
  around that instant. `ledger_settle_s` is the time from the end of the fault (the part answers again) to the first of
  three looks in a row without an error; or from the last answer to empty ledgers, if that took longer.
- *Requests* that didn't come whole: an endpoint's are those that it served, or that Envoy says it reset, while it was
  the one that was harmed. All others are Leadtime's.
- *Samples*: acknowledged are those posted to the collector whose 2xx came back. Lost are acknowledged ones that aren't
  in the stream when all is well again, doubled those that are there twice, of Envoy's too.
- *Bundles*: each decision's prediction is made again from the bundle that it names (`bundles.py`).

Limits: what the clock of Envoy, NATS and Redis does isn't played; the disk is full for the collector alone
(RLIMIT_FSIZE). Figures of p99 on a busy machine are its own.
"""

import asyncio
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from deploy.local.chaos import bundles
from deploy.local.chaos.harm import Clock, Link
from deploy.local.chaos.load import Fate, Load, Receipts
from deploy.local.chaos.report import quantile
from deploy.local.chaos.stored import Stored
from deploy.local.probes import tcp_probe
from deploy.local.processes import Child, Supervisor
from deploy.local.stack import Stack

MODEL: Final = "chaos-model"
ENDPOINTS: Final = 3
_LOOK_S: Final = 0.1
# A decision, a batch to the others and an answer's last bytes are under way for so long.
_LEEWAY_BEFORE_S: Final = 0.25
_LEEWAY_AFTER_S: Final = 0.02
_STEADY_LOOKS: Final = 3
_SETTLED_WITHIN_S: Final = 15.0
_READY_WITHIN_S: Final = 30.0
_IN_USE_WITHIN_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things last, in seconds. `cut_s`: of a dead part and a cut link; `frozen_s`: of SIGSTOP and errors.

    `recovers`: whether an endpoint that answered 500 is watched until it is in use again.
    """

    rate_per_s: float
    cut_s: float
    frozen_s: float
    after_s: float
    recovers: bool = False


LONG: Final = Pace(rate_per_s=10.0, cut_s=4.0, frozen_s=10.0, after_s=4.0, recovers=True)
SHORT: Final = Pace(rate_per_s=8.0, cut_s=1.5, frozen_s=4.0, after_s=1.5)


@dataclass(frozen=True, slots=True)
class Fault:
    """`act` makes it, waits, and undoes it. `of_endpoint`: a model server is harmed."""

    name: str
    act: Callable[["Suite"], Awaitable[None]]
    short: bool = True
    of_endpoint: bool = False


@dataclass
class Looks:
    """Each look at the ledgers: when, and by how many requests the worst of the routers that answered was wrong."""

    at: list[tuple[float, int]] = field(default_factory=list)

    def worst(self, from_s: float, to_s: float) -> int:
        return max((error for at_s, error in self.at if from_s <= at_s <= to_s), default=0)

    def settled_s(self, from_s: float) -> float | None:
        """When the first of some looks in a row without an error was, after an instant."""
        steady = 0
        for place, (at_s, error) in enumerate(self.at):
            if at_s < from_s:
                continue
            steady = steady + 1 if error == 0 else 0
            if steady == _STEADY_LOOKS:
                return self.at[place - _STEADY_LOOKS + 1][0] - from_s
        return None


class Suite:
    """One run over a stack that is up."""

    def __init__(
        self,
        stack: Stack,
        servers: Supervisor,
        link: Link,
        clock: Clock,
        pace: Pace,
        http: aiohttp.ClientSession,
        quiet: Callable[["Suite"], Awaitable[list[str]]] | None = None,
        controls: Mapping[str, str] | None = None,
    ) -> None:
        """`controls`: where each endpoint's faults are set."""
        self._controls = controls or {}
        self.stack = stack
        self._quiet = quiet
        self.servers = servers
        self.link = link
        self.clock = clock
        self.pace = pace
        self._http = http
        at = stack.addresses
        self._load = Load(http, at.gateway_url, MODEL, pace.rate_per_s)
        self._receipts = Receipts(
            http, at.collector_url, stack.config.pool, stack.endpoints[0].removeprefix("http://"), 5.0
        )
        self._harmed = "endpoint-1"
        self._looks = Looks()
        self._stored = Stored(at.nats_url)
        self._ledger_faults = 0

    async def run(self, faults: Sequence[Fault], say: Callable[[str], None]) -> dict[str, Any]:
        """Play the faults one after the other; what was measured of each."""
        background = [
            asyncio.create_task(work)
            for work in (
                self._load.run(),
                self._receipts.run(),
                self._look_at_ledgers(),
                bundles.watch(self._stored.judge, self.stack.addresses.redis_url, self.stack.config.pool),
            )
        ]
        results = []
        try:
            say("warming up")
            await asyncio.sleep(4.0)
            began_s = time.monotonic()
            await asyncio.sleep(max(3.0, self.pace.after_s))
            usual_ms = self._p99_ms(self._fates(began_s))
            for fault in faults:
                say(fault.name)
                results.append(await self._play(fault, usual_ms))
            samples = await self._trained()
            again = self._stored.judge_again()
        finally:
            for task in background:
                task.cancel()
            outcomes = await asyncio.gather(*background, return_exceptions=True)
            await self._load.stop()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return {
            "faults": results,
            "usual_p99_ms": usual_ms,
            "ledger_faults": self._ledger_faults,
            "samples": samples,
            "predictions": {
                "unseen": len(again.get(bundles.Verdict.UNSEEN, ())),
                "unexplained": [
                    f"{sample.decision_id} by {sample.bundle_version}"
                    for sample in again.get(bundles.Verdict.UNEXPLAINED, ())
                ],
            },
            "requests": len(self._load.fates),
        }

    # --- one fault ----------------------------------------------------------------------------------------------

    async def _play(self, fault: Fault, usual_ms: float | None) -> dict[str, Any]:
        began_s = time.monotonic()
        acknowledged = len(self._receipts.acknowledged)
        judged = self._stored.judged.copy()
        if fault.of_endpoint:
            self._harmed = await self._busiest_endpoint()
        await fault.act(self)
        undone_s = time.monotonic()
        await asyncio.sleep(max(self.pace.after_s, _STEADY_LOOKS * 2 * _LOOK_S))
        settled = await self._settled(undone_s)
        self._load.going = False
        ended = await self._load.drained(60.0)
        drained_s = time.monotonic()
        emptied = await self._emptied() if ended else None
        fates = self._fates(began_s)
        acknowledged_now = set(self._receipts.acknowledged)
        lost = await self._stored.lost(acknowledged_now, within_s=_SETTLED_WITHIN_S)
        doubled = self._stored.newly_doubled()
        failed = [fate for fate in fates if not fate.ok]
        theirs = [fate for fate in failed if fault.of_endpoint and is_the_endpoints(fate, self._harmed)]
        ours = [fate for fate in failed if fate not in theirs]
        stuck = await self._quiet(self) if self._quiet is not None else []
        await self._check_ledgers()
        added, now = self._p99_ms(fates), self._stored.judged
        result = {
            "fault": fault.name,
            "requests": len(fates),
            "failed_by_leadtime": len(ours),
            "failed_by_endpoint": len(theirs),
            "reasons": sorted({f"{fate.status} {fate.reason}"[:200] for fate in ours}),
            "p99_added_ms": None if added is None or usual_ms is None else round(added - usual_ms),
            "ledger_error_max": self._looks.worst(began_s, drained_s),
            "ledger_settle_s": None if settled is None or emptied is None else round(max(settled, emptied), 2),
            "samples_acknowledged": len(acknowledged_now) - acknowledged,
            "samples_lost": len(lost),
            "samples_doubled": len(doubled),
            "predictions_checked": now[bundles.Verdict.AGREES] - judged[bundles.Verdict.AGREES],
            "bundles_mixed": now[bundles.Verdict.MIXED] - judged[bundles.Verdict.MIXED],
            "predictions_unexplained": sum(
                now[verdict] - judged[verdict] for verdict in (bundles.Verdict.UNSEEN, bundles.Verdict.UNEXPLAINED)
            ),
            "stuck": stuck,
            "served_by": dict(sorted(Counter(fate.served_by or "nobody" for fate in fates).items())),
            "seconds": round(time.monotonic() - began_s, 1),
        }
        self._load.going = True
        return result

    def _fates(self, from_s: float) -> list[Fate]:
        """Requests that have ended since then: those that were under way at that instant among them."""
        return [fate for fate in self._load.fates if fate.ended_s >= from_s]

    @staticmethod
    def _p99_ms(fates: Sequence[Fate]) -> float | None:
        return quantile([(fate.ended_s - fate.sent_s) * 1e3 for fate in fates if fate.ok], 0.99)

    # --- ledgers ------------------------------------------------------------------------------------------------

    async def _look_at_ledgers(self) -> None:
        while True:
            asked_s = time.monotonic()
            counts = await asyncio.gather(*(self._in_flight(url) for url in self.stack.addresses.router_urls))
            answered_s = time.monotonic()
            await asyncio.sleep(_LEEWAY_AFTER_S)
            least, most = self._load.bounds(asked_s - _LEEWAY_BEFORE_S, answered_s + _LEEWAY_AFTER_S)
            errors = [max(count - most, least - count, 0) for count in counts if count is not None]
            self._looks.at.append((asked_s, max(errors, default=0)))
            await asyncio.sleep(max(0.0, asked_s + _LOOK_S - time.monotonic()))

    async def _in_flight(self, router_url: str) -> int | None:
        """None from a router that doesn't answer."""
        stats = await self.get(f"{router_url}/v1/stats", 0.5)
        return None if stats is None else int(stats["inflight_requests"])

    async def _settled(self, from_s: float) -> float | None:
        while time.monotonic() < from_s + _SETTLED_WITHIN_S:
            settled = self._looks.settled_s(from_s)
            if settled is not None:
                return settled
            await asyncio.sleep(_LOOK_S)
        return None

    async def _emptied(self) -> float | None:
        """How long after the last answer every router counted nothing at every endpoint."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + _SETTLED_WITHIN_S:
            answers = await asyncio.gather(
                *(self.get(f"{url}/v1/endpoints", 2.0) for url in self.stack.addresses.router_urls)
            )
            if all(
                answer is not None and all(endpoint["in_flight_requests"] == 0 for endpoint in answer["endpoints"])
                for answer in answers
            ):
                return time.monotonic() - began_s
            await asyncio.sleep(0.02)
        return None

    async def _check_ledgers(self) -> None:
        for url in self.stack.addresses.router_urls:
            found = await self.metric(url, "leadtime_router_ledger_faults_total")
            self._ledger_faults += int(found or 0)

    # --- samples ------------------------------------------------------------------------------------------------

    async def _trained(self) -> dict[str, Any]:
        """What the trainer has seen of the stream since its last start, once it has caught up."""
        self._load.going = self._receipts.going = False
        await self._load.drained(30.0)
        await asyncio.sleep(1.0)  # a post under way and the last entries: what is counted twice must stand still
        until_s = time.monotonic() + 20.0
        while True:
            await self._stored.read()
            url = self.stack.addresses.trainer_url
            taken = sum(
                [
                    int(await self.metric(url, f"leadtime_trainer_{name}") or 0)
                    for name in ("samples_total", "censored_samples_total")
                ]
            )
            rejected = await self.metric(url, "leadtime_trainer_samples_rejected_total") or 0
            doubles = await self.metric(url, 'leadtime_trainer_samples_rejected_total{reason="duplicate"}') or 0
            seen = taken + int(rejected - doubles)
            if seen >= self._stored.up_to or time.monotonic() > until_s:
                return {
                    "acknowledged": len(self._receipts.acknowledged),
                    "refused_for_now": self._receipts.refused,
                    "in_stream": self._stored.up_to,
                    "trained": taken,
                    "seen_by_trainer": seen,
                    "not_seen_by_trainer": max(0, self._stored.up_to - seen),
                    "trained_twice": max(0, taken - self._stored.up_to),
                }
            await asyncio.sleep(0.3)

    # --- harm ---------------------------------------------------------------------------------------------------

    def children(self, part: str) -> list[Child]:
        """The processes of a part."""
        if part == "predictors":
            names = [f"predictor-{number}" for number in range(1, self.stack.config.predictors + 1)]
            return [self.stack.supervisor[name] for name in names]
        if part == "endpoint":
            return [self.servers[self._harmed]]
        return [self.stack.supervisor["router-2" if part == "router" else part]]

    async def _busiest_endpoint(self) -> str:
        """The one whose harm meets the most requests."""
        until_s = time.monotonic() + 5.0
        while True:
            answer = await self.get(f"{self.stack.addresses.router_url}/v1/endpoints", 2.0) or {"endpoints": []}
            load = {one["address"]: one["in_flight_requests"] for one in answer["endpoints"]}
            addresses = [url.removeprefix("http://") for url in self.stack.endpoints]
            counts = [load.get(address, 0) for address in addresses]
            if max(counts) >= 2 or time.monotonic() > until_s:
                return f"endpoint-{counts.index(max(counts)) + 1}"
            await asyncio.sleep(0.05)

    async def kill(self, part: str) -> None:
        for child in self.children(part):
            child.kill()
            await child.wait()
        await asyncio.sleep(self.pace.cut_s)
        await self.start(part)

    async def freeze(self, part: str) -> None:
        for child in self.children(part):
            child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.pace.frozen_s)
        finally:
            for child in self.children(part):
                child.signal(signal.SIGCONT)
        await self.answers(part)

    async def restart(self, part: str) -> None:
        await self.start(part)

    async def start(self, part: str) -> None:
        """Again, ended first where it runs, until it answers."""
        for child in self.children(part):
            if part == "endpoint":
                number = int(self._harmed.rpartition("-")[2])
                port = int(self.stack.endpoints[number - 1].rpartition(":")[2])
                await self.servers.restart(child.name, tcp_probe(port))
            else:
                await self.stack.restart(child.name)
        await self.answers(part)

    async def answers(self, part: str) -> None:
        """Until the part does its work: what is thawed may have been taken for dead, and has to be found again."""
        at = self.stack.addresses
        until_s = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < until_s:
            if await self._works(part, at.router_urls):
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{part} doesn't work again within {_READY_WITHIN_S:g} s")

    async def _works(self, part: str, routers: Sequence[str]) -> bool:
        at = self.stack.addresses
        if part in {"router", "nats", "link"}:
            peers = await asyncio.gather(*(self.get(f"{url}/v1/peers", 1.0) for url in routers))
            return all(
                answer is not None
                and sum(peer["live"] and not peer["behind"] for peer in answer["peers"]) == len(routers) - 1
                for answer in peers
            )
        if part == "endpoint":
            answers = await asyncio.gather(*(self.get(f"{url}/v1/endpoints", 1.0) for url in routers))
            return all(
                answer is not None and sum(endpoint["ready"] for endpoint in answer["endpoints"]) == ENDPOINTS
                for answer in answers
            )
        if part == "redis":
            return True
        urls = {"collector": (at.collector_url,), "trainer": (at.trainer_url,), "predictors": at.predictor_urls}[part]
        return all([await self.get(f"{url}/healthz", 1.0) is not None for url in urls])

    async def cut_link(self) -> None:
        await self.link.cut()
        await asyncio.sleep(self.pace.frozen_s)
        await self.link.mend()
        await self.answers("link")

    async def fill_disk(self) -> None:
        """NATS is away, and the collector can't write what it is to keep."""
        pid = self.children("collector")[0].pid or 0
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        nats_server = self.children("nats")[0]
        nats_server.kill()
        await nats_server.wait()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            await asyncio.sleep(self.pace.frozen_s)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        await self.start("nats")

    async def answer_500(self) -> None:
        """An endpoint takes every request and fails it at once, until each router has set it aside, and longer."""
        began_s = time.monotonic()
        await self._set_faults({"fail_status": 500})
        try:
            await self._until(self._set_aside, f"{self._harmed} is set aside", _READY_WITHIN_S)
            await asyncio.sleep(max(0.0, began_s + self.pace.frozen_s - time.monotonic()))
        finally:
            await self._set_faults({})
        if self.pace.recovers:
            await self._until(self._in_use, f"{self._harmed} is in use again", _IN_USE_WITHIN_S)

    async def _set_faults(self, faults: dict[str, Any]) -> None:
        url = f"{self._controls[self._harmed]}/control/faults/{self._harmed}"
        async with self._http.post(url, json=faults, timeout=aiohttp.ClientTimeout(total=5)) as answer:
            answer.raise_for_status()

    async def _standings(self) -> set[str | None]:
        """What each router makes of the harmed endpoint; None of one that doesn't answer."""
        number = int(self._harmed.rpartition("-")[2])
        address = self.stack.endpoints[number - 1].removeprefix("http://")
        answers = await asyncio.gather(
            *(self.get(f"{url}/v1/endpoints", 2.0) for url in self.stack.addresses.router_urls)
        )
        return {
            None
            if answer is None
            else next(one["health"]["standing"] for one in answer["endpoints"] if one["address"] == address)
            for answer in answers
        }

    async def _set_aside(self) -> bool:
        return await self._standings() <= {"set_aside", "probing"}

    async def _in_use(self) -> bool:
        return await self._standings() == {"in_use"}

    @staticmethod
    async def _until(holds: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while not await holds():
            if time.monotonic() > until_s:
                raise RuntimeError(f"not within {within_s:g} s: {what}")
            await asyncio.sleep(_LOOK_S)

    async def jump_clock(self) -> None:
        for seconds in (3_600.0, -3_600.0, 0.0):
            self.clock.jump(seconds)
            await asyncio.sleep(self.pace.cut_s)

    # --- asking -------------------------------------------------------------------------------------------------

    async def get(self, url: str, timeout_s: float) -> Any:
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
                return await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def metric(self, base_url: str, name: str) -> float | None:
        """Sum over the labels, or one of them where `name` holds its labels."""
        try:
            async with self._http.get(f"{base_url}/metrics", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                page = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
        )


def is_the_endpoints(fate: Fate, endpoint: str) -> bool:
    """Whether a request failed for the harmed endpoint: it served it, or Envoy says that the upstream reset it."""
    return fate.served_by == endpoint or (fate.served_by is None and fate.status == 503 and "upstream" in fate.reason)


def all_faults() -> list[Fault]:
    """Every fault there is; those that aren't `short` are left out of a short run."""
    faults = []
    for part in ("router", "predictors", "collector", "trainer", "nats", "redis", "endpoint"):
        of_endpoint = part == "endpoint"
        called = "one router of three" if part == "router" else "all predictors" if part == "predictors" else part
        faults += [
            Fault(f"kill -9: {called}", _on(Suite.kill, part), of_endpoint=of_endpoint),
            Fault(
                f"SIGSTOP: {called}",
                _on(Suite.freeze, part),
                short=part in {"router", "collector", "nats", "endpoint"},
                of_endpoint=of_endpoint,
            ),
            Fault(
                f"restart: {called}",
                _on(Suite.restart, part),
                short=part in {"router", "nats", "trainer"},
                of_endpoint=of_endpoint,
            ),
        ]
    return [
        *faults,
        Fault("500: an endpoint, at once", Suite.answer_500, of_endpoint=True),
        Fault("cut: a router's NATS link", Suite.cut_link),
        Fault("full: the spool's disk, NATS away", Suite.fill_disk),
        Fault("jump: the clock, +1 h, -1 h, back", Suite.jump_clock),
    ]


def _on(act: Callable[[Suite, str], Awaitable[None]], part: str) -> Callable[[Suite], Awaitable[None]]:
    async def on_part(suite: Suite) -> None:
        await act(suite, part)

    return on_part
