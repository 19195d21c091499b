"""The way of completed samples to the collectors: `POST /v1/samples`, in batches, beside the request path. Edge: HTTP.

`offer` is what the request path sees: it appends to a bounded buffer and returns. One task takes batches from it, one
POST at a time, and repeats a batch until a collector has taken it: the decision id makes doubles vanish. Collectors are
interchangeable; the next is tried where one fails, with a pause once all have. Whatever doesn't arrive is counted by
its fate.

Limits: samples are expendable and die with the process, but for what the stop still delivers within its time.
"""

import asyncio
import contextlib
import random
import re
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.cancellation import raise_if_cancelled
from shared.errors import FieldError
from shared.samples import LatencySample, encode_sample

PATH: Final = "/v1/samples"
_MAX_ANSWER_BYTES: Final = 65_536
_INDEX: Final = re.compile(r"samples\[(\d{1,6})\]")


class Fate(StrEnum):
    """How a sample left this router."""

    DELIVERED = "delivered"
    REJECTED = "rejected"
    """The collector took it and found that it teaches nothing."""
    REFUSED = "refused"
    """It breaks the interface: no collector will ever take it."""
    PUSHED_OUT = "pushed_out"
    ABANDONED = "abandoned"


class _Post(StrEnum):
    TAKEN = "taken"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """`capacity`, `batch`: samples. `linger_ms`: what the first sample of a batch waits for others."""

    capacity: int = 10_000
    batch: int = 128
    linger_ms: float = 50.0
    timeout_ms: float = 15_000.0
    """Of one POST: a collector answers once JetStream has acknowledged, within 10 s by default."""
    first_delay_ms: float = 100.0
    last_delay_ms: float = 5_000.0
    flush_ms: float = 3_000.0
    """How long a stop goes on delivering."""


def parse_collectors(text: str) -> tuple[str, ...]:
    """Comma-separated `http(s)://host[:port]` → URLs without a path; raises FieldError."""
    urls = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        allowed = "http://host:port or https://host:port"
        parts = urlsplit(part)
        try:
            port = parts.port
        except ValueError:
            raise FieldError("collectors", f"'{part[:128]}'", allowed) from None
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or port == 0
            or parts.path.strip("/")
            or parts.query
            or parts.username
        ):
            raise FieldError("collectors", "a URL of another form", allowed)
        urls.append(f"{parts.scheme}://{parts.netloc}")
    return tuple(urls)


class SampleSink:
    """Use as an async context manager: leaving it delivers what it can within `flush_ms`."""

    def __init__(
        self,
        urls: Sequence[str],
        registry: CollectorRegistry,
        rng: random.Random,
        *,
        token: str | None = None,
        config: SinkConfig | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`urls`: at least one collector. `token`: the bearer token that they ask for."""
        if not urls:
            raise FieldError("collectors", "none", "at least one URL")
        self._urls = [url + PATH for url in urls]
        self._next_url = rng.randrange(len(urls))
        self._rng = rng
        self._token = token
        self._config = config or SinkConfig()
        self._tls = tls
        self._waiting: deque[LatencySample] = deque()
        self._under_way: list[LatencySample] = []
        self._filled = asyncio.Event()
        self._full = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()
        self._failing = False
        fates = Counter("leadtime_router_samples_total", "Completions by fate.", ["fate"], registry=registry)
        self._fates = {fate: fates.labels(fate.value) for fate in Fate}
        posts = Counter("leadtime_router_sample_posts_total", "POSTs to collectors.", ["result"], registry=registry)
        self._posts = {result: posts.labels(result.value) for result in _Post}
        Gauge(
            "leadtime_router_samples_waiting", "Completions waiting for a collector.", registry=registry
        ).set_function(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Samples that no collector has taken yet."""
        return len(self._waiting) + len(self._under_way)

    def offer(self, sample: LatencySample) -> None:
        """Queue a sample; the oldest waiting one goes if there is no room. Never waits."""
        if len(self._waiting) >= self._config.capacity:
            self._waiting.popleft()
            self._fates[Fate.PUSHED_OUT].inc()
        self._waiting.append(sample)
        self._filled.set()
        if len(self._waiting) >= self._config.batch:
            self._full.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="sample sink")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping = True
        self._filled.set()
        self._full.set()
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=self._config.flush_ms / 1e3)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._fates[Fate.ABANDONED].inc(self.waiting)
        self._waiting.clear()
        self._under_way = []

    async def _run(self) -> None:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, ttl_dns_cache=10, ssl=self._tls or True),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_ms / 1e3),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            while self._waiting or not self._stopping:
                raise_if_cancelled()
                await self._filled.wait()
                if not self._full.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._config.linger_ms / 1e3):
                            await self._full.wait()
                await self._deliver(session, self._take())

    def _take(self) -> list[LatencySample]:
        count = min(len(self._waiting), self._config.batch)
        batch = [self._waiting.popleft() for _ in range(count)]
        if not self._stopping:
            if not self._waiting:
                self._filled.clear()
            if len(self._waiting) < self._config.batch:
                self._full.clear()
        return batch

    async def _deliver(self, session: aiohttp.ClientSession, batch: list[LatencySample]) -> None:
        """Send a batch until each of its samples has been taken or refused."""
        self._under_way = batch
        parts = [batch]
        failures = 0
        while parts:
            raise_if_cancelled()
            part = parts[-1]
            result, answer = await self._post(session, part)
            self._posts[result].inc()
            if result is _Post.FAILED:
                failures += 1
                self._next_url = (self._next_url + 1) % len(self._urls)
                if failures % len(self._urls) == 0:
                    await asyncio.sleep(self._delay_s(failures // len(self._urls)))
                continue
            failures = 0
            parts.pop()
            if result is _Post.TAKEN:
                rejected = min(_count(answer.get("rejected")), len(part))
                self._fates[Fate.REJECTED].inc(rejected)
                self._fates[Fate.DELIVERED].inc(len(part) - rejected)
            elif (index := _index(answer, len(part))) is not None:
                self._fates[Fate.REFUSED].inc()
                parts += [rest for rest in (part[index + 1 :], part[:index]) if rest]
            else:  # too large together, or at fault nobody says where
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            self._under_way = [sample for rest in parts for sample in rest]

    async def _post(self, session: aiohttp.ClientSession, batch: list[LatencySample]) -> tuple[_Post, dict[str, Any]]:
        body = b"[" + b",".join(map(encode_sample, batch)) + b"]"
        url = self._urls[self._next_url]
        try:
            async with session.post(url, data=body, allow_redirects=False) as response:
                status = response.status
                answer = _document(await response.content.read(_MAX_ANSWER_BYTES))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed(type(error).__name__)
            return _Post.FAILED, {}
        if 200 <= status < 300:
            if self._failing:
                self._log.info("collector takes samples again")
            self._failing = False
            return _Post.TAKEN, answer
        if status in {400, 413, 422}:
            return _Post.REFUSED, answer
        self._failed(f"status {status}")
        return _Post.FAILED, {}

    def _failed(self, error: str) -> None:
        if not self._failing:
            self._failing = True
            self._log.warning("no collector takes samples", error=error)

    def _delay_s(self, rounds: int) -> float:
        longest = min(self._config.first_delay_ms * 2.0 ** min(rounds - 1, 16), self._config.last_delay_ms)
        return longest * self._rng.uniform(0.5, 1.0) / 1e3


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _index(answer: dict[str, Any], length: int) -> int | None:
    """Which sample of a refused list is at fault, where the answer says so; the only one of one anyway."""
    if length == 1:
        return 0
    error = answer.get("error")
    field = error.get("field") if isinstance(error, dict) else None
    found = _INDEX.match(field) if isinstance(field, str) else None
    index = int(found[1]) if found else length
    return index if index < length else None
