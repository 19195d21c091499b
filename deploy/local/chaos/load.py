"""What runs while parts die: requests through Envoy at a steady rate, and posted samples whose senders want a receipt.

An edge. Every request's fate is kept, and how many were under way at each instant, which is the truth that ledgers are
held against.
"""

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from shared.features import SCHEMA
from shared.samples import LatencySample, Outcome, Rung, encode_sample

_REQUEST_TIMEOUT_S: Final = 60.0
_KEPT_INSTANTS: Final = 100_000


@dataclass(slots=True)
class Fate:
    """One request. `served_by`: the simulated server's name where its headers came."""

    sent_s: float
    status: int = 0
    served_by: str | None = None
    whole: bool = False
    ended_s: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.whole


@dataclass
class Load:
    """`rate_per_s` requests while `going`; stop it with `pause` and wait for the last with `drained`."""

    http: aiohttp.ClientSession
    url: str
    model: str
    rate_per_s: float
    fates: list[Fate] = field(default_factory=list)
    going: bool = True
    under_way: int = 0
    _instants: deque[tuple[float, int]] = field(default_factory=lambda: deque([(0.0, 0)], _KEPT_INSTANTS))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _numbers: Any = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Send, until cancelled. Open loop: late is late, nothing is left out."""
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + 1.0 / self.rate_per_s, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if self.going:
                task = asyncio.create_task(self._one(next(self._numbers)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give the requests under way up."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self, timeout_s: float) -> bool:
        """Whether the last request has ended in time."""
        until_s = time.monotonic() + timeout_s
        while self.under_way and time.monotonic() < until_s:  # noqa: ASYNC110 - ends at a time as well
            await asyncio.sleep(0.01)
        return self.under_way == 0

    def bounds(self, from_s: float, to_s: float) -> tuple[int, int]:
        """The least and the most requests that were under way in a span of time."""
        before = 0
        counts: list[int] = []
        for at_s, count in reversed(self._instants):
            if at_s > to_s:
                continue
            if at_s < from_s:
                before = count
                break
            counts.append(count)
        counts.append(before)
        return min(counts), max(counts)

    def _step(self, change: int) -> None:
        self.under_way += change
        self._instants.append((time.monotonic(), self.under_way))

    async def _one(self, number: int) -> None:
        fate = Fate(time.monotonic())
        self.fates.append(fate)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"conversation {number % 12} " * 60 + f"turn {number}"}],
            "max_tokens": 80 + number % 80,
            "stream": True,
        }
        self._step(+1)
        try:
            async with self.http.post(
                f"{self.url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
            ) as answer:
                fate.status = answer.status
                fate.served_by = answer.headers.get("x-sim-server")
                fate.reason = answer.headers.get("x-leadtime-reason", "")
                content = await answer.read()
                fate.whole = content.rstrip().endswith(b"data: [DONE]")
                if answer.status != 200:
                    fate.reason = fate.reason or content[:300].decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fate.reason = f"{type(error).__name__}: {error}"
        finally:
            fate.ended_s = time.monotonic()
            self._step(-1)


@dataclass
class Receipts:
    """Samples posted to the collector, each again and again until it is acknowledged, as a router posts them."""

    http: aiohttp.ClientSession
    url: str
    pool: str
    endpoint: str
    rate_per_s: float
    acknowledged: set[str] = field(default_factory=set)
    going: bool = True
    refused: int = 0
    """Answers that told the sender to come again."""
    rejected: int = 0

    async def run(self) -> None:
        waiting: deque[LatencySample] = deque()
        for number in itertools.count():
            waiting.append(self._sample(f"chaos-{number:08d}"))
            while waiting and await self._post(waiting[0]):
                waiting.popleft()
            await asyncio.sleep(1.0 / self.rate_per_s)
            while not self.going:  # noqa: ASYNC110 - the end of the run is near
                await asyncio.sleep(0.1)

    async def _post(self, sample: LatencySample) -> bool:
        try:
            async with self.http.post(
                f"{self.url}/v1/samples", data=encode_sample(sample), timeout=aiohttp.ClientTimeout(total=15)
            ) as answer:
                if answer.status != 200:
                    self.refused += 1
                    return False
                body = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.refused += 1
            return False
        if body["rejected"]:
            self.rejected += 1
        else:
            self.acknowledged.add(sample.decision_id)
        return True

    def _sample(self, decision_id: str) -> LatencySample:
        now_ms = time.time() * 1e3
        return LatencySample(
            decision_id=decision_id,
            pool=self.pool,
            model="posted",
            endpoint=self.endpoint,
            outcome=Outcome.OK,
            status=200,
            streamed=True,
            received_unix_ms=now_ms - 500.0,
            completed_unix_ms=now_ms,
            rung=Rung.HEURISTIC,
            schema_hash=SCHEMA.hash,
            features=[0.0] * len(SCHEMA),
            ttft_ms=60.0,
            e2e_ms=400.0,
            input_tokens=100,
            output_tokens=20,
        )
